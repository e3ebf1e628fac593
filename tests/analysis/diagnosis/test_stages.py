"""Stage metrics from synthetic traces whose every number is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megaprof.analysis.notes import Note
from megaprof.analysis.report import drawn
from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from tests.analysis.exchanging import exchanging, write
from tests.analysis.scenarios import Scenario
from tests.analysis.scenarios import write as write_scenario
from tests.analysis.synthetic import TraceBuilder, chunk, pipeline, plain_stage
from tests.analysis.tables import stages_of, tables_in, tables_of_steps
from tests.analysis.truth.drawing import draw
from tests.analysis.truth.files import write as write_recording
from tests.analysis.truth.pipelines import Fault, Priced


def measured(directory):
    return stages_of(call for path in find_traces(directory) for call in steps_of(read_trace(path)))


def only(directory):
    (target,) = measured(directory)
    return target


def found(target, kind):
    """The notes of one kind."""
    return [note for note in target.warnings if note.kind == kind]


class TestNumbers:
    def test_one_step_of_two_stages(self, tmp_path):
        # Stage 0: 2 x 30 forward, 2 x 60 backward in a range of 200; stage 1 starts 10 later and ends 10 later.
        first = TraceBuilder(pp=0, pp_size=2, microbatches=2)
        first.call(0, 200)
        for mb in range(2):
            first.forward(mb, 30 * mb, 30)
            first.backward(mb, 80 + 60 * mb, 60)
        second = TraceBuilder(pp=1, pp_size=2, microbatches=2)
        second.call(10, 200)
        for mb in range(2):
            second.forward(mb, 40 + 30 * mb, 10)
            second.backward(mb, 50 + 30 * mb, 20)
        first.write(tmp_path)
        second.write(tmp_path)
        target = only(tmp_path)
        # It ends with the last pass, which is on stage 0.
        assert target.step_time_ms.mean == 200
        assert target.step_time_basis == "one_clock"
        a, b = target.stages
        assert (a.forward_ms.mean, a.backward_ms.mean, a.compute_ms.mean, a.bubble_ms.mean) == (60, 120, 180, 20)
        assert (b.forward_ms.mean, b.backward_ms.mean, b.compute_ms.mean, b.bubble_ms.mean) == (20, 40, 60, 140)
        assert a.bubble_fraction == pytest.approx(20 / 200)
        assert (a.forward_per_microbatch_ms.median, a.backward_per_microbatch_ms.count) == (30, 2)

    def test_steps_are_averaged_with_their_spread(self, tmp_path):
        for step, forward in ((5, 10.0), (6, 20.0)):
            plain_stage(0, 1, forward, 0, step=step, metadata={"forward_only": True}).write(tmp_path)
        target = only(tmp_path)
        assert target.steps == (5, 6)
        spread = target.stages[0].forward_ms
        assert (spread.mean, spread.min, spread.max, spread.stdev, spread.count) == (60, 40, 80, 20, 2)
        assert target.step_time_ms.mean == 60

    def test_chunks_are_told_apart_and_added_up_per_microbatch(self, tmp_path):
        described = {"forward_only": True, "schedule": "interleaved"}
        trace = TraceBuilder(pp_size=2, microbatches=2, chunks=[chunk(3), chunk(1)], metadata=described)
        trace.call(0, 100)
        for mb in range(2):
            trace.forward(mb, 20 * mb, 9, chunk=0)
            trace.forward(mb, 20 * mb + 10, 4, chunk=1)
        trace.write(tmp_path)
        (stage,) = only(tmp_path).stages
        assert [c.forward_ms.median for c in stage.chunks] == [9, 4]
        assert [c.holds.layers for c in stage.chunks] == [3, 1]
        assert (stage.forward_per_microbatch_ms.min, stage.forward_per_microbatch_ms.count) == (13, 2)

    def test_gradient_finalisation_is_exposed_dp_and_no_bubble(self, tmp_path):
        for dp, pp in np.ndindex(2, 2):
            trace = plain_stage(pp, 2, 10, 20, sizes={"dp": 2}, coords={"rank": 2 * dp + pp, "dp": dp})
            trace.call(0, 140)
            del trace.events[-2]  # the shorter outermost range
            trace.event("megaprof/finalize_grads", 120, 15)
            trace.write(tmp_path)
        stage = only(tmp_path).stages[0]
        assert (stage.exposed_ms["dp"].mean, stage.bubble_ms.mean) == (15, 0)

    @pytest.mark.parametrize("dp", [1, 2])
    def test_waiting_for_another_stage_in_the_finalisation_is_bubble(self, tmp_path, dp):
        # The passes of stage 0 end at 120, those of stage 1 at 130, and gradients are finalised until 145.
        for replica, pp in np.ndindex(dp, 2):
            coords = {"rank": 2 * replica + pp, "dp": replica}
            trace = plain_stage(pp, 2, 10, 20, start=10 * pp, sizes={"dp": dp}, coords=coords)
            trace.call(0, 145)
            del trace.events[-2]
            trace.event("megaprof/finalize_grads", 120 + 10 * pp, 25 - 10 * pp)
            trace.write(tmp_path)
        for stage in only(tmp_path).stages:
            parts = stage.exposed_ms["dp"].mean, stage.gradients_ms and stage.gradients_ms.mean
            assert parts == ((0, 15) if dp == 1 else (15, None))
            assert (stage.compute_ms.mean, stage.bubble_ms.mean) == (120, 10)

    @pytest.mark.parametrize("pp_size", [1, 2])
    def test_waiting_for_a_slower_replica_is_bubble_as_in_timelines(self, tmp_path, pp_size):
        # The passes of replica 1 take twice as long; all wait for it before their gradients are reduced.
        for dp, pp in np.ndindex(2, pp_size):
            coords, ms = {"rank": pp_size * dp + pp, "dp": dp}, 10 * (1 + dp)
            trace = plain_stage(pp, pp_size, ms, 2 * ms, start=ms * pp, sizes={"dp": 2}, coords=coords)
            end = (120 + 10 * pp) * (1 + dp)
            trace.call(0, 280)
            del trace.events[-2]
            trace.event("megaprof/finalize_grads", end, 280 - end)
            trace.write(tmp_path)
        target = only(tmp_path)
        assert target.step_time_ms.mean == 280
        for stage in target.stages:
            assert (stage.compute_ms.mean, stage.exposed_ms["dp"].mean) == (120, 280 - 240 - 20 * (pp_size - 1))
            assert stage.bubble_ms.mean == (120 if pp_size == 1 else 140)

    @pytest.mark.parametrize("dp", [1, 2])
    def test_the_parts_of_a_step_add_up_to_it(self, tmp_path, dp):
        # Two stages of 120 each, one behind the other by 10; gradients are finalised for 25 behind each.
        for replica, pp in np.ndindex(dp, 2):
            coords = {"rank": 2 * replica + pp, "dp": replica}
            trace = plain_stage(pp, 2, 10, 20, start=10 * pp, sizes={"dp": dp}, coords=coords)
            trace.call(10 * pp, 145)
            del trace.events[-2]
            trace.event("megaprof/finalize_grads", 120 + 10 * pp, 25)
            trace.write(tmp_path)
        target = only(tmp_path)
        for stage in target.stages:
            parts = (stage.compute_ms, stage.bubble_ms, stage.gradients_ms, stage.exposed_ms["dp"])
            assert sum(part.mean for part in parts if part) == target.step_time_ms.mean == 155

    def test_without_a_pipeline_there_is_no_bubble(self, tmp_path):
        trace = plain_stage(0, 1, 10, 20)
        trace.call(0, 500)
        del trace.events[-2]
        trace.write(tmp_path)
        stage = only(tmp_path).stages[0]
        assert (stage.bubble_ms.mean, stage.bubble_fraction) == (0, 0)
        assert stage.exposed_ms["pp"].mean == 0

    @pytest.mark.parametrize("pp_size", [1, 2])
    def test_replicas_of_a_log_prob_pass_that_run_at_different_times_are_as_long_as_the_longest(
        self, tmp_path, pp_size
    ):
        # Replica 1 begins a second later, and takes twice as long.
        for dp, ms in enumerate((10, 20)):
            for pp in range(pp_size):
                coords, start = {"rank": 2 * pp + dp, "dp": dp}, 1000 * dp + ms * pp
                trace = plain_stage(
                    pp, pp_size, ms, 0, start=start, target="train_log_probs", sizes={"dp": 2}, coords=coords
                )
                trace.write(tmp_path)
        target = only(tmp_path)
        assert (target.step_time_basis, target.unjudgeable) == ("one_clock", None)
        assert target.step_time_ms.mean == 60 + 20 * pp_size
        assert [stage.ranks for stage in target.stages] == [(0,), (2,)][:pp_size]
        for stage in target.stages:
            assert stage.compute_ms.mean == 40
            assert stage.bubble_ms.mean == 20 + 20 * pp_size, "they wait for the slower replica"
        (table,) = tables_in(tmp_path).values()
        assert table.length.tolist() == [60 + 20 * pp_size]
        late = [[[0, 10], [0, 20]], [[0], [0]]][pp_size == 1]
        assert table.entry.tolist() == [late], "no rank enters late because its replica began later"

    def test_combined_passes_count_as_compute_and_are_not_split(self, tmp_path):
        trace = TraceBuilder(microbatches=2)
        trace.call(0, 100)
        trace.forward(0, 0, 10)
        trace.event("megaprof/combined mb=1 chunk=0 bmb=0 bchunk=0", 10, 25)
        trace.backward(1, 40, 20)
        trace.write(tmp_path)
        target = only(tmp_path)
        (stage,) = target.stages
        assert (stage.forward_ms, stage.backward_ms, stage.forward_per_microbatch_ms) == (None, None, None)
        assert stage.compute_ms.mean == 55
        assert found(target, "passes_unknown")

    def test_with_unknown_microbatches_it_is_known_what_is_computed(self, tmp_path):
        trace = TraceBuilder(microbatches=3)
        trace.call(0, 100)
        for mb in range(3):
            trace.forward(mb, 20 * mb, 5)
            trace.backward("?", 20 * mb + 5, 10, chunk="?")
        trace.write(tmp_path)
        (stage,) = only(tmp_path).stages
        assert (stage.compute_ms.mean, stage.backward_ms.mean) == (45, 30)


class TestWhatTheTracesDoNotAllow:
    def test_no_microbatch_ranges(self, tmp_path):
        for pp in range(2):
            reason = "the step was replayed from a CUDA graph"
            trace = TraceBuilder(pp=pp, pp_size=2, metadata={"ranges": {"microbatch": False, "reason": reason}})
            trace.call(0, 50)
            trace.write(tmp_path)
        target = only(tmp_path)
        stage = target.stages[0]
        assert target.step_time_ms.mean == 50
        numbers = (stage.forward_ms, stage.backward_ms, stage.compute_ms, stage.bubble_ms, stage.exposed_ms["tp"])
        assert numbers == (None,) * 5
        assert [note.said for note in found(target, "passes_unknown")] == [reason]
        assert target.unjudgeable is not None

    def test_missing_stages(self, tmp_path):
        for path in pipeline(tmp_path, [6, 2, 2, 2]):
            if "pp1" in path.name or "pp3" in path.name:
                path.unlink()
        target = only(tmp_path)
        assert target.unjudgeable == Note("stages_missing", stages=(1, 3), count=2, of=4)
        assert target.unjudgeable in target.warnings
        assert target.imbalance is None

    def test_duplicates_count_once(self, tmp_path):
        pipeline(tmp_path, [2, 2])
        again = plain_stage(0, 2, 50, 100, start=3.0, chunks=[chunk(2, embedding=True)])
        again.write(tmp_path, "copy.pt.trace.json")
        target = only(tmp_path)
        assert [(note.ranks, note.steps) for note in found(target, "twice")] == [((0,), (5,))]
        assert target.stages[0].forward_ms.count == 1
        assert target.stages[0].forward_per_microbatch_ms.median == 50

    def test_stages_of_different_runs(self, tmp_path):
        plain_stage(0, 2, 30, 60).write(tmp_path)
        plain_stage(1, 2, 10, 20, start=60_000).write(tmp_path)
        target = only(tmp_path)
        assert found(target, "not_comparable")
        assert (target.step_time_basis, target.step_time_ms.mean) == ("longest_stage", 360)
        assert [stage.bubble_ms for stage in target.stages] == [None, None]
        assert target.unjudgeable is not None

    def test_stages_on_different_hosts(self, tmp_path):
        """No exchange goes both ways between them."""
        plain_stage(0, 2, 30, 0, target="train_log_probs", metadata={"host": "a"}).write(tmp_path)
        plain_stage(1, 2, 10, 0, target="train_log_probs", start=60_000, metadata={"host": "b"}).write(tmp_path)
        target = only(tmp_path)
        assert [note.names for note in found(target, "clocks_apart")] == [("a", "b")]
        assert (target.step_time_basis, target.step_time_ms.mean) == ("longest_stage", 120)
        assert [stage.bubble_ms.mean for stage in target.stages] == [0, 80]
        assert target.unjudgeable is None

    def test_exchanges_put_stages_on_different_hosts_on_one_clock(self, tmp_path):
        def captured(name, ahead, hosts):
            traces = exchanging([0.0, ahead], hosts=hosts)
            for trace, entered, by in zip(traces, (1.0, 4.0), (0.0, ahead), strict=True):
                end = trace.events[-1]["dur"] / 1000 + by
                trace.events[-1]["dur"] += 10_000  # the outermost range
                trace.event("megaprof/finalize_grads", end + entered, 9 - entered)
                trace.event("gloo:all_reduce", end + entered, 9 - entered, tid=2)
            write(traces, tmp_path / name)
            return only(tmp_path / name)

        together, apart = captured("together", 0.0, ["a", "a"]), captured("apart", 250.0, ["a", "b"])
        assert found(apart, "clocks_aligned")
        assert (apart.step_time_basis, apart.unjudgeable) == ("one_clock", None)
        assert apart.step_time_ms.mean == pytest.approx(together.step_time_ms.mean, abs=0.1)
        for one, other in zip(together.stages, apart.stages, strict=True):
            assert other.bubble_ms.mean == pytest.approx(one.bubble_ms.mean, abs=0.2)
            for part, spread in one.bubble_split.items():
                assert other.bubble_split[part].mean == pytest.approx(spread.mean, abs=0.2)

    def test_mixed_sizes_are_reported_apart(self, tmp_path):
        pipeline(tmp_path, [2, 2])
        plain_stage(3, 4, 10, 20).write(tmp_path)
        two, four = measured(tmp_path)
        assert (two.sizes.pp, four.sizes.pp) == (2, 4)
        assert found(two, "other_sizes")
        assert [note.stages for note in found(four, "stages_missing")] == [(0, 1, 2)]
        assert two.imbalance == 1
        assert four.imbalance is None

    def test_steps_that_not_every_stage_has(self, tmp_path):
        pipeline(tmp_path, [6, 2])
        plain_stage(0, 2, 10, 20, step=6, microbatches=3).write(tmp_path)
        target = only(tmp_path)
        assert (target.steps, target.microbatches) == ((5,), 4)
        assert [(n.steps, n.stages) for n in found(target, "left_out")] == [((6,), (0,))]
        assert not found(target, "not_comparable") + found(target, "microbatches_differ"), (
            "what is left out is not warned of"
        )

    def test_no_step_in_common(self, tmp_path):
        plain_stage(0, 2, 30, 60, step=5).write(tmp_path)
        plain_stage(1, 2, 10, 20, step=6).write(tmp_path)
        target = only(tmp_path)
        assert found(target, "not_comparable")
        assert target.unjudgeable is not None

    def test_layers_that_changed_between_steps(self, tmp_path):
        pipeline(tmp_path, [6, 2])
        pipeline(tmp_path, [4, 4], step=6)
        target = only(tmp_path)
        assert len(found(target, "not_comparable")) == 1
        assert target.unjudgeable is not None

    def test_a_window_that_was_closed_early(self, tmp_path):
        trace = plain_stage(0, 1, 10, 20, metadata={"truncated": True, "truncated_reason": "host memory"})
        trace.write(tmp_path)
        target = only(tmp_path)
        assert target.stages[0].forward_ms is None
        (note,) = found(target, "left_out")
        assert "host memory" in note.why.said

    def test_a_step_of_which_a_stage_has_a_part_counts_for_none(self, tmp_path):
        pipeline(tmp_path, [6, 2])
        plain_stage(0, 2, 90, 180, step=6).write(tmp_path)
        cut = plain_stage(1, 2, 10, 20, step=6, metadata={"truncated": True, "truncated_reason": "host memory"})
        cut.write(tmp_path)
        target = only(tmp_path)
        assert (target.steps, {stage.compute_ms.count for stage in target.stages}) == ((5,), {1})
        (note,) = found(target, "left_out")
        assert "host memory" in note.why.said

    def test_lost_ranges(self, tmp_path):
        trace = plain_stage(0, 1, 10, 20)
        del trace.events[0]
        trace.write(tmp_path)
        target = only(tmp_path)
        assert target.stages[0].compute_ms is None
        assert [(note.why.names, note.why.count, note.why.of) for note in found(target, "left_out")] == [
            (("forward",), 3, 4)
        ]

    def test_gpu_traces_without_launches_are_not_judged(self, tmp_path):
        for pp, forward in ((0, 60), (1, 20)):
            trace = plain_stage(pp, 2, forward, 20)
            trace.event("gemm", 1, 2, cat="kernel")
            trace.write(tmp_path)
        target = only(tmp_path)
        assert found(target, "passes_unknown")
        assert target.stages[0].compute_ms is None
        assert target.unjudgeable is not None

    def test_gpu_and_cpu_traces_are_not_compared(self, tmp_path):
        first, _ = pipeline(tmp_path, [6, 2])
        trace = plain_stage(0, 2, 60, 120, chunks=[chunk(6, embedding=True)])
        trace.event("gemm", 1, 2, cat="kernel")
        trace.write(tmp_path, first.name)
        target = only(tmp_path)
        assert found(target, "not_comparable")
        assert target.unjudgeable is not None

    def test_a_whole_step_is_no_pipeline(self, tmp_path):
        for pp in range(2):
            trace = plain_stage(pp, 2, 30, 60, target="train_overall")
            trace.call(0, 360, label="train_actor")
            trace.write(tmp_path)
        whole, actor = measured(tmp_path)
        assert (whole.target, actor.target) == ("train_overall", "train_actor")
        assert whole.stages[0].bubble_ms is None
        assert whole.stages[0].compute_ms.mean == actor.stages[0].compute_ms.mean == 360
        assert actor.stages[0].bubble_ms.mean == 0
        assert whole.unjudgeable is not None


def test_the_drawn_step_is_of_the_ranks_in_the_table(tmp_path):
    for dp, pp in np.ndindex(2, 2):
        plain_stage(pp, 2, 10, 20, sizes={"dp": 2}, coords={"rank": 2 * pp + dp, "dp": dp}).write(tmp_path)
    calls = [call for path in find_traces(tmp_path) for call in steps_of(read_trace(path))]
    (told,), (table,) = stages_of(calls), tables_of_steps(calls).values()
    assert [row.rank for row in drawn.of_steps(calls, told, table).rows] == [0, 2]
    others = replace(told, stages=tuple(replace(stage, ranks=(stage.ranks[0] + 1,)) for stage in told.stages))
    assert [row.rank for row in drawn.of_steps(calls, others, table).rows] == [1, 3]


def test_traces_and_timelines_of_one_run_tell_the_same(tmp_path):
    """Also of a replica that is slower: the others wait for it before they reduce gradients."""
    slow = Fault("slow_rank", 1.8, stage=1, replica=1)
    shape = {"microbatches": 8, "steps": 4, "noise": 0.0, "jitter_ms": 0.0, "load": 0.0}
    pipeline = replace(draw(20261127, 45), faults=(slow,), **shape)
    run = Priced(pipeline).run((slow,))
    found = {}
    for recording in ("cpu trace", "timeline"):
        write_recording(replace(pipeline, recording=recording), run, tmp_path / recording)
        (found[recording],) = analyze(tmp_path / recording).targets
    traced, recorded = found.values()
    assert traced.step_ms == pytest.approx(recorded.step_ms, rel=1e-3)
    assert (
        [row.ranks for row in traced.shown] == [row.ranks for row in recorded.shown] == [(0,), (2,), (3,), (4,), (6,)]
    )
    for one, other in zip(traced.shown, recorded.shown, strict=True):
        for of in (lambda row: row.compute_ms, lambda row: row.bubble_ms, lambda row: row.exposed_ms["dp"]):
            assert of(one).mean == pytest.approx(of(other).mean, abs=1e-3 * traced.step_ms)


def test_a_step_on_clocks_of_their_own_takes_as_long_as_on_one(tmp_path):
    one = Scenario("passes that go one way", layers=(4, 4, 6, 4), target="train_log_probs", steps=2)
    found = []
    for scenario in (one, replace(one, name="on hosts of their own", apart=True)):
        write_scenario(scenario, tmp_path / scenario.name)
        target = only(tmp_path / scenario.name)
        found.append([target.step_time_ms.mean, *(stage.bubble_ms.mean for stage in target.stages)])
    assert found[1] == pytest.approx(found[0], rel=0.02, abs=5.0)
