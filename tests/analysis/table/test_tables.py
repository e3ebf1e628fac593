"""Which steps, ranks and runs a table is made of, and why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.notes import Note
from megaprof.analysis.simulation import Replay, compiled
from megaprof.analysis.table import recorded
from megaprof.analysis.table.recorded import tables_of_timelines
from megaprof.analysis.table.table import DATA, Table, Unfit
from megaprof.analysis.table.traced import _core_wait, completed
from megaprof.analysis.trace.reading import read_all, recordings_in
from megaprof.analysis.trace.steps import WHOLE_STEP, Passes, TracedStep
from megaprof.analysis.what_if.what_if import what_if
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Timeline
from megaprof.parallel.schedules import PipelineSchedule, turns
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import START_NS, Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import kinds
from tests.analysis.tables import tables_in, tables_of_steps
from tests.analysis.truth import files
from tests.analysis.truth.drawing import draw_healthy
from tests.analysis.truth.pipelines import Fault, Priced

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=4))
HOUR = 3600 * 10**9


def table_in(directory: Path) -> Table:
    (table,) = tables_in(directory).values()
    assert isinstance(table, Table), table
    return table


def calls_of(scenario: Scenario, directory: Path) -> list[TracedStep]:
    write(scenario, directory)
    return [call for reading in read_all(recordings_in(directory)[0]) for call in reading.steps]


def chosen(step: TracedStep, rows: Any) -> Passes:
    """The passes of these rows."""
    columns = {name: column[rows] for name, column in step.passes._asdict().items() if isinstance(column, np.ndarray)}
    return step.passes._replace(**columns, exposed={group: ns[rows] for group, ns in step.passes.exposed.items()})


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda calls: [replace(c, target=WHOLE_STEP) for c in calls], "whole_step"),
        (lambda calls: [replace(c, unseen=Note("no_kernels"), passes=chosen(c, [])) for c in calls], "no_kernels"),
        (lambda calls: [replace(c, passes=chosen(c, [])) for c in calls], "passes_unknown"),
        (lambda calls: [replace(c, incomplete=Note("incomplete")) for c in calls], "no_step"),
        (lambda calls: [replace(c, has_kernels=True) for c in calls], "passes_unknown"),
        (
            lambda calls: [replace(c, passes=c.passes._replace(kind=0 * c.passes.kind + 2)) for c in calls],
            "schedule_unknown",
        ),
    ],
)
def test_a_job_without_a_table_has_a_reason(change, kind: str, tmp_path: Path) -> None:
    calls = change(calls_of(Scenario("plain", gpu=False, microbatches=4), tmp_path))
    (table,) = tables_of_steps(calls).values()
    assert isinstance(table, Unfit)
    assert table.note.kind == kind


def test_what_microbatches_consist_of_is_told_by_the_first_stage(tmp_path: Path) -> None:
    """Which reads its input. A later one may be given the same with padding."""
    tokens = {0: (4, 9, 6, 8)}
    calls = []
    for call in calls_of(Scenario("plain", gpu=False, microbatches=4), tmp_path):
        own = tokens.get(call.stage, (9, 9, 9, 9))
        told = {"tokens": own, "lengths": tuple((each,) for each in own), "lengths_from": "shapes"}
        calls.append(replace(call, metadata=replace(call.metadata, **told)))
    (table,) = tables_of_steps(calls).values()
    assert isinstance(table, Table)
    assert table.work is not None
    assert table.work[0, 0, :, 0].tolist() == [4, 9, 6, 8]
    assert [lengths for _, lengths in table.sequences[:1]] == [[[(4,), (9,), (6,), (8,)]]]


def test_combined_passes_are_replayed_as_they_ran(tmp_path: Path) -> None:
    """A stage that has twice the work: a replay of the truth says what the step would be without it, or with another
    number of microbatches."""
    schedule = PipelineSchedule.checked(4, 2, 8, combined=True, overlap="all")
    replay = compiled(schedule, False)
    times = np.broadcast_to(np.array([10.0, 20.0])[:, None], (4, 2, 2, 8)).copy()
    even = float(replay.step_ms(times))
    times[1] *= 2
    calls = calls_of(Scenario("interleaved", gpu=False, microbatches=8, layers=((1, 1),) * 4, steps=3), tmp_path)
    (table,) = tables_of_steps([_combined(call, replay, times) for call in calls]).values()
    assert isinstance(table, Table)
    assert table.schedule == schedule
    assert replay.step_ms(table.passes).mean() == pytest.approx(float(replay.step_ms(times)), rel=1e-3)
    assert table.passes.mean(axis=(0, 1, 3, 5)) == pytest.approx(times.mean(axis=(1, 3)), rel=1e-3)
    run = examine(table)
    diagnosis = diagnose(run)
    (first, *_) = diagnosis.causes
    assert first.stage == 1
    assert first.price.value == pytest.approx(float(replay.step_ms(times)) - even, rel=0.1)
    predicted, _ = what_if(run, diagnosis)
    assert predicted.replay_ms == pytest.approx(float(replay.step_ms(times)), rel=1e-3)
    others = [each for each in predicted.candidates if each.kind != "layout"]
    found = {each.microbatches or each.kind: each.step_ms.value for each in others}
    assert found.keys() == {"balanced", 4, 16}
    assert found["balanced"] == pytest.approx(1.25 * even, rel=1e-3)
    for count in (4, 16):
        other = compiled(PipelineSchedule.checked(4, 2, count, combined=True, overlap="all"), False)
        each = np.broadcast_to(times[..., :1] * 8 / count, (4, 2, 2, count))
        assert found[count] == pytest.approx(float(other.step_ms(each)), rel=1e-3)


def _combined(call: TracedStep, replay: Replay, times: Any) -> TracedStep:
    """The call with the passes that ``replay`` has from ``times``."""
    starts, ends = (
        (moments * 1e6).astype(int) + call.host[0] for moments in (replay.starts(times), replay.ends(times))
    )
    ids, spans, kinds = [], [], []
    for turn in turns(replay.schedule, call.stage):
        at = [(call.stage, each.chunk, int(each.kind == "backward"), each.microbatch) for each in turn]
        spans.append((int(starts[at[0]]), int(ends[at[-1]])))
        kinds.append(2 if len(turn) == 2 else int(turn[0].kind == "backward"))
        ids.append([*turn[0][1:], *(turn[1][1:] if len(turn) == 2 else (-1, -1))])
    extents = np.array(spans)
    took, none = extents[:, 1] - extents[:, 0], np.zeros(len(spans), dtype=int)
    times = {"host": extents, "spans": extents, "end": extents[:, 1], "compute": took, "working": took}
    others = {"idle": none, "garbage": none, "data": None, "exposed": {}}
    columns = Passes(kind=np.array(kinds), ids=np.array(ids), **times, **others)
    return replace(call, passes=columns)


def test_of_steps_with_other_numbers_of_microbatches_those_count_that_are_alike(tmp_path: Path) -> None:
    calls = calls_of(Scenario("plain", gpu=False, microbatches=4, steps=3), tmp_path)
    other = [
        replace(c, metadata=replace(c.metadata, microbatches=3), passes=chosen(c, c.passes.ids[:, 1] != 3))
        if c.step == 5
        else c
        for c in calls
    ]
    (table,) = tables_of_steps(other).values()
    assert isinstance(table, Table)
    assert (table.schedule.microbatches, table.steps.tolist()) == (4, [6, 7])
    assert "microbatches_differ" in kinds(table.warnings)


def test_the_steps_are_of_the_run_that_is_reported_on(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=6, forward_ms=50.0)
    write_timelines(tmp_path, LAYOUT, steps=6, first_step=1, forward_ms=10.0, start_ns=START_NS + HOUR)
    assert np.median(table_in(tmp_path).passes[..., 0, :]) == pytest.approx(10.0, rel=0.1)


def test_a_step_that_stood_still_is_none_of_them(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=30, slow=[Slow(rank=3, from_step=20, until_step=20, factor=500.0)])
    table = table_in(tmp_path)
    assert 20 not in table.steps
    assert {19, 21} <= set(table.steps.tolist())
    assert table.length.max() < 2 * table.length.min()


def test_a_rank_that_ended_early_takes_away_its_replica_alone(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=40, last_step={1: 4})
    table = table_in(tmp_path)
    assert 1 not in table.ranks
    assert (table.ranks.shape, len(table.steps)) == ((3, 2, 1), 40)


def test_steps_of_a_beginning_in_which_all_is_longer_are_none_of_them(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=30, slow=[Slow(until_step=4, factor=4.0)])
    assert table_in(tmp_path).steps.min() > 4


def test_a_stage_that_becomes_slow_on_all_replicas_is_told_with_its_step(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=40, slow=[Slow(stage=1, from_step=20, factor=1.5)])
    (cause,) = (c for c in diagnose(examine(table_in(tmp_path))).causes if c.stage == 1)
    assert (cause.kind, cause.since) == ("unexplained", 20)
    assert cause.share == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("begins", [83, 200])
def test_of_many_steps_those_are_looked_into_from_which_on_a_rank_is_slow(tmp_path: Path, begins: int) -> None:
    slow = [Slow(rank=5, from_step=begins, factor=1.5)]
    write_timelines(tmp_path, LAYOUT, steps=400, microbatches=4, slow=slow, tails=0.01)
    table = table_in(tmp_path)
    assert len(table.steps) <= recorded.STEPS
    assert {begins - 1, begins} <= set(table.steps.tolist())
    (cause,) = (c for c in diagnose(examine(table)).causes if c.kind == "slow_rank")
    assert (cause.ranks, cause.since) == ((5,), begins)


def test_clocks_on_either_side_of_any_moment_are_compared(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=6, skew_ms=2.0, start_ns=START_NS)  # some hosts' clocks are before it
    assert table_in(tmp_path).length.max() < 1000


def test_of_a_large_job_the_slowest_replicas_are_looked_at_and_one_peer_stands_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = WorldLayout(ParallelSizes(pp=2, tp=2, dp=8))
    write_timelines(tmp_path, layout, steps=40, microbatches=4, slow=[Slow(rank=9, from_step=1, factor=1.5)])
    reading = read_fleet(recordings_in(tmp_path)[1])
    monkeypatch.setattr(recorded, "_MOST_PASSES", 4 * 16 * 2 * 8)
    (table,) = tables_of_timelines(reading).values()
    assert isinstance(table, Table)
    assert (len(table.steps), table.compute.shape[1], table.compute.shape[3]) == (16, 4, 1)
    assert [8, 9] in table.ranks.reshape(-1, 2).tolist()


def test_what_passes_lose_to_a_group_is_its_own_and_not_that_of_others(tmp_path: Path) -> None:
    calls = calls_of(Scenario("exposed", exposed={"tp": 0.2, "dp": 0.1}, microbatches=4, dp=2), tmp_path)
    (table,) = tables_of_steps(calls).values()
    assert isinstance(table, Table)
    assert table.exposed.keys() == {"tp"}
    of_calls = sum(call.spent["tp"] for call in calls) / 1e6
    assert table.exposed["tp"].sum() == pytest.approx(of_calls, rel=0.01)


@pytest.mark.parametrize("recording", ["cpu trace", "nsys"])
def test_a_groups_collectives_count_where_others_may_be_of_several_groups(tmp_path: Path, recording: str) -> None:
    # An all-to-all can only be of experts here; an all-reduce, in which ranks wait for each other, of any group.
    drawn = draw_healthy(np.random.default_rng(0), (0, 0))
    sizes = {"stages": 2, "chunks": 1, "replicas": 1, "peers": 2, "microbatches": 8, "steps": 1}
    plain = {"recording": recording, "forward_only": False, "load": 0.0, "overlapped": False, "layers": ((4,), (4,))}
    priced = Priced(replace(drawn, **sizes, **plain, faults=(Fault("communication", 0.25, group="ep"),)))
    files.write(priced.pipeline, priced.run(priced.all), tmp_path)
    table = table_in(tmp_path)
    assert not np.isfinite(table.spent["ep"]).any()  # some of what is unknown may be of experts, too
    assert table.exposed["ep"] == pytest.approx(0.2 * table.passes, rel=0.05)
    assert [(cause.kind, cause.group) for cause in diagnose(examine(table)).causes] == [("communication", "ep")]


def test_peers_on_different_hosts_are_put_on_one_clock(tmp_path: Path) -> None:
    # Ranks that exchange tokens for experts: two replicas are peers of each other.
    drawn = draw_healthy(np.random.default_rng(0), (0, 0))
    sizes = {"stages": 2, "chunks": 1, "replicas": 2, "peers": 1, "microbatches": 8, "steps": 2}
    plain = {"recording": "gpu trace", "forward_only": False, "load": 0.0, "overlapped": False, "layers": ((4,), (4,))}
    priced = Priced(replace(drawn, **sizes, **plain, apart=True, faults=(Fault("communication", 0.25, group="ep"),)))
    files.write(priced.pipeline, priced.run(priced.all), tmp_path)
    table = table_in(tmp_path)
    assert table.compute.shape[1:4] == (1, 2, 2)
    assert table.passes == pytest.approx(1.25 * table.compute.max(axis=3), rel=0.2)
    assert table.length == pytest.approx(priced.length(priced.all), rel=0.02)


def test_a_timeline_whose_steps_have_different_numbers_of_microbatches_says_so(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    write_timelines(tmp_path, layout, steps=6, microbatches=4)
    write_timelines(tmp_path, layout, steps=3, microbatches=8, first_step=6, start_ns=START_NS + 10**10)
    table = table_in(tmp_path)
    assert (table.schedule.microbatches, table.steps.tolist()) == (4, [*range(6)])
    assert "microbatches_differ" in kinds(table.warnings)


def profiled(run: Table, **changed: Any) -> Table:
    """Returns two steps of a run, twice as long because a profiler recorded them."""
    fields = ("steps", "start", "end", "compute", "working", "idle", "entry", "reduction", "length")
    two = replace(run, **{name: (1 if name == "steps" else 2) * getattr(run, name)[:2] for name in fields})
    return replace(two, profiled_length=two.length, **changed)


def test_lengths_are_of_steps_without_a_profiler_and_contents_of_profiled_ones(tmp_path: Path) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4)), steps=20, microbatches=8)
    run = replace(table_in(tmp_path), device=True)
    usual = np.median(run.passes, axis=(0, 5), keepdims=True) + 0.0 * run.passes
    contents = {"working": 0.6 * usual[:2, :, :, None], "compute": 0.5 * usual[:2, :, :, None]}
    spent = {"host_bound": run.core_waits[:2], "pp": run.core_waits[:2]}
    traced = profiled(run, exposed={"tp": 0.1 * usual[:2]}, spent=spent, **contents)
    joined = completed(run, traced)
    assert joined is not None
    assert [note.names for note in run.warnings if note.kind == "exposed_unknown"] == [("pp",)]
    assert "exposed_unknown" not in kinds(joined.warnings), "the trace shows what the timeline does not"
    assert joined.length is run.length
    assert joined.profiled_length.tolist() == (2 * run.length[:2]).tolist()
    # Twice as long is what a profiled pass takes; of the pass of the job, what is left is 30 % and not 65 %.
    shares = {"working": joined.working[:, :, :, 0], "compute": joined.compute[:, :, :, 0], "idle": joined.idle}
    for name, share in {"working": 0.6, "compute": 0.5, "idle": 0.3}.items():
        assert shares[name].sum() == pytest.approx(share * run.passes.sum(), rel=0.02), name
    assert joined.exposed["tp"].sum() == pytest.approx(0.1 * run.passes.sum(), rel=0.02)
    assert joined.spent["host_bound"].sum() == pytest.approx(joined.idle.sum())


def test_nothing_that_a_pass_consists_of_takes_longer_than_the_pass(tmp_path: Path) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4)), steps=20, microbatches=8)
    run = replace(table_in(tmp_path), device=True)
    traced = profiled(run, exposed={"tp": run.passes[:2]}, spent={"host_bound": run.core_waits[:2]})
    joined = completed(run, traced)
    assert joined is not None
    whole = joined.working.max(axis=3) + joined.idle + joined.exposed["tp"]
    assert whole == pytest.approx(run.passes)
    assert min(joined.idle.min(), joined.working.min()) >= 0.0


def test_on_a_cpu_a_profiler_makes_compute_longer_too(tmp_path: Path) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4)), steps=20, microbatches=8)
    run = table_in(tmp_path)
    joined = completed(run, profiled(run, exposed={"tp": 0.1 * run.passes[:2]}))
    assert joined is not None
    assert not joined.idle.any()
    assert joined.compute[:, :, :, 0] + joined.exposed["tp"] == pytest.approx(run.passes, rel=0.1)
    # If timelines say who waited for whom in collectives, they say it in the compute of a rank.
    waiting = replace(run, spent={"tp_waiting": 0.0 * run.core_waits})
    known = completed(waiting, profiled(waiting, exposed={"tp": 0.1 * run.passes[:2]}))
    assert known is not None
    assert known.compute is run.compute


def test_what_a_rank_waits_for_data_is_neither_compute_nor_communication_beside_a_profiler(tmp_path: Path) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4)), steps=20, microbatches=8)
    run = table_in(tmp_path)
    loading = 0.25 * run.passes
    delays, spent = {DATA: loading}, {DATA: loading.sum(axis=(3, 4, 5))[..., None]}
    run = replace(run, delays=delays, spent=spent, working=0.75 * run.working)
    joined = completed(run, profiled(run, delays={}, spent={}, exposed={"tp": 0.1 * run.passes[:2]}))
    assert joined is not None
    assert joined.working.sum() == pytest.approx(0.9 * run.working.sum(), rel=0.02)
    assert sum(joined.spent[name].sum() for name in (DATA, "tp")) + joined.working.sum() == pytest.approx(
        run.passes.sum()
    )


def test_instruments_that_do_not_show_the_same_passes_are_not_joined(tmp_path: Path) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=4)), steps=20, microbatches=8)
    run = table_in(tmp_path)
    fewer = run.schedule._replace(microbatches=4)
    assert completed(run, profiled(run, schedule=fewer)) is None
    # The host's times of a job on a GPU say when work was given to it, not how long it took.
    assert completed(run, profiled(run, spent={"host_bound": run.core_waits[:2]})) is None
    assert completed(replace(run, metadata=(None, *run.metadata[1:])), profiled(run)) is None


def test_waits_of_finished_steps_do_not_depend_on_the_step_that_is_not_finished() -> None:
    """The counter is read while that step runs: before it is written, and after it hung until the job ended."""
    steps = np.zeros(5, dtype=format.STEP_TYPE)
    steps["start_ns"] = np.arange(5) * 1_000_000_000
    steps["duration"] = 1_000_000
    steps["duration"][4] = 30_000_000
    # Read at the end of step 1, and one second after the end of step 3.
    readings = {1: format.Waited(-1_000_000, 2_000_000, 500_000), 3: format.Waited(-1_000_000, 3_000_000, 900_000)}
    facts = {row: waited.pack() or b"" for row, waited in readings.items()}
    running, ended = (
        recorded._core_waits(
            Timeline(Path(), (), (), steps[:count], None, b"", (), (), {format.WAITED: facts}), range(4)
        )
        for count in (4, 5)
    )
    assert running.tolist() == pytest.approx([250.0, 250.0, 300.0, 300.0])
    assert ended.tolist() == pytest.approx(running.tolist())


def test_a_rank_does_not_wait_longer_in_a_captured_step_than_that_takes() -> None:
    """The counter is read after the window is closed."""
    profiler = SimpleNamespace(waited_ns=900_000_000)
    metadata = SimpleNamespace(target="train_actor", profiler=profiler)
    first, second = (
        SimpleNamespace(target="train_actor", metadata=metadata, extent=(begin, begin + 400_000_000))
        for begin in (0, 450_000_000)
    )
    assert _core_wait([first]) == 400.0
    assert _core_wait([first, second]) == 850.0
    profiler.waited_ns = 300_000_000
    assert _core_wait([first]) == 300.0
