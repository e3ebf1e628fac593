"""Who comes last inside a group: from arrivals made by hand, and of a job whose timelines have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaprof.analysis.collectives.arrivals import OfStep, waited_ms
from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.diagnosis.recorded import tables_of_timelines
from megaprof.analysis.diagnosis.table import Table
from megaprof.analysis.fleet.reading import read_fleet
from megaprof.formats import timeline as format
from megaprof.formats.arrivals import Arrivals, pack_arrivals, pack_groups
from megaprof.formats.flight import GroupConfig
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines

_TENSOR = ("1", (0, 1))


def of(rank: int, values: list[int], lengths: bool = False, host: str = "a", start_ns: int = 0, **other: Any) -> OfStep:
    numbers = np.arange(1, len(values) + 1)
    arrivals = Arrivals("1", lengths, other.pop("shift", 0), other.pop("numbers", numbers), np.array(values))
    return OfStep(rank, host, start_ns, {_TENSOR: arrivals})


def test_who_came_earlier_waited_for_the_last() -> None:
    assert waited_ms([of(0, [1000, 5000]), of(1, [3000, 4000])]) == {0: 2.0, 1: 1.0}
    # Hosts enter steps at different times; what counts is when they came.
    assert waited_ms([of(0, [1000]), of(1, [0], start_ns=5_000_000)]) == {0: 4.0, 1: 0.0}
    # On a device the shortest part is that of the last.
    assert waited_ms([of(0, [9000], lengths=True), of(1, [2000], lengths=True, host="b")]) == {0: 7.0, 1: 0.0}
    assert waited_ms([of(0, [1000]), of(1, [3000], host="b")]) == {}  # on clocks that may differ
    assert waited_ms([of(0, [1000])]) == {}


def test_what_was_left_out_counts_as_what_was_kept() -> None:
    all_of_them = of(0, [0] * 64)
    shift = 3
    numbers = all_of_them.groups[_TENSOR].numbers
    some = numbers[(numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - shift) == 0]
    found = waited_ms([all_of_them, of(1, [1000] * len(some), numbers=some, shift=shift)])
    assert found == {0: 8.0 * len(some), 1: 0.0}


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
