"""The fixed inputs: for each reader and shape at least one.

Most are made when they are needed, from fixed seeds, by the generators of the other tests. ``recordings/`` holds real
ones, by megaprof on one H200 that several ranks shared: 8 layers in 4 stages, or in 2 of 2 chunks, or in one with tp=2
whose rank 1 has more to compute.
"""

from __future__ import annotations

import json
import pickle
import random
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis import fuzzing
from tests.analysis.hang.test_hang import dump, entry
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, chunk
from tests.analysis.truth import files
from tests.analysis.truth.drawing import draw
from tests.analysis.truth.pipelines import Priced
from tests.foreign.test_foreign import Job
from tests.nsys.written import write_nsys

Input = Callable[[Path], Any]
RECORDINGS = Path(__file__).with_name("recordings")
TWICE = ((2, 2), (2, 2), (3, 3), (2, 2))

#: Traces by what is wrong with the run.
SCENARIOS = {
    "gpu-1f1b": Scenario("golden", layers=(4, 6, 4, 4)),
    "gpu-interleaved": Scenario("golden", layers=TWICE, microbatches=8),
    "gpu-no-pipelining": Scenario("golden", layers=(8,), exposed={"tp": 0.3}, microbatches=8),
    "gpu-forward-only": Scenario("golden", layers=(4, 7), microbatches=8, target="train_log_probs"),
    "gpu-slow-rank": Scenario("golden", layers=(4, 4), peers=2, slow={0: 1.5}, microbatches=8),
    "gpu-host-bound": Scenario("golden", layers=(4, 4), idle=0.4, microbatches=8),
    "gpu-first-microbatch-waits": Scenario("golden", layers=(4, 4), data=150.0, steps=3, microbatches=8),
    "gpu-clocks-apart": Scenario("golden", layers=(4, 4, 6), apart=True, transfer=12.0, microbatches=8),
    "gpu-without-operators": Scenario(
        "golden", layers=(4, 4), exposed={"tp": 0.3}, dp=2, tail=20.0, operators=False, microbatches=8
    ),
    "gpu-one-graph": Scenario("golden", layers=(3, 5), microbatches=8, graphed=True),
    "cpu-1f1b": Scenario("golden", layers=(6, 4, 4, 4), gpu=False),
    "cpu-late-entry": Scenario("golden", late={2: 300.0}, steps=4, merged=True, gpu=False),
    "cpu-slow-chunk": Scenario(
        "golden", layers=TWICE, gpu=False, stretched={(1, kind, 1): 1.6 for kind in ("forward", "backward")}
    ),
    "cpu-loss-layers-unknown": Scenario("golden", loss=12.0, counted=False, gpu=False),
}
#: Numbers of pipelines that are drawn from this seed, by their recording.
SEED = 11
DRAWN = {
    "drawn-timeline-recomputation": 22,
    "drawn-timeline-late-entry": 27,
    "drawn-timeline-unequal-replicas": 17,
    "drawn-timeline-forward-only-interleaved": 12,
    "drawn-timeline-no-pipelining": 38,
    "drawn-timeline-healthy": 6,
    "drawn-device-timeline-interleaved": 30,
    "drawn-device-timeline-no-pipelining": 29,
    "drawn-timeline-loader": 31,
    "drawn-gpu-loader": 8,
    "drawn-gpu-uneven": 39,
    "drawn-cpu-healthy": 18,
}


def recorded(*names: str) -> Input:
    """Real ones as they are."""

    def unpack(directory: Path) -> None:
        for name in names:
            with tarfile.open(RECORDINGS / f"{name}.tar.xz") as archive:
                archive.extractall(directory, filter="data")

    return unpack


def drawn(number: int, *recordings: str) -> Input:
    """A drawn pipeline, as it was recorded or in each of ``recordings``."""

    def write_drawn(directory: Path) -> None:
        priced = Priced(draw(SEED, number))
        run = priced.run(priced.all)
        for recording in recordings or (priced.pipeline.recording,):
            files.write(replace(priced.pipeline, recording=recording), run, directory)

    return write_drawn


def shifted(directory: Path) -> None:
    """32 ranks, of which one becomes slow, and another one's data end early."""
    layout = WorldLayout(ParallelSizes(tp=2, pp=4, dp=4))
    slow = [Slow(rank=9, from_step=70, factor=1.4)]
    write_timelines(directory, layout, steps=120, slow=slow, last_step={20: 100}, chunk_layers=(4, 4, 4, 4), seed=3)


def combined(directory: Path) -> None:
    """One stage whose forwards and backwards run as one, but for the first and the last."""
    trace = TraceBuilder(microbatches=4, chunks=[chunk(4, embedding=True, loss=True)])
    trace.forward(0, 0.0, 10.0)
    for number in range(3):
        name = f"megaprof/combined mb={number + 1} chunk=0 bmb={number} bchunk=0"
        trace.event(name, 10.0 + 25.0 * number, 25.0 + number)
    trace.backward(3, 90.0, 20.0)
    trace.call(0.0, 112.0)
    trace.write(directory)


def of_nsys(directory: Path) -> None:
    with_traces = directory / "made"
    for path in fuzzing.nsys_files(with_traces):
        path.rename(directory / path.name)
    for path in (with_traces / "traces").iterdir():
        path.unlink()


def foreign(directory: Path) -> None:
    """Two ranks of a job that megaprof did not record; rank 1 has more to compute."""
    for rank in range(2):
        job = Job(rank, 2)
        for step in range(3):
            start = 40.0 * step
            job.kernel("gemm", start, 10 + 4 * rank)
            job.reduce(start + 10 + 4 * rank, 8 - 4 * rank, [0, 1], "TENSOR_MODEL_PARALLEL_GROUP")
            job.kernel("gemm", start + 20, 5, launch=start + 1)
            job.event("user_annotation", f"ProfilerStep#{step}", start, 30)
        job.write(directory / f"rank{rank}.pt.trace.json")


def foreign_nsys(directory: Path) -> None:
    trace = TraceBuilder()
    job = Job()
    job.kernel("gemm", 0, 10)
    job.kernel("gemm", 12, 8, launch=0.5)
    trace.events = job.events
    write_nsys(trace, directory, sidecar=False)


def damaged(make: Input, pattern: str, part: float) -> Input:
    """The input with its last file of ``pattern`` cut after a part of its bytes, or gone if that is 0."""

    def write_damaged(directory: Path) -> None:
        make(directory)
        path = sorted(directory.rglob(pattern))[-1]
        data = path.read_bytes()
        path.unlink()
        if part:
            path.write_bytes(data[: int(part * len(data))])

    return write_damaged


def changed_traces(seed: int) -> Input:
    def write_changed(directory: Path) -> None:
        (directory / "healthy").mkdir()
        fuzzing.write_mutated_traces(fuzzing.traces(directory / "healthy"), directory, random.Random(seed))

    return write_changed


def dumps(held: Mapping[int, Any], write: Callable[[Any], bytes] = pickle.dumps) -> Input:
    """What torch's flight recorder holds, by rank."""

    def write_dumps(directory: Path) -> None:
        for rank, one in held.items():
            (directory / f"rank_{rank}").write_bytes(write(one))

    return write_dumps


def _everybody(rank_2: dict[str, Any]) -> dict[int, Any]:
    return {rank: dump(rank, [entry("5", 1, 0, False, **(rank_2 if rank == 2 else {}))]) for rank in range(4)}


REPORTS: dict[str, Input] = {
    **{name: lambda directory, scenario=scenario: write(scenario, directory) for name, scenario in SCENARIOS.items()},
    **{name: drawn(number) for name, number in DRAWN.items()},
    "h200-pp4": recorded("pp4-even"),
    "h200-pp4-timeline": recorded("pp4-even-timeline"),
    "h200-pp4-both": recorded("pp4-even", "pp4-even-timeline"),
    "h200-pp2-vpp2": recorded("pp2-vpp2"),
    "h200-pp2-vpp2-timeline": recorded("pp2-vpp2-timeline"),
    "h200-tp2-late": recorded("tp2-late1"),
    "h200-tp2-late-timeline": recorded("tp2-late1-timeline"),
    "drawn-cpu-and-timeline": drawn(15, "cpu trace", "timeline"),
    "drawn-nsys": drawn(9, "nsys"),
    "timelines-of-32-ranks": shifted,
    "cpu-combined": combined,
    "nsys": of_nsys,
    "foreign": foreign,
    "foreign-nsys": foreign_nsys,
    "damaged-trace-cut": damaged(lambda d: write(SCENARIOS["gpu-host-bound"], d), "*.json.gz", 0.5),
    "damaged-trace-gone": damaged(lambda d: write(SCENARIOS["cpu-1f1b"], d), "*.json.gz", 0.0),
    "damaged-timeline-cut": damaged(drawn(DRAWN["drawn-timeline-recomputation"]), "*.bin", 0.6),
    "damaged-nsys-cut": damaged(of_nsys, "*.sqlite", 0.7),
    "damaged-traces-changed": changed_traces(4),
}
HANGS: dict[str, Input] = {
    "hang-smaller": dumps(_everybody({"input_sizes": [[4, 1]]})),
    "hang-crossed": dumps({**_everybody({}), 2: dump(2, [entry("3", 1, 0, False)])}),
    "hang-absent": dumps({0: dump(0, [entry("1", 1, 0, False)]), 1: dump(1, [])}, lambda d: json.dumps(d).encode()),
    "hang-damaged": dumps({0: {"entries": 3}, 1: dump(1, [])}),
}
#: A report, and the change that is asked for.
WHAT_IFS: dict[str, tuple[str, dict[str, str]]] = {
    "what-if-layout": ("gpu-1f1b", {"layout": "5,5,4,4"}),
    "what-if-microbatches": ("drawn-timeline-forward-only-interleaved", {"microbatches": "32"}),
}
