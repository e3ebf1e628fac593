"""Several runs in one directory: told apart, and only one of them is reported on."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.terminal import show
from megaprof.analysis.trace.reading import NoSuchRun, Piece, Runs, recordings_in, runs_of
from megaprof.formats.metadata import ModelChunk
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import START_NS, Slow, write_timelines
from tests.analysis.synthetic import chunk, kinds, plain_stage
from tests.analysis.tables import tables_in
from tests.analysis.telling import notes

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))
TWO, FOUR = ParallelSizes(pp=2), ParallelSizes(pp=4)
DAY = 86_400 * 10**9


def piece(start: int, first: int, rank: int = 0, target: str = "train_actor", **options: Any) -> Piece:
    given = {"process": f"{start}-{rank}", "sizes": TWO, "chunks": (), **options}
    return Piece((target, None, rank), first, first + 40, 100 * start, 100 * start + 50, **given)


def trace(start: int, step: int, process: str, rank: int = 0, **options: Any) -> Piece:
    return piece(start, step, rank, process=process, timeline=False, **options)


def chosen(pieces: list[Piece], runs: Runs) -> list[int]:
    return [number for number, each in enumerate(pieces) if runs.has(each.start_ns)]


@pytest.mark.parametrize(
    ("pieces", "count", "newest"),
    [
        ([piece(1, 0), piece(2, 500), piece(3, 1000)], 1, [0, 1, 2]),  # one that was rotated
        ([piece(1, 0), piece(2, 300)], 1, [0, 1]),  # resumed from a checkpoint
        ([piece(1, 0), piece(2, 500), piece(4, 0), piece(5, 500)], 2, [2, 3]),
        ([piece(1, 7), piece(2, 0)], 2, [1]),
        ([piece(1, 0, rank=0), piece(1, 0, rank=9), piece(3, 0, rank=0)], 2, [2]),  # the newer has fewer ranks
        ([piece(1, 0), piece(2, 0, target="evaluate")], 1, [0, 1]),
        ([], 1, []),
        # A restarted process: a trace does not tell what it goes on from, a timeline does.
        ([trace(1, 3, "a"), trace(2, 9, "b")], 2, [1]),
        ([trace(1, 3, "a"), trace(2, 3, "a"), trace(3, 1, "a")], 1, [0, 1, 2]),
        ([trace(1, 3, "a"), trace(1, 3, "b", rank=1), trace(4, 3, "c"), trace(4, 3, "d", rank=1)], 2, [2, 3]),
        ([piece(1, 0, process="a"), trace(2, 3, "a"), piece(3, 40, process="b"), trace(4, 50, "b")], 1, [0, 1, 2, 3]),
        ([piece(1, 0, process="a"), trace(2, 3, "a"), piece(4, 0, process="b"), trace(4, 1, "b")], 2, [2, 3]),
        ([trace(1, 3, "a"), piece(3, 0, process="b"), trace(4, 3, "b")], 2, [1, 2]),
        ([piece(1, 0, process="a"), trace(3, 50, "b")], 2, [1]),
        # Other sizes and other layers are another run's.
        ([trace(1, 3, "a"), trace(3, 4, "b", rank=3, sizes=FOUR)], 2, [1]),
        ([piece(1, 0, chunks=(ModelChunk(layers=6),)), piece(3, 9, chunks=(ModelChunk(layers=4),))], 2, [1]),
        ([piece(1, 0, chunks=(ModelChunk(layers=6),)), piece(3, 9, target="evaluate")], 1, [0, 1]),
    ],
)
def test_what_is_one_run(pieces: list[Piece], count: int, newest: list[int]) -> None:
    runs = runs_of(pieces)
    assert (runs.count, chosen(pieces, runs)) == (count, newest)


def test_a_run_lasts_until_the_first_step_of_the_next_one() -> None:
    """Until then it may hang, long after its last step."""
    pieces = [piece(1, 0), piece(10, 0)]
    second_begins = pieces[1].start_ns / 1e9
    assert runs_of(pieces).span == (second_begins, math.inf)
    assert runs_of(pieces, 1).span == (0.0, second_begins)
    assert runs_of(pieces[:1]).span == (0.0, math.inf)


def test_a_rank_that_was_not_looked_at_may_begin_a_little_earlier() -> None:
    runs = runs_of([piece(1, 0), piece(10, 0)])
    assert runs.has(100 * 10 - 300)
    assert not runs.has(100 * 1 + 300)


def test_a_run_that_is_not_there() -> None:
    with pytest.raises(NoSuchRun, match=r"^3: the files are of runs 1 to 2$"):
        runs_of([piece(1, 0), piece(3, 0)], 3)
    with pytest.raises(NoSuchRun, match=r"^0: the files are of one run$"):
        runs_of([], 0)


def two_runs(directory: Path) -> None:
    job: dict[str, Any] = {"steps": 60, "microbatches": 4}
    write_timelines(directory / "old", LAYOUT, run="old", slow=[Slow(rank=1, from_step=20, factor=2.0)], **job)
    write_timelines(directory / "new", LAYOUT, run="new", start_ns=START_NS + DAY, first_step=0, **job)


def test_the_newest_run_is_reported_and_the_others_are_told(tmp_path: Path) -> None:
    two_runs(tmp_path)
    report = analyze(tmp_path)
    (target,) = report.targets
    assert target.fleet is not None
    assert "slow_rank" not in {cause.kind for cause in target.causes}
    assert not any("ran twice" in note for note in notes(target.fleet))
    assert {path.parent.name for path in report.timelines} == {"new"}
    assert (report.run, report.runs, report.warnings) == (2, 2, ())


def test_an_earlier_run_is_reported_on_demand(tmp_path: Path) -> None:
    two_runs(tmp_path)
    report = analyze(tmp_path, run=1)
    (target,) = report.targets
    assert [cause.ranks for cause in target.causes if cause.kind == "slow_rank"] == [(1,)]
    assert {path.parent.name for path in report.timelines} == {"old"}
    assert (report.run, report.runs) == (1, 2)
    assert {each.step for each in report.steps().values()} == {59}
    with pytest.raises(NoSuchRun):
        analyze(tmp_path, run=3)


def test_several_processes_choose_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_runs(tmp_path)
    monkeypatch.setattr("megaprof.analysis.trace.reading._TIMELINES_WORTH_IT", 0)
    paths = recordings_in(tmp_path)[1]
    assert sorted(read_fleet(paths, 2).read) == sorted(read_fleet(paths, 1).read)


def test_traces_of_two_runs_are_never_pooled(tmp_path: Path) -> None:
    """Whatever their layouts, and in every reader."""
    for name, layers, start in (("a", [6, 2], 0.0), ("b", [4, 4], 9e6), ("c", [2, 2, 2, 2], 2e7)):
        for pp in range(len(layers)):
            holds = chunk(layers[pp], embedding=pp == 0, loss=pp == len(layers) - 1)
            stage = plain_stage(
                pp, len(layers), 10.0 * layers[pp], 20.0 * layers[pp], start=start, chunks=[holds],
                metadata={"run": f"{name}-{pp}"},
            )  # fmt: skip
            stage.write(tmp_path, f"{name}{pp}.pt.trace.json")
    seen = {}
    for number in (None, 1, 2, 3):
        report = analyze(tmp_path, run=number)
        (target,) = report.targets
        assert not kinds(target.warnings) & {"twice", "other_sizes", "not_comparable"}
        seen[number] = report.run, [stage.chunks[0].holds.layers for stage in target.stages]
        assert {path.name[0] for path in report.traces} == {"abc"[report.run - 1]}
    assert seen == {None: (3, [2, 2, 2, 2]), 1: (1, [6, 2]), 2: (2, [4, 4]), 3: (3, [2, 2, 2, 2])}
    sink = io.StringIO()
    show(analyze(tmp_path), Console(file=sink, width=300))
    assert f"megaprof report {tmp_path} --run 2" in sink.getvalue().splitlines()[0]
    (job,) = tables_in(tmp_path)
    assert job.sizes.pp == 4
