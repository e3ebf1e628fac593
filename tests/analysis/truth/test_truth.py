"""Drawn pipelines: the same seed draws the same, a price is what it says, and marks are given as the table says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megaprof.parallel.topology import WorldLayout
from tests.analysis.truth.drawing import draw, draw_healthy, incidental, observed
from tests.analysis.truth.engines import Advised, Named, Said, report
from tests.analysis.truth.files import sizes_of, write_observed
from tests.analysis.truth.grading import grade, layers_of
from tests.analysis.truth.pipelines import Fault, Pipeline, Priced
from tests.benchmarks.truth import count, judge


def plain(**changes) -> Pipeline:
    """Four stages without any noise."""
    values = {
        "seed": (0, 0),
        "recording": "timeline",
        "stages": 4,
        "chunks": 1,
        "replicas": 1,
        "peers": 1,
        "microbatches": 12,
        "steps": 3,
        "forward_only": False,
        "layers": ((4,),) * 4,
        "layer_ms": 1.0,
        "ratio": 2.0,
        "noise": 0.0,
        "adds": True,
        "load": 0.0,
        "burst_ms": 0.0,
        "together": False,
        "apart": False,
        "buffered": True,
        "link_ms": 0.0,
        "tail_ms": 0.0,
        "jitter_ms": 0.0,
    }
    return Pipeline(**(values | changes))


def price(pipeline: Pipeline, mended=()) -> float:
    return float(Priced(pipeline).price(pipeline.faults[0], mended).mean())


def test_the_same_seed_draws_the_same():
    first, again, other = draw(5, 3), draw(5, 3), draw(6, 3)
    assert first == again
    assert first != other
    a, b = (Priced(one) for one in (first, again))
    assert (a.length(a.all) == b.length(b.all)).all()


def test_the_first_layers_of_a_stage_cost_their_time_in_every_microbatch():
    uneven = plain(layers=((4,), (6,), (4,), (4,)), faults=(Fault("layers", 2, stage=1),))
    # Even: 4.5 layers on each stage, for 12 microbatches and 3 of filling. Uneven: stage 1 works through all of them,
    # between the first forward and the last backward of stage 0; and its third forward is done at 22, the first
    # backward of the stage behind it, which waited for stage 3, at 34.
    assert float(Priced(uneven).length(frozenset(uneven.faults)).mean()) == pytest.approx(12 * 18 + 12 + 12)
    assert price(uneven) == pytest.approx(12 * 18 + 24 - 4.5 * 3 * 15)


def test_recomputation_costs_a_forward_of_every_microbatch():
    again = plain(faults=(Fault("recomputation", 1.0, stage=3),))
    assert price(again) == pytest.approx(12 * 4.0)


def test_a_late_stage_costs_what_nobody_else_fills():
    late = plain(faults=(Fault("late_entry", 50.0, stage=0, replica=0),))
    assert price(late) == pytest.approx(50.0)
    # The last stage has nothing to do before three forwards are through.
    assert price(replace(late, faults=(Fault("late_entry", 50.0, stage=3, replica=0),))) == pytest.approx(50.0 - 12.0)


def test_exposed_communication_costs_its_part_of_everything():
    assert price(plain(faults=(Fault("communication", 0.25, group="tp"),))) == pytest.approx(0.25 * 15 * 12)


def test_the_gradient_reduction_waits_for_the_slowest_replica():
    slow = Fault("slow_rank", 1.5, stage=3, replica=1, steps=(1,))
    priced = Priced(plain(replicas=2, faults=(slow,)))
    assert priced.price(slow).tolist() == pytest.approx([0.0, 12 * 6.0, 0.0])


def test_a_fault_beside_another_one_costs_more_when_that_is_mended():
    first, second = Fault("slow_stage", 1.5, stage=1), Fault("slow_stage", 1.25, stage=2)
    both = plain(faults=(second, first))
    assert price(both, [first]) > price(both) + 10


@pytest.mark.parametrize(
    "neutral",
    [
        Fault("slow_stage", 1.0, stage=2),
        Fault("slow_link", 0.0, stage=1),
        Fault("late_entry", 0.0, stage=1, replica=0),
        Fault("uneven_microbatches", 0.0),
        Fault("unequal_replicas", 0.0),
        Fault("communication", 0.0, group="ep"),
        Fault("host_bound", 0.0),
        Fault("stalls", 0.0),
        Fault("layers", 0.0, stage=1),
        Fault("embedding_or_loss", 0.0, stage=3),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_neutral_fault_costs_nothing(neutral):
    noisy = plain(noise=0.05, load=0.1, burst_ms=20.0, replicas=2, faults=(neutral,))
    assert np.abs(Priced(noisy).price(neutral)).max() < 1e-9


@pytest.mark.parametrize("number", range(6))
def test_what_only_adds_time_never_shortens_a_step(number):
    pipeline = draw_healthy(np.random.default_rng(number), (8, number))
    for fault in (Fault("slow_stage", 1.3, stage=0), Fault("data_wait", 5.0, stage=0), Fault("host_bound", 0.2)):
        one = Priced(replace(pipeline, faults=(*pipeline.faults, fault)))
        assert (one.price(fault) >= -1e-6).all()


def test_healthy_pipelines_have_nothing_that_is_worth_naming():
    for number in range(4):
        one = Priced(draw_healthy(np.random.default_rng(number), (9, number)))
        assert incidental(one.pipeline) == one.pipeline.faults
        assert all(one.price(fault).mean() < 0.01 * one.length(one.all).mean() for fault in one.pipeline.faults)


def test_a_slow_stage_that_goes_by_the_name_of_work_is_priced_as_spread():
    one = plain(faults=(Fault("slow_stage", 1.5, stage=3),))
    priced = Priced(one)
    # 6 layers' worth beside 4, 4 and 4: spread it is 4.5 on each.
    assert priced.price(one.faults[0], to_spread=True).mean() == pytest.approx(
        priced.price(one.faults[0]).mean() - 0.5 * 3 * 15
    )


def test_marks():
    uneven = plain(
        layers=((4,), (6,), (4,), (4,)),
        replicas=2,
        faults=(Fault("layers", 2, stage=1), Fault("slow_rank", 1.3, stage=3, replica=1)),
    )
    priced = Priced(uneven)
    step = float(priced.length(priced.all).mean())
    alone = [float(priced.price(fault).mean()) for fault in uneven.faults]
    said = Said(
        (
            Named("layers", 1, price=alone[0], low=alone[0] - 1, high=alone[0] + 1),
            Named("slow_rank", 3, ranks=(5,), price=alone[1] + 0.4 * step),
            Named("slow_link", 2, group="pp"),
        ),
        (Advised("Et*5|t*5|t*4|t*4L", 1.0, 0.5, 1.5, best=True), Advised("Et*18|||L", 1.0, 0.9, 1.1, best=False)),
        in_order=False,
    )
    marks = grade(0, priced, said)
    assert [claim.there for claim in marks.claims] == [True, False, False]  # rank 5 is replica 1's of stage 2
    assert [claim.inside for claim in marks.claims] == [True, None, None]
    assert {(fault.kind, fault.named) for fault in marks.faults} == {("layers", True), ("slow_rank", False)}
    assert [layout.inside for layout in marks.layouts] == [True, False]
    counts = count([marks])
    assert counts.all["precision"] == [1, 3]
    assert counts.all["price"] == [1, 1]
    assert counts.all["layouts"] == [1, 1]


def test_messages_that_take_time_are_a_term_of_every_pipeline():
    one = Priced(plain(link_ms=1.0))
    # A microbatch passes three links, there and back.
    assert one.price(one.links).mean() > 2 * 3
    marks = grade(
        0, one, Said((Named("communication", group="pp"), Named("communication", group="tp")), (), in_order=True)
    )
    assert [claim.there for claim in marks.claims] == [True, False]
    assert marks.healthy


def test_a_layouts_truth_is_the_pipeline_that_holds_it():
    uneven = plain(noise=0.03, layers=((4,), (6,), (4,), (4,)), faults=(Fault("layers", 2, stage=1),))
    priced = Priced(uneven)
    assert priced.speedup(layers_of("Et*4|t*6|t*4|t*4L", 4)) == 1.0
    assert priced.speedup(layers_of("E(t*5|)*2t*4|t*4L", 4)) > 1.1
    assert layers_of("Et*2|(t*3|)*6t*2L", 4).tolist() == [[2, 3], [3, 3], [3, 3], [3, 2]]


#: One of each recording, with a fault that the report names today.
SEEN = {"timeline": 7, "device timeline": 14, "gpu trace": 8, "cpu trace": 19, "nsys": 170}


@pytest.mark.parametrize(
    "recording", [n if n in ("timeline", "gpu trace") else pytest.param(n, marks=pytest.mark.slow) for n in SEEN]
)
def test_a_drawn_pipeline_is_written_read_and_found(recording, tmp_path):
    found = judge(7, SEEN[recording], "report", keep=tmp_path)
    assert found.failure is None
    assert found.recording == recording
    assert all(fault.named for fault in found.faults if fault.drawn)
    assert all(claim.there for claim in found.claims)
    assert list(tmp_path.glob("*/truth.txt"))


def test_what_the_profiler_makes_a_gpu_wait_for_is_no_cause(tmp_path):
    uneven = Fault("uneven_microbatches", 0.5)
    job, profiled = observed(plain(seed=(0, 0), recording="gpu trace", noise=0.03, buffered=False, faults=(uneven,)))
    assert profiled is not None
    assert max(each.size for each in profiled.faults if each.kind == "host_bound") > 0.2
    write_observed(job, profiled, tmp_path)
    kinds = {each.kind for each in report(tmp_path).named}
    assert uneven.kind in kinds
    assert "host_bound" not in kinds


@pytest.mark.parametrize("number", [56, 112])
def test_what_bursts_make_longer_in_steps_without_a_profiler_is_no_waiting_for_the_host(number):
    assert "host_bound" not in {claim.kind for claim in judge(20261201, number, "report").claims}


@pytest.mark.parametrize("recording", ["gpu trace", "cpu trace"])
def test_which_peer_computes_longer_is_known_from_profiled_steps(recording, tmp_path):
    slow = Fault("slow_rank", 1.5, stage=1, replica=0, peer=1)
    job, profiled = observed(plain(recording=recording, noise=0.01, buffered=False, peers=2, faults=(slow,)))
    assert profiled is not None
    write_observed(job, profiled, tmp_path)
    (found,) = (each for each in report(tmp_path).named if each.kind == "slow_rank")
    assert found.ranks == (3,)
    assert found.low <= Priced(job).price(slow).mean() <= found.high


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("groups", [("tp", "ep"), ("cp", "ep"), ("ep",), ("tp", "cp", "ep")])
def test_communication_of_any_groups_is_of_a_job_that_megatron_would_start(groups, replicas):
    faults = tuple(Fault("communication", 0.2, group=group) for group in groups)
    WorldLayout(sizes_of(plain(replicas=replicas, faults=faults)))  # else it raises ValueError
