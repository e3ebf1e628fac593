"""Two ranks of a tensor-, an expert- and a context-parallel group over NCCL: whose communication its kernels are, with
and without CPU operators."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing.gpt import BuiltGPT, build
from tests.gpu.found import Found
from tests.gpu.job import WARM, build_with, config, hooked, shorten, small, steps_from, train
from tests.gpu.ranks import joined, together

_AXES = ("tp", "ep", "cp")


class GatheredAttention(DotProductAttention):  # type: ignore[misc]
    """Attention over the keys of all context-parallel ranks. Megatron's own needs Transformer Engine for that."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        key, value = (gather_from_sequence_parallel_region(each, group=group) for each in (key, value))
        mask = torch.zeros(1, 1, query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
        return super().forward(query, key, value, mask, *args, **kwargs)


def _gathering(spec: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        layer = spec(*args, **kwargs)
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
        return layer

    return made


def _built(axis: str, cpu: bool, device: str) -> BuiltGPT:
    if axis != "cp":
        return build(small(cpu, **{axis: 2}), device)
    initialize = functools.partial(parallel_state.initialize_model_parallel, context_parallel_size=2)
    with patch.object(parallel_state, "initialize_model_parallel", initialize):
        gpt = build_with(small(cpu, dp=2), device, _gathering(gpt_layer_specs.get_gpt_layer_local_spec))
    shorten(gpt, 2)
    return gpt


def one_rank(directory: str, cpu: bool) -> None:
    """Windows with both kinds of activities, and with CUDA alone."""
    with joined(cpu) as device:
        for axis in _AXES:
            gpt = _built(axis, cpu, device)
            train(gpt, WARM)
            for name, options in {"both": {}, "cuda": {} if cpu else {"activities": ("cuda",)}}.items():
                with hooked(gpt, config(Path(directory) / axis / name, cpu, **options, **steps_from(gpt, 2))):
                    train(gpt, 2)


def run(work: Path, cpu: bool) -> Found:
    together(one_rank, 2, str(work), cpu, cpu=cpu)
    found = Found()
    for axis in _AXES:
        exposed: dict[str, list[float | None]] = {}
        for name in ("both", "cuda"):
            calls = [call for path in find_traces(work / axis / name) for call in steps_of(read_trace(path))]
            found.expect(f"{axis}, {name}: windows", len(calls), 4)
            exposed[name] = [None if math.isnan(ns := call.spent[axis]) else ns / 1e6 for call in calls]
            found.figures[f"{axis}_{name}_exposed_ms"] = exposed[name]
        seen = all(exposed["both"])
        found.on_a_gpu(cpu, f"{axis}: exposed (ms) with CPU operators", exposed["both"], "above zero", seen)
        never_zero = all(each is None or each > 0 for each in exposed["cuda"])
        found.on_a_gpu(cpu, f"{axis}: null without them, or above zero", exposed["cuda"], "no zero", never_zero)
    return found
