"""Replay and predictions, on traces whose times come from a known cost per layer."""

from __future__ import annotations

import io
import shlex
import tempfile
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.terminal import show
from megaprof.analysis.report.text.what_if import assumptions, worth_showing
from megaprof.analysis.simulation import simulate
from megaprof.analysis.table.tabulate import schedule_of
from megaprof.analysis.what_if.contents import Cost, in_flight_layers, measured_memory
from megaprof.analysis.what_if.layouts import check_layout, default_layout, parse_layout
from megaprof.analysis.what_if.what_if import what_if as predictions
from megaprof.formats.metadata import Metadata, ModelChunk
from megaprof.formats.timeline import Memory
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, chunk, kinds, pipeline
from tests.analysis.tables import tables_in
from tests.analysis.what_if.oracle import CostModel, replay_layout

CPU = {"gpu": False, "noise": 0.005}


def found(scenario):
    """The what-if of the only target that a scenario's traces hold."""
    with tempfile.TemporaryDirectory() as directory:
        write(scenario, Path(directory))
        (target,) = analyze(directory).targets
    return target.what_if


def truth(scenario, pieces):
    """The step of another layout, by the costs that the scenario's traces were made from."""
    cost = CostModel(
        Cost(scenario.layer, 2 * scenario.layer),
        Cost(scenario.embedding, 2 * scenario.embedding),
        Cost(scenario.loss, 2 * scenario.loss),
        p2p_ms=scenario.transfer,
    )
    return replay_layout(pieces, scenario.stages, cost, scenario.microbatches).step_ms


def layout_of(flags, stages, layers, mtp=0):
    """What Megatron makes of some flags: the pieces."""
    options = dict(zip(flags, (*flags[1:], ""), strict=True))
    chunks = int(options.get("--num-virtual-stages-per-pipeline-rank", 1))
    if "--pipeline-model-parallel-layout" in options:
        return parse_layout(options["--pipeline-model-parallel-layout"], stages)
    ends = [options.get(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    first, last = (None if end is None else int(end) for end in ends)
    return default_layout(
        stages,
        chunks,
        layers,
        mtp,
        first=first,
        last=last,
        account_for_embedding="--account-for-embedding-in-pipeline-split" in flags,
        account_for_loss="--account-for-loss-in-pipeline-split" in flags,
    )


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("1f1b", layers=(6, 2), **CPU),
        Scenario("1f1b on gpus", layers=(6, 4, 4, 2)),
        Scenario("interleaved", layers=((2, 2), (2, 2), (1, 3), (2, 2)), loss=3.0, **CPU),
        Scenario("forward only", layers=(6, 2), target="train_log_probs", **CPU),
        Scenario("uneven microbatches", layers=(5, 3), uneven=0.6, **CPU),
        Scenario("no pipeline", layers=(4,), **CPU),
        Scenario("hosts with clocks of their own", layers=(6, 2, 4, 4), tail=20.0, dp=2, apart=True, steps=3),
    ],
    ids=lambda scenario: scenario.name,
)
def test_the_schedule_reproduces_the_measured_step(scenario):
    what_if = found(scenario)
    assert what_if.replay_error.count == scenario.steps
    assert abs(what_if.replay_error.mean) < 0.005
    assert what_if.replay_ms == pytest.approx(what_if.measured_ms, rel=0.005)
    assert what_if.outside_ms == pytest.approx(scenario.tail, abs=1.5)
    assert bool(what_if.candidates) == (scenario.stages > 1)


@pytest.mark.parametrize(
    ("scenario", "layout"),
    [
        (Scenario("two stages", layers=(6, 2), **CPU), "Et*4|t*4L"),
        (Scenario("the other way", layers=(2, 6), **CPU), "Et*4|t*4L"),
        (Scenario("a heavy loss", layers=(8, 8, 8, 8), loss=20.0, **CPU), "Et*9|t*9|t*9|t*5L"),
        (Scenario("on gpus", layers=(8, 8, 8, 8), loss=20.0), "Et*9|t*9|t*9|t*5L"),
        (Scenario("uneven microbatches", layers=(6, 2), uneven=0.5, **CPU), "Et*4|t*4L"),
        (Scenario("log-probs", layers=(6, 2), target="train_log_probs", **CPU), "Et*4|t*4L"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_suggested_layout_is_the_best_one_and_takes_what_was_predicted(scenario, layout):
    what_if = found(scenario)
    assert what_if.best is not None
    assert what_if.best.layout == layout
    pieces = parse_layout(layout, scenario.stages)
    assert layout_of(what_if.best.flags, scenario.stages, sum(scenario.layers)) == pieces
    if scenario.uneven or scenario.target != "train_actor":
        return
    assert what_if.best.step_ms.value == pytest.approx(truth(scenario, pieces), rel=0.03)
    assert what_if.best.speedup.value == pytest.approx(what_if.measured_ms / what_if.best.step_ms.value)
    assert what_if.advice == "change"


def test_costs_are_those_that_the_traces_were_made_from():
    costs = found(Scenario("known", layers=(6, 4, 3, 5), layer=5.0, embedding=4.0, loss=12.0, **CPU)).costs
    assert astuple(costs.by_kind["dense"]) == pytest.approx((5, 10), rel=0.02)
    assert astuple(costs.by_kind["embedding"]) == pytest.approx((4, 8), rel=0.15)
    assert astuple(costs.by_kind["loss"]) == pytest.approx((12, 24), rel=0.05)


def test_balanced_stages_are_left_alone():
    what_if = found(Scenario("balanced", **CPU))
    assert what_if.best is None
    assert not [each for each in what_if.candidates if each.kind == "layout"]


@pytest.mark.parametrize(("noise", "layers"), [(0.1, (17, 15)), (0.6, (9, 7))])
def test_a_gain_within_the_uncertainty_is_no_suggestion(noise, layers):
    what_if = found(Scenario("noisy", layers=layers, noise=noise, steps=3, gpu=False, microbatches=8))
    (first, *_) = [each for each in what_if.candidates if each.kind == "layout"]
    assert first.speedup.low < 1.02 < first.speedup.high
    assert what_if.best is None
    assert what_if.alike == ()


def test_how_many_steps_would_tell_is_that_of_the_quickest_layout():
    what_if = found(Scenario("r113", layers=(5, 6), loss=3.0, microbatches=4, noise=0.2, gpu=False, seed=113))
    (first, *_) = [each for each in what_if.candidates if each.kind == "layout"]
    assert first.speedup.low < 1.02 < first.speedup.value
    assert what_if.best is None
    assert first.more_steps > 0
    assert what_if.more_steps == first.more_steps


def stretched(directory, milliseconds):
    """A pipeline of 6 and 2 layers in which stage 1 stood still between its passes, for nothing that a replay knows."""
    forward, backward = [[30.0], [10.0]], [[60.0], [20.0]]
    run = simulate(forward, backward, 8)
    for pp, layers in enumerate((6, 2)):
        held = chunk(layers, embedding=pp == 0, loss=pp == 1)
        trace = TraceBuilder(pp=pp, pp_size=2, microbatches=8, chunks=[held])
        for number, event in enumerate(e for e in run.events if e.stage == pp):
            start = event.start_ms + milliseconds * (number >= 6)
            getattr(trace, event.phase)(event.microbatch, start, event.end_ms - event.start_ms)
        trace.call(0.0, run.step_ms + milliseconds)
        trace.write(directory)


def test_what_the_replay_misses_is_uncertain(tmp_path):
    stretched(tmp_path, 200.0)
    what_if = analyze(tmp_path).targets[0].what_if
    assert what_if.replay_error.mean == pytest.approx(-200 / 960, abs=0.02)
    assert what_if.best is None
    assert [(w.kind, round(w.factor, 1)) for w in what_if.warnings] == [("replay_off", 0.2)]
    stretched(tmp_path, 20.0)
    assert analyze(tmp_path).targets[0].what_if.best.layout == "Et*4|t*4L"


def test_what_stages_take_to_exchange_is_in_the_replay(tmp_path):
    """A stage takes 3 ms between passes of 10 and 20 ms although it waits for nobody, and once 40 ms."""
    run = simulate([[13.0]] * 4, [[23.0]] * 4, 8)
    for pp in range(4):
        trace = TraceBuilder(pp=pp, pp_size=4, microbatches=8, chunks=[chunk(2, embedding=pp == 0, loss=pp == 3)])
        for number, event in enumerate(e for e in run.events if e.stage == pp):
            start = event.start_ms + 3.0 + 40.0 * (number >= 9)
            getattr(trace, event.phase)(event.microbatch, start, event.end_ms - event.start_ms - 3.0)
        trace.call(0.0, run.step_ms + 40.0)
        trace.write(tmp_path)
    target = analyze(tmp_path).targets[0]
    assert target.what_if.replay_error.mean == pytest.approx(-40 / (run.step_ms + 40.0), abs=0.015)
    (exchanges,) = [cause for cause in target.causes if cause.kind == "communication"]
    assert (exchanges.group, exchanges.price.value) == ("pp", pytest.approx(run.step_ms * 3 / 18, rel=0.1))


def test_what_stages_take_to_exchange_comes_with_every_pass(tmp_path):
    """Passes of 10 and 20 ms begin 3 ms after their stage is free. One chunk has half as many passes. It would take
    648 ms if these began 6 ms after their stage is free."""
    run = simulate([[13.0] * 2] * 2, [[23.0] * 2] * 2, 8)
    for pp in range(2):
        held = [chunk(2, embedding=pp == 0), chunk(2, loss=pp == 1)]
        interleaved = {"schedule": "interleaved", "microbatch_group_size": 2}
        trace = TraceBuilder(pp=pp, pp_size=2, microbatches=8, chunks=held, metadata=interleaved)
        for event in (e for e in run.events if e.stage == pp):
            start, took = event.start_ms + 3.0, event.end_ms - event.start_ms - 3.0
            getattr(trace, event.phase)(event.microbatch, start, took, chunk=event.chunk)
        trace.call(0.0, run.step_ms)
        trace.write(tmp_path)
    found = next(each for each in analyze(tmp_path).targets[0].what_if.candidates if each.chunks == 1)
    assert found.step_ms.value == pytest.approx(simulate([[23.0]] * 2, [[43.0]] * 2, 8).step_ms, rel=0.035)


def test_a_layout_that_needs_more_activations_than_any_stage_held_is_flagged():
    what_if = found(Scenario("memory", layers=(2, 6), **CPU))
    best = next(each for each in what_if.candidates if each.layout == "Et*4|t*4L")
    assert (what_if.in_flight, best.in_flight, best.exceeds(what_if.in_flight)) == ((4, 6), (8, 4), True)
    other = found(Scenario("memory", layers=(6, 2), **CPU))
    assert not next(each for each in other.candidates if each.layout == "Et*4|t*4L").exceeds(other.in_flight)
    forwards = found(Scenario("log-probs", layers=(2, 6), target="train_log_probs", **CPU))
    assert (forwards.in_flight, forwards.best.in_flight) == ((0, 0), (0, 0))


@pytest.mark.parametrize("capacity", [40, 22, 20, None])
def test_a_layout_that_would_not_fit_into_the_measured_memory_is_not_advised(tmp_path, capacity):
    write(Scenario("memory", layers=(2, 6), microbatches=8, **CPU), tmp_path)
    # Peaks: 2 * 2 + 12 + 4 * 0.5 = 18 GiB on stage 0, 6 * 2 + 2 + 6 * 0.5 = 17 on stage 1, where a layer takes least.
    gib = [(16, 18), (14, 17)]
    memory = tuple(Memory(least << 30, most << 30, (capacity or 0) << 30) for least, most in gib)
    (table,) = tables_in(tmp_path).values()
    examined = examine(replace(table, memory=memory))
    what_if, _ = predictions(examined, diagnose(examined))
    of = {each.layers: each for each in what_if.candidates if each.kind == "layout"}
    even = of[4, 4]
    if capacity is None:  # nothing is guessed
        assert (even.fits, even.needed, what_if.allowed, what_if.best) == (None, None, None, even)
        assert even.exceeds(what_if.in_flight)
    else:
        assert even.needed[0] / 2**30 == pytest.approx(24.7, abs=0.05)
        assert [each / 2**30 for each in (*what_if.allocated, *what_if.allowed)] == [18, 17, capacity, capacity]
        assert even.fits == (capacity == 40)
    if capacity == 40:
        assert what_if.best == even
    if capacity == 22:
        assert what_if.best == of[3, 5]
        assert what_if.best.fits
    if capacity == 20:
        assert (what_if.best, what_if.advice, what_if.quickest) == (None, "none_fits", even)


def test_activations_in_flight_follow_the_schedule():
    assert in_flight_layers(("Ett", "tt", "ttL"), PipelineSchedule.checked(3, 1, 8)) == [6, 4, 2]
    assert in_flight_layers(("Ett", "tt", "ttL"), PipelineSchedule.checked(3, 1, 2)) == [4, 4, 2]
    # Interleaved: stage 0 of 2 warms up with 2 * 1 + 2 forwards of chunks 0 0 1 1, and runs one more before a backward.
    assert in_flight_layers(("Et", "t", "tt", "tL"), PipelineSchedule.checked(2, 2, 4))[0] == 1 + 1 + 2 + 2 + 1
    assert in_flight_layers(("Ett", "ttL"), PipelineSchedule.checked(2, 1, 4, forward_only=True)) == [0, 0]


def test_an_mtp_layer_needs_memory_as_a_layer_does():
    schedule = PipelineSchedule.checked(2, 1, 4)
    known = measured_memory([Memory(4, 8, 99), Memory(2, 3, 99)], ("Ett", "mL"), [4, 1])
    assert known is not None
    assert known.fit(("Ett", "mL"), schedule)[1] == (8, 3)
    assert known.fit(("Et", "tmL"), schedule)[1] == (8 - 2 - 2, 3 + 2 + 1)


@pytest.mark.parametrize(
    ("layers", "slow", "target"),
    [
        ((4, 4, 4, 4), {1: 1.5}, "train_actor"),
        ((4, 4), {1: 4.5}, "train_log_probs"),
        ((7, 3, 3, 3), {1: 1.3}, "train_actor"),
    ],
    ids=str,
)
def test_slow_ranks_are_not_answered_by_a_layout(layers, slow, target):
    """What the step gains without them is told by their causes. A prediction leaves them as slow as they are."""
    scenario = Scenario("slow ranks", layers=layers, peers=2, slow=slow, target=target, **CPU)
    what_if, healthy = found(scenario), found(replace(scenario, slow={}))
    assert what_if.layout == healthy.layout
    assert "ranks_stay_slow" in kinds(what_if.warnings)
    if healthy.best is None:
        assert (what_if.best, what_if.advice) == (None, "slow_ranks")
        assert not [each for each in what_if.candidates if each.kind == "layout"]
        return
    assert what_if.best is not None
    assert what_if.best.layers == healthy.best.layers
    after = found(replace(scenario, layers=what_if.best.layers))
    assert what_if.best.speedup.holds(what_if.measured_ms / after.measured_ms)
    assert what_if.best.step_ms.value == pytest.approx(after.measured_ms, rel=0.02)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("late", late={2: 300.0}, steps=4, merged=True, gpu=False),
        Scenario("idle", idle=0.4),
        Scenario("link", link={1: 12.0}, apart=True, **CPU),
    ],
    ids=lambda scenario: scenario.name,
)
def test_what_lies_outside_passes_is_replayed_too(scenario):
    what_if = found(scenario)
    assert abs(what_if.replay_error.mean) < 0.02
    assert what_if.warnings == ()


def test_other_microbatches_and_chunks_say_what_they_assume():
    what_if = found(Scenario("others", layers=(4, 4), microbatches=8, **CPU))
    more, fewer = (each for each in what_if.candidates if each.kind == "microbatches")
    assert [(each.microbatches, each.tokens, each.activations) for each in (more, fewer)] == [(16, 0.5, 0.5), (4, 2, 2)]
    forward, backward = [[10.0], [10.0]], [[20.0], [20.0]]
    assert more.step_ms.value == pytest.approx(simulate(forward, backward, 16).step_ms, rel=0.03)
    assert fewer.step_ms.value == pytest.approx(simulate([[40.0], [40.0]], [[80.0], [80.0]], 4).step_ms, rel=0.03)
    chunks = next(each for each in what_if.candidates if each.chunks == 2)
    assert chunks.layers == (4, 4)
    assert chunks.step_ms.value == pytest.approx(simulate([[10.0] * 2] * 2, [[20.0] * 2] * 2, 8).step_ms, rel=0.03)
    assert chunks.layout == "E" + "t*2|" * 3 + "t*2L"
    assert all(any(assumptions(each)) for each in (more, fewer, chunks))


@pytest.mark.parametrize(
    ("p2p", "version", "overlap", "frees"),
    [
        (None, "0.18.0", "steady", False),
        ({"overlap_p2p_comm": False}, "0.18.0", "none", False),
        ({"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}, "0.17.1", "steady", False),
        ({"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}, "0.18.0rc0", "steady", True),
        ({"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}, None, "all", False),
    ],
)
def test_exchanges_of_the_interleaved_schedule_overlap_where_the_metadata_say_so(p2p, version, overlap, frees):
    one = ModelChunk(False, 1, (1,), 0, False, ("dense",))
    coords = WorldLayout(ParallelSizes(pp=4)).coords(0)
    metadata = Metadata(
        "train_actor",
        coords,
        (0, 0),
        schedule="interleaved",
        microbatches=4,
        chunks=(one, one),
        p2p=p2p,
        megatron_core=version,
    )
    schedule = schedule_of(metadata, False)
    assert (schedule.overlap, schedule.frees) == (overlap, frees)


def test_exchanges_of_1f1b_are_replayed_as_what_comes_closer():
    # This scenario's messages are buffered, whatever its metadata say.
    assert found(Scenario("1f1b", layers=(6, 2), **CPU)).rendezvous is False


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        ({"schedule": None}, "schedule_unknown"),
        ({"schedule": "unknown"}, "schedule_unknown"),
        ({"chunks": [chunk(4)] * 2, "schedule": "1f1b"}, "no_step"),
        ({"microbatches": 3}, "no_step"),
    ],
)
def test_what_cannot_be_replayed_says_why(tmp_path, damage, kind):
    pipeline(tmp_path, [4, 4], metadata=damage)
    what_if = analyze(tmp_path).targets[0].what_if
    assert what_if.candidates == ()
    assert [(w.kind, w.why.kind) for w in what_if.warnings] == [("not_replayed", kind)]


def test_a_missing_stage_withholds_everything(tmp_path):
    first, _ = pipeline(tmp_path, [6, 2])
    (warning,) = analyze(first).targets[0].what_if.warnings
    assert (warning.kind, warning.why.kind) == ("not_replayed", "stages_missing")


def test_where_stages_hold_no_layer_there_may_be_no_other_layout():
    """Every piece of another layout holds something, and three parts are too few for four pieces."""
    what_if = found(Scenario("few", layers=(0, 1, 0, 0), embedding=3.0, loss=3.0, **CPU))
    assert (what_if.layout, what_if.advice) == ("E|t||L", "no_other")


def test_flags_are_those_of_the_layout():
    best = found(Scenario("flags", layers=(8, 8, 8, 8), loss=20.0)).best
    assert best.layout == "E" + "t*9|" * 3 + "t*5L"
    assert layout_of(best.flags, 4, 32) == parse_layout(best.layout, 4)


def test_the_text_has_the_answer_and_its_error(tmp_path):
    write(Scenario("text", layers=(6, 2), **CPU), tmp_path)
    sink = io.StringIO()
    report = analyze(tmp_path)
    show(report, Console(file=sink, width=80, highlight=False))
    text = sink.getvalue()
    assert "--decoder-first-pipeline-num-layers 4\n" in text
    assert "times as fast" in text
    # The letters that a line explains stand above it, and how each change that is shown is made.
    layouts = [each for each in worth_showing(report.targets[0].what_if) if each.flags]
    assert len(layouts) > 2
    assert all(f"{shlex.join(each.flags)}\n" in text for each in layouts)


@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.floats(0.0, 20.0),
    st.floats(0.0, 20.0),
    st.sampled_from([4, 8, 12]),
    st.integers(0, 3),
)
def test_no_suggestion_is_slower_than_the_captured_layout(layers, embedding, loss, microbatches, seed):
    scenario = Scenario(
        "any", layers=tuple(layers), embedding=embedding, loss=loss, microbatches=microbatches, seed=seed, **CPU
    )
    what_if = found(scenario)
    captured = parse_layout(what_if.layout, len(layers)) if what_if.layout else None
    for each in what_if.candidates:
        if each.kind not in ("layout", "chunks"):
            continue
        pieces = parse_layout(each.layout, len(layers))
        check_layout(pieces, len(layers), sum(layers))
        assert layout_of(each.flags, len(layers), sum(layers)) == pieces
    if what_if.best is not None and captured is not None and len(layers) > 2:
        # With two stages an embedding and a loss cannot both be told from the layers, and the report says so.
        suggested = truth(scenario, parse_layout(what_if.best.layout, len(layers)))
        assert suggested <= truth(scenario, captured) * 1.001


def test_no_layout_has_a_stage_without_layers_or_the_name_of_another():
    """The loss takes so long that the last stage had better hold nothing else."""
    for layers in ((2, 2), (4, 4, 4, 4), ((2, 2), (3, 3), (2, 2), (2, 2))):
        candidates = [
            each for each in found(Scenario("a", layers=layers, loss=30.0)).candidates if each.kind == "layout"
        ]
        assert candidates
        assert all(min(each.layers) > 0 for each in candidates)
        assert len({each.layers for each in candidates}) == len(candidates)
