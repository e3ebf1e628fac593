"""Causes of runs whose timelines are known, and every kind of cause in sentences."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.diagnosis.stages import ChunkTimes, Stage, TargetStages
from megaprof.analysis.notes import Note
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text import causes, evidence
from megaprof.analysis.samples import Interval
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.metadata import ModelChunk
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write

PIPELINE = WorldLayout(ParallelSizes(pp=2, dp=4))
EXPERTS = WorldLayout(ParallelSizes(tp=2, pp=2, ep=2, dp=4))
TWO_REPLICAS = WorldLayout(ParallelSizes(pp=2, dp=2))
STEPS, MICROBATCHES, PASSES_MS = 120, 8, 30.0
_RANDOM = random.Random(0)
#: In every step the ranks of another replica are slow.
UNEQUAL = [
    Slow(rank=4 * pp + replica, from_step=step, until_step=step, factor=1.4)
    for step, replica in enumerate([_RANDOM.randrange(4) for _ in range(STEPS)])
    for pp in range(2)
]


#: Slow from the beginning on, and then more so, so nothing began, and it is slow in all steps.
FIRST = [Slow(rank=5, until_step=59, factor=1.27)]


def now_and_then(rank: int, every: int, lasts: int, factor: float) -> list[Slow]:
    starts = range(8, STEPS, every)
    return [Slow(rank=rank, from_step=step, until_step=step + lasts - 1, factor=factor) for step in starts]


@pytest.mark.parametrize(
    ("layout", "slow", "expected"),
    [
        # Kind, ranks, since, the part of the steps, and milliseconds of a microbatch that it takes longer then.
        (PIPELINE, [Slow(rank=5, from_step=70, factor=1.31)], ("slow_rank", (5,), 70, 50 / 120, 0.31)),
        (PIPELINE, [Slow(rank=3, factor=1.5)], ("slow_rank", (3,), None, 1.0, 0.5)),
        (PIPELINE, [*FIRST, Slow(rank=5, from_step=60, factor=1.7)], ("slow_rank", (5,), None, 1.0, (0.27 + 0.7) / 2)),
        (EXPERTS, [Slow(rank=9, from_step=60, factor=1.4)], ("slow_rank", (8, 9, 10, 11), 60, 0.5, 0.4)),
        (PIPELINE, now_and_then(5, 16, 8, 1.5), ("slow_rank", (5,), None, 0.47, 0.5)),
        (TWO_REPLICAS, now_and_then(1, 19, 6, 1.6), ("slow_rank", (1,), None, 0.3, 0.6)),
        (PIPELINE, UNEQUAL, ("unequal_replicas", (), None, 1.0, 0.3)),
        (PIPELINE, [Slow(from_step=50, factor=8, kind="finalize")], ("communication", (), 50, 0.58, 40 / 240)),
        (PIPELINE, [], None),
    ],
    ids=[
        "slow since",
        "slow",
        "slower since",
        "slow group",
        "now and then",
        "of two replicas",
        "unequal",
        "slow reduction",
        "healthy",
    ],
)
def test_the_causes_of_a_run(
    tmp_path: Path, layout: WorldLayout, slow: list[Slow], expected: tuple[Any, ...] | None
) -> None:
    write_timelines(tmp_path, layout, steps=STEPS, microbatches=MICROBATCHES, slow=slow)
    (target,) = analyze(tmp_path).targets
    assert target.findings[0].kind == (expected[0] if expected else "no_cause")
    assert target.findings[0].severity == ("slow" if expected else "fine")
    assert [(each.kind, each.ranks) for each in target.causes] == ([expected[:2]] if expected else [])
    for cause in target.causes:
        assert expected is not None
        _, _, since, share, longer = expected
        # Every third step is looked at.
        assert (cause.since is None) == (since is None)
        assert abs((cause.since or 0) - (since or 0)) <= 3
        assert cause.share == pytest.approx(share, abs=0.07)
        assert cause.while_ms == pytest.approx(longer * PASSES_MS * MICROBATCHES, rel=0.2)
        assert cause.price.low < cause.price.value < cause.price.high


SIZES = ParallelSizes(pp=4, dp=2)
MEASURED = TargetStages("train_actor", None, SIZES, "1f1b", False, 8, (5, 6), None, "one_clock", (), None, ())


def cause(kind: str, **about: Any) -> Cause:
    fields: dict[str, Any] = {"price": Interval(40.0, 30.0, 50.0), "share": 1.0, "while_ms": 40.0, "since": None}
    fields |= {"steps": 48, "parts": {"factor": 1.4}}
    return Cause(kind, **(fields | about))


def diagnosis(*found: Cause, perhaps: tuple[Cause, ...] = (), rest_ms: float = 0.0) -> Diagnosis:
    return Diagnosis(400.0, 2, 400.0, found, perhaps, rest_ms, sure=not perhaps)


WHOSE = ("slow_rank", "late_entry", "processor_wait")


@pytest.mark.parametrize("kind", sorted(evidence.KINDS))
def test_every_kind_has_a_sentence_with_its_place_and_price(kind: str) -> None:
    about: dict[str, Any] = {"stage": 2}
    about |= {"ranks": (5,), "hosts": ("node-1",)} if kind in WHOSE else {}
    about |= {"link": (2, 3)} if kind == "slow_link" else {"chunk": 1} if kind == "slow_chunk" else {}
    of_link = {"transfer_ms": 45.3, "usual_ms": 0.76}
    found = diagnosis(cause(kind, parts={"factor": 1.4, "forward_ms": 3.0, "backward_ms": 6.0, **of_link}, **about))
    (said,) = causes.findings(MEASURED, found, None)
    assert (said.kind, said.severity, said.command) == (kind, "slow", None)
    assert said.text.endswith("This costs 40.0 ms (10% of the step), between 30.0 and 50.0 ms.")
    assert ("node-1" in said.text) == ("ranks" in about)
    assert ("45.3 ms" in said.text and "0.76 ms" in said.text) == ("link" in about)
    assert "None" not in said.text


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (9_200.0, 9_900.0, "9200 and 9900 ms"),
        (9_200.0, 12_300.0, "9200 ms and 12.3 s"),
        (1e4, 2e4, "10.0 s and 20.0 s"),
    ],
)
def test_both_ends_of_a_price_have_the_unit_that_is_said(low: float, high: float, said: str) -> None:
    of_long_steps = replace(diagnosis(cause("stalls", price=Interval(9_600.0, low, high))), step_ms=60_000.0)
    assert f"between {said}." in causes.findings(MEASURED, of_long_steps, None)[0].text


@pytest.mark.parametrize(
    ("host", "about", "command"),
    [
        ("megatron-lm", {"ranks": (5,)}, "torchrun --nproc_per_node=gpu megatron/training/gpu_sniff_test.py"),
        ("megatron-lm", {"ranks": (4, 5)}, None),
        ("verl", {"ranks": (5,)}, None),
        (None, {"ranks": (5,)}, None),
    ],
)
def test_a_slow_rank_of_megatron_lm_comes_with_its_own_test_of_gpus(
    host: str | None, about: dict[str, Any], command: str | None
) -> None:
    found = diagnosis(cause("slow_rank", stage=2, **about))
    said, *_ = causes.findings(replace(MEASURED, framework=host), found, None)
    assert said.command == command


@pytest.mark.parametrize(
    ("kind", "reason", "host", "option"),
    [
        ("garbage_collection", None, None, "--manual-gc --manual-gc-interval 100"),
        ("garbage_collection", None, "ms-swift", "--manual_gc true --manual_gc_steps 100"),
        ("unequal_replicas", "data", "verl", "trainer.balance_batch=True"),
        ("unequal_replicas", None, "slime", "--balance-data"),
        ("unequal_replicas", "data", "ms-swift", "--sequence_packing_scheduler dp_balanced"),
        ("unequal_replicas", "data", "skyrl", None),
        ("unequal_replicas", "machine", "verl", None),
    ],
)
def test_a_cause_that_an_option_of_the_host_mends_comes_with_it(
    kind: str, reason: str | None, host: str | None, option: str | None
) -> None:
    explained = float(reason == "data")
    parts = {"explained": explained, "explained_low": explained, "explained_high": explained, "longest_ms": 3.0}
    told = evidence.evidence(cause(kind, reason=reason, parts=parts), replace(MEASURED, framework=host))
    assert option in told if option else not re.search(r"--|=", told)


@pytest.mark.parametrize(("noise", "sure"), [(0.0, True), (0.3, False)])
def test_nothing_is_ruled_out_where_steps_differ_too_much(tmp_path: Path, noise: float, sure: bool) -> None:
    write(Scenario("even", noise=noise, steps=2, microbatches=16), tmp_path)
    (target,) = analyze(tmp_path).targets
    assert target.diagnosis is not None
    assert target.diagnosis.sure == sure
    said = causes.in_brief(replace(target.diagnosis, causes=()), None)
    assert said.severity == ("fine" if sure else "open")


@pytest.mark.parametrize(("kinds", "blamed"), [(("dense",), False), (("moe",), True), (None, True)])
def test_experts_are_blamed_only_where_there_may_be_some(kinds: tuple[str, ...] | None, blamed: bool) -> None:
    held = ChunkTimes(0, ModelChunk(layers=1, kinds=kinds), None, None)
    measured = replace(MEASURED, stages=(Stage(pp=0, ranks=(), chunks=(held,)),))
    parts = {"explained": 0.0, "explained_low": 0.0, "explained_high": 0.0}
    told = evidence.evidence(cause("unequal_replicas", reason="machine", parts=parts), measured)
    assert ("experts" in told) == blamed


@pytest.mark.parametrize(
    ("layers", "about", "said"),
    [
        (((2, 2), (1, 1)), {"stage": 0}, "Stage 0 holds 4 layers, and the other holds 2."),
        (((2,), (2,), (1,)), {"stages": (0, 1)}, "Stages 0-1 hold 2 layers each, and the other holds 1."),
        (((3, 1), (2, 2)), {"stages": (0, 1)}, "The layers are not spread evenly over the model chunks."),
    ],
)
def test_layers_are_those_of_stages_or_if_these_are_equal_of_chunks(
    layers: tuple[tuple[int, ...], ...], about: dict[str, Any], said: str
) -> None:
    chunks = [tuple(ChunkTimes(i, ModelChunk(layers=n), None, None) for i, n in enumerate(each)) for each in layers]
    measured = replace(MEASURED, stages=tuple(Stage(pp=pp, ranks=(), chunks=each) for pp, each in enumerate(chunks)))
    assert evidence.evidence(cause("layers", **about), measured) == said


def test_what_may_be_a_cause_comes_with_the_steps_that_would_tell() -> None:
    few = cause("slow_forward", stage=1, price=Interval(9.0, -2.0, 20.0), more_steps=6)
    first, second = causes.findings(MEASURED, diagnosis(perhaps=(few,)), None)
    assert first.severity == "open"
    assert "8 steps would show" in second.text
    assert "up to 20.0 ms" in second.text
    many = replace(few, more_steps=0)
    (_, hopeless) = causes.findings(MEASURED, diagnosis(perhaps=(many,)), None)
    assert "would show" not in hopeless.text
    # Beside what surely costs more, nobody needs to know it yet: that is mended first.
    first = cause("layers", stage=0)
    assert len(causes.findings(MEASURED, diagnosis(first, perhaps=(few,)), None)) == 1
    assert causes.capture_advice(MEASURED, diagnosis(first, perhaps=(few,)), WhatIf(), None) is None
    # One command for all that is open: what a run is started with, or what a running job is asked with.
    open_ = diagnosis(perhaps=(few, replace(few, more_steps=3), many))
    for predicted, job, command in (
        (WhatIf(), None, "--profile-steps train_actor=7:15"),
        (WhatIf(more_steps=9), Path("/d"), "megaprof trigger /d --target train_actor --steps 11 --select per-stage"),
    ):
        told = causes.capture_advice(MEASURED, open_, predicted, job)
        assert told is not None
        assert told.command == command
    assert causes.capture_advice(MEASURED, diagnosis(perhaps=(many,)), WhatIf(), None) is None


def test_what_comes_and_goes_has_the_cost_of_its_steps_where_the_others_cost_nothing() -> None:
    """0.25 x 100 = 25."""
    found = cause("slow_rank", stage=1, ranks=(3,), share=0.25, while_ms=100.0, price=Interval(25.0, 20.0, 30.0))
    (said,) = causes.findings(MEASURED, diagnosis(found), None)
    assert [float(ms) for ms in re.findall(r"([\d.]+) ms", said.text)] == [25, 30, 100]
    assert "in 12 of 48 steps" in said.text
    (said,) = causes.findings(MEASURED, diagnosis(replace(found, while_ms=99.8)), None)
    assert "99.8 ms in these steps" in said.text, "25.0 and 24.95 differ as printed"
    elsewhere = replace(found, price=Interval(40.0, 30.0, 50.0))
    (said,) = causes.findings(MEASURED, diagnosis(elsewhere), None)
    assert [float(ms) for ms in re.findall(r"([\d.]+) ms", said.text)] == [40, 50], "the average alone"
    # Who comes and goes is told from who became slow.
    since = replace(found, since=40)
    hints = [" comes and goes" in evidence.evidence(one, MEASURED) for one in (found, elsewhere, since)]
    assert hints == [True, False, False]


def test_a_price_that_may_be_nothing_has_only_its_upper_end() -> None:
    hiding = cause("layers", stage=0, price=Interval(6.0, -1.0, 13.0), while_ms=6.0)
    first, _ = causes.findings(MEASURED, diagnosis(hiding, cause("slow_rank", ranks=(3,))), None)
    assert [float(ms) for ms in re.findall(r"([\d.]+) ms", first.text)] == [13.0]
    brief = causes.in_brief(diagnosis(hiding, cause("slow_rank", ranks=(3,))), None)
    assert [float(ms) for ms in re.findall(r"([\d.]+) ms", brief.text)] == [13.0, 40.0]


def test_what_may_be_a_cause_is_priced_with_as_many_microbatches_as_there_are() -> None:
    perhaps, few = cause("late_entry", ranks=(1,)), cause("few_microbatches")
    for above, fixed in (((), False), ((few,), False), ((cause("layers", stage=0), few), True)):
        said = causes.findings(MEASURED, diagnosis(*above, perhaps=(perhaps,)), None)[-1]
        assert ("with the causes above fixed" in said.text) == fixed


def test_a_step_that_may_have_been_warming_up_is_not_asked_for_again() -> None:
    few = cause("slow_forward", stage=1, price=Interval(9.0, -2.0, 20.0), more_steps=3)
    for steps, wanted in (((0,), "1:6"), ((0, 1), "2:7"), ((2, 3, 4), "2:7")):
        told = causes.capture_advice(replace(MEASURED, steps=steps), diagnosis(perhaps=(few,)), WhatIf(), None)
        assert told is not None
        assert told.command == f"--profile-steps train_actor={wanted}"


def test_only_the_most_expensive_cause_is_priced_with_nothing_fixed_before_it() -> None:
    first, second = causes.findings(MEASURED, diagnosis(cause("layers", stage=0), cause("slow_rank", ranks=(3,))), None)
    assert "This costs 40.0 ms" in first.text
    assert "With the causes above fixed, this costs 40.0 ms" in second.text


@pytest.mark.parametrize(("stage", "name"), [(0, "embedding of stage 0"), (1, "output layer and loss of stage 1")])
def test_what_a_stage_cannot_hold_is_not_named(stage: int, name: str) -> None:
    assert evidence.name_of(cause("embedding_or_loss", stage=stage)) == name


def test_an_excess_of_a_stage_is_no_embedding_if_nobody_says_what_it_holds() -> None:
    found = diagnosis(cause("embedding_or_loss", stage=0, parts={"forward_ms": 3.0, "backward_ms": 6.0}))
    held = ChunkTimes(0, ModelChunk(embedding=True), None, None)
    for stages in ((), (Stage(pp=0, ranks=(), chunks=(held,)),)):  # nothing is known, or not how many layers
        (said,) = causes.findings(replace(MEASURED, stages=stages), found, None)
        assert "embedding" not in said.text
        assert "9.00 ms" in said.text


def test_as_many_more_steps_are_asked_for_as_every_open_question_needs() -> None:
    few = cause("communication", group="dp", price=Interval(9.0, -2.0, 20.0), more_steps=6)
    (told,) = filter(None, [causes.capture_advice(MEASURED, diagnosis(perhaps=(few,)), WhatIf(more_steps=9), None)])
    assert told.text.startswith("To be more certain, capture 11 steps instead of 2")


def test_what_nobody_can_name_is_said_where_it_is_much() -> None:
    assert [found.kind for found in causes.findings(MEASURED, diagnosis(rest_ms=9.0), None)] == ["no_cause", "rest"]
    assert [found.severity for found in causes.findings(MEASURED, diagnosis(rest_ms=7.0), None)] == ["fine"]


def test_without_a_diagnosis_it_says_why() -> None:
    why = Note("incomplete", said="1 of 2 stages captured")
    (said,) = causes.findings(MEASURED, None, why)
    assert (said.kind, said.severity) == ("no_verdict", "open")
    assert said.text.endswith(": 1 of 2 stages captured.")


@pytest.mark.parametrize(
    ("layers", "name"),
    [((4, 4), "exchanges between stages 0 and 1"), ((3, 3, 3), "exchanges between all stages")],
)
def test_exchanges_are_said_to_be_between_all_stages_where_there_are_several_links(
    layers: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    slow = dict.fromkeys(range(len(layers) - 1), 12.0)
    write(Scenario("exchanges", layers=layers, link=slow, gpu=False), tmp_path)
    (target,) = analyze(tmp_path).targets
    assert target.in_brief().text.startswith(name)
