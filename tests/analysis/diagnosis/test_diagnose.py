"""Pipelines with a known fault, simulated by code that shares nothing with the analysis: names and prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis, _by_content, _cause, _dear_part, _needed, diagnose
from megaprof.analysis.diagnosis.examine import examine, terms
from megaprof.analysis.diagnosis.model import _own_of_replicas, divided
from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.diagnosis.stages import averages
from megaprof.analysis.diagnosis.view import EXCHANGE, receivers
from megaprof.analysis.samples import LEVEL, Interval, errors_of_mean
from megaprof.analysis.table.iterations import Iterations, PartOfIteration
from megaprof.analysis.table.table import WAIT, Table, Unfit
from tests.analysis.tables import tables_in
from tests.analysis.truth.files import BETWEEN, write
from tests.analysis.truth.pipelines import Fault, Pipeline, Priced

HEALTHY = Pipeline(
    seed=(7, 1),
    recording="timeline",
    stages=4,
    chunks=1,
    replicas=1,
    peers=1,
    microbatches=16,
    steps=6,
    forward_only=False,
    layers=((4,), (4,), (4,), (4,)),
    layer_ms=3.0,
    ratio=2.0,
    noise=0.01,
    adds=False,
    load=0.0,
    burst_ms=20.0,
    together=False,
    apart=False,
    buffered=False,
    link_ms=0.05,
    tail_ms=0.5,
    jitter_ms=0.05,
)
TWICE = replace(HEALTHY, chunks=2, layers=((2, 2),) * 4)
REPLICAS = replace(HEALTHY, replicas=3)
LONG = replace(REPLICAS, steps=40)
DEVICE = replace(HEALTHY, recording="device timeline", apart=True)
GPU = replace(HEALTHY, recording="gpu trace", steps=3)
CPU = replace(HEALTHY, recording="cpu trace", steps=3)
ALONE = replace(HEALTHY, stages=1, layers=((4,),), replicas=4, steps=20)


def table_of(pipeline: Pipeline, directory) -> Table:
    priced = Priced(pipeline)
    write(pipeline, priced.run(priced.all), directory)
    (table,) = tables_in(directory).values()
    if isinstance(table, Unfit):
        raise table
    return table


def diagnosis_of(pipeline: Pipeline, directory) -> Diagnosis:
    return diagnose(examine(table_of(pipeline, directory)))


def place(cause: Cause) -> tuple:
    return cause.kind, cause.stage, cause.chunk, cause.ranks, cause.group


def with_layers(pipeline: Pipeline, *layers: int) -> Pipeline:
    return replace(pipeline, layers=tuple((n,) for n in layers))


@pytest.mark.parametrize(
    ("pipeline", "fault", "expected"),
    [
        (with_layers(HEALTHY, 4, 6, 4, 4), Fault("layers", 2, stage=1), ("layers", 1, None, (), None)),
        (HEALTHY, Fault("embedding_or_loss", 5.0, stage=3), ("embedding_or_loss", 3, None, (), None)),
        (GPU, Fault("embedding_or_loss", 5.0, stage=0), ("embedding_or_loss", 0, None, (), None)),
        (HEALTHY, Fault("recomputation", 1.0, stage=2), ("recomputation", 2, None, (), None)),
        (HEALTHY, Fault("slow_backward", 1.25, stage=1), ("slow_backward", 1, None, (), None)),
        (CPU, Fault("slow_forward", 1.8, stage=1), ("slow_forward", 1, None, (), None)),
        (HEALTHY, Fault("slow_stage", 1.2, stage=2), ("unexplained", 2, None, (), None)),
        (TWICE, Fault("slow_chunk", 1.6, stage=1, chunk=1), ("slow_chunk", 1, 1, (), None)),
        (TWICE, Fault("slow_stage", 1.2, stage=0), ("unexplained", 0, None, (), None)),
        (REPLICAS, Fault("slow_rank", 1.3, stage=2, replica=1), ("slow_rank", 2, None, (7,), None)),
        (
            replace(CPU, peers=2),
            Fault("slow_rank", 1.3, stage=1, replica=0, peer=1),
            ("slow_rank", 1, None, (3,), None),
        ),
        (HEALTHY, Fault("slow_link", 6.0, stage=1), ("slow_link", 1, None, (), None)),
        (replace(HEALTHY, apart=True), Fault("slow_link", 6.0, stage=2), ("slow_link", 2, None, (), None)),
        (replace(HEALTHY, buffered=True), Fault("slow_link", 6.0, stage=0), ("slow_link", 0, None, (), None)),
        (HEALTHY, Fault("late_entry", 80.0, stage=2, replica=0), ("late_entry", 2, None, (2,), None)),
        (DEVICE, Fault("late_entry", 80.0, stage=1, replica=0), ("late_entry", 1, None, (1,), None)),
        (DEVICE, Fault("late_entry", 80.0, stage=3, replica=0), ("late_entry", 3, None, (3,), None)),
        (HEALTHY, Fault("data_wait", 90.0, stage=0), ("data_wait", 0, None, (), None)),
        (GPU, Fault("data_wait", 90.0, stage=0), ("data_wait", 0, None, (), None)),
        (HEALTHY, Fault("loader", 9.0, stage=0), ("data_wait", 0, None, (0,), None)),
        (HEALTHY, Fault("loader", 40.0, stage=0, every=8), ("data_wait", 0, None, (0,), None)),
        (REPLICAS, Fault("loader", 9.0, stage=0, replica=1), ("data_wait", 0, None, (1,), None)),
        (replace(HEALTHY, peers=2), Fault("loader", 9.0, stage=0), ("data_wait", 0, None, (0,), None)),
        (replace(CPU, steps=6), Fault("loader", 9.0, stage=0), ("data_wait", 0, None, (0,), None)),
        (replace(GPU, steps=6), Fault("loader", 9.0, stage=0), ("data_wait", 0, None, (0,), None)),
        (HEALTHY, Fault("uneven_microbatches", 0.4), ("uneven_microbatches", None, None, (), None)),
        (HEALTHY, Fault("uneven_microbatches", 0.5, stage=1), ("uneven_microbatches", 1, None, (), None)),
        (GPU, Fault("communication", 0.3, group="tp"), ("communication", None, None, (), "tp")),
        (CPU, Fault("communication", 0.3, group="ep"), ("communication", None, None, (), "ep")),
        (REPLICAS, Fault("communication", 100.0, group="dp"), ("communication", None, None, (), "dp")),
        (LONG, Fault("stalls", 400.0), ("stalls", None, None, (), None)),
        (LONG, Fault("garbage_collection", 400.0), ("garbage_collection", None, None, (), None)),
        (
            replace(CPU, replicas=3, steps=12),
            Fault("garbage_collection", 400.0),
            ("garbage_collection", None, None, (), None),
        ),
        (LONG, Fault("unequal_replicas", 0.2), ("unequal_replicas", None, None, (), None)),
        (
            replace(ALONE, replicas=2),
            Fault("unequal_replicas", 0.2),
            ("unequal_replicas", None, None, (), None),
        ),
        (ALONE, Fault("slow_rank", 1.3, stage=0, replica=2), ("slow_rank", 0, None, (2,), None)),
    ],
    ids=lambda each: each.kind if isinstance(each, Fault) else "",
)
def test_one_fault_is_named_alone_with_its_place_and_its_price(pipeline, fault, expected, tmp_path):
    pipeline = replace(pipeline, faults=(fault,))
    found = diagnosis_of(pipeline, tmp_path)
    assert [place(cause) for cause in found.causes] == [expected]
    (cause,) = found.causes
    price = cause.price
    assert price.low <= price.value <= price.high
    assert price.value == pytest.approx(Priced(pipeline).price(fault).mean(), rel=0.1)


@pytest.mark.parametrize("every", [1, 4])
def test_a_loader_is_late_for_the_microbatches_of_the_replica_that_waits(every, tmp_path):
    pipeline = replace(REPLICAS, faults=(Fault("loader", 30.0, stage=0, replica=1, every=every),))
    (cause,) = diagnosis_of(pipeline, tmp_path).causes
    assert cause.parts["spread"] == pytest.approx(1 / every, rel=0.1)


SHARED = Fault("processor_wait", 1.6, stage=2, replica=1)


@pytest.mark.parametrize("pipeline", [REPLICAS, replace(REPLICAS, recording="cpu trace"), replace(REPLICAS, peers=2)])
def test_a_rank_that_shares_its_core_waits_and_is_not_slow(pipeline, tmp_path):
    pipeline = replace(pipeline, counted=True, faults=(SHARED,))
    table = table_of(pipeline, tmp_path / "counted")
    (cause,) = diagnose(examine(table)).causes
    assert (cause.kind, cause.reason) == ("processor_wait", None)
    assert set(cause.ranks) <= set(table.ranks[SHARED.replica, SHARED.stage].tolist())
    assert cause.price.value == pytest.approx(Priced(pipeline).price(SHARED).mean(), rel=0.1)
    # 1.6 times as long means that 6 of 16 milliseconds were waited.
    waits = 0.375 * 1.6 * pipeline.microbatches * pipeline.forward_ms * (1.0 + pipeline.ratio)
    assert cause.parts["waited_ms"] == pytest.approx(waits, rel=0.1)
    for other in (replace(pipeline, counted=False), replace(pipeline, faults=(replace(SHARED, kind="slow_rank"),))):
        (cause,) = diagnosis_of(other, tmp_path / str(other.counted)).causes
        assert (cause.kind, cause.stage) == ("slow_rank", 2)


@pytest.mark.parametrize("place", [{"stage": 2, "replica": 1}, {"stage": 1, "replica": 0}])
def test_what_a_slow_rank_costs_and_what_ranks_wait_for_a_core_is_told_once(place, tmp_path):
    """Of one rank or of two; and a rank is as slow as the tables and the live view have it, with its waits."""
    slow, shared = Fault("slow_rank", 1.5, stage=2, replica=1), Fault("processor_wait", 1.4, **place)
    pipeline = replace(REPLICAS, counted=True, faults=(slow, shared))
    table, priced = table_of(pipeline, tmp_path), Priced(pipeline)
    found = diagnose(examine(table))
    assert {cause.kind for cause in found.causes} == {"slow_rank", "processor_wait"}
    lost = found.step_ms - priced.length(frozenset({priced.links})).mean()
    assert sum(cause.price.value for cause in found.causes) == pytest.approx(lost, rel=0.02)
    (cause,) = (each for each in found.causes if each.kind == "slow_rank")
    others = priced.price(slow, [] if found.causes[0] is cause else [shared]).mean()
    assert cause.price.low <= others <= cause.price.high
    compute = averages(table, cause.ranks)
    (own,), usual = compute.slow_ranks, compute.stages[2].compute_ms
    assert cause.parts["factor"] == pytest.approx(own.compute_ms.mean / usual.mean, rel=0.02)


@pytest.mark.parametrize("recording", ["timeline", "cpu trace"])
def test_a_stage_without_peers_that_shares_its_core_is_slow_for_no_certain_reason(recording, tmp_path):
    fault = replace(SHARED, replica=0)
    pipeline = replace(HEALTHY, recording=recording, counted=True, faults=(fault,))
    found = diagnosis_of(pipeline, tmp_path / "counted")
    assert found.causes == ()
    (cause,) = (each for each in found.perhaps if each.kind == "unexplained")
    assert cause.stage == 2
    assert cause.price.low < LEAST * found.step_ms < cause.price.value < cause.price.high
    (cause,) = diagnosis_of(replace(pipeline, counted=False), tmp_path / "uncounted").causes
    assert (cause.kind, cause.stage) == ("unexplained", 2)


@pytest.mark.parametrize("recording", ["timeline", "cpu trace"])
def test_what_ranks_wait_for_a_core_is_one_cause(recording, tmp_path):
    """One shares its core with somebody all the time, and everybody's cores are shared now and then."""
    pipeline = replace(REPLICAS, recording=recording, load=0.3, burst_ms=60.0, steps=12, counted=True, faults=(SHARED,))
    table = table_of(pipeline, tmp_path)
    found = diagnose(examine(table))
    assert [(each.kind, each.reason) for each in found.causes] == [("processor_wait", None)]
    (cause,) = found.causes
    waited = np.broadcast_to(table.core_waits.mean(axis=0), table.ranks.shape)
    assert cause.parts["waited_ms"] == pytest.approx(waited.max())
    assert cause.ranks[0] == table.ranks[waited == waited.max()]
    assert sorted(cause.ranks) == sorted(table.ranks[waited >= LEAST * found.step_ms])
    lost = found.step_ms - Priced(replace(pipeline, load=0.0, faults=())).length(frozenset()).mean()
    # What the quicker passes waited is told of none of them.
    assert 0.5 * lost < cause.price.value < cause.price.value + found.rest_ms < 1.1 * lost


@pytest.mark.parametrize(
    ("pipeline", "fault"),
    [
        (HEALTHY, Fault("slow_stage", 1.2, stage=2)),
        (TWICE, Fault("slow_chunk", 1.6, stage=1, chunk=1)),
        (HEALTHY, Fault("embedding_or_loss", 5.0, stage=3)),
    ],
)
def test_what_waits_for_a_core_may_explain_of_a_stage_makes_its_price_less_certain(pipeline, fault, tmp_path):
    """All ranks wait in every pass, so nobody knows which passes took how long because of that."""
    found = []
    for factor in (1.005, 1.5):
        waits = tuple(Fault("processor_wait", factor, stage=stage, replica=0) for stage in range(pipeline.stages))
        busy = replace(pipeline, counted=True, faults=(fault, *waits))
        found.append(diagnosis_of(busy, tmp_path / str(factor)))
    quiet, busy = found
    (cause,) = (each for each in quiet.causes if each.kind != WAIT)
    (price,) = (each.price for each in (*busy.causes, *busy.perhaps) if place(each) == place(cause))
    assert price.value - price.low > 2.0 * (cause.price.value - cause.price.low)
    assert price.low <= Priced(replace(pipeline, faults=(fault,))).price(fault).mean() <= price.high
    assert [place(each) for each in busy.causes if each.kind != WAIT] in ([], [place(cause)])


@pytest.mark.parametrize(("waiting", "certain"), [([0, 1, 2, 3], True), ([1, 2], False)])
def test_what_all_ranks_wait_for_a_core_explains_no_slow_link(waiting, certain, tmp_path):
    fault = Fault("slow_link", 6.0, stage=1)
    pipeline = replace(HEALTHY, faults=(fault,))
    table = table_of(pipeline, tmp_path)
    core_waits = np.zeros_like(table.core_waits)
    core_waits[:, :, waiting] = 0.3 * table.length.mean()
    found = diagnose(examine(replace(table, core_waits=core_waits)))
    (cause,) = found.causes or found.perhaps
    assert (place(cause), cause.link) == (("slow_link", 1, None, (), None), (1, 2))
    assert (found.causes == (cause,)) == certain
    assert cause.price.low <= Priced(pipeline).price(fault).mean() <= cause.price.high


def test_steps_with_more_work_are_no_disturbances_of_single_passes(tmp_path):
    more = tuple(Fault("slow_rank", 1.5, stage=stage, replica=0, steps=(0, 2)) for stage in range(HEALTHY.stages))
    found = diagnosis_of(replace(HEALTHY, faults=more), tmp_path)
    assert (found.causes, found.perhaps) == ((), ())
    assert found.rest_ms < LEAST * found.step_ms


@pytest.mark.parametrize("recording", ["timeline", "cpu trace"])
def test_what_a_busy_machine_takes_from_passes_is_named_alone(recording, tmp_path):
    busy = replace(REPLICAS, recording=recording, load=0.3, burst_ms=60.0, steps=12, counted=True)
    found = diagnosis_of(busy, tmp_path)
    (cause,) = found.causes
    assert cause.kind == "processor_wait"
    lost = found.step_ms - Priced(replace(busy, load=0.0)).length(frozenset()).mean()
    # What the quicker passes waited is told of none of them.
    assert 0.5 * lost < cause.price.value < cause.price.value + found.rest_ms < 1.1 * lost


@pytest.mark.parametrize(
    "pipeline",
    [
        HEALTHY,
        TWICE,
        REPLICAS,
        GPU,
        CPU,
        ALONE,
        replace(HEALTHY, forward_only=True),
        replace(HEALTHY, recording="device timeline", replicas=2),
        replace(HEALTHY, noise=0.05, apart=True),
        replace(CPU, load=0.1, together=True),
        replace(REPLICAS, load=0.1, steps=12),
        replace(HEALTHY, stages=2, layers=((4,), (4,))),
    ],
)
def test_nothing_is_said_of_a_healthy_job(pipeline, tmp_path):
    found = diagnosis_of(pipeline, tmp_path)
    assert [place(cause) for cause in found.causes] == []
    assert found.step_ms == pytest.approx(Priced(pipeline).length(frozenset()).mean(), rel=0.01)
    assert found.replayed_ms == pytest.approx(found.step_ms, rel=0.02)


def test_two_faults_are_told_dearest_first_and_no_millisecond_twice(tmp_path):
    pipeline = with_layers(REPLICAS, 4, 6, 4, 4)
    slow = Fault("slow_rank", 1.25, stage=1, replica=2)
    pipeline = replace(pipeline, faults=(Fault("layers", 2, stage=1), slow))
    found = diagnosis_of(pipeline, tmp_path)
    assert {cause.kind for cause in found.causes} == {"layers", "slow_rank"}
    prices = [cause.price.value for cause in found.causes]
    assert prices == sorted(prices, reverse=True)
    priced = Priced(pipeline)
    together = float((priced.length(priced.all) - priced.length(frozenset())).mean())
    assert sum(prices) == pytest.approx(together, rel=0.05)


def test_two_faults_that_hide_each_other_are_both_named(tmp_path):
    # Stage 0 takes 6 layers, and one rank of stage 2 as long for 4: to mend either alone gains nothing.
    pipeline = with_layers(replace(REPLICAS, noise=0.003, microbatches=64), 6, 4, 4, 4)
    pipeline = replace(pipeline, faults=(Fault("layers", 2, stage=0), Fault("slow_rank", 1.5, stage=2, replica=1)))
    priced = Priced(pipeline)
    assert priced.price(pipeline.faults[1]).mean() < LEAST * priced.length(priced.all).mean()
    found = diagnosis_of(pipeline, tmp_path)
    assert {(cause.kind, cause.stage) for cause in found.causes} == {("layers", 0), ("slow_rank", 2)}
    together = float((priced.length(priced.all) - priced.length(frozenset())).mean())
    assert sum(cause.price.value for cause in found.causes) == pytest.approx(together, rel=0.05)


def test_what_is_slow_is_slow_for_work_that_it_is_given(tmp_path):
    # Spread evenly, the loss takes half as long again where backwards are slow.
    loss, slow = Fault("embedding_or_loss", 9.0, stage=3), Fault("slow_backward", 1.5, stage=1)
    pipeline = replace(HEALTHY, noise=0.002, microbatches=40, faults=(loss, slow))
    found = diagnosis_of(pipeline, tmp_path)
    priced = Priced(pipeline)
    first, second = found.causes
    assert first.price.value == pytest.approx(priced.price(loss).mean(), rel=0.02)
    assert second.price.value == pytest.approx(priced.price(slow, [loss]).mean(), rel=0.02)


def test_a_stage_of_few_layers_is_not_certainly_slow_if_all_passes_may_take_as_long_beside_their_layers(tmp_path):
    # Were it slow, it would be so for each layer that it is given. What a pass takes beside its layers is given once.
    slow = Fault("slow_stage", 1.3, stage=1)
    few = replace(HEALTHY, stages=3, layers=((6,), (1,), (1,)), faults=(Fault("layers", 5, stage=0), slow))
    found = diagnosis_of(few, tmp_path / "few")
    assert [cause.kind for cause in found.causes] == ["layers"]
    (perhaps,) = found.perhaps
    assert (perhaps.kind, perhaps.stage) == ("unexplained", 1)
    recorded = 0.3 * 3.0 * (1.0 + few.ratio) * few.microbatches
    assert perhaps.price.low < recorded < perhaps.price.value
    # Beyond what a layer takes, it is slow.
    (slower, *_) = diagnosis_of(replace(few, faults=(few.faults[0], replace(slow, size=2.5))), tmp_path / "slow").causes
    assert (slower.kind, slower.stage) == ("unexplained", 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_single_step_does_not_tell_what_happens_once_in_every_step(steps, tmp_path):
    pipeline = replace(HEALTHY, steps=steps, faults=(Fault("late_entry", 200.0, stage=2, replica=0),))
    found = diagnosis_of(pipeline, tmp_path)
    (cause,) = found.perhaps if steps == 1 else found.causes
    assert (cause.kind, cause.ranks) == ("late_entry", (2,))
    assert (cause.more_steps > 0) == (steps == 1)


@pytest.mark.parametrize("recording", ["timeline", "cpu trace"])
def test_a_rank_that_was_still_in_the_step_before_is_not_late(recording, tmp_path):
    layers = Fault("layers", 2, stage=0)
    pipeline = replace(with_layers(HEALTHY, 6, 2), stages=2, steps=12, recording=recording, faults=(layers,))
    left = Priced(pipeline).run([layers]).finish.mean(axis=(1, 2))
    # Nothing makes the stages wait for each other between their steps, so the second enters each step before the first.
    late = Fault("late_entry", left[0] - left[1], stage=0, replica=0)
    assert late.size > 30.0
    pipeline = replace(pipeline, faults=(layers, late))
    run = Priced(pipeline).run([layers, late])
    write(pipeline, replace(run, length=run.length - late.size), tmp_path)
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    period = (run.length - late.size).mean() + BETWEEN
    assert table.length[1:].mean() == pytest.approx(period, rel=0.01)
    assert [cause.kind for cause in diagnose(examine(table)).causes] == ["layers"]


@pytest.mark.parametrize("recording", ["timeline", "cpu trace"])
def test_a_rank_that_is_still_in_the_log_probs_before_while_others_begin_the_next_is_not_late(recording, tmp_path):
    slow = Fault("slow_stage", 2.0, stage=1)
    pipeline = replace(with_layers(HEALTHY, 4, 4, 4), stages=3, forward_only=True, steps=12, recording=recording)
    left = Priced(pipeline).run([slow]).finish.mean(axis=(1, 2))
    ends = tuple(Fault("late_entry", left[stage] - left[0], stage=stage, replica=0) for stage in (1, 2))
    pipeline = replace(pipeline, faults=(slow, *ends))
    run = Priced(pipeline).run([slow, *ends])
    # The first stage begins the next step as soon as it is done with this one.
    write(pipeline, replace(run, length=run.finish[0, :, 0]), tmp_path)
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    assert [(cause.kind, cause.stage) for cause in diagnose(examine(table)).causes] == [("unexplained", 1)]


def test_of_causes_that_hide_each_other_only_those_are_named_that_the_last_one_needs(tmp_path):
    slow = (Fault("slow_stage", 1.3, stage=1), Fault("slow_stage", 1.3, stage=2))
    six = replace(HEALTHY, stages=6, layers=((4,),) * 6, noise=0.0, microbatches=40, faults=slow)
    run = examine(table_of(six, tmp_path))
    by_stage = {term.stage: term for term in terms(run.table, run.view, run.step_ms) if term.kind == "stage"}
    assert _needed(run, [by_stage[0], by_stage[1]], by_stage[2]) == [by_stage[1]]
    first, second = diagnose(run).causes
    assert first.price.value == pytest.approx(first.alone_ms)
    assert second.price.low > LEAST * run.step_ms
    # Each of them alone gains nothing but the filling of the pipeline.
    assert second.alone_ms < first.alone_ms < 0.2 * second.price.value


def test_filling_the_pipeline_is_priced_and_named_after_all_other_causes(tmp_path):
    pipeline = replace(HEALTHY, microbatches=6, faults=(Fault("slow_link", 2.0, stage=1),))
    found = diagnosis_of(pipeline, tmp_path)
    first, second = found.causes
    assert (first.kind, second.kind) == ("slow_link", "few_microbatches")
    assert second.price.value > first.price.value


def test_a_wait_for_data_is_no_part_of_what_a_stage_holds(tmp_path):
    wait, ends = Fault("data_wait", 90.0, stage=0), Fault("embedding_or_loss", 6.0, stage=0)
    pipeline = replace(HEALTHY, faults=(wait, ends))
    prices = {cause.kind: cause.price.value for cause in diagnosis_of(pipeline, tmp_path).causes}
    priced = Priced(pipeline)
    assert prices["embedding_or_loss"] == pytest.approx(priced.price(ends).mean(), rel=0.01)
    assert prices["data_wait"] == pytest.approx(priced.price(wait, [ends]).mean(), rel=0.02)


def test_contents_are_those_of_average_microbatches_whatever_these_are_like(tmp_path):
    # On one stage alone: medians of its microbatches differ from rank to rank, which makes no rank slow.
    uneven = Fault("uneven_microbatches", 0.3, stage=0)
    table = table_of(replace(REPLICAS, steps=6, faults=(uneven,)), tmp_path)
    forwards = examine(table).view.content.whole[0, :, 0, 0]
    assert forwards == pytest.approx(forwards[1:].mean(), rel=0.02)


def test_clocks_are_told_from_a_slow_link_by_both_directions(tmp_path):
    # Behind a long last stage inputs lie there before they are needed, but for the first one of a step.
    slow = (Fault("layers", 2, stage=3), Fault("slow_link", 4.0, stage=1))
    pipeline = replace(with_layers(HEALTHY, 4, 4, 4, 6), apart=True, buffered=True, faults=slow)
    table = table_of(pipeline, tmp_path)
    assert table.entry.max() < 1.0
    assert diagnose(examine(table)).sure


def test_where_senders_wait_one_direction_is_enough_to_compare_clocks(tmp_path):
    late, link = Fault("late_entry", 40.0, stage=2, replica=0), Fault("slow_link", 3.0, stage=1)
    pipeline = replace(HEALTHY, apart=True, forward_only=True, faults=(late, link))
    found = diagnosis_of(pipeline, tmp_path)
    assert found.clocks
    prices = {(cause.kind, cause.stage): cause.price.value for cause in found.causes}
    priced = Priced(pipeline)
    assert prices["slow_link", 1] == pytest.approx(priced.price(link).mean(), rel=0.05)
    assert prices["late_entry", 2] == pytest.approx(priced.price(late, [link]).mean(), rel=0.05)
    assert prices.keys() == {("slow_link", 1), ("late_entry", 2)}


def test_what_both_directions_at_once_take_longer_belongs_to_the_slow_link(tmp_path):
    """One direction alone is as quick as on the other links."""
    run = examine(table_of(HEALTHY, tmp_path))
    longer = 5.0 * receivers(run.table.schedule)[1][..., None] + np.zeros_like(run.view.passes)
    view = replace(run.view, passes=run.view.passes + longer)
    delays = {**run.view.delays, EXCHANGE: run.view.delays[EXCHANGE] + longer}
    exchange = run.view.exchange + 5.0 * (np.arange(run.view.exchange.shape[-1]) == 1)
    slow = replace(run, view=replace(view, delays=delays, exchange=exchange))
    costs = float((view.step_ms - run.view.step_ms).mean())
    every = terms(slow.table, slow.view, slow.step_ms)
    (link,) = (term for term in every if (term.kind, term.stage) == ("slow_link", 1))
    (usual,) = (term for term in every if (term.kind, term.group) == ("communication", "pp"))
    assert slow.gain(link).mean() == pytest.approx(costs, rel=0.05)
    # What all links have in common is gone, and not what this one takes longer.
    assert slow.mended(usual).gain(link).mean() == pytest.approx(costs, rel=0.05)


def test_without_clocks_to_compare_no_late_entry_is_ruled_out(tmp_path):
    late = Fault("late_entry", 80.0, stage=2, replica=0)
    found = diagnosis_of(replace(HEALTHY, apart=True, buffered=True, forward_only=True, faults=(late,)), tmp_path)
    assert (found.causes, found.sure, found.clocks) == ((), False, False)


def test_messages_that_are_received_in_turn_have_a_model(tmp_path):
    slow = Fault("slow_link", 6.0, stage=1)
    pipeline = replace(TWICE, buffered=True, overlapped=False, faults=(slow,))
    found = diagnosis_of(pipeline, tmp_path)
    assert found.replayed_ms == pytest.approx(found.step_ms, rel=0.002)
    (cause,) = found.causes
    assert (cause.kind, cause.stage) == ("slow_link", 1)
    assert cause.price.value == pytest.approx(Priced(pipeline).price(slow).mean(), rel=0.03)
    assert cause.parts["transfer_ms"] == pytest.approx(6.05, rel=0.02)


def test_a_rank_says_when_it_is_slow(tmp_path):
    now_and_then = tuple(range(2, 40, 4))
    since = tuple(range(20, 40))
    for steps in (now_and_then, since):
        fault = Fault("slow_rank", 1.6, stage=1, replica=2, steps=steps)
        pipeline = replace(LONG, faults=(fault,))
        directory = tmp_path / str(len(steps))
        found = diagnosis_of(pipeline, directory)
        (cause,) = found.causes
        assert (cause.kind, cause.ranks) == ("slow_rank", (5,))
        assert cause.parts["factor"] == pytest.approx(1.6, rel=0.05)
        assert cause.share == pytest.approx(len(steps) / 40, abs=0.01)
        assert cause.since == (25 if steps == since else None)
        true = Priced(pipeline).price(fault)[list(steps)].mean()
        assert cause.while_ms == pytest.approx(true, rel=0.1)


def test_what_a_cause_costs_does_not_tell_when_it_is_there(tmp_path):
    """Other things that hold a step up hide a cause, or make it dearer: a rank is as slow in those steps."""
    fault = Fault("slow_rank", 1.6, stage=1, replica=2, steps=tuple(range(5, 40)))
    table = table_of(replace(LONG, faults=(fault,)), tmp_path)
    hides = np.where(np.arange(len(table.steps)) % 3 == 2, 4.0, 1.0)
    busy = {name: getattr(table, name).copy() for name in ("start", "end", "compute", "idle")}
    for each in busy.values():
        each[:, 0] *= hides.reshape(-1, *[1] * (each.ndim - 2))
    longer = replace(table, **busy, length=table.length * hides)
    (cause,) = (each for each in diagnose(examine(longer)).causes if each.ranks == (5,))
    assert (cause.kind, cause.since) == ("slow_rank", 10)


def test_a_rank_that_waits_equally_long_in_all_steps_waits_in_all_of_them(tmp_path):
    """Elsewhere the step is held back nearly as much in most steps, so that the waits cost little there."""
    fault = Fault("processor_wait", 1.6, stage=1, replica=2)
    run = examine(table_of(replace(REPLICAS, recording="cpu trace", counted=True, faults=(fault,)), tmp_path))
    (wait,) = (term for term in terms(run.table, run.view, run.step_ms) if term.kind == WAIT)
    gain = np.array([4.0, 2.0, 300.0, 5.0, 3.0, 4.0])
    cause = _cause(run, wait, Interval(53.0, 9.0, 97.0), gain)
    assert (cause.share, cause.since) == (1.0, None)
    assert cause.while_ms == pytest.approx(cause.price.value)


@pytest.mark.parametrize(("usually", "certain"), [(1.08, True), (1.05, False)])
def test_only_a_certain_cause_is_said_to_be_in_some_of_the_steps(usually, certain, tmp_path):
    """The rank is slow in all steps, and in two of six much slower."""
    faults = tuple(
        Fault("slow_rank", factor, stage=1, replica=2, steps=steps)
        for factor, steps in ((1.6, (1, 4)), (usually, (0, 2, 3, 5)))
    )
    found = diagnosis_of(replace(REPLICAS, faults=faults), tmp_path)
    (cause,) = found.causes if certain else found.perhaps
    assert (cause.kind, cause.ranks) == ("slow_rank", (5,))
    assert cause.share == (pytest.approx(1 / 3) if certain else 1.0)
    assert (cause.while_ms == pytest.approx(cause.price.value)) != certain


def test_a_link_says_since_when_it_is_slow_and_how_slow_it_is_then(tmp_path):
    fault = Fault("slow_link", 6.0, stage=1, steps=tuple(range(20, 40)))
    pipeline = replace(LONG, faults=(fault,))
    (cause,) = diagnosis_of(pipeline, tmp_path).causes
    assert (cause.kind, cause.stage, cause.since) == ("slow_link", 1, 25)  # steps are numbered from 5 on
    assert cause.while_ms == pytest.approx(Priced(pipeline).price(fault)[20:].mean(), rel=0.1)
    assert cause.parts == pytest.approx({"transfer_ms": 6.0 + pipeline.link_ms, "usual_ms": pipeline.link_ms}, rel=0.05)


def test_steps_that_a_busy_machine_makes_longer_do_not_hide_the_others(tmp_path):
    fault = Fault("slow_rank", 1.6, stage=1, replica=2, steps=tuple(range(5, 40)))
    table = table_of(replace(LONG, faults=(fault,)), tmp_path)
    longer = np.where(np.arange(len(table.steps)) % 5 == 2, 4.0, 1.0)
    times = {name: getattr(table, name) for name in ("start", "end", "compute", "idle", "entry", "reduction", "length")}
    busy = {name: each * longer.reshape(-1, *[1] * (each.ndim - 1)) for name, each in times.items()}
    (cause,) = diagnose(examine(replace(table, **busy))).causes
    assert (cause.kind, cause.ranks, cause.since) == ("slow_rank", (5,), 10)
    assert cause.share == pytest.approx(35 / 40, abs=0.01)


def test_without_a_pipeline_a_rank_that_becomes_slow_is_no_unequal_work(tmp_path):
    slow = Fault("slow_rank", 1.4, stage=0, replica=2, steps=tuple(range(18, 40)))
    (cause,) = diagnosis_of(replace(ALONE, steps=40, faults=(slow,)), tmp_path).causes
    assert (cause.kind, cause.ranks, cause.since) == ("slow_rank", (2,), 23)  # steps are numbered from 5 on


def test_without_a_pipeline_replicas_with_unequal_work_hardly_ever_make_a_rank_slow():
    dealt = np.random.default_rng(0).normal(0.0, 0.2, (300, 12, 2))
    slow = [_own_of_replicas(level).any() for level in dealt]
    assert np.mean(slow) < 0.2
    # One that is slow in all steps is as slow as it is, by what work hides of it.
    assert _own_of_replicas(dealt[0] + [1.0, 0.0])[:, 0].mean() == pytest.approx(1.0, abs=0.2)


def test_a_few_steps_that_lose_much_never_lose_less_than_nothing():
    lost = np.zeros(26)
    lost[[3, 9, 20]] = 100.0
    mean = float(lost.mean())
    price = Interval.of(mean, draws=errors_of_mean(lost))
    assert 0.0 < price.low < mean < price.high
    # Of many steps it is the standard error.
    many = np.random.default_rng(1).normal(5.0, 1.0, 4000)
    price = Interval.of(5.0, draws=errors_of_mean(many))
    assert (price.high - 5.0) * np.sqrt(4000) == pytest.approx(LEVEL, rel=0.1)


def test_one_step_shows_what_every_microbatch_shows_and_only_perhaps_what_comes_once_a_step(tmp_path):
    slow = replace(HEALTHY, steps=1, faults=(Fault("slow_stage", 1.3, stage=1),))
    assert [cause.kind for cause in diagnosis_of(slow, tmp_path / "slow").causes] == ["unexplained"]
    late = replace(HEALTHY, steps=1, faults=(Fault("late_entry", 60.0, stage=1, replica=0),))
    found = diagnosis_of(late, tmp_path / "late")
    assert found.causes == ()
    (cause,) = found.perhaps
    assert (cause.kind, cause.ranks) == ("late_entry", (1,))
    assert cause.price.low <= LEAST * found.step_ms < cause.price.value
    assert cause.more_steps >= 1


def test_what_disturbed_some_passes_of_a_single_step_makes_no_cause_sure(tmp_path):
    """A backward that is a little long on a stage is not sure to cost what disturbed backwards took."""
    slow = replace(
        HEALTHY, stages=2, microbatches=6, steps=1, noise=0.05, faults=(Fault("slow_backward", 1.3, stage=0),)
    )
    quiet = table_of(with_layers(slow, 3, 5), tmp_path)
    replay = examine(quiet).view.replay
    passes = quiet.passes.copy()
    passes[:, :, 0, :, 1, :2] *= 4.0
    end, length = replay.ends(passes, entry=quiet.entry), replay.step_ms(passes, entry=quiet.entry)
    computed = passes[:, :, :, None]
    disturbed = replace(
        quiet, start=end - passes, end=end, compute=computed, working=computed, length=length.max(axis=1)
    )
    found = diagnose(examine(disturbed))
    assert found.causes == ()
    assert 0 in [cause.stage for cause in found.perhaps]


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_stall_costs_all_that_its_pass_takes_longer_where_bursts_make_others_longer(seed, tmp_path):
    stalls = Fault("stalls", 150.0)
    busy = replace(LONG, seed=(7, seed), replicas=2, load=0.15, burst_ms=100.0, together=True, faults=(stalls,))
    (cause,) = (cause for cause in diagnosis_of(busy, tmp_path).causes if cause.kind == "stalls")
    truth = float(Priced(busy).price(stalls).mean())
    assert cause.price.value == pytest.approx(truth, rel=0.15)
    assert cause.price.low <= truth <= cause.price.high


@pytest.mark.parametrize("longer", [(1.0, 2.0), (0.0, 2.0)])
def test_a_slow_stage_computes_longer_by_what_the_table_of_microbatches_shows(longer, tmp_path):
    """Where the GPU waits for its host, passes are not longer by what they compute longer."""
    waiting = replace(GPU, steps=6, faults=(Fault("host_bound", 0.5), Fault("slow_stage", 1.15, stage=2)))
    table = table_of(waiting, tmp_path)
    working = table.working.copy()
    working[:, :, 2] = working[:, :, 1] + np.array(longer)[:, None]
    idle = table.passes - working[:, :, :, 0]
    run = examine(replace(table, working=working, compute=working, idle=idle))
    (cause,) = (cause for cause in diagnose(run).causes if cause.stage == 2)
    stages = averages(run.table).stages
    passes = [(stage.forward_per_microbatch_ms.median, stage.backward_per_microbatch_ms.median) for stage in stages]
    assert cause.kind == ("slow_backward" if longer[0] == 0.0 else "unexplained")
    assert [cause.parts["forward_ms"], cause.parts["backward_ms"]] == pytest.approx(
        np.subtract(passes[2], np.minimum(passes[1], passes[2])), abs=1e-9
    )
    assert [cause.parts["forward_ms"], cause.parts["backward_ms"]] == pytest.approx(longer, abs=0.02)


def test_on_two_stages_with_other_layers_the_interval_says_what_cannot_be_told_apart(tmp_path):
    two = replace(HEALTHY, stages=2, noise=0.001)
    equal = replace(with_layers(two, 4, 4), faults=(Fault("embedding_or_loss", 4.0, stage=1),))
    unequal = replace(with_layers(two, 5, 3), faults=(Fault("layers", 1, stage=0),))
    (of_loss,) = diagnosis_of(equal, tmp_path / "equal").causes
    of_layers = diagnosis_of(unequal, tmp_path / "unequal")
    assert of_loss.kind == "embedding_or_loss"
    assert of_loss.price.high - of_loss.price.low < 0.1 * of_loss.price.value
    widest = max((*of_layers.causes, *of_layers.perhaps), key=lambda cause: cause.price.high - cause.price.low)
    assert widest.price.high - widest.price.low > 0.2 * widest.price.value


def test_traces_and_timelines_fill_the_same_table(tmp_path):
    line = table_of(replace(CPU, recording="timeline"), tmp_path / "timeline")
    trace = table_of(CPU, tmp_path / "trace")
    assert line.steps.tolist() == trace.steps.tolist()
    assert line.layers.tolist() == trace.layers.tolist()
    np.testing.assert_allclose(line.passes, trace.passes, atol=0.002)
    np.testing.assert_allclose(line.length, trace.length, atol=0.5)
    assert line.start.shape == (3, 1, 4, 1, 2, 16)


def test_of_a_job_without_one_of_its_stages_nothing_is_named(tmp_path):
    priced = Priced(HEALTHY)
    write(HEALTHY, priced.run(priced.all), tmp_path)
    next(path for path in sorted(tmp_path.rglob("*")) if "pp2" in path.name or "rank00002" in path.name).unlink()
    (found,) = tables_in(tmp_path).values()
    assert [each is None for each in found.metadata] == [False, False, True, False]
    with pytest.raises(Unfit) as refused:
        examine(found)
    assert (refused.value.note.count, refused.value.note.of) == (3, 4)


def test_an_entry_may_be_late_because_another_window_was_closed(tmp_path):
    late = Fault("late_entry", 200.0, stage=2, replica=0)
    found = diagnosis_of(replace(CPU, faults=(late,)), tmp_path)
    assert found.causes == ()
    assert [(cause.kind, cause.ranks) for cause in found.perhaps] == [("late_entry", (2,))]


def test_what_the_host_costs_is_told_by_steps_without_a_profiler(tmp_path):
    idle, loss = Fault("host_bound", 0.4), Fault("embedding_or_loss", 9.0, stage=3)
    pipeline = replace(GPU, faults=(idle, loss))
    assert [cause.kind for cause in diagnosis_of(pipeline, tmp_path).causes] == ["embedding_or_loss"]
    # The passes of the timeline are those of the job; those of the trace beside it need not be.
    again = replace(pipeline, recording="device timeline", steps=12)
    priced = Priced(again)
    write(again, priced.run(priced.all), tmp_path)
    (table,) = tables_in(tmp_path).values()
    first, second = diagnose(examine(table)).causes
    assert (first.kind, second.kind) == ("host_bound", "embedding_or_loss")
    assert first.price.value == pytest.approx(float(priced.price(idle).mean()), rel=0.05)


def test_what_makes_one_kind_of_pass_long_on_an_end_is_a_factor_that_a_loss_would_have_too(tmp_path):
    loss, slow = Fault("embedding_or_loss", 6.0, stage=3), Fault("slow_forward", 1.6, stage=0)
    pipeline = replace(HEALTHY, noise=0.0, faults=(loss, slow))
    (first,) = [cause for cause in diagnosis_of(pipeline, tmp_path).causes if cause.kind == "embedding_or_loss"]
    # Spread, a part of it lies on stage 0, and takes 1.6 times as long there.
    assert first.price.value == pytest.approx(float(Priced(pipeline).price(loss).mean()), rel=0.01)


def test_the_closest_model_of_exchanges_counts_however_close_the_other_is(tmp_path):
    pipeline = replace(HEALTHY, buffered=True, noise=0.003, microbatches=24)
    assert not examine(table_of(pipeline, tmp_path)).view.replay.rendezvous


def test_other_disturbances_of_a_shorter_step_are_in_the_interval_of_a_price(tmp_path):
    late = (Fault("late_entry", 60.0, stage=0, replica=0),)
    widths = []
    for name, load in (("quiet", 0.0), ("disturbed", 0.15)):
        pipeline = replace(HEALTHY, steps=8, noise=0.003, load=load, burst_ms=150.0, faults=late)
        (cause,) = [cause for cause in diagnosis_of(pipeline, tmp_path / name).causes if cause.kind == "late_entry"]
        widths.append((cause.price.high - cause.price.low) / cause.price.value)
    # The replays of all steps agree on what the entry costs; which steps the bursts hit is luck.
    assert widths[1] > 2 * widths[0]


def test_a_stage_without_layers_tells_nothing_of_them() -> None:
    ends = np.array([[[2.0, 4.0]], [[0.0, 0.0]], [[9.0, 18.0]]])
    found = divided(np.array([[[2.0, 4.0]], [[20.0, 40.0]], [[9.0, 18.0]]]), np.array([[0.0], [4.0], [0.0]]), ends)
    assert found.unit.tolist() == [5.0, 10.0]
    assert (found.stage == 1.0).all()
    assert (found.ends == ends).all()


def test_a_late_entry_names_the_part_that_is_dear_on_its_rank_alone() -> None:
    def of(name: str, rank: int, rank_ms: float, ms: float = 10.0) -> PartOfIteration:
        return PartOfIteration(name, ms, 1.0, rank_ms, rank, rank_ms)

    parts = of("forward", 1, 900.0), of("optimizer", 0, 300.0), of("saving", 1, 80.0), of("logging", 1, 40.0)
    iterations = Iterations(10, 1000.0, 800.0, (*parts, of("between", 1, 500.0)))
    assert _dear_part(iterations, (1,)) == "saving"
    assert _dear_part(iterations, (0, 1)) == "optimizer"
    assert _dear_part(iterations, (2,)) is None
    assert _dear_part(replace(iterations, parts=(of("saving", 1, 12.0),)), (1,)) is None
    assert _dear_part(None, (1,)) is None


def test_no_price_exceeds_what_other_stages_leave_of_a_step(tmp_path) -> None:
    noisy = replace(HEALTHY, stages=2, layers=((6,), (2,)), noise=0.5, steps=3, microbatches=4, forward_only=True)
    run = examine(table_of(noisy, tmp_path))
    of_ranks = run.view.passes.sum(axis=(3, 4, 5))
    for term in terms(run.table, run.view, run.step_ms):
        if term.fitted and term.stage is not None:
            gain = run.gain(term)
            left_ms = np.delete(of_ranks, term.stage, axis=2).max(axis=(1, 2)).mean()
            assert gain.mean() <= run.price(term, gain).high <= run.step_ms - left_ms + 1e-6


@pytest.mark.parametrize(
    ("term", "place", "longer", "kind"),
    [
        ("chunk", (1, 1), (1.7, 0.6), "embedding_or_loss"),
        ("chunk", (0, 0), (1.7, 0.6), "embedding_or_loss"),
        ("chunk", (1, 1), (1.7, 0.1), "slow_forward"),
        ("chunk", (1, 0), (1.7, 3.4), "slow_chunk"),
        ("ends", (1, 1), (1.7, 0.6), "embedding_or_loss"),
    ],
)
def test_a_chunk_with_a_loss_that_takes_longer_is_no_slow_chunk(term, place, longer, kind) -> None:
    content = np.tile([28.0, 55.0], (2, 2, 1))
    content[place] += longer
    cause = Cause(term, Interval.of(10.0), 1.0, 10.0, 5, None, stage=place[0], chunk=place[1])
    found = _by_content(divided(content, np.ones((2, 2))), cause)
    assert found.kind == kind
    assert found.parts["forward_ms"] == pytest.approx(1.7)
    assert found.chunk == (place[1] if kind == "slow_chunk" else None)
