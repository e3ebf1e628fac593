"""Steps that are replayed from a full-iteration CUDA graph are captured, and say that they were replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.install import install_hooks
from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import config, machine, workload
from tests.gpu.stand_ins import GRAPHS, faked

_WARM_UP = 2
"""Steps that run as they are; the next is captured, and from then on the graph is replayed."""


def run(work: Path, cpu: bool) -> Found:
    with machine(cpu, work) as device, faked(cpu, GRAPHS):
        train_replayed(work / "traces", cpu, device)
    traces = {trace.metadata.steps[0]: trace.metadata.ranges for trace in map(read_trace, find_traces(work / "traces"))}
    replayed = [step for step, each in traces.items() if not each.microbatch and "CUDA graph" in (each.reason or "")]
    found = Found()
    found.expect("every step but the one under capture has a window", sorted(traces), [0, 1, 3, 4])
    found.expect("steps that say they were replayed", sorted(replayed), [3, 4])
    return found


def train_replayed(directory: Path, cpu: bool, device: str, **options: Any) -> None:
    """Five steps, captured with ``options``; the last two are replayed."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    gpt = build(workload(cpu), device)

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        return gpt.forward_step(iter([(batch["tokens"], batch["labels"])]), model)

    count = gpt.workload.microbatches
    with install_hooks(gpt.chunks, config(directory, cpu, skip_first=0, repeat=0, **options)):
        wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=_WARM_UP)
        for step in range(5):
            batches = ({"tokens": tokens, "labels": labels} for tokens, labels in gpt.data_iterator(step))
            wrapper(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=gpt.chunks,
                num_microbatches=count,
                seq_length=gpt.workload.seq_length,
                micro_batch_size=gpt.workload.micro_batch_size,
                forward_only=False,
            )
