"""The stages of timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.diagnosis.stages import averages
from megaprof.analysis.report.report import TargetReport, analyze
from megaprof.analysis.table.table import Table
from megaprof.formats import timeline as format
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.synthetic import kinds, pipeline
from tests.analysis.tables import tables_in

#: Before the first backward of each stage, less its forwards.
WARM_UP_MS = (90.6, 80.5, 30.4, 40.3)
LAYOUT = WorldLayout(ParallelSizes(pp=4))


def report_of(directory: Path, layout: WorldLayout = LAYOUT, **options: Any) -> TargetReport:
    write_timelines(directory, layout, **({"steps": 40, "microbatches": 8, "noise": 0.0} | options))
    (target,) = analyze(directory).targets
    return target


def test_stages_bubble_and_verdict_are_those_of_the_pipeline(tmp_path: Path) -> None:
    target = report_of(tmp_path, forward_ms=[10, 10, 20, 10], backward_ms=[20, 20, 40, 20], chunk_layers=[4, 4, 8, 4])
    # The steps that its causes are priced in, and the same time of a step.
    assert target.steps == tuple(range(40))
    assert target.diagnosis is not None
    assert target.step_ms == pytest.approx(target.diagnosis.step_ms)
    assert [stage.ranks for stage in target.stages] == [(0,), (1,), (2,), (3,)]
    assert [round(stage.forward_ms.mean) for stage in target.stages if stage.forward_ms] == [80, 80, 160, 80]
    assert [round(stage.backward_ms.mean) for stage in target.stages if stage.backward_ms] == [160, 160, 320, 160]
    assert target.step_time_ms is not None
    for stage in target.stages:
        assert stage.compute_ms is not None
        assert stage.bubble_ms is not None
        assert stage.gradients_ms is not None
        beside = target.step_time_ms.mean - stage.compute_ms.mean - stage.gradients_ms.mean
        assert stage.bubble_ms.mean == pytest.approx(beside, abs=1)
        split = [part.mean for part in stage.bubble_split.values() if part is not None]
        assert sum(split) == pytest.approx(stage.bubble_ms.mean)
        assert split[0] == pytest.approx(WARM_UP_MS[stage.pp], abs=1.5)
    assert target.slowest_stage == 2
    assert [cause.kind for cause in target.causes][:1] == ["layers"]
    assert target.imbalance == pytest.approx(60 / 37.5, rel=0.01)
    assert target.what_if.replay_error is not None
    assert abs(target.what_if.replay_error.mean) < 0.05


def test_interleaved_chunks(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2, vpp=2))
    target = report_of(tmp_path, layout, microbatches=4, chunk_layers=[2, 2])
    assert [len(stage.chunks) for stage in target.stages] == [2, 2]
    assert [stage.compute_ms.mean for stage in target.stages if stage.compute_ms] == pytest.approx([120] * 2)


def test_clocks_of_different_hosts_are_aligned(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=4))
    skewed = report_of(tmp_path / "skewed", layout, skew_ms=500.0)
    exact = report_of(tmp_path / "exact", layout)
    assert [stage.ranks for stage in skewed.stages] == [(0,), (8,), (16,), (24,)]
    assert skewed.step_time_basis == exact.step_time_basis == "one_clock"
    assert skewed.step_time_ms is not None
    assert exact.step_time_ms is not None
    assert skewed.step_time_ms.mean == pytest.approx(exact.step_time_ms.mean, rel=0.01)
    assert [each.kind for each in skewed.warnings].count("clocks_aligned") == 1


def test_what_a_timeline_does_not_tell_is_null(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=2, pp=2, cp=2, ep=2, dp=2))
    measured = report_of(tmp_path, layout)
    for stage in measured.stages:
        missing = [axis for axis, exposed in stage.exposed_ms.items() if exposed is None]
        assert missing == ["tp", "ep", "cp", "pp", "unknown"]
    assert [each.names for each in measured.warnings if each.kind == "exposed_unknown"] == [
        ("pp",),
        ("tp", "ep", "cp"),
    ]


def test_on_the_devices_clock_exchanges_are_used_as_on_the_hosts(tmp_path: Path) -> None:
    target = report_of(tmp_path / "device", device_clock=True)
    assert [stage.compute_ms.mean for stage in target.stages if stage.compute_ms] == pytest.approx([240] * 4)
    assert ("pp",) in [note.names for note in target.warnings]
    assert target.fleet is not None
    assert target.fleet.clock == "device"


def test_stages_whose_gpu_waits_for_its_host_are_said(tmp_path: Path) -> None:
    """In three quarters of its 16 passes on stage 2, in an eighth of them on stage 0; the other files do not say."""
    host_bound = {0: b"\x03\x00", 2: b"\xff\x0f"}
    for path in write_timelines(tmp_path, LAYOUT, steps=40, microbatches=8, noise=0.0, device_clock=True):
        timeline = format.read_timeline(path)
        if (bits := host_bound.get(timeline.metadata[0].coords.pp)) is not None:
            with path.open("ab") as file:
                file.write(b"".join(format.fact_record(row, format.HOST_BOUND, bits) for row in range(10, 40)))
    (target,) = analyze(tmp_path).targets
    assert [stage.host_bound_passes for stage in target.stages] == [0.125, None, 0.75, None]
    said = [(note.stages, note.factor, note.steps) for note in target.warnings if note.kind == "waits_for_host"]
    assert said == [((2,), 0.75, ())]


def test_a_stage_whose_gpu_waits_for_its_host_from_a_step_on_is_said_with_that_step(tmp_path: Path) -> None:
    path = write_timelines(tmp_path, LAYOUT, steps=40, microbatches=8, noise=0.0, device_clock=True)[-1]
    with path.open("ab") as file:
        bits = [b"\xff\xff" if row >= 24 else b"\x00\x01" for row in range(40)]
        file.write(b"".join(format.fact_record(row, format.HOST_BOUND, each) for row, each in enumerate(bits)))
    (target,) = analyze(tmp_path).targets
    (note,) = (note for note in target.warnings if note.kind == "waits_for_host")
    assert (note.factor, note.steps) == (1.0, (24,))
    assert "it did not before step 24" in note.text


def test_steps_without_any_time_are_not_shown_as_steps_of_no_time(tmp_path: Path) -> None:
    """As they are written where the GPU was not done with them in time."""
    paths = write_timelines(tmp_path, LAYOUT, steps=40, microbatches=8, noise=0.0, device_clock=True, events=False)
    for path in paths:
        timeless(path)
    with pytest.raises(Unanswerable, match="holds no times"):
        analyze(tmp_path)


def timeless(path: Path) -> None:
    """Rewrite a timeline as if no step of it had been timed."""
    timeline = format.read_timeline(path)
    steps = [
        format.step_record(
            0, 0, tuple(int(each[name]) for name in ("index", "flags", "step", "start_ns")), (0,) * 7, b""
        )
        for each in timeline.steps
    ]
    head = format.metadata_record(timeline.metadata[0].as_dict()), format.shape_record(timeline.shapes[0].tolist())
    path.write_bytes(b"".join((format.MAGIC, *head, *steps)))


def test_without_times_of_events_the_step_is_known(tmp_path: Path) -> None:
    target = report_of(tmp_path, events=False)
    assert target.step_time_ms is not None
    assert target.microbatches == 8
    assert [stage.compute_ms.mean for stage in target.stages if stage.compute_ms] == pytest.approx([240] * 4, rel=0.02)
    assert [chunk.holds is not None for stage in target.stages for chunk in stage.chunks] == [True] * 4
    assert target.imbalance is None
    assert "no_step" in kinds(target.warnings)


def test_only_steps_that_every_stage_has(tmp_path: Path) -> None:
    measured = report_of(tmp_path, last_step={2: 30})
    assert measured.steps == tuple(range(31))


@pytest.mark.parametrize(("cold", "left_out"), [(None, []), (0, [(0,)]), (1, [(0, 1)])])
def test_first_steps_are_left_out_only_if_they_are_longer(
    tmp_path: Path, cold: int | None, left_out: list[tuple[int, ...]]
) -> None:
    slow = [] if cold is None else [Slow(until_step=cold, factor=1.5)]
    measured = report_of(tmp_path, steps=8, noise=0.05, slow=slow)
    assert [each.steps for each in measured.warnings if each.kind == "first_steps"] == left_out
    assert measured.steps == tuple(range(0 if cold is None else cold + 1, 8))


def test_the_pipeline_without_the_slow_rank_is_shown_and_the_slow_rank_is_a_cause(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=4, dp=2))
    target = report_of(tmp_path, layout, noise=0.01, slow=[Slow(rank=4, from_step=10, factor=1.5)])
    assert [stage.ranks for stage in target.stages] == [(1,), (3,), (5,), (7,)]
    assert target.slowest_stage is None
    (cause,) = (cause for cause in target.causes if cause.kind == "slow_rank")
    assert (cause.stage, cause.ranks) == (2, (4,))
    assert cause.while_ms == pytest.approx(105, rel=0.1)
    # It has a row of its own in the tables, the one that is in bold.
    assert [row.ranks for row in target.shown] == [(1,), (3,), (5,), (4,), (7,)]
    assert [row.ranks for row in target.shown if target.marked(row)] == [(4,)]
    peer, slow = (row.compute_ms for row in target.shown if row.pp == 2)
    assert peer is not None
    assert slow is not None
    assert slow.mean / peer.mean == pytest.approx(1.0 + 0.5 * 30 / 39, rel=0.03)
    # The others wait for it in their synchronisation, which is no slow communication.
    assert "communication" not in {cause.kind for cause in target.causes}


def test_of_incomplete_pipelines_the_one_with_most_stages_is_shown(tmp_path: Path) -> None:
    """What is known of its stages stays known, and nothing is named."""
    layout = WorldLayout(ParallelSizes(pp=4, dp=2))
    seen = [layout.rank_of(tp=0, cp=0, dp=dp, pp=pp) for dp, pp in ((0, 1), (1, 0), (1, 2))]
    target = report_of(tmp_path, layout, ranks=seen)
    assert [(stage.pp, stage.ranks) for stage in target.stages] == [(0, (1,)), (2, (5,))]
    assert [stage.compute_ms.mean for stage in target.stages if stage.compute_ms] == pytest.approx([240] * 2)
    assert (target.diagnosis, target.imbalance) == (None, None)
    assert target.withheld is not None
    assert (target.withheld.kind, target.withheld.count, target.withheld.of) == ("stages_missing", 2, 4)


def test_timelines_give_the_times_where_there_are_both(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    write_timelines(tmp_path / "alone", layout, steps=40, microbatches=4, noise=0.0)
    write_timelines(tmp_path / "both", layout, steps=40, microbatches=4, noise=0.0)
    pipeline(tmp_path / "both", [4, 4])
    report = analyze(tmp_path / "both")
    (alone,), (target,) = analyze(tmp_path / "alone").targets, report.targets
    assert target.step_time_ms == alone.step_time_ms
    assert alone.profiled_step_time_ms is None
    assert target.profiled_step_time_ms is not None
    assert target.profiled_step_time_ms.count == 1
    assert [stage.forward_ms for stage in target.stages] == [stage.forward_ms for stage in alone.stages]
    assert target.fleet is not None
    assert target.fleet.coverage.calls == 40
    assert (len(report.traces), len(report.timelines)) == (2, 2)


def test_a_trace_of_one_rank_takes_nothing_from_timelines_of_all(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    for name in ("alone", "both"):
        write_timelines(tmp_path / name, layout, steps=40, microbatches=4, forward_ms=[10.0, 20.0])
    pipeline(tmp_path / "both", [4, 4])
    next((tmp_path / "both").glob("*.pp1-*.json.gz")).unlink()
    (alone,), (target,) = analyze(tmp_path / "alone").targets, analyze(tmp_path / "both").targets
    assert alone.causes
    assert (target.causes, target.what_if, target.stages) == (alone.causes, alone.what_if, alone.stages)
    assert {*kinds(target.warnings)} == {*kinds(alone.warnings), "left_out"}


def test_a_step_that_ran_again_counts_as_it_ran_last(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=40, microbatches=8, noise=0.0)
    later = 2 * 10**18
    write_timelines(
        tmp_path, LAYOUT, steps=40, first_step=20, microbatches=8, noise=0.0, start_ns=later, forward_ms=30.0
    )
    report = analyze(tmp_path)
    (target,) = report.targets
    assert target.steps[-1] == 59
    forward = [stage.forward_ms for stage in target.stages]
    assert [each.max for each in forward if each is not None] == pytest.approx([240] * 4)
    (drawn,) = report.steps().values()
    assert all(row.extent[0] >= later for row in drawn.rows)
    assert {each.kind for row in drawn.rows for each in row.passes} > {"forward", "backward", "finalize_grads"}


def test_steps_that_the_gpu_began_late_are_aligned_by_their_phases(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=4))
    late = report_of(tmp_path / "late", layout, skew_ms=50.0, device_clock=True)
    exact = report_of(tmp_path / "exact", layout)
    assert late.step_time_ms is not None
    assert exact.step_time_ms is not None
    assert late.step_time_ms.mean == pytest.approx(exact.step_time_ms.mean, rel=0.01)
    assert "clocks_aligned" in kinds(late.warnings)
    for one, other in zip(late.stages, exact.stages, strict=True):
        assert one.bubble_ms is not None
        assert other.bubble_ms is not None
        assert one.bubble_ms.mean == pytest.approx(other.bubble_ms.mean, rel=0.02)


def test_waiting_is_no_communication_where_peers_have_no_timeline_either(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(tp=2, pp=2, dp=4))
    seen = [rank for rank in range(16) if layout.coords(rank).tp == 0 and layout.coords(rank).dp != 2]
    slow = [Slow(rank=layout.rank_of(tp=0, cp=0, dp=1, pp=0), factor=1.8)]
    write_timelines(tmp_path, layout, steps=40, microbatches=8, slow=slow, ranks=seen)
    (target,) = analyze(tmp_path).targets
    assert not any(ms for ms in target.fleet.synchronisation.synchronisation_ms)
    assert all(stage.exposed_ms["dp"] is None for stage in target.stages)
    assert "communication" not in {cause.kind for cause in target.causes}


def test_a_slow_rank_costs_what_the_step_takes_longer_than_without_it(tmp_path: Path) -> None:
    """The stages are those of a pipeline without it."""
    layout = WorldLayout(ParallelSizes(pp=4, dp=4))
    rank = layout.rank_of(tp=0, cp=0, dp=2, pp=1)
    job: dict[str, Any] = {"steps": 60, "noise": 0.01}
    slow = report_of(tmp_path / "slow", layout, slow=[Slow(rank=rank, factor=1.6)], **job)
    healthy = report_of(tmp_path / "healthy", layout, **job)
    assert all(rank not in stage.ranks for stage in slow.stages)
    (cause,) = (cause for cause in slow.causes if cause.kind == "slow_rank")
    assert cause.ranks == (rank,)
    assert slow.diagnosis is not None
    assert healthy.diagnosis is not None
    assert slow.diagnosis.step_ms - cause.price.value == pytest.approx(healthy.diagnosis.step_ms, rel=0.04)
    assert (slow.what_if.best, slow.what_if.advice) == (None, "slow_ranks"), "layers stay where they are"
    assert healthy.what_if.advice is not None


@pytest.mark.parametrize("tp", [1, 2])
def test_all_slow_ranks_are_named(tmp_path: Path, tp: int) -> None:
    layout = WorldLayout(ParallelSizes(tp=tp, pp=4, dp=4))
    ranks = [layout.rank_of(tp=0, cp=0, dp=2, pp=1), layout.rank_of(tp=0, cp=0, dp=1, pp=2)]
    slow = [Slow(rank=ranks[0], from_step=10, factor=1.5), Slow(rank=ranks[1], from_step=10, factor=1.3)]
    causes = report_of(tmp_path, layout, steps=60, noise=0.01, slow=slow).causes
    named = [rank for cause in causes if cause.kind == "slow_rank" for rank in cause.ranks]
    assert set(ranks) <= set(named)
    assert len(named) == 2 * tp


def test_a_pipeline_without_slow_ranks_is_shown_even_if_more_of_its_ranks_have_other_causes(tmp_path: Path) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4, dp=2)), steps=8, microbatches=8, noise=0.0)
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    (slow, *_), waiting = table.ranks[1, :, 0].tolist(), table.ranks[0, 1:3, 0].tolist()
    found = averages(table, [slow], [slow, *waiting])
    assert [stage.ranks[0] for stage in found.stages] == table.ranks[0, :, 0].tolist()
    assert [each.ranks for each in found.slow_ranks] == [(slow,)]


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("captured", [1, 2])
def test_where_a_replica_was_not_captured_waiting_for_it_is_not_told_apart(
    captured: int, ep: int, tmp_path: Path
) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4, dp=2, ep=ep)), steps=8, microbatches=8, noise=0.0)
    for path in tmp_path.rglob("*-dp1.*") if captured == 1 else ():
        path.unlink()
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    measured = averages(table)
    told = [(note.count, note.of) for note in measured.warnings if note.kind == "replicas_missing"]
    assert told == ([(1, 2)] if captured == 1 else [])
    for stage in measured.stages:
        assert (stage.exposed_ms["dp"] is None, stage.dp_tail_ms is None) == (captured == 1, captured == 1)


def test_a_reduction_that_may_wait_for_a_replica_that_was_not_captured_is_only_a_possible_cause(
    tmp_path: Path,
) -> None:
    """The one that was not captured is slow. More steps would not tell."""
    layout = WorldLayout(ParallelSizes(pp=4, dp=2))
    slow = [Slow(rank=layout.rank_of(tp=0, cp=0, dp=1, pp=1), factor=1.6)]
    seen = [rank for rank in range(8) if layout.coords(rank).dp == 0]
    write_timelines(tmp_path, layout, steps=20, microbatches=8, slow=slow, ranks=seen)
    (target,) = analyze(tmp_path).targets
    assert "communication" not in {cause.kind for cause in target.causes}
    (possible,) = (cause for cause in target.diagnosis.perhaps if cause.kind == "communication")
    assert possible.group == "dp"
    assert possible.price.low <= 0.0 < possible.price.value
    assert possible.more_steps == 0


@pytest.mark.parametrize("ep", [1, 2])
def test_replicas_of_a_large_job_that_are_not_in_its_table_were_captured(
    ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4, dp=4 * ep, ep=ep)), steps=20, microbatches=8)
    monkeypatch.setattr("megaprof.analysis.table.recorded._MOST_PASSES", 16 * 4 * 16 * 2)
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    assert len(table.ranks) < 4
    measured = averages(table)
    assert "replicas_missing" not in kinds(measured.warnings)
    assert all(stage.exposed_ms["dp"] is not None for stage in measured.stages)
