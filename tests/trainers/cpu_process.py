"""A whole trainer on the CPU: a process that is told for the rest of its life that it has a GPU.

`megaprof.testing.cpu_megatron` is a context around code of your own. A trainer of somebody else's asks torch.cuda for a
device, wants bf16 and NCCL, and works in threads. `cpu_process` answers all of that, once and for good: nothing is put
back, so that nothing has to be at the end of the process.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megaprof.testing.cpu import OnCpu, constant, cpu_patches, is_cuda, patch

__all__ = ["cpu_process"]

_BYTES = 1 << 34
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_TYPED = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_cpu_already = False


def cpu_process(gpus: int = 1) -> None:
    """Put this process on the CPU until it ends, with ``gpus`` GPUs in what ``torch.cuda`` answers.

    Beyond `megaprof.testing.cpu_megatron`: ``torch.cuda.is_available()`` is True, ``current_device()`` is 0, and
    ``device_count()`` follows ``CUDA_VISIBLE_DEVICES`` where that is set; every thread is covered; ``Tensor.type()``
    names CUDA types, by which Megatron-Core's optimizers tell bf16 parameters apart; TorchScript runs eagerly; pinned
    memory is plain memory of its own; process groups of NCCL are gloo's, which computes averages as sums. Idempotent.
    Call it before the trainer is imported: what that took from torch by name beforehand stays as it was.

    Raises:
        ValueError: ``gpus`` is not at least 1.
        ImportError: megatron-core is not installed.
    """
    global _cpu_already
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: must be at least 1")
    if _cpu_already:
        return
    _cpu_already = True
    torch.compiler.set_stance("force_eager")
    torch.jit._state.disable()  # as PYTORCH_JIT=0 does: a script cannot call what stands for torch's functions
    for patches in (cpu_patches, lambda: _gpu(gpus), _devices, _types, _groups):
        for each in patches():
            each.start()
    OnCpu().__enter__()


def _gpu(gpus: int) -> list[Any]:
    """A GPU in words: it exists, is idle, and has memory."""
    properties = SimpleNamespace(
        name="CPU", total_memory=_BYTES, major=8, minor=0, multi_processor_count=1, uuid="0", warp_size=32
    )
    answers: dict[str, Any] = {
        "can_device_access_peer": False,
        "current_device": 0,
        "empty_cache": None,
        "get_device_capability": (8, 0),
        "get_device_name": "CPU",
        "get_device_properties": properties,
        "init": None,
        "ipc_collect": None,
        "is_available": True,
        "is_bf16_supported": True,
        "is_initialized": True,
        "manual_seed_all": None,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (_BYTES // 2, _BYTES),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "memory_stats": defaultdict(int),
        "memory_summary": "",
        "reset_max_memory_allocated": None,
        "reset_peak_memory_stats": None,
    }

    def device_count() -> int:
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return len(named.split(",")) if named else gpus

    accelerator = {"current_accelerator": None, "current_device_idx": 0, "current_device_index": 0, "device_count": 0}
    accelerator |= dict.fromkeys(("set_device_idx", "set_device_index", "set_stream", "synchronize"))
    return [
        *(patch(torch.cuda, name, constant(value)) for name, value in answers.items()),
        *(patch(torch.cuda, name, _typed(dtype)) for name, dtype in _TYPED.items()),
        *(patch(torch.accelerator, name, constant(value)) for name, value in accelerator.items()),
        patch(torch.accelerator, "is_available", constant(False)),
        patch(torch.accelerator, "current_stream", lambda *_, **__: torch.cuda.current_stream()),
        patch(torch.cuda, "device_count", device_count),
    ]


def _typed(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """``torch.cuda.FloatTensor`` and its kin: sizes, or the values themselves."""
    return lambda *given: (
        torch.tensor(given[0], dtype=dtype)
        if given and not isinstance(given[0], int)
        else torch.zeros(*given, dtype=dtype)
    )


def _devices() -> list[Any]:
    """Returns what makes tensors, in every thread: a ``TorchFunctionMode`` holds for one."""
    constructors = [str(getattr(each, "__name__", "")) for each in _device_constructors()]
    names = [name for name in constructors if callable(getattr(torch, name, None))]
    makers: list[tuple[Any, str]] = [(torch, name) for name in (*names, *_LIKE)]
    makers += [(torch.Tensor, name) for name in _NEW]
    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, "cpu" if map_location is None or is_cuda(map_location) else map_location, *args, **kwargs)

    return [
        *(patch(owner, name, _on_cpu(getattr(owner, name))) for owner, name in makers),
        patch(torch, "load", load_on_cpu),
        patch(torch.Tensor, "to", _on_cpu(torch.Tensor.to, by_place=True)),
        patch(torch._C._nn, "_parse_to", _on_cpu(torch._C._nn._parse_to, by_place=True)),  # of modules and tensordict
        patch(torch.Tensor, "pin_memory", lambda self, *_, **__: self.clone()),  # a trainer may free what it came from
    ]


def _on_cpu(function: Callable[..., Any], *, by_place: bool = False) -> Callable[..., Any]:
    """``by_place``: for a function that takes a device by its place, too."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if by_place:
            return function(*("cpu" if is_cuda(argument) else argument for argument in args), **kwargs)
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


def _types() -> list[Any]:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = str(original(self))  # through the redirection of devices this may be called twice
            return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
        return original(self, dtype.replace(".cuda.", ".") if isinstance(dtype, str) else dtype, *args, **kwargs)

    return [patch(torch.Tensor, "type", type_of)]


class _Done:
    """The handle of a collective that has happened already."""

    def wait(self, *_: object, **__: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _groups() -> list[Any]:
    """Gloo in the place of NCCL, by name, and what gloo lacks."""
    module = dist.distributed_c10d

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
            if "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            if args and isinstance(args[0], str) and "nccl" in args[0]:  # init_process_group's first argument
                args = ("gloo", *args[1:])
            return function(*args, **kwargs)

        return made

    reduce, barrier = module.all_reduce, module.barrier

    @functools.wraps(reduce)
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return reduce(tensor, op, group, async_op)
        reduce(tensor, dist.ReduceOp.SUM, group, False)
        tensor.div_(dist.get_world_size(group))
        return _Done() if async_op else None

    @functools.wraps(barrier)
    def barrier_of_cpus(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    replaced = {
        "init_process_group": named(module.init_process_group),
        "new_group": named(module.new_group),
        "all_reduce": all_reduce,
        "barrier": barrier_of_cpus,
    }
    return [patch(owner, name, function) for name, function in replaced.items() for owner in (dist, module)]
