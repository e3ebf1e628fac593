"""The jobs that the parts look at: model, world and steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaprof.autoload.install import install_hooks
from megaprof.config.options import ProfileConfig
from megaprof.testing import gpt as building
from megaprof.testing.cpu import cpu_megatron
from megaprof.testing.gpt import BuiltGPT, GPTWorkload

WARM = 4
"""Steps before a part measures."""


def workload(cpu: bool, **options: Any) -> GPTWorkload:
    """What a rehearsal runs is as small as can be."""
    if cpu:
        sizes: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "seq_length": 16, "microbatches": 4}
    else:
        sizes = {"layers": 8, "hidden": 2048, "heads": 16, "seq_length": 2048, "microbatches": 8, "vocab": 8192}
    return GPTWorkload(**{**sizes, "dtype": "bfloat16", **options})


def small(cpu: bool, **options: Any) -> GPTWorkload:
    """What parts that compare no times run on a GPU, where several of them run at once."""
    return workload(
        cpu, **({} if cpu else {"layers": 4, "hidden": 1024, "seq_length": 1024, "microbatches": 4}) | options
    )


def shorten(gpt: BuiltGPT, cp: int) -> None:
    """What a host does with context parallelism: each rank gets its share of every sequence."""
    whole, length = gpt.data_iterator, gpt.workload.seq_length // cp
    gpt.data_iterator = (
        lambda step: (  # type: ignore[method-assign]
            (tokens[:, :length], labels[:, :length]) for tokens, labels in whole(step)
        )
    )


def large(cpu: bool) -> dict[str, Any]:
    """Options of a job that the GPU limits: microbatches as large as its memory allows, 16 sequences in a step."""
    if cpu:
        return {}
    size = min(max(torch.cuda.get_device_properties(0).total_memory >> 34, 1), 8)
    return {"micro_batch_size": size, "microbatches": max(16 // size, 1)}


@contextlib.contextmanager
def device_of(cpu: bool) -> Iterator[str]:
    """The device to build on."""
    with cpu_megatron() if cpu else _without_transformer_engine():
        if not cpu:
            torch.cuda.set_device(0)
        yield "cpu" if cpu else "cuda"


@contextlib.contextmanager
def _without_transformer_engine() -> Iterator[None]:
    """Megatron's router reads a name of Transformer Engine's that is missing without it (0.13 and later)."""
    from megatron.core.transformer.moe import moe_utils

    with contextlib.ExitStack() as stack:
        if not hasattr(moe_utils, "te_general_gemm"):
            stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


@contextlib.contextmanager
def machine(cpu: bool, work: Path) -> Iterator[str]:
    """The same, with a world of this one rank."""
    with device_of(cpu) as device:
        store = f"file://{work / 'store'}"
        dist.init_process_group("gloo" if cpu else "nccl", init_method=store, rank=0, world_size=1)
        yield device


def build_with(asked: GPTWorkload, device: str, spec: Callable[..., Any] | None = None, **options: Any) -> BuiltGPT:
    """A model with ``options`` of TransformerConfig beyond the workload's, and with ``spec`` for its layers."""
    from megatron.core.models.gpt import gpt_layer_specs

    configure = building._config

    def configured(workload: GPTWorkload) -> Any:
        made = configure(workload)
        return dataclasses.replace(made, **options)

    with patch.object(building, "_config", configured):
        if spec is None:
            return building.build(asked, device)
        with patch.object(gpt_layer_specs, "get_gpt_layer_local_spec", spec):
            return building.build(asked, device)


class Stopwatch:
    """A schedule, with the milliseconds of each of its calls by CUDA events."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, Any]] = []

    def __call__(self, **arguments: Any) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        cuda: Any = torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        result = get_forward_backward_func()(**arguments)
        end.record()
        self.events.append((begin, end))
        return result

    def take(self) -> list[float]:
        """The times since it was asked last."""
        torch.cuda.synchronize()
        found = [float(begin.elapsed_time(end)) for begin, end in self.events]
        self.events.clear()
        return found


def config(directory: Path, cpu: bool, **options: Any) -> ProfileConfig:
    """All ranks of ``train_actor``; a rehearsal records no CUDA activity."""
    given: dict[str, Any] = {"target": ("train_actor",), "dir": str(directory), "select": "all"}
    if cpu and "torch" in options.get("tool", ("torch",)):
        given["activities"] = ("cpu",)
    return ProfileConfig(**given | options)


def hooked(gpt: BuiltGPT, wanted: ProfileConfig) -> Any:
    """The handle of hooks that count as the model does."""
    return install_hooks(gpt.chunks, wanted, iteration=lambda: gpt.step)


def train(gpt: BuiltGPT, steps: int, schedule: Stopwatch | None = None) -> list[float]:
    """The loss of each step."""
    return [sum(gpt.train_step(schedule)) for _ in range(steps)]


def steps_from(gpt: BuiltGPT, count: int) -> dict[str, Any]:
    """The option for the next ``count`` steps."""
    return {"steps": f"{gpt.step}:{gpt.step + count}"}


def activities(cpu: bool) -> list[torch.profiler.ProfilerActivity]:
    """Those of a torch profiler of the part's own."""
    return [torch.profiler.ProfilerActivity.CPU] + ([] if cpu else [torch.profiler.ProfilerActivity.CUDA])
