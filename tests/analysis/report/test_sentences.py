"""What a report says, from data alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaprof.analysis.report import sentences
from megaprof.analysis.report.sentences import Finding
from megaprof.analysis.stages.loads import Cause
from megaprof.analysis.stages.verdict import Comparison, Outcome, Verdict
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.what_if import WhatIf

COMPARISON = Comparison(0, "slow", 94.35, 61.51, 1.2, 90.0, 60.0)


@pytest.mark.parametrize(
    ("outcome", "severity", "text"),
    [
        (
            "slow",
            "slow",
            "Stage 0 is slow: it computes 94 ms per microbatch (median), 53% above the average over stages (62 ms).",
        ),
        (
            "within",
            "fine",
            "No stage is slow: stage 0 is the slowest and computes 94 ms per microbatch (median), 53% above the "
            "average over stages (62 ms); a stage is called slow when it is more than 10% above.",
        ),
        (
            "chance",
            "open",
            "No stage is called slow: stage 0 is the slowest and computes 94 ms per microbatch (median), 53% above the "
            "average over stages (62 ms), but microbatches vary so much that this may be chance (standard error 1.20 "
            "ms).",
        ),
        (
            "some_microbatches",
            "open",
            "No stage is called slow: stage 0 is the slowest and computes 94 ms per microbatch (median), 53% above the "
            "average over stages (62 ms), but it is slower in some microbatches only: its quickest one takes 90.0 ms, "
            "on average over stages the quickest one takes 60.0 ms.",
        ),
    ],
)
def test_the_verdict(outcome: Outcome, severity: str, text: str) -> None:
    said = sentences.of_verdict(Verdict(comparison=replace(COMPARISON, outcome=outcome)))
    assert said is not None
    assert (said.severity, said.text, said.command) == (severity, text, None)


def test_a_verdict_that_is_withheld_says_why() -> None:
    said = sentences.of_verdict(Verdict(withheld="there is no pipeline (pp=1)"))
    assert said == Finding("no_verdict", "open", "No stage is called slow: there is no pipeline (pp=1).")
    assert sentences.of_verdict(Verdict()) is None


def test_a_cause_says_what_it_costs() -> None:
    cause = Cause("layers", 0, "6 layers against 2", "", 26.04)
    text = "6 layers against 2. It takes 26.0 ms per microbatch, compared with the average over stages."
    assert sentences.of_cause(cause) == Finding("layers", "open", text)
    text = "6 layers against 2. It costs 212 ms of the step."
    assert sentences.of_cause(replace(cause, gain_ms=212.4)) == Finding("layers", "open", text)


def test_two_slow_stages_are_both_named() -> None:
    also = replace(COMPARISON, stage=2, median_ms=80.0)
    said = sentences.of_verdict(Verdict(slowest_stage=0, comparison=COMPARISON, also_slow=(also,)))
    assert said is not None
    assert said.text.endswith(
        "Stage 2 is slow, too: it computes 80 ms per microbatch (median), 30% above the average over stages (62 ms)."
    )


def test_what_predictions_rest_on_is_said_once_below_the_table() -> None:
    more = "more layers x in-flight microbatches on stage 0 than any stage held (22 against 16)"
    two, four = (Prediction("chunks", f"{n} model chunks", 9.0, 1.1, 0.1, assumes="a chunk costs it") for n in (2, 4))
    assert sentences.caveats([replace(two, memory=more), four, Prediction("layout", "4+4 layers", 9.0, 1.1, 0.1)]) == [
        "2 model chunks / 4 model chunks: assumes that a chunk costs it.",
        f"2 model chunks: {more}.",
    ]


def test_a_command_is_data_and_stands_in_backticks_only_where_all_is_text() -> None:
    flags = ("--pipeline-model-parallel-layout", "Et*4|t*4L")
    best = Prediction("layout", "4+4 layers", 500.0, 1.4, 20.0, flags=flags)
    said = sentences.of_what_if(WhatIf(best=best, advice="4+4 layers: 500 ms a step"))
    assert said is not None
    assert (said.text, said.command) == (
        "4+4 layers: 500 ms a step.",
        "--pipeline-model-parallel-layout 'Et*4|t*4L'",
    )
    assert said.plain == f"{said.text} `{said.command}`"
    assert sentences.of_what_if(WhatIf()) is None


def test_predictions_that_are_noise_are_left_out_and_counted() -> None:
    best = Prediction("layout", "4+4 layers", 500.0, 1.4, 20.0, 0.05, 0.01)
    within = Prediction("chunks", "2 model chunks", 650.0, 1.08, 140.0, 0.2, 0.01)  # not for noise: cores are shared
    noise = Prediction("layout", "5+3 layers", 600.0, 1.17, 1200.0, 2.3, 2.0, more_steps=9)
    clear = Prediction("balanced", "spread evenly", 350.0, 2.0, 60.0, 0.4, 0.2)
    found = WhatIf(candidates=(best, within, noise, clear), best=best)
    assert sentences.worth_showing(found) == [best, within, clear]
    assert sentences.left_out(found) == (
        "1 prediction is left out: what it gains is within the uncertainty, which more captured steps would make "
        "smaller."
    )
    assert sentences.left_out(replace(found, best=noise)) is None
    noisy = WhatIf(candidates=(noise, replace(noise, what="6+2 layers")))
    assert sentences.worth_showing(noisy) == []
    assert (sentences.left_out(noisy) or "").startswith("2 predictions are left out: what they gain ")
