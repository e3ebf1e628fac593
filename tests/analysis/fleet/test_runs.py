"""Several runs in one directory: told apart, and only one of them is reported on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.fleet.reading import find_timelines, read_fleet
from megaprof.analysis.fleet.runs import NoSuchRun, Piece, Runs, runs_of
from megaprof.analysis.report.report import analyze
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import START_NS, Slow, write_timelines
from tests.analysis.telling import notes

LAYOUT = WorldLayout(ParallelSizes.of(4, pp=2))
DAY = 86_400 * 10**9


def piece(start: int, first: int, rank: int = 0, target: str = "train_actor") -> Piece:
    return Piece((target, None, rank), first, 100 * start, 100 * start + 50)


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
    ],
)
def test_what_is_one_run(pieces: list[Piece], count: int, newest: list[int]) -> None:
    runs = runs_of(pieces)
    assert (runs.count, chosen(pieces, runs)) == (count, newest)


def test_a_rank_that_was_not_looked_at_may_begin_a_little_earlier() -> None:
    runs = runs_of([piece(1, 0), piece(10, 0)])
    assert runs.has(100 * 10 - 300)
    assert not runs.has(100 * 1 + 300)


def test_a_run_that_is_not_there() -> None:
    with pytest.raises(NoSuchRun, match=r"^3: the timelines are of runs 1 to 2$"):
        runs_of([piece(1, 0), piece(3, 0)], 3)
    with pytest.raises(NoSuchRun, match=r"^0: the timelines are of one run$"):
        runs_of([], 0)


def two_runs(directory: Path) -> None:
    job: dict[str, Any] = {"steps": 60, "microbatches": 4}
    write_timelines(directory / "old", LAYOUT, slow=[Slow(rank=1, from_step=20, factor=2.0)], **job)
    write_timelines(directory / "new", LAYOUT, start_ns=START_NS + DAY, first_step=0, **job)


def test_the_newest_run_is_reported_and_the_others_are_told(tmp_path: Path) -> None:
    two_runs(tmp_path)
    report = analyze(tmp_path)
    (target,) = report.targets
    assert target.fleet is not None
    assert "slow_rank" not in {cause.kind for cause in target.causes}
    assert not any("ran twice" in note for note in notes(target.fleet))
    assert {path.parent.name for path in report.timelines} == {"new"}
    assert report.warnings == (
        "there are timelines of 2 runs; this report is about the newest (`--run N` chooses the N-th, 1 is the oldest)",
    )


def test_an_earlier_run_is_reported_on_demand(tmp_path: Path) -> None:
    two_runs(tmp_path)
    report = analyze(tmp_path, run=1)
    (target,) = report.targets
    (slow,) = (cause for cause in target.causes if cause.kind == "slow_rank")
    assert slow.ranks == (1,)
    assert {path.parent.name for path in report.timelines} == {"old"}
    assert "this report is about number 1" in report.warnings[0]
    assert {call.metadata.steps for call in report.drawn} == {(59, 59)}
    with pytest.raises(NoSuchRun):
        analyze(tmp_path, run=3)


def test_several_processes_choose_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_runs(tmp_path)
    monkeypatch.setattr("megaprof.analysis.fleet.reading._WORTH_IT", 0)
    paths = find_timelines(tmp_path)
    assert sorted(read_fleet(paths, 2).read) == sorted(read_fleet(paths, 1).read)
