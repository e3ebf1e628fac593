from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.simulation import simulate
from megaprof.analysis.what_if import layout_search
from megaprof.analysis.what_if.contents import Cost, StageMemory, in_flight_layers
from megaprof.analysis.what_if.layouts import (
    check_layout,
    default_layout,
    format_layout,
    layers_per_stage,
    parse_layout,
    to_flags,
)
from megaprof.parallel.schedules import PipelineSchedule
from tests.analysis.what_if.oracle import CostModel, lower_bound_ms, replay_layout, searched

milliseconds = st.integers(0, 12).map(lambda quarters: quarters / 4)
costs = st.builds(Cost, milliseconds, milliseconds)


@st.composite
def models(draw, layers: int):
    layer = draw(costs | st.lists(costs, min_size=layers, max_size=layers).map(tuple))
    return CostModel(layer, draw(costs), draw(costs), draw(costs), draw(milliseconds))


def every_layout(pp: int, vpp: int, layers: int, mtp_layers: int):
    """Every layout without an empty piece that keeps the MTP layers together, by checking all ways to cut."""
    flat = "E" + "t" * layers + "m" * mtp_layers + "L"
    for cuts in itertools.combinations(range(1, len(flat)), pp * vpp - 1):
        pieces = tuple(flat[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(flat)]))
        if sum("m" in piece for piece in pieces) == bool(mtp_layers):
            yield pieces


@given(st.data(), st.integers(1, 4), st.integers(4, 7), st.integers(0, 2), st.booleans(), st.booleans())
def test_the_best_of_all_layouts_is_found_and_nothing_beats_the_bound(
    data, pp, layers, mtp_layers, forward_only, rendezvous
):
    vpp = data.draw(st.integers(1, 2)) if pp == 3 else 1
    microbatches = pp * data.draw(st.integers(1, 3))
    cost = data.draw(models(layers))
    options = {"forward_only": forward_only, "rendezvous": rendezvous}
    steps = {
        pieces: replay_layout(pieces, pp, cost, microbatches, **options).step_ms
        for pieces in every_layout(pp, vpp, layers, mtp_layers)
    }
    found = searched(cost, pp, vpp, layers, microbatches, mtp_layers=mtp_layers, top=3, **options)
    assert list(found.values()) == pytest.approx(sorted(steps.values())[:3])
    bound = lower_bound_ms(cost, pp, vpp, layers, microbatches, mtp_layers=mtp_layers, forward_only=forward_only)
    assert bound <= min(steps.values()) * (1 + 1e-12)
    for pieces, step_ms in found.items():
        assert parse_layout(format_layout(pieces), pp) == pieces
        check_layout(pieces, pp, layers, mtp_layers)
        assert step_ms == pytest.approx(steps[pieces])


@pytest.mark.parametrize(
    ("loss", "mixed"), [(0.5, True), pytest.param(2.0, True, marks=pytest.mark.slow), (2.0, False), (5.0, False)]
)
@pytest.mark.parametrize(("pp", "vpp", "layers"), [(4, 1, 16), (3, 2, 10), (6, 1, 12)])
def test_the_local_search_comes_within_a_percent_of_the_best(monkeypatch, pp, vpp, layers, loss, mixed):
    layer = tuple(Cost(1.0 + (index % 3), 2.0 + (index % 3)) for index in range(layers)) if mixed else Cost(1.0, 2.0)
    cost = CostModel(layer, Cost(0.2, 0.3), Cost(loss, 2 * loss), p2p_ms=0.1)
    steps = {pieces: replay_layout(pieces, pp, cost, 2 * pp).step_ms for pieces in every_layout(pp, vpp, layers, 0)}
    best = min(steps, key=lambda pieces: steps[pieces])
    monkeypatch.setattr(layout_search, "_MOST", 120)
    found = min(searched(cost, pp, vpp, layers, 2 * pp).values())
    assert steps[best] * (1 - 1e-9) <= found <= steps[best] * 1.01
    own = layers_per_stage(best, pp)
    stage = own.index(max(own))  # may have a layer less

    def needs(stages, layers):
        return (stages == stage) * layers.sum(axis=1) / (own[stage] - 1)

    allowed = {pieces: ms for pieces, ms in steps.items() if layers_per_stage(pieces, pp)[stage] < own[stage]}
    bounded = searched(cost, pp, vpp, layers, 2 * pp, needs=needs)
    assert bounded.keys() <= allowed.keys()
    best = min(allowed.values())
    assert best * (1 - 1e-9) <= min(bounded.values()) <= best * 1.03
    assert searched(cost, pp, vpp, layers, 2 * pp, needs=lambda stages, _: stages + 1.5) == {}


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(16, 1, 32), (16, 2, 32), (64, 1, 256)])
def test_a_layout_is_found_within_a_tight_bound_on_many_stages(pp, vpp, microbatches):
    """The first stages hold the most microbatches, and may have much less than in the even split."""
    schedule, layers = PipelineSchedule.checked(pp, vpp, microbatches), 4 * pp
    even = in_flight_layers(default_layout(pp, vpp, layers), schedule)
    least = (4 << 30,) * pp
    most = tuple(own + (held << 28) for own, held in zip(least, even, strict=True))
    memory = StageMemory((4,) * pp, tuple(even), least, most, (round(0.7 * most[0]),) * pp)
    cost = CostModel(Cost(1.0, 2.0), Cost(0.2, 0.3), Cost(1.3, 2.5), p2p_ms=0.05)
    found = searched(cost, pp, vpp, layers, microbatches, needs=partial(memory.part, schedule=schedule))
    assert found
    assert all(memory.fit(pieces, schedule)[0] for pieces in found)


@given(st.data(), st.integers(2, 5), st.integers(1, 3), st.integers(0, 2))
def test_where_a_layout_keeps_the_bound_one_is_found(data, pp, vpp, mtp_layers):
    """The bound is what a drawn layout needs, and a byte."""
    vpp = 1 if mtp_layers else vpp
    layers = data.draw(st.integers(pp * vpp, pp * vpp + 6))
    schedule = PipelineSchedule.checked(pp, vpp, pp * data.draw(st.integers(1, 3)))
    cut = data.draw(st.sets(st.integers(1, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    flat = ["E", *"t" * layers, "m" * mtp_layers + "L"]
    drawn = tuple("".join(flat[begin:end]) for begin, end in itertools.pairwise([0, *sorted(cut), layers + 2]))
    beside = data.draw(st.lists(st.integers(0, 9000), min_size=pp, max_size=pp))
    least, activations = tuple(1000 + more for more in beside), data.draw(st.sampled_from([250, 1000, 4000]))
    memory = StageMemory((1,) * pp, (1,) * pp, least, tuple(each + activations for each in least), (1,) * pp)
    memory = replace(memory, allowed=tuple(each + 1 for each in memory.fit(drawn, schedule)[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_search, "_FEWEST", 0)
        patch.setattr(layout_search, "_MOST", 0)  # all moves are ruled by memory
        cost = CostModel(Cost(1.0, 2.0), loss=Cost(1.0, 2.0))
        needs = partial(memory.part, schedule=schedule)
        found = searched(cost, pp, vpp, layers, schedule.microbatches, mtp_layers=mtp_layers, needs=needs)
    assert found
    assert all(memory.fit(pieces, schedule)[0] for pieces in found)


def test_a_large_search_is_valid_deterministic_and_better_than_the_balanced_split():
    cost = CostModel(Cost(1.0, 2.0), Cost(0.2, 0.3), Cost(1.3, 2.5), p2p_ms=0.05)
    found = searched(cost, 64, 1, 128, 16)
    balanced = replay_layout(("Ett", *["tt"] * 62, "ttL"), 64, cost, 16).step_ms
    bound = lower_bound_ms(cost, 64, 1, 128, 16)
    steps = list(found.values())
    assert bound <= steps[0] < balanced
    assert steps == sorted(steps)
    assert list(found.items()) == list(searched(cost, 64, 1, 128, 16).items())
    for pieces in found:
        check_layout(pieces, 64, 128)


def test_among_equals_the_simpler_flags_come_first():
    first, step_ms = next(iter(searched(CostModel(Cost(1.0, 2.0)), 4, 1, 16, 64).items()))
    assert to_flags(first, 4) == ()
    assert layers_per_stage(first, 4) == (4, 4, 4, 4)
    assert step_ms == simulate([[4.0]] * 4, [[8.0]] * 4, 64).step_ms


def test_a_heavy_loss_takes_layers_from_the_last_stage():
    cost = CostModel(Cost(1.0, 2.0), loss=Cost(2.0, 4.0))
    best = next(iter(searched(cost, 4, 1, 14, 32)))
    assert layers_per_stage(best, 4) == (4, 4, 4, 2)
    assert to_flags(best, 4) == ("--decoder-last-pipeline-num-layers", "2")


def test_more_pieces_than_layers_have_no_layout():
    assert searched(CostModel(Cost(1.0, 2.0)), 4, 1, 2, 8)
    assert searched(CostModel(Cost(1.0, 2.0)), 4, 1, 1, 8) == {}
