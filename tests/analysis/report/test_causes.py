"""Causes of runs whose timelines are known, and every kind of cause in sentences."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.diagnosis.examine import Price
from megaprof.analysis.report import causes
from megaprof.analysis.report.report import analyze
from megaprof.analysis.stages.stages import TargetStages
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines

PIPELINE = WorldLayout(ParallelSizes.of(32, pp=4))
EXPERTS = WorldLayout(ParallelSizes.of(64, tp=2, pp=2, ep=4))
TWO_REPLICAS = WorldLayout(ParallelSizes.of(4, pp=2))
_RANDOM = random.Random(0)
#: In every step the ranks of another replica are slow.
UNEQUAL = [
    Slow(rank=pp * 8 + replica, from_step=step, until_step=step, factor=1.4)
    for step, replica in enumerate([_RANDOM.randrange(8) for _ in range(120)])
    for pp in range(4)
]


@pytest.mark.parametrize(
    ("layout", "slow", "expected"),
    [
        # kind, ranks, since, the part of the steps, milliseconds of each of those
        (PIPELINE, [Slow(rank=19, from_step=70, factor=1.31)], [("slow_rank", (19,), 70, 50 / 120, 132)]),
        (PIPELINE, [Slow(rank=3, factor=1.5)], [("slow_rank", (3,), None, 1.0, 214)]),
        (EXPERTS, [Slow(rank=41, from_step=60, factor=1.4)], [("slow_rank", tuple(range(40, 48)), 60, 0.5, 91)]),
        (
            PIPELINE,
            [Slow(rank=19, from_step=step, until_step=step + 7, factor=1.5) for step in range(8, 120, 16)],
            [("slow_rank", (19,), None, 0.47, 218)],
        ),
        (
            TWO_REPLICAS,
            [Slow(rank=1, from_step=step, until_step=step + 5, factor=1.6) for step in range(10, 120, 19)],
            [("slow_rank", (1,), None, 0.3, 119)],
        ),
        (PIPELINE, UNEQUAL, [("unequal_replicas", (), None, 1.0, 201)]),
        (
            PIPELINE,
            [Slow(from_step=50, factor=8, kind="finalize")],
            [("communication", (), 50, 0.58, 40)],
        ),
        (PIPELINE, [], []),
    ],
    ids=["slow since", "slow", "slow group", "now and then", "of two replicas", "unequal", "slow reduction", "healthy"],
)
def test_the_causes_of_a_run(
    tmp_path: Path, layout: WorldLayout, slow: list[Slow], expected: list[tuple[Any, ...]]
) -> None:
    write_timelines(tmp_path, layout, steps=120, microbatches=4 * layout.sizes.pp, slow=slow)
    (target,) = analyze(tmp_path).targets
    assert [(each.kind, each.ranks) for each in target.causes] == [each[:2] for each in expected]
    for cause, (_, _, since, share, while_ms) in zip(target.causes, expected, strict=True):
        # Every third step is looked at.
        assert (cause.since is None and since is None) or abs((cause.since or 0) - since) <= 3
        assert cause.share == pytest.approx(share, abs=0.07)
        assert cause.while_ms == pytest.approx(while_ms, rel=0.1)
        assert cause.price.low < cause.price.ms < cause.price.high
    assert target.findings[0].severity == ("slow" if expected else "fine")
    assert [finding.kind for finding in target.findings][: len(expected)] == [each[0] for each in expected]


SIZES = ParallelSizes.of(8, pp=4)
MEASURED = TargetStages("train_actor", None, SIZES, "1f1b", False, 8, (5, 6), None, "", (), None, ())


def cause(kind: str, **about: Any) -> Cause:
    fields: dict[str, Any] = {"price": Price(40.0, 30.0, 50.0), "share": 1.0, "while_ms": 40.0, "since": None}
    return Cause(kind, **(fields | about))


def diagnosis(*found: Cause, perhaps: tuple[Cause, ...] = (), rest_ms: float = 0.0) -> Diagnosis:
    return Diagnosis(400.0, 2, 400.0, found, perhaps, rest_ms)


@pytest.mark.parametrize("kind", sorted(causes.KINDS))
def test_every_kind_has_a_sentence_with_its_place_and_price(kind: str) -> None:
    about: dict[str, Any] = {"stage": 2}
    about |= {"ranks": (5,), "hosts": ("node-1",)} if kind in ("slow_rank", "late_entry") else {}
    about |= {"link": (2, 3)} if kind == "slow_link" else {"chunk": 1} if kind == "slow_chunk" else {}
    found = diagnosis(cause(kind, parts={"forward_ms": 3.0, "backward_ms": 6.0}, **about))
    (said,) = causes.findings(MEASURED, found, None)
    assert (said.kind, said.severity, said.command) == (kind, "slow", None)
    assert said.text.endswith("It costs 40.0 ms (10% of the step), between 30.0 and 50.0 ms.")
    assert ("node-1" in said.text) == ("ranks" in about)
    assert "None" not in said.text


def test_what_may_be_a_cause_comes_with_the_steps_that_would_tell() -> None:
    few = cause("slow_forward", stage=1, price=Price(9.0, -2.0, 20.0), more_steps=6)
    first, second = causes.findings(MEASURED, diagnosis(perhaps=(few,)), None)
    assert first.severity == "open"
    assert second.command == "--profile-steps train_actor=5:13"
    assert "could be anything up to 20.0 ms" in second.text
    (_, of_the_run) = causes.findings(MEASURED, diagnosis(perhaps=(few,)), None, captured=False)
    assert of_the_run.command is None
    many = cause("slow_forward", stage=1, price=Price(9.0, -2.0, 20.0), more_steps=4000)
    (_, hopeless) = causes.findings(MEASURED, diagnosis(perhaps=(many,)), None)
    assert (hopeless.command, "more than 100" in hopeless.text) == (None, True)


def test_what_nobody_can_name_is_said_where_it_is_much() -> None:
    assert [found.kind for found in causes.findings(MEASURED, diagnosis(rest_ms=9.0), None)] == ["no_cause", "rest"]
    assert [found.severity for found in causes.findings(MEASURED, diagnosis(rest_ms=7.0), None)] == ["fine"]


def test_without_a_diagnosis_it_says_why() -> None:
    (said,) = causes.findings(MEASURED, None, "1 of 2 stages captured")
    assert (said.kind, said.severity) == ("no_verdict", "open")
    assert said.text.endswith(": 1 of 2 stages captured.")
