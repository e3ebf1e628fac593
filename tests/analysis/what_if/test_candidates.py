"""Half as many stages: what is predicted, against timelines of a job that has them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.what_if.changes import halved
from megaprof.analysis.what_if.what_if import half_as_deep
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Memory
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines

GIB = 1 << 30
LAYERS, STAGE_MS = (5, 1, 1, 3), (50.0, 10.0, 10.0, 45.0)  # a layer's 10 ms, and 15 for the loss


def job(
    directory: Path,
    replicas: int,
    microbatches: int,
    layers: Sequence[int],
    stage_ms: Sequence[float],
    finalize_ms: float = 8.0,
) -> list[Path]:
    return write_timelines(
        directory,
        WorldLayout(ParallelSizes(pp=len(layers), dp=replicas)),
        steps=12,
        microbatches=microbatches,
        forward_ms=stage_ms,
        backward_ms=[2 * ms for ms in stage_ms],
        chunk_layers=layers,
        finalize_ms=finalize_ms,
        noise=0.002,
    )


@pytest.mark.parametrize(
    ("stages", "replicas", "microbatches", "layout"),
    [(4, 1, 8, "Et*6|t*4L"), (4, 2, 6, "Et*6|t*4L"), (2, 1, 4, "Et*6L")],
)
def test_it_takes_what_such_a_job_takes(
    stages: int, replicas: int, microbatches: int, layout: str, tmp_path: Path
) -> None:
    layers, ms = LAYERS[:stages], STAGE_MS[:stages]
    job(tmp_path / "before", replicas, microbatches, layers, ms)
    in_twos = [[a + b for a, b in zip(each[::2], each[1::2], strict=True)] for each in (layers, ms)]
    job(tmp_path / "after", 2 * replicas, microbatches // 2, *in_twos, finalize_ms=16.0)
    (known,) = analyze(tmp_path / "before").by_hand
    assert known is not None
    found = half_as_deep(known)
    took = analyze(tmp_path / "after").targets[0].step_time_ms
    assert took is not None
    assert found.step_ms.value == pytest.approx(took.mean, rel=0.01)
    assert found.step_ms.holds(took.mean)
    assert (found.layout, found.microbatches, found.layers) == (layout, microbatches // 2, tuple(in_twos[0]))


def test_ranks_of_neighbours_are_replicas_that_share_the_microbatches() -> None:
    times = np.arange(2 * 4 * 6.0).reshape(2, 4, 1, 1, 6)  # replicas, stages, chunks, kinds, microbatches
    entry = link = np.arange(8.0).reshape(2, 4)
    passes, entries, links = halved(times, entry, link)
    assert passes.shape == (4, 2, 1, 1, 3)
    for replica in range(2):
        for of_both in range(2):
            for stage in range(2):
                own = times[replica, 2 * stage : 2 * stage + 2, 0, 0, of_both::2].sum(axis=0)
                new = 2 * of_both + replica
                assert passes[new, stage, 0, 0].tolist() == own.tolist()
                assert entries[new, stage] == entry[replica, 2 * stage + of_both]
                assert links[new, stage] == link[replica, 2 * stage + 1]


@pytest.mark.parametrize(
    ("microbatches", "layers", "why"), [(8, (3, 3, 2), "3 stages"), (7, (2, 2, 2, 2), "7 microbatches")]
)
def test_what_there_is_not(microbatches: int, layers: Sequence[int], why: str, tmp_path: Path) -> None:
    job(tmp_path, 1, microbatches, layers, [10.0 * each for each in layers])
    (known,) = analyze(tmp_path).by_hand
    assert known is not None
    with pytest.raises(ValueError, match=why):
        half_as_deep(known)


@pytest.mark.parametrize(("limit", "fits"), [(16.5, True), (15.5, False)])
def test_a_stage_needs_the_memory_of_two_and_activations_of_fewer_microbatches(
    limit: float, fits: bool, tmp_path: Path
) -> None:
    files = job(tmp_path, 1, 8, (2, 2, 2, 2), [10.0] * 4)
    for stage, file in enumerate(files):  # 2 GiB for a layer, and 1 for its activations of a microbatch
        memory = Memory(4 * GIB, (4 + 2 * (4 - stage)) * GIB, 80 * GIB)
        file.write_bytes(file.read_bytes() + format.fact_record(0, format.MEMORY, memory.pack()))
    (known,) = analyze(tmp_path, memory_limit=round(limit * GIB)).by_hand
    assert known is not None
    found = half_as_deep(known)
    assert (found.needed, found.fits) == ((16 * GIB, 12 * GIB), fits)
