"""Steps that are replayed from a full-iteration CUDA graph are captured, and say that they were replayed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.autoload.install import install_hooks
from megaprof.testing.gpt import build
from megaprof.testing.launcher import RanksFailed
from tests.gpu.found import Found
from tests.gpu.job import config, machine, small
from tests.gpu.ranks import together
from tests.gpu.stand_ins import GRAPHS, faked

_WARM_UP = 2
"""Steps that run as they are; the next is captured, and from then on the graph is replayed."""


def without_hooks() -> None:
    """The same steps, to see whose fault a failure is."""
    with tempfile.TemporaryDirectory() as work, machine(False, Path(work)) as device:
        train_replayed(None, False, device)


def run(work: Path, cpu: bool) -> Found:
    found = Found()
    if not cpu:
        alone = _without_hooks()
        found.expect("without hooks the graph is captured and replayed", alone, "nothing raised")
        if alone != "nothing raised":
            return found
    with machine(cpu, work) as device, faked(cpu, GRAPHS):
        train_replayed(work / "traces", cpu, device)
    traces = {trace.metadata.steps[0]: trace.metadata.ranges for trace in map(read_trace, find_traces(work / "traces"))}
    replayed = [step for step, each in traces.items() if not each.microbatch and "CUDA graph" in (each.reason or "")]
    found.expect("every step but the one under capture has a window", sorted(traces), [0, 1, 3, 4])
    found.expect("steps that say they were replayed", sorted(replayed), [3, 4])
    return found


def _without_hooks() -> str:
    try:
        together(without_hooks, 1, cpu=False)
    except RanksFailed as failed:
        return failed.reports[0].traceback or str(failed.reports[0])
    return "nothing raised"


def train_replayed(directory: Path | None, cpu: bool, device: str, **options: Any) -> None:
    """Five steps, captured with ``options`` if there is a directory; the last two are replayed."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if not cpu:
        get_cuda_rng_tracker(use_cudagraphable_rng=True)  # before the model is built
    with contextlib.nullcontext() if cpu else _side_stream():
        gpt = build(small(cpu), device)

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        return gpt.forward_step(iter([(batch["tokens"], batch["labels"])]), model)

    count = gpt.workload.microbatches
    wanted = None if directory is None else config(directory, cpu, schedule="0:0:0:1:0", **options)
    with install_hooks(gpt.chunks, wanted) if wanted else contextlib.nullcontext():
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


@contextlib.contextmanager
def _side_stream() -> Iterator[None]:
    """Megatron-LM wraps its model on a stream of its own, because autograd accumulates gradients on the stream that
    this was done on, and the default stream cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.default_stream().wait_stream(stream)
