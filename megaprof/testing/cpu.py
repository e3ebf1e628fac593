"""Real megatron-core in a process that has no GPU, or must not use the one it has.

Megatron-core asks torch.cuda for devices, streams and random states even in code that is otherwise device-neutral.
`cpu_megatron` answers for the CPU and changes nothing else: models, schedules, optimizers and process groups stay
megatron-core's own. The replacements are data (`cpu_patches`), applied and undone by one mechanism, so that after the
context every attribute is the same object as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


#: What replaces one attribute while it is open, ``patch(module or class, name, replacement)``.
patch = functools.partial(mock.patch.object, create=True)


# Dynamo keeps a table of torch's functions and refuses one object under two names, so every replacement is new.
def constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Event:
    """A CUDA event on a device where everything is done at once: it only keeps its time."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time = 0.0

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds between the two recordings, as torch.cuda.Event gives them."""
        return (end._time - self._time) * 1e3

    query, wait, synchronize = constant(True), constant(None), constant(None)


class _Stream:
    """A CUDA stream whose work is done when it is issued. Megatron-core compares streams by identity."""

    device = _CPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    query, synchronize = constant(True), constant(None)
    wait_stream, wait_event = constant(None), constant(None)


_DEFAULT_STREAM = _Stream()
#: The current stream of each thread, as CUDA keeps it.
_CURRENT_STREAM = ContextVar("stream", default=_DEFAULT_STREAM)


@contextlib.contextmanager
def _use_stream(stream: _Stream | None) -> Iterator[None]:
    token = _CURRENT_STREAM.set(stream or _CURRENT_STREAM.get())
    try:
        yield
    finally:
        _CURRENT_STREAM.reset(token)


def is_cuda(device: object) -> bool:
    """Returns whether ``device``, as torch's functions take it, is one of CUDA's; a bare index is one of the
    accelerator's."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, str) and device.startswith("cuda")


#: `torch.nn.Module.to` and tensordict parse their arguments with the second one.
_TO = (torch.Tensor.to, torch._C._nn._parse_to)


class OnCpu(TorchFunctionMode):
    """Every torch call that names a CUDA device gets the CPU instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func in _TO:
            args = tuple(_CPU if is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _also_in_backward(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``run_backward`` with the mode on: a mode is off while it handles a call, and backward is such a call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return run_backward(*args, **kwargs)

    return run


def _over_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``create`` with gloo in place of NCCL, which megatron-core names for groups between modules (0.16+)."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **(kwargs | {"backend": "gloo"} if kwargs.get("backend") == "nccl" else kwargs))

    return created


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(new_state)


def _norm_under_sequence_parallel(wrapped_norm: Any) -> Any:
    """Returns a ``__new__`` for megatron-core's torch norm that marks parameters for sequence parallelism.

    The fused norms of Apex and Transformer Engine do so themselves. Torch's norm is refused with sequence parallelism,
    though it computes the same; the mark makes ``finalize_model_grads`` sum the gradients over the tensor parallel
    group.
    """
    original = wrapped_norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


def _restoring(owner: Any, *names: str) -> list[Any]:
    """Returns patches that restore globals which megatron-core fills while the context is open."""
    return [patch(owner, name, getattr(owner, name)) for name in names if hasattr(owner, name)]


def cpu_patches() -> list[Any]:
    """Returns everything that `cpu_megatron` replaces in this process, for the installed megatron-core."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Converts sizes as megatron-core does when it moves them off a GPU; on the CPU they would stay tensors."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    on_cuda: dict[str, Any] = {
        "is_available": constant(False),
        "device_count": constant(0),
        "current_device": constant(0),
        "set_device": constant(None),
        "device": constant(contextlib.nullcontext()),
        "synchronize": constant(None),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: _use_stream(stream),
        "current_stream": lambda *_, **__: _CURRENT_STREAM.get(),
        "default_stream": constant(_DEFAULT_STREAM),
        "is_current_stream_capturing": constant(False),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        # Not torch.manual_seed: that one seeds torch.cuda as well, which would lead back here.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    }
    patches = [
        *(patch(torch.cuda, name, replacement) for name, replacement in on_cuda.items()),
        patch(torch.cuda.nvtx, "range_push", constant(None)),
        patch(torch.cuda.nvtx, "range_pop", constant(None)),
        patch(torch.autograd, "_engine_run_backward", _also_in_backward(vars(torch.autograd)["_engine_run_backward"])),
        *(patch(dist, name, _over_gloo(vars(dist)[name])) for name in ("new_group", "new_subgroups_by_enumeration")),
        patch(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        patch(torch.Tensor, "record_stream", constant(None)),
        patch(torch.nn.Module, "cuda", lambda module, *_, **__: module),
        # With the CPU's generator in place of the GPU's, megatron-core's own RNG tracker works, including fork.
        patch(random, "_get_cuda_rng_state", _get_rng_state),
        patch(random, "_set_cuda_rng_state", _set_rng_state),
        patch(token_dispatcher, "maybe_move_tensor_to_cpu", as_host_value),
        patch(torch_norm.WrappedTorchNorm, "__new__", _norm_under_sequence_parallel(torch_norm.WrappedTorchNorm)),
        *_restoring(random, "_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"),
        *_restoring(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"),
    ]
    if hasattr(schedules, "combined_1f1b_schedule_for_no_pipelining"):  # megatron-core >= 0.14
        from megatron.core.pipeline_parallel import utils

        patches += _restoring(utils, "_COMP_STREAM", "_COMM_STREAM")
    if not hasattr(moe_utils, "te_general_gemm"):
        # Imported from Transformer Engine, which may be missing, yet read unconditionally by the router (0.13+).
        patches.append(patch(moe_utils, "te_general_gemm", None))
    return patches


@contextlib.contextmanager
def cpu_megatron() -> Iterator[None]:
    """A context in which real megatron-core models are built and run on the CPU, over gloo, even if there is a GPU.

    While the context is open ``torch.cuda`` answers for the CPU: calls that name a CUDA device get the CPU,
    ``.cuda()`` returns its object, streams and events exist and are always done, the CUDA random state is the CPU's
    (so ``model_parallel_cuda_manual_seed`` and the tracker's ``fork`` work for real), and ``torch.compile`` runs
    eagerly (no compiler needed, same numbers). ``torch.cuda.is_available()`` is False. ``torch.profiler`` works.

    All of it is undone on exit, after an exception too; contexts nest. The redirection of ``device="cuda"`` is that
    of a ``TorchFunctionMode`` and holds for the thread that entered; the other replacements hold for the process.

    Raises:
        ImportError: megatron-core is not installed.
    """
    with contextlib.ExitStack() as stack:
        for each in (torch.compiler.set_stance("force_eager"), *cpu_patches(), OnCpu()):
            stack.enter_context(each)
        yield
