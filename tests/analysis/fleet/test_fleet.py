"""Slow ranks, stages and collectives in runs that are known, and nothing in healthy ones."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.fleet.fleet import Fleet, survey
from megaprof.analysis.fleet.reading import find_timelines, read_fleet
from megaprof.analysis.fleet.stragglers import coupled, groups_of, layout_of
from megaprof.formats.timeline import Cost, cost_record
from megaprof.parallel.topology import ParallelSizes, Place, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.telling import findings, notes

PIPELINE = WorldLayout(ParallelSizes.of(32, pp=4))
EXPERTS = WorldLayout(ParallelSizes.of(64, tp=2, pp=2, ep=4))
TWO_REPLICAS = WorldLayout(ParallelSizes.of(4, pp=2))
THREE_REPLICAS = WorldLayout(ParallelSizes.of(3))
WARM_UP = Slow(from_step=0, until_step=4, factor=6)
CHECKPOINTS = tuple(Slow(from_step=step, until_step=step, factor=3) for step in range(49, 300, 50))

NOTHING = "Over the run nothing became slower, and no rank is slower than its peers."


def fleet_of(directory: Path, layout: WorldLayout, **options: Any) -> Fleet:
    write_timelines(directory, layout, **({"steps": 120, "microbatches": 4} | options))
    return fleet_in(directory)


def fleet_in(directory: Path) -> Fleet:
    (fleet,) = survey(read_fleet(find_timelines(directory)), directory)
    return fleet


def test_a_slow_rank_is_named_with_its_onset(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(rank=19, from_step=70, factor=1.31), WARM_UP, *CHECKPOINTS])
    (slow,) = fleet.stragglers
    assert (slow.ranks, slow.stage, slow.hosts, slow.peers) == ((19,), 2, ("node-0002",), 7)
    assert (slow.from_step, slow.until, slow.since_start, slow.capture) == (70, None, False, None)
    assert slow.factor == pytest.approx(1.31, abs=0.02)
    assert re.match(
        r"Rank 19 \(stage 2, node-0002\) has been 3\d% slower than its 7 peers since step 70, computing 15\d ms per "
        r"step instead of 1\d\d ms; the step takes 1\d% longer since then\.$",
        findings(fleet)[0],
    )
    assert not any(stage.shifts for stage in fleet.stages)
    assert [shift.step for shift in fleet.times.step_shifts] == [70]
    assert not fleet.synchronisation.synchronisation_shifts  # the others waited in it, and nobody was slow in it
    assert fleet.times.single.count == 5 + 2  # those of the warm-up, and steps 49 and 99


def test_thousands_of_steps_are_kept_in_a_few_buckets(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(8, pp=2))
    fleet = fleet_of(tmp_path, layout, steps=3000, events=False, slow=[Slow(rank=2, from_step=1500, factor=1.2)])
    assert fleet.width == 15
    assert len(fleet.buckets) == 200
    (slow,) = fleet.stragglers
    assert slow.ranks == (2,)
    assert abs(slow.from_step - 1500) <= fleet.width
    assert fleet.coverage.calls == 3000
    assert "about step 1500" in findings(fleet)[0]


def test_coupled_ranks_are_named_together_with_the_capture_that_tells_more(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, EXPERTS, slow=[Slow(rank=41, from_step=60, factor=1.4)])
    (slow,) = fleet.stragglers
    assert slow.ranks == tuple(range(40, 48))  # its expert-parallel group and their tensor-parallel peers
    assert slow.capture == "40-47"
    assert f"megaprof trigger {tmp_path} --target train_actor --steps 2 --select 40-47" in findings(fleet)[0]
    assert any("expert-parallel communication" in note for note in notes(fleet))


def test_a_rank_that_is_slow_alone_stands_out_of_its_group(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(8, tp=4))
    write_timelines(tmp_path, layout, steps=120, microbatches=4, slow=[Slow(stage=0, factor=1.5)], ranks=[5])
    fleet = fleet_of(tmp_path, layout, ranks=[0, 1, 2, 3, 4, 6, 7])
    (slow,) = fleet.stragglers
    assert (slow.ranks, slow.peers, slow.since_start) == ((5,), 3, True)
    assert "Rank 5 (stage 0, node-0000) has been 50% slower than its 3 peers since the first step" in findings(fleet)[0]


def test_a_slow_stage_is_no_slow_rank(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(stage=1, from_step=50, factor=1.25)])
    assert not fleet.stragglers
    shifts = {stage.pp: [(s.step, s.until) for s in stage.shifts] for stage in fleet.stages}
    assert shifts == {0: [], 1: [(50, None)], 2: [], 3: []}
    assert findings(fleet)[0].startswith("Stage 1 has been 25% slower since step 50, compared with the other stages")
    assert fleet.imbalance[10] == pytest.approx(1.0, abs=0.02)
    assert fleet.imbalance[-1] == pytest.approx(5 / 4.25, abs=0.02)


def test_two_stages_of_one_rank_each(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(2, pp=2))
    fleet = fleet_of(tmp_path, layout, slow=[Slow(rank=1, from_step=50, factor=1.25)])
    assert {stage.pp: [s.step for s in stage.shifts] for stage in fleet.stages} == {0: [], 1: [50]}


def test_a_slow_collective_is_no_slow_compute(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(from_step=50, factor=8, kind="finalize")])
    assert not fleet.stragglers
    assert not any(stage.shifts for stage in fleet.stages)
    (shift,) = fleet.synchronisation.synchronisation_shifts
    assert (shift.step, shift.until) == (50, None)
    assert shift.after_ms == pytest.approx(8 * shift.before_ms, rel=0.05)
    assert findings(fleet)[0].startswith("Gradient synchronisation has taken 40.")


def test_the_slow_collective_of_one_group(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(32, tp=2, pp=2))
    fleet = fleet_of(tmp_path, layout, slow=[Slow(rank=17, from_step=50, factor=8, kind="finalize")])
    (slow,) = fleet.stragglers
    assert (slow.what, slow.stage, slow.ranks, slow.from_step) == ("synchronisation", 1, tuple(range(17, 32, 2)), 50)
    one = fleet_of(tmp_path / "one", PIPELINE, slow=[Slow(rank=10, from_step=50, factor=8, kind="finalize")])
    assert [(pp, shift.step) for pp, shift in one.synchronisation.stage_synchronisation] == [(1, 50)]
    assert not one.stragglers


def test_a_pipeline_that_comes_late_without_computing_longer(tmp_path: Path) -> None:
    write_timelines(tmp_path, PIPELINE, steps=120, microbatches=4, events=False)
    reading = read_fleet(find_timelines(tmp_path))
    (series,) = reading.series.values()
    for rank in series.ranks:
        if rank.coords.dp != 3:
            rank.finalize[70:] += 100  # they wait for it
    (fleet,) = survey(reading, Path("/runs/one job"))
    (late,) = fleet.stragglers
    assert (late.what, late.ranks, late.from_step, late.until) == ("arrival", (3, 11, 19, 27), 70, None)
    assert (late.peers, late.peers_ms - late.own_ms) == (7, pytest.approx(100, abs=1))
    assert findings(fleet)[0] == (
        "Ranks 3, 11, 19, 27 have come last to the gradient synchronisation since step 70: the others spend 105 ms in "
        "it, they spend 5.01 ms. None of them computes longer in these steps, so it may be exchanges, data loading or "
        "work between steps. A capture shows what it is: "
        "`megaprof trigger '/runs/one job' --target train_actor --steps 2 --select 3,11,19,27`"
    )


def test_a_pipeline_that_is_waited_for_because_it_computes_is_one_finding(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(rank=19, from_step=70, factor=2.0)])
    assert [slow.what for slow in fleet.stragglers] == ["compute"]


def test_a_rank_that_computes_a_little_longer_does_not_explain_that_its_pipeline_comes_far_later(
    tmp_path: Path,
) -> None:
    named = {}
    for late in (100, 400):
        directory = tmp_path / str(late)
        write_timelines(directory, PIPELINE, steps=120, microbatches=4, events=False)
        reading = read_fleet(find_timelines(directory))
        (series,) = reading.series.values()
        for rank in series.ranks:
            if rank.coords.rank == 19:
                rank.compute[70:] += 50
            if rank.coords.dp != 3:
                rank.finalize[70:] += late  # they wait for it
        (fleet,) = survey(reading, directory)
        named[late] = [(s.what, s.ranks) for s in fleet.stragglers]
    computes = ("compute", (19,))
    assert named == {100: [computes], 400: [computes, ("arrival", (3, 11, 19, 27))]}


def test_what_lasts_for_seconds_is_nothing(tmp_path: Path) -> None:
    short = {"forward_ms": 1.0, "backward_ms": 2.0, "finalize_ms": 0.0, "steps": 200}
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(rank=19, from_step=70, until_step=110, factor=3.0)], **short)
    assert findings(fleet) == (NOTHING,)


def test_what_ended_is_told_with_both_ends(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, slow=[Slow(rank=19, from_step=30, until_step=60, factor=1.5)])
    (slow,) = fleet.stragglers
    assert (slow.from_step, slow.until) == (30, 60)
    assert "was 50% slower than its 7 peers from step 30 to step 60" in findings(fleet)[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layout", "noise", "tails"),
    [
        (PIPELINE, 0.02, 0.0),
        (PIPELINE, 0.15, 0.05),
        (EXPERTS, 0.05, 0.02),
        (WorldLayout(ParallelSizes.of(2)), 0.2, 0.02),
    ],
    ids=["quiet", "noisy", "experts", "two ranks"],
)
def test_healthy_runs_raise_no_alarm(
    tmp_path: Path, layout: WorldLayout, noise: float, tails: float, seed: int
) -> None:
    fleet = fleet_of(
        tmp_path,
        layout,
        steps=200,
        noise=noise,
        tails=tails,
        seed=seed,
        events=False,
        slow=[WARM_UP, *CHECKPOINTS],
    )
    assert findings(fleet) == (NOTHING,)


@pytest.mark.parametrize("seed", range(6))
def test_of_two_replicas_noise_makes_none_slow_again_and_again(tmp_path: Path, seed: int) -> None:
    # A rank that always computes a little longer is far slower than its only peer in many steps of a busy machine.
    noisy = {"steps": 200, "noise": 0.2, "tails": 0.05, "seed": seed, "events": False}
    fleet = fleet_of(tmp_path, TWO_REPLICAS, slow=[Slow(rank=1, factor=1.07), Slow(rank=2, factor=1.07)], **noisy)
    assert findings(fleet) == (NOTHING,)


@pytest.mark.parametrize("seed", range(3))
def test_of_two_replicas_one_is_slow_again_and_again(tmp_path: Path, seed: int) -> None:
    slow = [Slow(rank=1, from_step=step, until_step=step + 5, factor=1.6) for step in range(10, 200, 19)]
    fleet = fleet_of(tmp_path, TWO_REPLICAS, slow=slow, steps=200, noise=0.05, tails=0.05, seed=seed, events=False)
    (found,) = fleet.stragglers
    assert (found.ranks, found.until) == ((1,), None)
    assert found.share == pytest.approx(0.3, abs=0.1)
    assert "is slow again and again" in findings(fleet)[0]


def test_ranks_that_ended_early_and_ranks_that_are_missing(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, ranks=[r for r in range(32) if r not in (3, 8, 9, 10)], last_step={20: 77})
    assert fleet.coverage.missing == (3, 8, 9, 10)
    assert [(e.rank, e.stage, e.host, e.last_step) for e in fleet.coverage.ended] == [(20, 2, "node-0002", 77)]
    assert any(note.startswith("28 of 32 ranks have a timeline; missing: 3, 8-10.") for note in notes(fleet))
    assert "rank 20 (stage 2, node-0002) after step 77. The last step of the other ranks is 119." in findings(fleet)[-1]
    # The rank that ended may have been the one that its group waited for.
    assert not fleet.synchronisation.stage_synchronisation


def test_the_recorders_own_cost_is_told(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE)
    assert fleet.recording.own_us is None
    assert notes(fleet)[-1] == "What recording cost is not known: the run was too short to measure it."
    for number, path in enumerate(sorted(tmp_path.rglob("*.timeline.bin"))):
        cost = Cost(9, 30, 5e4, 90.0 + number % 3, 12.0, 140.0, 3.0)
        path.write_bytes(path.read_bytes() + cost_record(Cost(1, 3, 1.0, 1.0, 1.0, 1.0, 1.0)) + cost_record(cost))
    fleet = fleet_in(tmp_path)
    assert fleet.recording.own_us == pytest.approx(91, abs=1)
    assert fleet.recording.own_fraction == pytest.approx(91 / 5e4, rel=0.02)
    assert notes(fleet)[-1] == "Recording added 91 ± 12 µs to a step (0.18%), and 140 µs of CPU time."


def test_too_few_steps_are_said_to_be_too_few(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, PIPELINE, steps=5, slow=[Slow(rank=3, factor=2)])
    assert not fleet.stragglers
    assert any("5 steps are too few" in note for note in notes(fleet))


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_the_rank_order_is_found_from_coordinates(order: str) -> None:
    layout = WorldLayout(ParallelSizes.of(32, tp=2, pp=2, cp=2, ep=2, etp=2), order)
    places = {c.rank: c for c in layout}
    found = layout_of(places.values(), ParallelSizes(tp=2, pp=2, cp=2, ep=2, dp=4, vpp=1, etp=2))
    assert found is not None
    assert list(found) == list(layout)
    groups = groups_of(places, found)
    assert sorted(rank for group in groups for rank in group) == list(range(32))
    for group in groups:
        assert {coupled(layout, rank) for rank in group} == {frozenset(group)}
        assert len({places[rank].pp for rank in group}) == 1


def test_without_a_known_order_a_pipelines_position_is_a_group() -> None:
    places = {rank: Place(rank, pp=0, tp=rank % 2, cp=0, ep=0, dp=1 - rank // 2) for rank in range(4)}
    assert layout_of(places.values(), ParallelSizes(tp=2, dp=2)) is None
    assert groups_of(places, None) == [(0, 1), (2, 3)]


def test_a_rank_that_becomes_much_slower_has_two_beginnings(tmp_path: Path) -> None:
    slow = [Slow(rank=19, from_step=20, factor=1.2), Slow(rank=19, from_step=70, factor=2.0)]
    fleet = fleet_of(tmp_path, PIPELINE, slow=slow)
    assert [(s.ranks, s.from_step, s.until) for s in fleet.stragglers] == [((19,), 70, None), ((19,), 20, 69)]
    assert "2.4 times as slow as its 7 peers since step 70" in findings(fleet)[0]


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_take_longer_again_and_again_are_no_change_beside_the_rank_that_makes_them(
    tmp_path: Path, seed: int
) -> None:
    # Of 50 steps every second five are slow, so those from some step on are slow more often than those before it.
    slow = [Slow(rank=1, from_step=step, until_step=step + 4, factor=1.9) for step in range(5, 50, 10)]
    fleet = fleet_of(tmp_path, THREE_REPLICAS, slow=slow, steps=50, noise=0.02, seed=seed)
    (found,) = findings(fleet)
    assert "is slow again and again" in found


def test_a_rank_that_is_slow_again_and_again(tmp_path: Path) -> None:
    slow = [Slow(rank=19, from_step=step, until_step=step + 7, factor=1.5) for step in range(8, 120, 16)]
    fleet = fleet_of(tmp_path, PIPELINE, slow=slow)
    (found,) = fleet.stragglers
    assert (found.ranks, found.from_step, found.until, found.last_step) == ((19,), 8, None, 111)
    assert found.share == pytest.approx(56 / 120)
    assert findings(fleet)[0].startswith(
        "Rank 19 (stage 2, node-0002) is slow again and again: 50% slower than its 7 peers in 47% of the steps, first "
        "in step 8, last in step 111, computing "
    )


def test_peers_without_a_timeline_may_be_the_slow_ones(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(32, tp=4))
    fleet = fleet_of(tmp_path, layout, slow=[Slow(rank=8, from_step=50, factor=1.4)], ranks=range(0, 32, 4))
    (found,) = fleet.stragglers
    assert (found.ranks, found.unseen) == ((8,), (9, 10, 11))
    assert "; it may as well be one of the tp peers 9-11, which have no timeline." in findings(fleet)[0]


def test_none_computes_longer_is_checked_on_the_very_stretch(tmp_path: Path) -> None:
    write_timelines(tmp_path, PIPELINE, steps=120, microbatches=4, events=False)
    reading = read_fleet(find_timelines(tmp_path))
    (series,) = reading.series.values()
    for rank in series.ranks:
        if rank.coords.dp != 3:
            rank.finalize[70:] += 22.5  # they wait for it
        elif rank.coords.pp == 1:
            rank.compute[70:] += 11.6  # too little to be called slow, and more than half of what they wait
    (fleet,) = survey(reading, tmp_path)
    (late,) = fleet.stragglers
    assert late.what == "arrival"
    assert late.computing_ms == pytest.approx(11, abs=2)
    assert "In these steps a stage of the same pipeline computes 1" in findings(fleet)[0]


def test_replicas_that_differ_at_random_get_a_finding(tmp_path: Path) -> None:
    rng = random.Random(0)
    slowest = [rng.randrange(8) for _ in range(120)]
    slow = [
        Slow(rank=pp * 8 + replica, from_step=step, until_step=step, factor=1.4)
        for step, replica in enumerate(slowest)
        for pp in range(4)
    ]
    fleet = fleet_of(tmp_path, PIPELINE, slow=slow)
    assert not fleet.stragglers
    assert fleet.unbalanced is not None
    assert fleet.unbalanced.ratio == pytest.approx(1.4 / (1 + 0.4 / 8), rel=0.03)
    assert fleet.unbalanced.balanced_ms < fleet.unbalanced.step_ms - 30
    (said,) = findings(fleet)
    assert said.startswith(
        "The replicas get unequal work, another one the most in every step: the slowest computes 1.3"
    )


def test_single_stalls_that_hit_ranks_in_turn_are_named(tmp_path: Path) -> None:
    stalls = [Slow(rank=rank, from_step=20 + 9 * rank, until_step=20 + 9 * rank, factor=3) for rank in range(8)]
    layout = WorldLayout(ParallelSizes.of(8, pp=2))
    fleet = fleet_of(tmp_path, layout, slow=stalls)
    assert fleet.stalls is not None
    assert (fleet.stalls.ranks, fleet.stalls.count) == (tuple(range(8)), 8)
    assert fleet.stalls.longer_ms == pytest.approx(240, rel=0.1)
    (said,) = (note for note in notes(fleet) if "--manual-gc" in note)
    assert said.startswith("Single stalls hit 8 of 8 ranks, each in other steps: 8 steps of a rank took about 2")
    everywhere = fleet_of(tmp_path / "all", layout, slow=[Slow(from_step=s, until_step=s, factor=3) for s in (20, 50)])
    assert everywhere.stalls is None


def test_a_rank_that_enters_the_step_late_says_by_how_much(tmp_path: Path) -> None:
    write_timelines(tmp_path, PIPELINE, steps=120, microbatches=4, events=False)
    reading = read_fleet(find_timelines(tmp_path))
    (series,) = reading.series.values()
    for rank in series.ranks:
        if rank.coords.dp == 3 and rank.coords.pp == 0:
            rank.between[70:] += 100
        elif rank.coords.dp != 3:
            rank.finalize[70:] += 100  # they wait for it
    (fleet,) = survey(reading, tmp_path)
    (late,) = fleet.stragglers
    assert (late.what, late.entering_ms) == ("arrival", pytest.approx(100, abs=2))
    assert re.search(
        r"They enter the step (99\.\d|100|101) ms late, since something between the steps", findings(fleet)[0]
    )


def test_what_costs_the_step_most_comes_first(tmp_path: Path) -> None:
    slow = [Slow(rank=17, from_step=60, factor=1.5), Slow(rank=10, from_step=20, until_step=50, factor=9.0)]
    write_timelines(tmp_path, PIPELINE, steps=120, microbatches=4, events=False, slow=slow)
    reading = read_fleet(find_timelines(tmp_path))
    (series,) = reading.series.values()
    for rank in series.ranks:
        if rank.coords.dp == 3 and rank.coords.pp == 0:
            rank.between[70:] += 400
        elif rank.coords.dp != 3:
            rank.finalize[70:] += 400  # they wait for it
    (fleet,) = survey(reading, tmp_path)
    said = findings(fleet)
    costs = {s.ranks[0]: round(s.cost_ms, -1) for s in fleet.stragglers}
    assert costs == {17: 60, 10: 960, 3: 400}
    assert [text.split(" (")[0].split(" have")[0] for text in said] == ["Ranks 3, 11, 19, 27", "Rank 17", "Rank 10"]
