"""Where iterations go: the parts of every one add up to its wall time, whatever the host does between its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.report.drawn import boxes, of_roles
from megaprof.analysis.table.iterations import EXCHANGES, UNKNOWN, Parts, iterations_of, parts_of
from megaprof.analysis.trace.reading import Timelines
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.facts import pack_between, pack_data
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.synthetic import chunk
from tests.analysis.truth.files import START_NS, described

MS = st.integers(0, 10_000)
CALL = st.tuples(MS, MS, MS, MS, MS)  # waits for data, the rest of the forwards, backwards, gradients, the rest
BETWEEN = st.dictionaries(st.sampled_from(["optimizer", "evaluation", "saving", "train_log_probs", "gone"]), MS)
STEP = st.tuples(st.lists(CALL, min_size=1, max_size=3), BETWEEN, MS)


def of_calls(target: str, role: str | None, microbatches: int) -> bytes:
    layout = WorldLayout(ParallelSizes(tp=1, pp=1, cp=1, ep=1, dp=1))
    metadata = described(
        layout.coords(0),
        [chunk(4, embedding=True, loss=True)],
        target=target,
        steps=(0, 1),
        microbatches=microbatches,
        host="node-1",
        device="cpu",
    )
    return format.metadata_record(metadata | {"timeline": {"clock": "host"}, "role": role})


def write(
    path: Path,
    steps: list[Any],
    *,
    flags: int = 0,
    target: str = "train_actor",
    role: str | None = None,
    begin_ms: int = 0,
) -> list[float]:
    """A file of these steps, every second one with another number of microbatches, and what comes between in the order
    given; returns the wall time of each that has one behind it, in milliseconds."""
    metadata = [of_calls(target, role, microbatches) for microbatches in (1, 2)]
    out = [format.MAGIC, *metadata, format.shape_record([])]
    now_us, row, before, walls = 1000 * begin_ms, 0, None, list[float]()
    for number, (calls, between, unknown) in enumerate(steps):
        began_us = now_us
        for index, (waits, forward, backward, gradients, rest) in enumerate(calls):
            length = waits + forward + backward + gradients + rest
            spent = (1000 * length, 1000 * (waits + forward), 1000 * backward, 0, 1000 * gradients, 0, 0)
            begun = index, flags, number, START_NS + 1000 * now_us
            out.append(format.step_record(number % 2, 0, begun, spent, b""))
            data = [(codes.DATA | codes.phase(0, 0, 0), 0, 1_000_000 * waits)]
            out.append(format.fact_record(row, format.DATA, pack_data(data)))
            if index == 0 and before is not None:
                took = [(part, 1_000_000 * ms) for part, ms in before]
                out.append(format.fact_record(row, format.BETWEEN, pack_between(took)))
            now_us, row = now_us + 1000 * length, row + 1
        now_us += 1000 * (sum(between.values()) + unknown)
        before = [*between.items(), ("", unknown)]
        walls.append((now_us - began_us) / 1e3)
    path.write_bytes(b"".join(out))
    return walls[:-1]


def read(path: Path) -> Parts:
    timeline = read_timeline(path)
    return parts_of(timeline, np.arange(len(timeline.steps)))


@given(st.lists(STEP, min_size=2, max_size=6))
def test_the_parts_of_every_iteration_add_up(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    path = tmp_path_factory.mktemp("timeline") / "a.timeline.bin"
    walls = write(path, steps)
    parts = read(path)
    assert sum(parts.values()) == pytest.approx(walls, rel=0.01, abs=1e-6)
    for number, (_, between, unknown) in enumerate(steps[:-1]):
        assert parts["optimizer"][number] == between.get("optimizer", 0)
        assert parts[UNKNOWN][number] == pytest.approx(
            unknown + between.get("gone", 0), abs=0.01 * walls[number] + 1e-6
        )
    found = iterations_of({0: [parts]})
    if found is not None:
        assert sum(part.ms for part in found.parts) == pytest.approx(found.ms)
        assert found.ms == pytest.approx(np.mean(walls), rel=0.01)


def test_the_rank_on_which_a_part_is_dear_is_named(tmp_path: Path) -> None:
    ranks = {}
    for rank, saves in enumerate((0, 300, 0)):
        path = tmp_path / f"{rank}.timeline.bin"
        write(path, [([(5, 20, 40, 10, 25)], {"saving": saves * (n % 5 == 4)}, 0) for n in range(21)])
        ranks[rank] = [read(path)]
    found = iterations_of(ranks)
    assert found is not None
    (saving,) = (part for part in found.parts if part.name == "saving")
    assert (saving.rank, saving.rank_ms, saving.ms, saving.longest_ms) == (1, 60.0, 20.0, 300.0)
    assert saving.often == pytest.approx(0.2 / 3)
    assert (found.ms, found.step_ms, found.count) == (120.0, 100.0, 20)
    assert 1.0 - found.step_ms / found.ms == pytest.approx(1 / 6)
    assert [part.ms for part in found.parts if part.name == EXCHANGES] == [25.0]


def test_what_a_rank_waits_for_a_call_of_another_one_is_not_outside_of_the_schedule(tmp_path: Path) -> None:
    ranks = {}
    for rank, waits in enumerate((0, 45)):
        path = tmp_path / f"{rank}.timeline.bin"
        write(path, [([(5, 20, 40, 10, 75 - waits)], {"optimizer": 10}, waits) for _ in range(5)])
        ranks[rank] = [read(path)]
    found = iterations_of(ranks)
    assert found is not None
    assert (found.ms, found.step_ms) == (160.0, 150.0)
    assert 1.0 - found.step_ms / found.ms == pytest.approx(10 / 160)


CALLS = [(5, 20, 40, 10, 25)]


def test_an_iteration_with_rollouts_has_all_steps_until_the_next_one(tmp_path: Path) -> None:
    """Two steps for each rollout, as slime has them; half of the rollouts take as long as the rest, the others twice as
    long."""
    path = tmp_path / "a.timeline.bin"
    steps: list[Any] = []
    for number in range(10):
        between = {"optimizer": 10}
        if number % 2:
            long = 300 if number % 4 == 1 else 150
            between |= {"weight_sync": 20, "rollout": long, "train_log_probs": 30, "reference": 40, "waiting": 5}
        steps.append((CALLS, between, 15))
    write(path, [*steps, (CALLS, {}, 0)])
    found = iterations_of({0: [read(path)]})
    assert found is not None
    rest = 2 * (100 + 10 + 15) + 20 + 30 + 40 + 5
    assert (found.count, found.ms, found.step_ms) == (5, pytest.approx(rest + 240), 200)
    assert (found.ms_of("rollout"), found.ms_of("reference"), found.ms_of("waiting")) == (240, 40, 5)
    assert found.quicker_rollout_ms == pytest.approx(found.ms - 0.2 * 240)
    assert found.rollout_ahead_ms == pytest.approx(rest)


def test_all_roles_are_drawn_on_one_clock(tmp_path: Path) -> None:
    """The reference works while the actor waits for it. The first iterations are shorter than the others."""
    files = tmp_path / "actor.timeline.bin", tmp_path / "ref.timeline.bin"
    between = {"weight_sync": 20, "rollout": 300, "waiting": 70}
    steps = [(CALLS, between | {"rollout": 300 - 9 * (number < 2)}, 10) for number in range(6)]
    write(files[0], steps, role="actor")
    ref = [([(0, 60, 0, 0, 0)], {"waiting": 437}, 3)] * 6
    write(files[1], ref, target="train_log_probs", role="ref", begin_ms=425 - 18)

    reading = read_fleet(Timelines(files))
    roles = [(key, row) for key, series in reading.series.items() for row in series.ranks]
    drawn = of_roles(reading, roles)
    begin = START_NS + 1_000_000 * (drawn.step * 500 - 18)
    rows = {
        row.stage: [(box.kind, (box.start - begin) / 1e6, (box.end - begin) / 1e6) for box in row.passes]
        for row in drawn.rows
    }
    assert drawn.step >= 2
    assert {tuple(moment - begin for moment in row.extent) for row in drawn.rows} == {(0, 500_000_000)}
    assert rows == {
        "actor": [("training", 0, 100), ("weight sync", 100, 120), ("rollout", 120, 420), ("unknown", 490, 500)],
        "ref": [("unknown", 422, 425), ("log-probs", 425, 485)],
    }
    assert len(drawn.notes) == 1
    (key, row) = roles[1]
    assert len(of_roles(reading, [roles[0], (key, row._replace(host="two"))]).notes) == 2
    packed = boxes(drawn)
    assert [row["stage"] for row in packed["rows"]] == ["actor", "ref"]
    assert set(zip(packed["names"], packed["kinds"], strict=True)) == {
        ("training", "forward"),
        ("weight sync", "pp"),
        ("rollout", "dp"),
        ("unknown", "unknown"),
        ("log-probs", "backward"),
    }


def test_a_rollout_that_is_longer_than_the_rest_hides_that(tmp_path: Path) -> None:
    path = tmp_path / "a.timeline.bin"
    write(path, [(CALLS, {"rollout": 1000}, 50)] * 4)
    found = iterations_of({0: [read(path)]})
    assert found is not None
    assert (found.ms, found.rollout_ahead_ms) == (1150, 1000)
    write(path, [(CALLS, {"waiting": 1000}, 50)] * 4)
    found = iterations_of({0: [read(path)]})
    assert found is not None
    assert (found.quicker_rollout_ms, found.rollout_ahead_ms) == (None, None)


def test_the_calls_of_a_reference_alone_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a.timeline.bin"
    steps: list[Any] = [(CALLS, {"reference": 100, "waiting": 300}, 0)] * 3
    write(path, steps, target="train_log_probs", role="ref")
    parts = read(path)
    assert "reference" not in parts
    assert parts["waiting"].tolist() == [300, 300]


def test_a_window_on_other_calls_disturbs_an_iteration(tmp_path: Path) -> None:
    """Its log-probs were captured: they lie between two calls of the training."""
    path = tmp_path / "a.timeline.bin"
    write(path, [(CALLS, {"train_log_probs": 500 if number == 1 else 50}, 0) for number in range(4)])
    begun = 0, format.DISTURBED, 2, START_NS + 300_000_000
    captured = of_calls("train_log_probs", None, 1) + format.step_record(2, 0, begun, (1000, 0, 0, 0, 0, 0, 0), b"")
    path.write_bytes(path.read_bytes() + captured)
    timeline = read_timeline(path)
    parts = parts_of(timeline, np.flatnonzero(timeline.steps["metadata"] < 2))
    assert parts["train_log_probs"].tolist() == [50, 50]


def test_disturbed_iterations_and_files_of_earlier_versions_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.timeline.bin"
    steps = [([(5, 20, 40, 10, 25)], {"saving": 5}, 0)] * 3
    write(path, steps, flags=format.DISTURBED)
    assert iterations_of({0: [read(path)]}) is None
    write(path, steps[:1])
    assert iterations_of({0: [read(path)]}) is None
