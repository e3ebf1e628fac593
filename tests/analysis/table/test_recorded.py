"""Who comes last inside a group: from arrivals made by hand, and of a job whose timelines have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.report.report import analyze
from megaprof.analysis.samples import Spread
from megaprof.analysis.table.recorded import Member, ran, tables_of_timelines, waited_ms
from megaprof.analysis.table.table import Table
from megaprof.analysis.trace.reading import Timelines
from megaprof.formats import timeline as format
from megaprof.formats.facts import Arrivals, kept, pack_arrivals
from megaprof.formats.flight import GroupConfig
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines

PAIR = "tp", "1", (0, 1)


def of(values: list[int], lengths: bool = False, host: str = "a", begun_ms: float = 0.0, **other: Any) -> Member:
    numbers = other.get("numbers", np.arange(1, len(values) + 1))
    return host, begun_ms, Arrivals("1", lengths, other.get("shift", 0), numbers, np.array(values))


def at(value: int) -> list[int]:
    """Microseconds of 32 collectives, of which one is ``value``."""
    return [0] * 31 + [value]


def sums(*members: Member) -> list[float]:
    """How many milliseconds each member of a pair waited."""
    return [float(waited) for waited, _ in waited_ms(PAIR, members)]


def test_who_comes_first_waits_for_who_comes_last() -> None:
    assert sums(of(at(1000)), of(at(3000))) == [2.0, 0.0]
    # Hosts enter steps at different times; what counts is when they came.
    assert sums(of([1000] * 32), of([0] * 32, begun_ms=5.0)) == [128.0, 0.0]
    # On a device the shortest part is that of the last.
    assert sums(of(at(9000), lengths=True), of(at(2000), lengths=True, host="b")) == [7.0, 0.0]
    assert sums(of(at(1000)), of(at(3000), host="b")) == []  # on clocks that may differ
    assert sums(of(at(1000))) == []
    assert sums(of([1]), of([2], lengths=True)) == []


def test_what_was_left_out_counts_as_what_was_kept() -> None:
    numbers = np.arange(1, 65)
    some = numbers[kept(numbers, 3)]
    assert sums(of([0] * 64), of([1000] * len(some), numbers=some, shift=3)) == [8.0 * len(some), 0.0]


def test_a_wait_longer_than_a_usual_pass_counts_once() -> None:
    """Of 64 collectives some are kept, and the peer is late to one of them by 200 ms: no other pass is as long."""
    numbers = np.arange(1, 65)[kept(np.arange(1, 65), 3)]
    values = [1000] * len(numbers)
    stalled = of([200_000, *values[1:]], lengths=True, numbers=numbers, shift=3)
    rest_ms = 8.0 * (len(numbers) - 1)
    found = waited_ms(PAIR, [of([0] * len(numbers), lengths=True, numbers=numbers, shift=3), stalled], pass_ms=30.0)
    assert found[1].tolist() == [rest_ms + 200.0, 200.0]
    assert ran({PAIR: stalled[2]}, "tp", 30.0) == rest_ms + 200.0


GROUP = {"tp": "TENSOR_MODEL_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP"}


def two_peers(directory: Path, axis: str, values: Callable[[int, int], npt.NDArray[np.int64]], **other: Any) -> Table:
    """The table of two ranks that wait for each other, whose collectives have ``values(rank, step)``."""
    layout = WorldLayout(ParallelSizes(dp=2 if axis == "ep" else 1, **{axis: 2}))
    paths = write_timelines(directory, layout, steps=other.get("steps", 24), noise=0.01)
    for path in paths:
        timeline = read_timeline(path)
        facts = [format.fact_record(0, format.GROUPS, msgspec.json.encode({"7": GroupConfig(GROUP[axis], "[0, 1]")}))]
        for row in range(len(timeline.steps)):
            own = values(timeline.metadata[0].coords.rank, row)
            if not len(own):
                continue
            arrivals = Arrivals("7", other.get("lengths", False), 0, 64 * row + np.arange(len(own)), own)
            facts.append(format.fact_record(row, format.COLLECTIVES, pack_arrivals([arrivals])))
        with path.open("ab") as file:
            file.write(b"".join(facts))
    (table,) = tables_of_timelines(read_fleet(Timelines(paths))).values()
    assert isinstance(table, Table)
    return table


@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("late", [0, 1, None])
def test_a_timeline_with_arrivals_names_one_of_its_peers(tmp_path: Path, late: int | None, axis: str) -> None:
    """One comes 3 ms late to one in four collectives; and all the time now one comes later, now the other."""
    chance = 300 * np.resize([1, 1, -1, -1], 24)

    def values(rank: int, step: int) -> npt.NDArray[np.int64]:
        found = 1000 * np.arange(64) + 2000 + chance[step] * (rank % 2)
        found[::4] += 3000 * (rank == late)
        return found

    causes = diagnose(examine(two_peers(tmp_path, axis, values))).causes
    named = [cause for cause in causes if cause.kind == "slow_rank"]
    assert [cause.ranks for cause in named] == ([] if late is None else [(late,)])
    assert [cause.price for cause in named if not cause.price.low < 48.0 < cause.price.high] == []
    # Its peer is in its passes for as long, but does not compute meanwhile.
    assert all(cause.parts["factor"] > 1.1 for cause in named)


@pytest.mark.parametrize("known", [range(7), range(1, 8), range(4)])
def test_steps_without_arrivals_hide_no_slow_rank(tmp_path: Path, known: range) -> None:
    """Rank 1 comes 48 ms late in each of eight steps. What ended last is often not read any more."""

    def values(rank: int, step: int) -> npt.NDArray[np.int64]:
        return np.full(64 * (step in known), 1750 - 750 * rank)

    causes = diagnose(examine(two_peers(tmp_path, "tp", values, lengths=True, steps=8))).causes
    assert [cause.ranks for cause in causes if cause.kind == "slow_rank"] == [(1,)]


def test_too_few_steps_with_arrivals_are_said(tmp_path: Path) -> None:
    table = two_peers(tmp_path, "tp", lambda rank, step: np.full(64 * (step < 3), 1000), lengths=True, steps=8)
    assert [(note.count, note.of) for note in table.warnings if note.kind == "exposed_unknown"] == [(3, 8)]


def test_how_long_timed_collectives_ran_is_exposed_in_the_report_of_a_timeline(tmp_path: Path) -> None:
    """NCCL's times of 64 collectives of 2 ms each on the rank that comes last; its peer waits for 16 ms more."""
    steps = {0: range(20), 1: range(1, 24)}  # of which each has read them
    two_peers(tmp_path, "tp", lambda rank, step: np.full(64 * (step in steps[rank]), 2250 - 250 * rank), lengths=True)
    (target,) = analyze(tmp_path).targets
    (stage,) = target.stages
    exposed, compute = stage.exposed_ms["tp"], stage.compute_ms
    assert exposed is not None
    assert compute is not None
    assert target.step_time_ms is not None
    assert exposed.mean == pytest.approx(144.0)
    assert exposed.mean + compute.mean == pytest.approx(target.step_time_ms.mean, rel=0.05)
    assert [spread and spread.mean for spread in map(stage.exposed_ms.get, ("ep", "cp"))] == [0.0, 0.0]
    (parted,) = stage.collectives.values()
    assert (parted.waiting_ms, parted.transferring_ms) == (Spread.of([16.0] * 19), Spread.of([128.0] * 19))
    assert parted.reason is None


def test_how_long_untimed_collectives_transferred_is_not_known(tmp_path: Path) -> None:
    """Two ranks over gloo wait for each other by turns."""
    two_peers(tmp_path, "tp", lambda rank, step: 1000 * np.arange(64) + 100 * (step % 2 != rank))
    (stage,) = analyze(tmp_path).targets[0].stages
    (parted,) = stage.collectives.values()
    assert parted.waiting_ms is not None
    assert parted.waiting_ms.mean == pytest.approx(6.4 / 2)
    assert parted.transferring_ms is None
    assert parted.reason is not None
