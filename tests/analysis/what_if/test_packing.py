"""The same sequences in other microbatches: what a packing is predicted to take is what it takes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.diagnosis.diagnose import diagnose
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.simulation import compiled
from megaprof.analysis.table.table import Table
from megaprof.analysis.what_if.changeable import Changeable, chosen
from megaprof.analysis.what_if.changes import (
    PLANS,
    Step,
    _balanced,
    _dealt,
    longest,
    plan,
    plans,
    repacked,
    sequences_of,
    switch_of,
)
from megaprof.analysis.what_if.contents import Model
from megaprof.analysis.what_if.what_if import what_if
from megaprof.formats.phrases import Unanswerable
from tests.analysis.diagnosis.test_diagnose import HEALTHY, table_of

JOB = replace(HEALTHY, replicas=2, steps=6, noise=0.005)
FIXED, PER_TOKEN, PER_SQUARE = 1.0, 2e-3, 1e-6


def drawn(table: Table) -> list[Step]:
    """Sequences of very different lengths, in microbatches of three."""
    random = np.random.default_rng(3)
    t, d, _, _, _, m = table.passes.shape
    lengths = np.minimum(np.exp(random.normal(6.5, 1.0, (t, d, m, 3))).astype(int) + 16, 6000)
    return [[[tuple(own) for own in replica] for replica in step] for step in lengths.tolist()]


def takes(step: Step) -> np.ndarray:
    """[d, m]: milliseconds of a pass."""
    cost = [[sum(PER_TOKEN * n + PER_SQUARE * n * n for n in own) + FIXED for own in replica] for replica in step]
    return np.array(cost)


def having(table: Table, steps: list[Step], layers: tuple[int, ...] = (4, 4, 4, 4)) -> Table:
    """A run that had these sequences and layers, replayed: a backward takes twice a forward."""
    passes = np.stack([takes(step) for step in steps])[:, :, None, None, None, :] * np.array([1.0, 2.0])[:, None]
    passes = passes * (np.array(layers) / 4.0)[:, None, None, None]
    work = np.array(
        [[[(sum(o), len(o), sum(n * n for n in o)) for o in replica] for replica in step] for step in steps],
        dtype=float,
    )
    table = replace(
        table,
        schedule=table.schedule._replace(microbatches=passes.shape[-1]),
        delays={},
        entry=np.zeros(table.entry.shape),
        reduction=np.zeros(len(steps)),
        work=work,
        lengths_from="packed_seq_params",
        sequences=tuple(zip(work, steps, strict=True)),
    )
    return replayed(table, passes)


def replayed(table: Table, passes: np.ndarray) -> Table:
    """A run whose passes took so long."""
    ends = compiled(table.schedule, rendezvous=True).ends(passes, entry=table.entry, link=np.zeros(table.entry.shape))
    length = ends.reshape(*ends.shape[:2], -1).max(axis=2).max(axis=1)
    own = {"compute": passes[:, :, :, None], "working": passes[:, :, :, None], "idle": np.zeros_like(passes)}
    return replace(table, start=ends - passes, end=ends, length=length, **own)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return table_of(JOB, tmp_path_factory.mktemp("job"))


def test_a_packing_takes_what_it_was_predicted_to_take(table: Table) -> None:
    steps = drawn(table)
    before = having(table, steps)
    run = examine(before)
    known = sequences_of(run)
    assert known is not None
    assert known.most == max(sum(own) for step in steps for replica in step for own in replica)
    for name in PLANS:
        packed = plan(known, name)
        if packed is None:
            continue
        found, count = repacked(known, packed)[0], before.schedule.microbatches
        laid = [PLANS[name](known, step, count) for step in steps]
        if name == "fewer" or any(step is None for step in laid):
            continue
        after = having(table, [step for step in laid if step is not None])
        speedup = before.length.mean() / after.length.mean()
        assert found.speedup.value == pytest.approx(speedup, rel=0.02), name
        assert found.speedup.holds(speedup), name
        was, now = (
            sorted(n for step in each for replica in step or [] for own in replica for n in own)
            for each in (steps, laid)
        )
        assert was == now, "the same sequences"
    told = plans(known)
    assert told[-1].kind == "even_packing"
    assert told[0].packing == "pooled"
    assert told[0].speedup.low > 1.05
    assert told[-1].speedup.value >= told[0].speedup.value * 0.99, "no packing beats even ones"
    advised, _ = what_if(run, diagnose(run))
    assert [each.packing for each in advised.packings] == [each.packing for each in told]
    assert advised.most_tokens == known.most


@pytest.mark.parametrize("told", [True, False])
def test_why_there_is_nothing_to_pack(table: Table, told: bool) -> None:
    same = [[[(512, 512)] * len(replica) for replica in step] for step in drawn(table)]
    made = having(table, same)
    run = examine(made if told else replace(made, work=None, sequences=(), lengths_from=None))
    _, known = what_if(run, diagnose(run))
    assert known is not None
    assert (known.sequences, known.alike) == (None, told)
    with pytest.raises(Unanswerable):
        chosen(known, {"packing": "balanced"})


@pytest.mark.parametrize("seed", range(4))
def test_what_disturbs_some_passes_is_nothing_that_a_packing_gains(table: Table, seed: int) -> None:
    random = np.random.default_rng(seed)

    def disturbed(steps: list[Step]) -> Table:
        found = having(table, steps)
        struck = random.random(found.passes.shape) < 0.05
        return replayed(found, found.passes * (1.0 + struck * random.exponential(0.5, struck.shape)))

    before = disturbed(drawn(table))
    known = sequences_of(examine(before))
    assert known is not None
    for name in ("balanced", "fewer"):
        laid = plan(known, name)
        assert laid is not None
        found, *_ = repacked(known, laid)
        after = float(np.mean([disturbed(laid).length.mean() for _ in range(8)]))
        speedup = float(before.length.mean()) / after
        assert found.speedup.value == pytest.approx(speedup, rel=0.04), name
        assert found.speedup.holds(speedup), name


def test_fewer_microbatches_are_as_few_as_have_room(table: Table) -> None:
    """10 microbatches of 8 tokens would hold all tokens, but no two sequences of 5 go into one, nor 5 and 4."""
    known = sequences_of(examine(having(table, [[[(8,), *[(5,)] * 8, *[(4,)] * 7]] * 2] * len(table.steps))))
    assert known is not None
    found = plan(known, "fewer")
    assert found is not None
    assert {len(replica) for step in found for replica in step} == {13}


def test_a_packing_goes_with_another_layout_and_other_microbatches(table: Table) -> None:
    """Both together take what they take, and a packing alone what the report says."""
    steps = drawn(table)
    before = having(table, steps, (6, 4, 3, 3))
    run = examine(before)
    known = sequences_of(run)
    assert known is not None
    model = Model(("Etttttt", "tttt", "ttt", "tttL"), ("layer",) * 16, 4)
    by_hand = Changeable(longest(run), model, None, sequences=known)
    alone = plan(known, "balanced")
    assert alone is not None
    assert chosen(by_hand, {"packing": "balanced"}).prediction.step_ms == repacked(known, alone)[0].step_ms
    for count in (16, 24):
        laid = [_balanced(known, step, count) for step in steps]
        after = having(table, [step for step in laid if step is not None], (4, 4, 4, 4))
        choices = {"layout": "4,4,4,4", "microbatches": str(count), "packing": "balanced"}
        found = chosen(by_hand, choices)
        assert found.setting.microbatches == count
        assert found.prediction.speedup.value == pytest.approx(before.length.mean() / after.length.mean(), rel=0.04)
    with pytest.raises(ValueError, match="cannot lie so"):
        chosen(by_hand, {"packing": "balanced", "microbatches": "2"})
    with pytest.raises(Unanswerable, match="not captured"):
        chosen(replace(by_hand, sequences=None), {"packing": "balanced"})


def test_without_sequences_nothing_is_predicted(table: Table) -> None:
    known = having(table, drawn(table))
    assert sequences_of(examine(replace(known, sequences=()))) is None
    assert sequences_of(examine(table)) is None
    even = having(table, [[[(512, 512)] * 16] * 2] * len(known.steps))
    run = examine(even)
    assert what_if(run, diagnose(run))[0].packings == (), "microbatches do not differ"


def test_one_stage_has_packings_and_no_other_layout(tmp_path: Path) -> None:
    one = table_of(replace(JOB, stages=1, layers=((4,),)), tmp_path / "job")
    run = examine(having(one, drawn(one), (4,)))
    found, known = what_if(run, diagnose(run))
    known = pickle.loads(pickle.dumps(known))  # from the process that reads to the one that shows
    assert known is not None
    best = found.packings[0]
    assert best.speedup.low > 1.02
    by_hand = chosen(known, {"packing": "pooled"}).prediction
    assert (by_hand.packing, by_hand.speedup.value) == (best.packing, pytest.approx(best.speedup.value))
    assert chosen(known, {"layout": "4"}).setting == known.captured
    for refused in ({"layout": "2,2"}, {"chunks": "2"}):
        with pytest.raises(ValueError, match=r"pp=1|stage"):
            chosen(known, refused)
    without = examine(replace(run.table, sequences=()))
    assert what_if(without, diagnose(without))[1] is None


@pytest.mark.parametrize("count", [1, 8])
def test_replicas_with_unequal_work_gain_by_pooling_however_alike_the_microbatches_of_each_are(
    table: Table, count: int
) -> None:
    """In every step another replica has the long sequences, the same ones in each of its microbatches."""
    random, replicas = np.random.default_rng(0), range(2)
    long = [[random.integers(200, 1500, 4) * (1 + (d == t % 2)) for d in replicas] for t in range(len(table.steps))]
    steps: list[Step] = [[[tuple(own.tolist())] * count for own in step] for step in long]
    before = having(table, steps)
    run = examine(before)
    told = diagnose(run)
    assert ("unequal_replicas", "data") in [(each.kind, each.reason) for each in told.causes]
    known = sequences_of(run)
    assert known is not None
    laid = plan(known, "pooled")
    assert laid is not None
    best = what_if(run, told)[0].packings[0]
    after = having(table, laid)
    assert best.packing == "pooled"
    assert best.speedup.value == pytest.approx(before.length.mean() / after.length.mean(), rel=0.02)
    assert best.speedup.low > 1.05


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8), st.integers(500, 4000))
def test_sequences_are_dealt_whole_and_within_the_limit(lengths: list[int], count: int, most: int) -> None:
    groups = _dealt(lengths, count, lambda n: n + n * n / 100, most)
    if groups is not None:
        assert len(groups) == count
        assert sorted(n for group in groups for n in group) == sorted(lengths)
        assert all(group and sum(group) <= most for group in groups)
        # Of those dealt greedily no group could give its last one to the lightest and be longer still.
    elif len(lengths) >= count and lengths:
        assert sum(lengths) > most * count - count * max(lengths), "there was room for all"


def test_a_host_is_told_in_its_own_words() -> None:
    assert switch_of("slime", 4096) == (
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
        "4096",
        "--balance-by-flops",
    )
    assert switch_of("skyrl", 7) == ("trainer.max_tokens_per_microbatch=7",)
    assert switch_of("megatron-lm", 4096) is switch_of(None, 4096) is None
