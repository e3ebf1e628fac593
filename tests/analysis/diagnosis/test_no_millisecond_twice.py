"""What is left of a step without its causes and the rest is never less than what a stage computes by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megaprof.analysis.diagnosis.diagnose import Diagnosis, diagnose
from megaprof.analysis.diagnosis.examine import Examined, examine
from tests.analysis.diagnosis.test_diagnose import CPU, GPU, table_of
from tests.analysis.truth.drawing import draw
from tests.analysis.truth.pipelines import Fault, Pipeline, Priced
from tests.golden.answers import EXPECTED

#: What gives work to another stage, and what takes it away.
_SPREAD = {"layers", "embedding_or_loss", "uneven_microbatches"}
_OF_STAGE = {"unexplained", "slow_forward", "slow_backward", "recomputation", "slow_chunk"}


def longest(of_stage: Sequence[float], kinds: Set[str]) -> float:
    """Of what stages compute, that of the longest one; where causes change it, of an average one or of the quickest."""
    return float(min(of_stage) if kinds & _OF_STAGE else np.mean(of_stage) if kinds & _SPREAD else max(of_stage))


def computed_ms(run: Examined, found: Diagnosis) -> float:
    """What the quickest rank of the longest stage computes in the quicker passes of a step."""
    own = np.minimum(run.table.working, run.table.compute).min(axis=3)
    of_stage = np.quantile(own, 0.25, axis=(0, 1, 5)).sum(axis=(1, 2)) * own.shape[-1]
    return longest(of_stage.tolist(), {cause.kind for cause in found.causes})


def left_ms(found: Diagnosis) -> float:
    return found.step_ms - sum(cause.price.value for cause in found.causes) - found.rest_ms


SLOW_PEER = Fault("slow_rank", 2.3, stage=0, replica=0, peer=1)
SLOW_REPLICA = Fault("slow_rank", 2.3, stage=0, replica=0)
MUCH = Fault("communication", 1.5, group="tp")


@pytest.mark.parametrize(
    ("pipeline", "slow", "others"),
    [
        (replace(GPU, stages=1, layers=((4,),), peers=2), SLOW_PEER, (MUCH,)),
        (replace(CPU, peers=2), SLOW_PEER, (replace(MUCH, group="cp"),)),
        (replace(GPU, peers=2), SLOW_PEER, (replace(MUCH, size=0.5, group="ep"),)),
        (replace(GPU, replicas=2), SLOW_REPLICA, (MUCH,)),
        (replace(GPU, stages=1, layers=((4,),), replicas=2), SLOW_REPLICA, (MUCH,)),
    ],
)
def test_a_rank_is_slow_by_what_is_its_own(
    pipeline: Pipeline, slow: Fault, others: tuple[Fault, ...], tmp_path
) -> None:
    """Messages are as quick as they would be without it."""
    pipeline = replace(pipeline, faults=(slow, *others))
    run = examine(table_of(pipeline, tmp_path))
    found = diagnose(run)
    (cause,) = (cause for cause in found.causes if cause.kind == "slow_rank")
    assert cause.alone_ms == pytest.approx(Priced(pipeline).price(slow).mean(), rel=0.03)
    assert cause.parts["factor"] == pytest.approx(slow.size, rel=0.03)
    assert left_ms(found) >= computed_ms(run, found)


def test_of_two_slow_ranks_of_a_group_one_alone_gains_nothing(tmp_path) -> None:
    pipeline = replace(CPU, stages=1, layers=((4,),), peers=4, faults=(SLOW_PEER,))
    table = table_of(pipeline, tmp_path)
    working = table.working.copy()
    working[:, :, :, 2] = working[:, :, :, 1]
    found = diagnose(examine(replace(table, working=working, compute=working)))
    assert {cause.ranks for cause in found.causes} == {(1,), (2,)}
    together = float(Priced(pipeline).price(SLOW_PEER).mean())
    assert sum(cause.price.value for cause in found.causes) == pytest.approx(together, rel=0.03)


@pytest.mark.parametrize("number", range(8))
def test_drawn_pipelines_lose_no_millisecond_twice(number: int, tmp_path) -> None:
    run = examine(table_of(draw(20270111, number), tmp_path))
    found = diagnose(run)
    assert left_ms(found) >= 0.99 * computed_ms(run, found)


@pytest.mark.parametrize("path", sorted(EXPECTED.glob("*.json")), ids=lambda path: path.stem)
def test_golden_answers_tell_no_millisecond_twice(path: Path) -> None:
    for target in json.loads(path.read_text()).get("targets", ()):
        found, computed = target["diagnosis"], [stage["compute_ms"] for stage in target["stages"]]
        if found is None or None in computed:
            continue
        # What a rank waits for data is part of what it computes, as far as anybody knows.
        causes = [cause for cause in found["causes"] if cause["kind"] != "data_wait"]
        left = found["step_ms"] - found["rest_ms"] - sum(cause["price"]["value"] for cause in causes)
        # On average, a stage computes longer than in its quicker passes, by some of the rest.
        assert left >= 0.98 * longest([each["mean"] for each in computed], {cause["kind"] for cause in causes})
