"""What lengths of sequences explain of how long microbatches take: the data's, a machine's, or not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.diagnosis.lengths import _medians, _not_negative
from megaprof.analysis.table.table import Table
from tests.analysis.diagnosis.test_diagnose import ALONE, CPU, HEALTHY, LONG, table_of
from tests.analysis.truth.pipelines import Fault

UNEVEN = replace(HEALTHY, faults=(Fault("uneven_microbatches", 0.4),))
UNEQUAL = replace(LONG, faults=(Fault("unequal_replicas", 0.2),))


def given_lengths(table: Table, squares: np.ndarray) -> Table:
    """``squares`` [t, d, m], of sequences in microbatches of 4,096 tokens."""
    work = np.stack((np.full(squares.shape, 4096.0), np.ones(squares.shape), squares), axis=-1)
    return replace(table, work=work, lengths_from="packed_seq_params")


def long_as_they_take(table: Table) -> np.ndarray:
    """Squares in proportion to what the passes of a microbatch take beyond a fixed part, which is a third."""
    took = np.median(table.passes, axis=(2, 3, 4))
    return (took - took.mean() / 3.0) * 1e6


@pytest.mark.parametrize("pipeline", [UNEVEN, UNEQUAL, replace(ALONE, faults=UNEQUAL.faults)], ids=["m", "d", "alone"])
def test_uneven_work_is_the_datas_where_lengths_explain_it_and_else_a_machines(pipeline, tmp_path):
    table = table_of(pipeline, tmp_path)
    squares = long_as_they_take(table)
    others = np.random.default_rng(0).permutation(squares.reshape(-1)).reshape(squares.shape)
    cases: dict[str, np.ndarray | None] = {"data": squares, "machine": others, "": None}
    for reason, own in cases.items():
        told = diagnose(examine(table if own is None else given_lengths(table, own)))
        (cause,) = told.causes
        assert cause.kind in ("uneven_microbatches", "unequal_replicas")
        assert (cause.reason or "") == reason
        assert (told.lengths is None) == (own is None)
        assert ("explained" in cause.parts) == (own is not None)


PEERS = replace(CPU, peers=2)
#: Stage 1 of 4, its second rank.
SLOW = Fault("slow_rank", 1.3, stage=1, replica=0, peer=1)


@pytest.mark.parametrize(
    ("pipeline", "fault", "tokens", "reason"),
    [
        (PEERS, SLOW, (1, 1, 1600.0), "expert_load"),
        (PEERS, SLOW, (1, 1, 1030.0), "machine"),
        (PEERS, SLOW, (1, 0, 1600.0), "machine"),
        (PEERS, SLOW, None, None),
        (PEERS, Fault("slow_stage", 1.3, stage=2), (2, 0, 1500.0), "expert_load"),
        (PEERS, Fault("slow_stage", 1.3, stage=2), (3, 0, 1500.0), "machine"),
    ],
)
def test_a_slow_rank_is_its_experts_where_these_got_more_and_else_its_machine(
    pipeline, fault, tokens, reason, tmp_path
):
    table = table_of(replace(pipeline, faults=(fault,)), tmp_path)
    assert table.experts is None
    (of_machine,) = diagnose(examine(table)).causes
    if tokens is not None:
        stage, peer, own = tokens
        experts = np.full(table.compute.shape[1:4], 1000.0)
        experts[0, stage, peer] = own
        table = replace(table, experts=experts)
    (cause,) = diagnose(examine(table)).causes
    assert cause.stage == fault.stage
    assert cause.reason == reason
    # Of two ranks the other one gets what the slow one loses.
    halved = reason == "expert_load" and fault.kind == "slow_rank"
    assert cause.price.value == pytest.approx(of_machine.price.value / (1 + halved))
    if tokens is not None and reason == "expert_load":
        assert (cause.parts["expert_tokens"], cause.parts["usual_expert_tokens"]) == (own, 1000.0)


def test_costs_are_what_passes_take(tmp_path):
    table = table_of(UNEVEN, tmp_path)
    squares = long_as_they_take(table)
    told = diagnose(examine(given_lengths(table, squares))).lengths
    assert told is not None
    assert told.explained.low > 0.9
    assert told.squares == pytest.approx((squares.max(axis=2) / squares.mean(axis=2)).mean())
    assert told.tokens_ratio == 1.0
    for cost in told.costs:
        took = table.passes[:, :, cost.stage, cost.chunk, table.schedule.kinds.index(cost.kind)].mean()
        # All have as many tokens, so these and the fixed part are one.
        assert cost.fixed_ms + 4 * cost.tokens_ms == pytest.approx(took / 3.0, rel=0.1)
        assert cost.squares_ms * squares.mean() / 1024**2 == pytest.approx(took / 1.5, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
def test_what_disturbs_few_passes_is_nothing_that_their_sequences_take(seed):
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(3.2, 0.9, (48, 3)))
    x = np.stack((np.ones(48), lengths.sum(axis=1), (lengths**2).sum(axis=1)), axis=-1)
    undisturbed = x @ [8.0, 0.08, 0.0008]
    disturbed = random.permutation(48) < 8
    y = np.stack((undisturbed, 2 * undisturbed), axis=-1) + disturbed[:, None] * random.exponential(20.0, (48, 2))
    found = _medians(x, y, np.ones((1, 48)))[0]
    assert found[:, 1:] == pytest.approx(np.array([[0.08, 0.0008], [0.16, 0.0016]]), rel=0.1)


@given(st.integers(0, 2**32 - 1), st.integers(4, 40))
def test_least_squares_with_nothing_below_0(seed, n):
    random = np.random.default_rng(seed)
    x = np.stack((np.ones(n), random.uniform(1, 1e4, n), random.uniform(1, 1e8, n)), axis=-1)
    y = (x / [1.0, 1e4, 1e8]) @ random.uniform(-1, 1, (3, 2)) + random.normal(0, 0.1, (n, 2))
    scaled = x / x.max(axis=0)
    for q, own in enumerate(_not_negative(x, y, np.ones((1, n, 2)))[0]):
        found = own * x.max(axis=0)
        slope = scaled.T @ (scaled @ found - y[:, q])
        # Where it is above 0 it cannot be better, and where it is 0 only below 0 would be.
        assert (found >= 0).all()
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-6 * n
        assert slope[found == 0].min(initial=0.0) > -1e-6 * n
