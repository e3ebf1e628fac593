"""Costs per kind of layer out of what stages take: recovered where the stages determine them, withheld elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.what_if.cost_model import (
    LAYER_RANGES,
    MOST_RESIDUAL,
    STAGE_TIMES,
    ChunkCost,
    NoCostModel,
    fit_costs,
)
from megaprof.analysis.what_if.layout_search import Cost

DENSE, MOE, EMBEDDING, LOSS, MTP = Cost(4.0, 8.0), Cost(7.0, 13.0), Cost(3.0, 1.0), Cost(5.0, 6.0), Cost(9.0, 17.0)
TRUE = {"dense": DENSE, "moe": MOE, "embedding": EMBEDDING, "loss": LOSS, "mtp": MTP}


def chunks(stages, *, costs=TRUE, slow=None, ranges=False, mtp=0):
    """One chunk per stage, ``stages`` naming their layers: ``d`` dense, ``m`` MoE; ``slow``: factor by stage."""
    kinds, made = {"d": "dense", "m": "moe"}, []
    for stage, text in enumerate(stages):
        held = [kinds[letter] for letter in text]
        first, last = stage == 0, stage == len(stages) - 1
        parts = held + ["embedding"] * first + ["mtp"] * (mtp * last) + ["loss"] * last
        factor = (slow or {}).get(stage, 1.0)
        total = Cost(*(factor * sum(costs[part][i] for part in parts) for i in (0, 1)))
        each = tuple(Cost(*(factor * ms for ms in costs[kind])) for kind in held) if ranges else None
        made.append(ChunkCost(stage, tuple(held), total, embedding=first, mtp=mtp * last, loss=last, layers=each))
    return made


def close(fit, **expected):
    assert set(fit.by_kind) == set(expected)
    for kind, cost in expected.items():
        assert fit.by_kind[kind] == pytest.approx(cost, abs=1e-6), kind


@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=8),
    *[st.tuples(st.floats(0.5, 50), st.floats(0.5, 50)) for _ in range(3)],
)
def test_layer_embedding_and_loss_are_recovered_from_three_stages_and_more(layers, dense, embedding, loss):
    layers[1] = max(layers[1], 1)
    costs = {"dense": Cost(*dense), "embedding": Cost(*embedding), "loss": Cost(*loss)}
    made = chunks(["d" * n for n in layers], costs=costs)
    fit = fit_costs(made)
    assert fit.residual <= 0.01
    for chunk in made:  # what it leaves out must not matter
        names = ["dense"] * len(chunk.kinds) + ["embedding"] * chunk.embedding + ["loss"] * chunk.loss
        again = sum(sum(fit.by_kind.get(name, Cost(0.0))) for name in names)
        assert again == pytest.approx(sum(chunk.cost), rel=0.0111)


def test_what_the_stages_determine_is_exact():
    fit = fit_costs(chunks(["dddd", "dddd", "dddddd", "ddd"]))
    close(fit, dense=DENSE, embedding=EMBEDDING, loss=LOSS)
    assert fit.source == STAGE_TIMES
    assert fit.residual == pytest.approx(0, abs=1e-9)
    assert fit.assumptions == ()


def test_dense_and_moe_layers_have_costs_of_their_own():
    close(fit_costs(chunks(["ddd", "dmm", "mmm", "mmm", "mm"])), dense=DENSE, moe=MOE, embedding=EMBEDDING, loss=LOSS)


def test_kinds_in_the_same_mix_everywhere_share_one_cost():
    costs = {**TRUE, "embedding": Cost(0.0), "loss": Cost(0.0)}
    fit = fit_costs(chunks(["dm", "dm", "dmdm"], costs=costs))
    mean = Cost((4 + 7) / 2, (8 + 13) / 2)
    close(fit, dense=mean, moe=mean)
    assert any("take the same time" in each for each in fit.assumptions)


def test_the_fewest_costs_that_explain_the_stages_are_taken():
    costs = {"dense": DENSE, "embedding": Cost(0.05, 0.0), "loss": Cost(0.0, 0.05)}
    fit = fit_costs(chunks(["dddddd", "dd"], costs=costs))
    assert set(fit.by_kind) == {"dense"}
    assert fit.residual <= 0.01
    assert fit.assumptions == ("embedding and loss count as free: not told apart from the layers",)


def test_two_stages_give_two_costs_and_say_that_nothing_checks_them():
    costs = {"dense": DENSE, "embedding": Cost(0.0), "loss": LOSS}
    fit = fit_costs(chunks(["dddddd", "dd"], costs=costs))
    close(fit, dense=DENSE, loss=LOSS)
    assert any("embedding counts as free" in each for each in fit.assumptions)
    assert any("nothing checks them" in each for each in fit.assumptions)


def test_a_slow_rank_is_no_cost_of_a_layer():
    with pytest.raises(NoCostModel, match="stage 2 is"):
        fit_costs(chunks(["dddd"] * 5, slow={2: 1.5}))


def test_layer_ranges_tell_embedding_and_loss_apart_even_on_two_stages():
    fit = fit_costs(chunks(["dddddd", "dd"], ranges=True))
    close(fit, dense=DENSE, embedding=EMBEDDING, loss=LOSS)
    assert fit.source == LAYER_RANGES
    assert fit.assumptions == ()


def test_layer_ranges_that_do_not_add_up_are_not_used():
    made = chunks(["dddd", "dddd", "dddddd", "ddd"], ranges=True)
    halved = [
        ChunkCost(**{**c.__dict__, "layers": tuple(Cost(*(ms / 2 for ms in each)) for each in c.layers)}) for c in made
    ]
    fit = fit_costs(halved)
    close(fit, dense=DENSE, embedding=EMBEDDING, loss=LOSS)
    assert fit.source == STAGE_TIMES


def test_mtp_and_loss_in_one_chunk_are_told_apart_by_ranges_only():
    made = chunks(["dddd", "dddd", "ddd"], mtp=2)
    assert not {"mtp", "loss"} <= set(fit_costs(made).by_kind)
    made = chunks(["dddd", "dddd", "ddd"], mtp=2, ranges=True)
    made[-1] = ChunkCost(**{**made[-1].__dict__, "mtp_layers": Cost(*(2 * ms for ms in MTP))})
    close(fit_costs(made), dense=DENSE, embedding=EMBEDDING, loss=LOSS, mtp=MTP)


def test_a_model_has_one_cost_per_layer_in_order():
    model = fit_costs(chunks(["ddd", "dmm", "mmm", "mmm", "mm"])).model(p2p_ms=0.5)
    assert model.layer == (pytest.approx(DENSE),) * 4 + (pytest.approx(MOE),) * 10
    assert (model.embedding, model.loss, model.p2p_ms) == (pytest.approx(EMBEDDING), pytest.approx(LOSS), 0.5)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([ChunkCost(0, (), Cost(1.0, 1.0), embedding=True)], "no decoder layers"),
        ([ChunkCost(0, ("dense",), Cost(0.0, 0.0))], "took no time"),
        ([ChunkCost(0, tuple("abcdefgh"), Cost(1.0, 1.0))], "8 kinds of layers"),
    ],
)
def test_what_cannot_be_fitted_says_why(made, says):
    with pytest.raises(NoCostModel, match=says):
        fit_costs(made)


STAGE = st.tuples(st.sampled_from(["d", "dd", "dm", "mmm", "dddd"]), st.floats(0.1, 100), st.floats(0.0, 100))


@given(st.lists(STAGE, min_size=1, max_size=6))
def test_costs_are_never_negative_and_never_far_from_the_stages(stages):
    made = [
        ChunkCost(c.stage, c.kinds, Cost(forward, backward), c.embedding, loss=c.loss)
        for c, (_, forward, backward) in zip(chunks([held for held, _, _ in stages]), stages, strict=True)
    ]
    try:
        fit = fit_costs(made)
    except NoCostModel:
        return
    assert all(ms >= 0 for cost in fit.by_kind.values() for ms in cost)
    for chunk in made:
        names = [*chunk.kinds, *["embedding"] * chunk.embedding, *["loss"] * chunk.loss]
        again = sum(sum(fit.by_kind.get(name, Cost(0.0))) for name in names)
        assert again == pytest.approx(sum(chunk.cost), rel=MOST_RESIDUAL + 1e-9)
