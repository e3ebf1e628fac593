"""``megaprof rehearse`` on a GPU: the stages of a pipeline alone, one after another, against its ranks over NCCL.

Ranks that share the GPU have a part of it each, and so has a stage alone, where CUDA's multi-process service runs.
Without that service, times are only figures.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaprof.analysis.report.report import analyze
from megaprof.rehearse import rehearsal
from megaprof.rehearse.links import Link
from megaprof.testing.gpt import GPTWorkload, build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, steps_from, train, workload
from tests.gpu.ranks import joined, together

_STEPS, _SHARE = 8, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def asked(cpu: bool) -> GPTWorkload:
    return workload(cpu, pp=2, layers=8, layout=(6, 2))


def one_stage(directory: str, cpu: bool) -> tuple[float, int]:
    """Milliseconds of a microbatch on its way to the next stage, and bytes that were allocated at most."""
    with joined(cpu) as device:
        job = asked(cpu)
        tensor, took = torch.zeros(job.seq_length * job.hidden, dtype=torch.bfloat16, device=device), []
        for _ in range(WARM + _STEPS):
            begin = time.perf_counter()
            dist.broadcast(tensor, 0)
            if not cpu:
                torch.cuda.synchronize()
            took.append(1e3 * (time.perf_counter() - begin))
        gpt = build(job, device)
        train(gpt, WARM)
        with hooked(gpt, config(Path(directory), cpu, tool=("timeline",), **steps_from(gpt, _STEPS))):
            train(gpt, _STEPS)
        return statistics.median(took[WARM:]), 0 if cpu else torch.cuda.max_memory_allocated()


def run(work: Path, cpu: bool) -> Found:
    found, job, real, alone = Found(), asked(cpu), work / "real", work / "alone"
    ranks = together(one_stage, job.pp, str(real), cpu, cpu=cpu)
    size = 2 * job.seq_length * job.hidden
    link = Link("gloo" if cpu else "nvlink", size / (1e-3 * ranks[0][0]), 0.0, "measured", "a broadcast of two ranks")
    words = ["-m", __name__, "cpu" if cpu else "gpu"]
    # This job has one layout, whatever its options say, and no time for the stages of others.
    only = patch.object(rehearsal, "_best_of", lambda changes, *_: (list(changes), None))
    with only, patch.dict(os.environ, {_SHARE: str(100 // job.pp)}):
        made, report = rehearsal.rehearsed(
            words, [sys.executable, *words], alone, job.pp, steps=_STEPS, links={link.name: link}, per_host=job.pp
        )
    (target,), (predicted,) = analyze(real).targets, report.targets
    no_times = cpu or "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    found.figures["step_ms"] = {"predicted": vars(made.step_ms), "measured": target.step_ms}
    found.within(no_times, "the predicted step is the measured one", made.step_ms.value, target.step_ms, 0.05)
    inside = target.step_ms is not None and made.step_ms.holds(target.step_ms)
    found.on_a_gpu(no_times, "the measured step is inside the interval", inside, True)
    for one, other in zip(predicted.stages, target.stages, strict=True):
        computed = [None if each.compute_ms is None else each.compute_ms.mean for each in (one, other)]
        found.within(no_times, f"stage {one.pp}: compute", *computed, 0.05)
    for stage, (most, (_, bytes_)) in enumerate(zip(made.what_if.allocated or (None,) * job.pp, ranks, strict=True)):
        found.within(cpu, f"stage {stage}: the most memory", most, bytes_, 0.02)
    found.expect("layers as the model has them", predicted.what_if.layout, target.what_if.layout)
    ends = sorted({"embedding", "loss"} - set(predicted.what_if.costs.by_kind if predicted.what_if.costs else ()))
    found.expect("parts whose cost is not known", ends, [])
    found.expect("links that are kept", [*rehearsal.compared(alone, real)[2]], [link.name])
    return found


if __name__ == "__main__":
    with joined(sys.argv[1] == "cpu") as where:
        train(build(asked(sys.argv[1] == "cpu"), where), 100_000)
