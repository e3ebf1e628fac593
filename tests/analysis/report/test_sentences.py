"""What a report says, from data alone."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from megaprof.analysis.diagnosis.stages import Stage, TargetStages
from megaprof.analysis.report.text import sentences, what_if
from megaprof.analysis.samples import Interval, Spread
from megaprof.analysis.table.iterations import Iterations
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.what_if import Advice, WhatIf
from megaprof.parallel.topology import ParallelSizes

BEST = Prediction("layout", Interval.of(500.0), Interval(1.4, 1.35, 1.45), layers=(4, 4))


def test_what_predictions_rest_on_is_said_once_below_the_table() -> None:
    two, four = (
        Prediction("chunks", Interval.of(9.0), Interval(1.2, 1.1, 1.3), chunks=n, layers=(4, 4)) for n in (2, 4)
    )
    found = WhatIf(candidates=(replace(two, in_flight=(22, 8)), four, BEST), in_flight=(16, 8))
    both, more = what_if.remarks(found)
    assert both.startswith("2, 4 model chunks per stage, 4+4 layers: on the assumption that ")
    assert more.startswith("2 model chunks per stage, 4+4 layers: ")
    assert "22 layers x microbatches at once, and no stage holds more than 16 now" in more
    assert "fits" not in (what_if.memory(replace(two, in_flight=(22, 8), fits=True), found) or "")


def test_a_command_is_data_beside_its_text() -> None:
    best = replace(BEST, flags=("--pipeline-model-parallel-layout", "Et*4|t*4L"))
    said = what_if.layout_advice(WhatIf(best=best, advice="change", measured_ms=700.0))
    assert said is not None
    assert said.text.startswith("4+4 layers: 1.4")
    assert said.command == "--pipeline-model-parallel-layout 'Et*4|t*4L'"
    assert what_if.layout_advice(WhatIf()) is None


def test_a_layout_that_may_be_faster_than_the_advised_one_is_named_beside_it() -> None:
    other = replace(BEST, layout="Et*3|t*5L", layers=(3, 5), speedup=Interval(1.1, 0.9, 1.45))
    found = WhatIf(best=BEST, candidates=(BEST, other), advice="change", measured_ms=700.0, alike=("Et*3|t*5L",))
    told = what_if.layout_advice(found)
    assert told is not None
    assert "; 3+5 layers may be faster still: a capture with --profile-ranges layer would show" in told.text


@pytest.mark.parametrize("advice", get_args(Advice))
def test_every_advice_has_a_sentence_of_its_own(advice: Advice) -> None:
    first = replace(BEST, needed=(9 << 30, 5 << 30), fits=False)
    found = WhatIf(candidates=(first,), quickest=first, advice=advice, allowed=(8 << 30,) * 2, allocated=(7 << 30,) * 2)
    said = what_if.layout_advice(replace(found, best=first) if advice == "change" else found)
    others = [what_if.layout_advice(replace(found, advice=each)) for each in get_args(Advice) if each != advice]
    assert said is not None
    assert said not in others
    assert "None" not in said.text
    assert ("8.0 GiB" in said.text) == (advice == "none_fits")


def test_other_chunks_or_microbatches_that_certainly_gain_more_stand_beside_the_advice() -> None:
    chunks = Prediction("chunks", Interval.of(460.0), Interval(1.5, 1.4, 1.6), chunks=2, layers=(4, 4))
    half = Prediction("microbatches", Interval.of(450.0), Interval(1.55, 1.01, 1.7), microbatches=4, tokens=2.0)
    found = WhatIf(candidates=(BEST, chunks, half), best=BEST, advice="change", measured_ms=700.0)
    named = "2 model chunks per stage, 4+4 layers, 1.50 (1.40 to 1.60) times as fast"
    needs = replace(chunks, in_flight=(9, 4))
    for each, said in (
        (found, f" Faster still, if the assumptions below hold: {named}."),
        (replace(found, candidates=(replace(chunks, flags=("--a", "2")),)), f"{named} (its flags are further below)."),
        (replace(found, best=None, advice="unsure"), f" Faster, if the assumptions below hold: {named}."),
        (replace(found, candidates=(needs,), in_flight=(8, 4)), " no stage holds more than 8 now."),
        (replace(found, candidates=(BEST, replace(chunks, speedup=Interval(1.5, 1.01, 1.6)), half)), None),
        (replace(found, candidates=(BEST, replace(chunks, speedup=Interval(1.3, 1.25, 1.35)))), None),
        (replace(found, candidates=(BEST, replace(chunks, fits=False))), None),
    ):
        told = what_if.layout_advice(each)
        assert told is not None
        assert told.text.endswith(said) if said else "model chunks per stage" not in told.text


def test_predictions_that_are_noise_are_left_out() -> None:
    within = Prediction(
        "chunks", Interval.of(650.0), Interval(1.08, 0.88, 1.28), chunks=2
    )  # no number of steps would tell
    noise = Prediction("layout", Interval.of(600.0), Interval(1.17, 0.6, 3.5), layers=(5, 3), more_steps=9)
    clear = Prediction("balanced", Interval.of(350.0), Interval(2.0, 1.6, 2.4))
    best, found = BEST, WhatIf(candidates=(BEST, within, noise, clear), best=BEST)
    assert what_if.worth_showing(found) == [best, clear]
    noisy = WhatIf(candidates=(noise, replace(noise, layers=(6, 2))))
    assert what_if.worth_showing(noisy) == []


def test_a_step_without_its_last_stage_is_said_to_be_that() -> None:
    whole = TargetStages(
        "train_actor", None, ParallelSizes(pp=2), "1f1b", False, 8, (5,), None, "one_clock", (), None, ()
    )
    stage = Stage(pp=0, ranks=(), chunks=())
    told = [sentences.basis(replace(whole, stages=(stage,) * count)) for count in (2, 1)]
    assert len(set(told)) == 2
    assert told[1].startswith(told[0])


def test_a_step_that_is_longer_than_an_iteration_says_why() -> None:
    """Each of two stages takes 100 ms for its part of a pass, and begins with the next one at once."""
    passes = TargetStages(
        "train_log_probs",
        None,
        ParallelSizes(pp=2),
        "1f1b",
        True,
        8,
        (5,),
        Spread.of([200.0]),
        "one_clock",
        (),
        None,
        (),
    )
    quick, slow = (Iterations(9, ms, 100.0, ()) for ms in (100.0, 230.0))
    assert "begins the next pass" in sentences.basis(passes, quick)
    for found, iterations in ((passes, slow), (passes, None), (replace(passes, forward_only=False), quick)):
        assert "longer" not in sentences.basis(found, iterations)
