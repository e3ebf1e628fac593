"""Who comes last inside a group: from arrivals made by hand, and of a job whose timelines have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaprof.analysis.collectives.arrivals import OfStep, again_and_again, late_ms
from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.diagnosis.recorded import tables_of_timelines
from megaprof.analysis.diagnosis.table import Table
from megaprof.analysis.fleet.reading import read_fleet
from megaprof.formats import timeline as format
from megaprof.formats.arrivals import Arrivals, kept, pack_arrivals, pack_groups
from megaprof.formats.flight import GroupConfig
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines

_TENSOR = ("1", (0, 1))


def of(rank: int, values: list[int], lengths: bool = False, host: str = "a", start_ns: int = 0, **other: Any) -> OfStep:
    numbers = np.arange(1, len(values) + 1)
    arrivals = Arrivals("1", lengths, other.pop("shift", 0), other.pop("numbers", numbers), np.array(values))
    return OfStep(rank, host, start_ns, {_TENSOR: arrivals})


def at(value: int) -> list[int]:
    """Microseconds of 32 collectives, of which one is ``value``."""
    return [0] * 31 + [value]


def test_who_comes_last_is_late() -> None:
    assert late_ms([of(0, at(1000)), of(1, at(3000))]) == {0: -2.0, 1: 2.0}
    # Hosts enter steps at different times; what counts is when they came.
    assert late_ms([of(0, [1000] * 32), of(1, [0] * 32, start_ns=5_000_000)]) == {0: -128.0, 1: 128.0}
    # On a device the shortest part is that of the last.
    assert late_ms([of(0, at(9000), lengths=True), of(1, at(2000), lengths=True, host="b")]) == {0: -7.0, 1: 7.0}
    assert late_ms([of(0, at(1000)), of(1, at(3000), host="b")]) == {}  # on clocks that may differ
    assert late_ms([of(0, at(1000))]) == {}


def test_what_every_collective_scatters_by_is_no_lateness() -> None:
    apart = np.random.default_rng(3).normal(0, 500, 200).astype(int)
    late = late_ms([of(0, [0] * 200), of(1, [*apart[:-1], 20_000])])
    assert 17 < late[1] < 20
    assert abs(late_ms([of(0, [0] * 200), of(1, apart.tolist())])[1]) < 0.5


def test_what_was_left_out_counts_as_what_was_kept() -> None:
    all_of_them = of(0, [0] * 64)
    numbers = all_of_them.groups[_TENSOR].numbers
    some = numbers[kept(numbers, 3)]
    found = late_ms([all_of_them, of(1, [1000] * len(some), numbers=some, shift=3)])
    assert found == {0: -8.0 * len(some), 1: 8.0 * len(some)}


def test_again_and_again() -> None:
    random = np.random.default_rng(5)
    chance = random.normal(0, 10, (20, 2))
    assert again_and_again(chance).max() < 10
    chance[:, 1] += np.where(np.arange(20) < 3, 300.0, 0.0)  # a disturbance of some steps
    assert again_and_again(chance)[:, 1].max() < 10
    chance[8:, 0] += 100.0
    found = again_and_again(chance)
    assert (found[:8, 0] == 0).all()
    assert (abs(found[8:, 0] - 100) < 15).all()
    assert again_and_again(np.array([[50.0, -50.0]])).max() == 0  # one step shows nothing that comes again


@pytest.mark.parametrize("late", [0, 1, None])
def test_a_timeline_with_arrivals_names_one_of_its_peers(tmp_path: Path, late: int | None) -> None:
    """Two tensor-parallel ranks of one stage: one comes 3 ms late to one in four collectives, or chance decides."""
    layout = WorldLayout(ParallelSizes.of(4, tp=2, pp=2))
    paths = write_timelines(tmp_path, layout, steps=24, noise=0.01)
    random = np.random.default_rng(7)
    apart = random.normal(0, 200, (24, 64)).astype(int)
    for rank, path in enumerate(paths):
        rows = len(read_timeline(path).steps)
        pair = (0, 1) if rank < 2 else (2, 3)
        group = {f"{pair[0]}": GroupConfig("TENSOR_MODEL_PARALLEL_GROUP", str([*pair]))}
        facts = [format.fact_record(0, format.GROUPS, pack_groups(group))]
        for row in range(rows):
            values = 1000 * np.arange(64) + 2000 + (apart[row] if rank % 2 else 0)
            values[::4] += 3000 * (rank == late)
            arrivals = Arrivals(f"{pair[0]}", False, 0, 64 * row + np.arange(64), values)
            facts.append(format.fact_record(row, format.COLLECTIVES, pack_arrivals([arrivals])))
        with path.open("ab") as file:
            file.write(b"".join(facts))
    (table,) = tables_of_timelines(read_fleet(paths)).values()
    assert isinstance(table, Table)
    causes = diagnose(examine(table)).causes
    named = [cause.ranks for cause in causes if cause.kind == "slow_rank"]
    assert named == ([] if late is None else [(late,)])
