"""What a layer costs, and what the times of chunks leave open."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.report.report import TargetReport, analyze
from megaprof.analysis.simulation import Simulation, simulate
from megaprof.analysis.what_if.contents import Model, costs_of, fitted
from megaprof.analysis.what_if.layouts import parse_layout
from megaprof.analysis.what_if.what_if import WhatIf, what_if
from megaprof.formats import ranges
from tests.analysis.diagnosis.test_diagnose import HEALTHY, table_of
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, chunk
from tests.analysis.truth.pipelines import Fault, Priced

DRAWS = 200


def content(held: Model, costs: dict[str, float], slow: dict[int, float] | None = None) -> np.ndarray:
    """[stage, chunk, kind]: backwards take twice as long."""
    forward = np.einsum("scn,n->sc", held.counts(), [costs[name] for name in held.names])
    for stage, factor in (slow or {}).items():
        forward[stage] *= factor
    return np.stack([forward, 2 * forward], axis=-1)


def dense(layout: str, stages: int, **measured: tuple[float, ...]) -> Model:
    pieces = parse_layout(layout, stages)
    return Model(pieces, ("dense",) * "".join(pieces).count("t"), stages, measured)


def test_what_the_chunks_tell_is_found() -> None:
    held = dense("Et*6|t*4|t*4|t*3L", 4)
    costs = {"dense": 5.0, "embedding": 2.0, "loss": 9.0}
    found = fitted(costs_of(content(held, costs), held))
    assert {name: cost.forward_ms for name, cost in found.by_kind.items()} == pytest.approx(costs)
    assert found.residual == pytest.approx(0.0, abs=1e-9)
    assert found.assumptions == ()


@pytest.mark.parametrize(
    ("stage", "longer", "name"),
    [(3, (3.0, 0.2), "loss"), (0, (0.1, 0.6), "embedding"), (0, (0.0, 20.5), "embedding")],
    ids=["a loss", "an embedding", "activations computed again"],
)
def test_what_is_long_in_one_kind_of_pass_on_an_end_is_slowness_as_in_causes_and_in_draws_the_end_or_not(
    stage: int, longer: tuple[float, float], name: str
) -> None:
    held = dense("Et*4|t*4|t*4|t*4L", 4)
    whole = content(held, {"dense": 5.0, "embedding": 0.0, "loss": 0.0})
    whole[stage, 0] += longer
    found, place = costs_of(whole, held), held.names.index(name)
    assert found.parts[place].tolist() == [0.0, 0.0]
    assert found.of(held.pieces) == pytest.approx(whole)
    drawn = costs_of(np.stack([whole] * DRAWS), held, np.random.default_rng(0))
    assert {tuple(part) for part in drawn.parts[:, place].round(3)} == {(0.0, 0.0), longer}
    assert drawn.of(held.pieces) == pytest.approx(np.stack([whole] * DRAWS))


def test_kinds_of_layers_are_told_apart_where_chunks_mix_them_differently() -> None:
    pieces = parse_layout("Et*4|t*4|t*4|t*4|t*3L", 5)
    held = Model(pieces, ("dense",) * 6 + ("moe",) * 13, 5)
    costs = {"dense": 4.0, "moe": 7.0, "embedding": 1.0, "loss": 5.0}
    found = fitted(costs_of(content(held, costs), held))
    assert {name: cost.forward_ms for name, cost in found.by_kind.items()} == pytest.approx(costs, rel=0.15)


def test_a_hybrid_model_has_its_layout_in_its_pattern() -> None:
    kinds = ("MambaLayer", "mlp", "MambaLayer", "attention", "MambaLayer", "moe")
    held = Model(("Etttt", "ttL"), kinds, 2)
    assert held.flags(("Ettt", "tttL")) == ("--hybrid-layer-pattern", "M-M|*ME")
    assert held.flags(("Ettt", "tttmL")) == ()
    assert Model(("Ettt", "tttL"), (*kinds[:5], "GatedDeltaNetLayer"), 2).flags(("Ettt", "tttL")) == ()
    mixed = Model(("Ettt", "tttL"), ("dense",) * 3 + ("moe",) * 3, 2)
    assert mixed.flags(("Ett", "ttttL")) == ("--decoder-first-pipeline-num-layers", "2")


def test_a_slow_stage_is_slow_for_every_layer_that_it_is_given() -> None:
    held = dense("Et*4|t*4|t*4|t*4L", 4)
    costs = costs_of(content(held, {"dense": 5.0, "embedding": 0.0, "loss": 0.0}, {1: 1.3}), held)
    moved = costs.of(parse_layout("Et*5|t*2|t*5|t*4L", 4))
    assert moved[:, 0, 0].tolist() == pytest.approx([25.0, 13.0, 25.0, 20.0])


@pytest.mark.parametrize("slow", [{}, {1: 1.4}], ids=["a loss", "a slow rank"])
def test_on_two_stages_a_loss_may_as_well_be_a_slow_rank(slow: dict[int, float]) -> None:
    """Fitted by construction, one number for the loss of two stages was as good as any; draws take both."""
    held = dense("Et*6|t*2L", 2)
    loss = 0.0 if slow else 8.0
    whole = content(held, {"dense": 10.0, "embedding": 0.0, "loss": loss}, slow)
    drawn = costs_of(np.stack([whole] * DRAWS), held, np.random.default_rng(0))
    moved = parse_layout("Et*4|t*4L", 2)
    truth = content(replace(held, pieces=moved), {"dense": 10.0, "embedding": 0.0, "loss": loss}, slow)
    last = drawn.of(moved)[:, 1, 0, 0]
    assert last.min() <= truth[1, 0, 0] <= last.max()
    assert last.max() - last.min() > 5.0
    assert drawn.of(held.pieces) == pytest.approx(np.stack([whole] * DRAWS))


def test_ranges_of_embedding_and_output_layer_settle_it() -> None:
    held = dense("Et*6|t*2L", 2, embedding=(1.0, 2.0), loss=(4.2, 8.4))
    whole = content(held, {"dense": 10.0, "embedding": 1.0, "loss": 3.0}, {1: 1.4})
    found, moved = costs_of(whole, held), parse_layout("Et*4|t*4L", 2)
    assert dict(zip(held.names, found.parts[:, 0], strict=True)) == pytest.approx(
        {"dense": 10.0, "embedding": 1.0, "loss": 3.0}
    )
    assert found.of_stage[:, 0].tolist() == pytest.approx([1.0, 1.4])
    # Up to 1 ms of both ends may be in every pass, and so in all of another number of chunks.
    drawn = costs_of(np.stack([whole] * DRAWS), held, np.random.default_rng(0))
    assert drawn.of(moved)[:, :, 0, 0] == pytest.approx(np.stack([found.of(moved)[:, 0, 0]] * DRAWS), rel=0.02)
    longer = drawn.of(parse_layout("Et*3|t*3|t|tL", 2))[:, :, :, 0].sum(axis=-1)
    assert np.ptp(longer, axis=0) == pytest.approx([1.0, 1.0], rel=0.1)


def test_what_a_pass_without_ends_takes_beside_its_layers_is_in_every_pass() -> None:
    measured = {"dense": (10.0, 20.0), "embedding": (3.0, 6.0), "loss": (7.0, 14.0), "beside": (2.0, 4.0)}
    held = dense("Et*4|t*2|t*2|tL", 4, **measured)
    whole = content(held, {"dense": 10.0, "embedding": 1.0, "loss": 5.0}) + np.array([2.0, 4.0])
    found = costs_of(whole, held)
    assert found.parts[:, 0].tolist() == pytest.approx([10.0, 1.0, 5.0])
    assert found.of(parse_layout("Et*2|t|t|t|t|t|t|tL", 4))[:, :, 0].tolist() == pytest.approx(
        np.array([[23.0, 12.0], [12.0, 12.0], [12.0, 12.0], [12.0, 17.0]])
    )


def of(scenario: Scenario, directory: Path) -> WhatIf:
    write(scenario, directory)
    (target,) = analyze(directory).targets
    return target.what_if


@pytest.mark.parametrize("layers", [(6, 2), (4, 4), (2, 6)])
@pytest.mark.parametrize("cause", [{"loss": 8.0}, {"stretched": {(1, k, None): 1.4 for k in ("forward", "backward")}}])
def test_other_layouts_of_two_stages_take_what_was_predicted(layers, cause, tmp_path: Path) -> None:
    scenario = Scenario("two", layers=layers, steps=3, noise=0.01, gpu=False, **cause)
    before = of(scenario, tmp_path / "before")
    layouts = [each for each in before.candidates if each.kind == "layout"]
    for number, each in enumerate(layouts):
        after = tuple(piece.count("t") for piece in parse_layout(each.layout, 2))
        taken = of(replace(scenario, layers=after, seed=1), tmp_path / str(number))
        assert each.speedup.holds(before.measured_ms / taken.measured_ms), each


def two_stages(directory: Path, *, ranged: bool) -> TargetReport:
    """6+2 layers of 10 ms, and a loss of 3 ms on a rank that is 1.4 times as slow."""
    forward = [[60.0], [1.4 * 23.0]]
    run = simulate(forward, [[2 * ms for ms in each] for each in forward], 8)
    for pp, (layers, first, layer_ms) in enumerate(((6, 1, 10.0), (2, 7, 14.0))):
        held = chunk(layers, embedding=pp == 0, loss=pp == 1, first=first)
        trace = TraceBuilder(pp=pp, pp_size=2, microbatches=8, chunks=[held])
        for each in (e for e in run.events if e.stage == pp):
            getattr(trace, each.phase)(each.microbatch, each.start_ms, each.end_ms - each.start_ms)
            for n in range(layers if ranged else 0):
                label = str(ranges.module_range(ranges.LAYER, first + n))
                label = label if each.phase == "forward" else ranges.module_backward(label)
                ms = layer_ms if each.phase == "forward" else 2 * layer_ms
                trace.event(label, each.start_ms + n * ms, ms)
        trace.call(0.0, run.step_ms)
        trace.write(directory)
    return analyze(directory).targets[0]


def test_ranges_in_a_trace_make_layouts_surer(tmp_path: Path) -> None:
    alone, told = (
        next(each for each in report.what_if.candidates if each.layers == (5, 3))
        for report in (two_stages(tmp_path / str(ranged), ranged=ranged) for ranged in (False, True))
    )
    before, after = (
        simulate([[first], [last]], [[2 * first], [2 * last]], 8, rendezvous=True).step_ms
        for first, last in ((60.0, 1.4 * 23.0), (50.0, 1.4 * 33.0))
    )
    for each in (alone, told):
        assert each.speedup.holds(before / after)
    assert told.speedup.high - told.speedup.low < 0.8 * (alone.speedup.high - alone.speedup.low)


def test_ranges_of_layers_tell_causes_and_costs_alike(tmp_path: Path) -> None:
    """By times alone the last stage might have a loss of 12.2 ms: its layers say that it is slow."""
    report = two_stages(tmp_path, ranged=True)
    assert report.what_if.costs is not None
    costs = {name: cost.forward_ms for name, cost in report.what_if.costs.by_kind.items()}
    assert costs == pytest.approx({"dense": 10.0, "embedding": 0.0, "loss": 3.0}, abs=0.05)
    steps = [
        simulate([[first], [last]], [[2 * first], [2 * last]], 8, rendezvous=True).step_ms
        for first, last in ((60.0, 1.4 * 23.0), (60.0, 23.0), (40.0, 43.0), (41.5, 41.5))
    ]
    causes = [(cause.kind, cause.stage) for cause in report.diagnosis.causes]
    assert causes == [("unexplained", 1), ("layers", 0), ("embedding_or_loss", 1)]
    prices = [cause.price.value for cause in report.diagnosis.causes]
    assert prices == pytest.approx([before - after for before, after in itertools.pairwise(steps)], rel=0.02)


@pytest.mark.parametrize("stages", [2, 4])
def test_what_passes_take_beside_their_layers_comes_with_every_chunk(stages: int, tmp_path: Path) -> None:
    """Two layers of 10 ms and 3 ms beside them, and twice that in the backward. With two stages, the 3 ms may as well
    be of embedding and loss."""
    run = step_of([23.0] * stages)
    for pp in range(stages):
        held = chunk(2, embedding=pp == 0, loss=pp == stages - 1, first=2 * pp + 1)
        trace = TraceBuilder(pp=pp, pp_size=stages, microbatches=8, chunks=[held])
        for each in (e for e in run.events if e.stage == pp):
            getattr(trace, each.phase)(each.microbatch, each.start_ms, each.end_ms - each.start_ms)
            longer = 1 if each.phase == "forward" else 2
            for n in range(2):
                label = str(ranges.module_range(ranges.LAYER, 2 * pp + 1 + n))
                label = label if longer == 1 else ranges.module_backward(label)
                trace.event(label, each.start_ms + 10.0 * longer * n, 10.0 * longer)
        trace.call(0.0, run.step_ms)
        trace.write(tmp_path)
    (target,) = analyze(tmp_path).targets
    found = next(each for each in target.what_if.candidates if each.chunks == 2)
    layers_only, whole = [[10.0] * 2] * stages, [[13.0] * 2] * stages
    if stages == 2:
        layers_only = [[13.0, 10.0], [10.0, 13.0]]
    of_ends, of_passes = (simulate(ms, (2 * np.array(ms)).tolist(), 8).step_ms for ms in (layers_only, whole))
    assert found.step_ms.value == pytest.approx(of_passes if stages > 2 else of_ends, rel=0.01)
    assert found.step_ms.holds(0.99 * of_passes)


DENSE_MS, MOE_MS = 2.5, 10.0


def first_dense(directory: Path, *, ranged: bool) -> TargetReport:
    """Three dense layers and then twelve with experts, which take four times as long, on four stages: 3+4+4+4."""
    held = [["dense"] * 3, *[["moe"] * 4] * 3]
    layer_ms = [[{"dense": DENSE_MS, "moe": MOE_MS}[kind] for kind in kinds] for kinds in held]
    run = step_of([sum(own) for own in layer_ms])
    first = 1
    for pp, (kinds, own) in enumerate(zip(held, layer_ms, strict=True)):
        content = chunk(len(kinds), embedding=pp == 0, loss=pp == 3, first=first) | {"kinds": kinds}
        trace = TraceBuilder(pp=pp, pp_size=4, microbatches=8, chunks=[content])
        for each in (e for e in run.events if e.stage == pp):
            getattr(trace, each.phase)(each.microbatch, each.start_ms, each.end_ms - each.start_ms)
            begin, longer = each.start_ms, 1 if each.phase == "forward" else 2
            for number, ms in enumerate(own if ranged else (), first):
                label = str(ranges.module_range(ranges.LAYER, number))
                trace.event(label if longer == 1 else ranges.module_backward(label), begin, longer * ms)
                begin += longer * ms
        trace.call(0.0, run.step_ms)
        trace.write(directory)
        first += len(kinds)
    return analyze(directory).targets[0]


def step_of(forward_ms: list[float]) -> Simulation:
    return simulate([[ms] for ms in forward_ms], [[2 * ms] for ms in forward_ms], 8)


def test_layers_of_several_kinds_count_as_what_ranges_say_that_they_take(tmp_path: Path) -> None:
    """The stage with dense layers holds too little, although it holds nearly as many layers as the others."""
    report = first_dense(tmp_path, ranged=True)
    before, spread, best = (step_of(ms).step_ms for ms in ([7.5, 40, 40, 40], [31.875] * 4, [37.5, 30, 30, 30]))
    cause = report.diagnosis.causes[0]
    assert (cause.kind, cause.price.value) == ("layers", pytest.approx(before - spread, rel=0.02))
    assert report.what_if.best is not None
    assert report.what_if.best.layers == (6, 3, 3, 3)
    assert report.what_if.best.step_ms.value == pytest.approx(best, rel=0.02)


def test_of_kinds_of_layers_that_nothing_tells_apart_no_layout_is_advised(tmp_path: Path) -> None:
    """If all layers were alike, the first stage would be quick, and should hold more of them."""
    what_if = first_dense(tmp_path, ranged=False).what_if
    assert what_if.costs is not None
    assert "kinds_alike" in what_if.costs.assumptions
    assert (what_if.best, what_if.advice, what_if.more_steps) == (None, "unsure", 0)


UNEVEN = replace(
    HEALTHY,
    stages=2,
    layers=((3,), (1,)),
    layer_ms=24.0,
    microbatches=8,
    steps=7,
    noise=0.02,
    adds=True,
    faults=(Fault("layers", 2, stage=0),),
)


@pytest.mark.parametrize("seed", [1, 3])
def test_what_ranks_wait_for_a_core_makes_a_layout_no_less_certain_than_the_layers(seed: int, tmp_path: Path) -> None:
    """Most of what is waited made single passes longer, and is taken out of these: contents do not contain it again.
    And the passes that a layout changes took what they took."""
    busy = replace(UNEVEN, seed=(seed, 5), load=0.8, burst_ms=100.0, counted=True)
    run = examine(table_of(busy, tmp_path))
    found = diagnose(run)
    assert [found.causes[0].kind, found.causes[0].stage] == ["layers", 0]
    predicted, _ = what_if(run, found)
    assert predicted.best is not None
    assert predicted.best.layers == (2, 2)
    assert predicted.best.speedup.holds(Priced(busy).speedup(np.array([[2], [2]])))
    price, gained = found.causes[0].price, predicted.best.step_ms
    assert gained.high - gained.low < 1.75 * (price.high - price.low)


def test_ranks_that_wait_for_a_core_longer_than_their_passes_take_compute_in_these_all_the_same(tmp_path: Path) -> None:
    table = table_of(UNEVEN, tmp_path)
    run = examine(replace(table, core_waits=np.full_like(table.core_waits, 2 * table.length.max())))
    speedups = [each.speedup for each in what_if(run, diagnose(run))[0].candidates]
    assert speedups
    assert max(each.high for each in speedups) < 4.0


@pytest.mark.parametrize("fault", [Fault("slow_stage", 1.3, stage=1), Fault("embedding_or_loss", 7.2, stage=1)])
def test_layers_cost_what_they_do_whether_the_other_stage_is_slow_or_holds_a_loss(fault: Fault, tmp_path: Path) -> None:
    """A loss stays as it is, and a slow stage would be slow with more layers, too. Times do not tell them apart."""
    one = replace(UNEVEN, faults=(*UNEVEN.faults, fault))
    run = examine(table_of(one, tmp_path))
    found, priced = diagnose(run), Priced(one)
    assert [found.causes[0].kind, found.causes[0].stage] == ["layers", 0]
    assert found.causes[0].price.holds(float(priced.price(one.faults[0]).mean()))
    best = what_if(run, found)[0].best
    assert best is not None
    assert best.speedup.holds(priced.speedup(np.array([[2], [2]])))


@pytest.mark.parametrize("seed", [1, 5])
def test_a_stage_with_more_to_compute_waits_more_for_a_core(seed: int, tmp_path: Path) -> None:
    """If waits stayed where they were, a slow stage would seem to gain by layers that it would wait for, too."""
    slow = (*UNEVEN.faults, Fault("slow_stage", 1.3, stage=1))
    busy = replace(UNEVEN, seed=(seed, 5), load=0.3, burst_ms=100.0, counted=True, faults=slow)
    run = examine(table_of(busy, tmp_path))
    predicted = what_if(run, diagnose(run))[0].quickest
    assert predicted is not None
    assert predicted.layers == (2, 2)
    assert predicted.speedup.holds(Priced(busy).speedup(np.array([[2], [2]])))
