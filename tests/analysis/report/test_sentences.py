"""What a report says, from data alone."""

from __future__ import annotations

from dataclasses import replace

from megaprof.analysis.report.text import sentences
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.what_if import WhatIf


def test_what_predictions_rest_on_is_said_once_below_the_table() -> None:
    more = "more layers x in-flight microbatches on stage 0 than any stage held (22 against 16)"
    two, four = (
        Prediction("chunks", f"{n} model chunks", 9.0, 1.1, 1.0, 1.2, assumes="a chunk costs it") for n in (2, 4)
    )
    assert sentences.caveats(
        [replace(two, memory=more), four, Prediction("layout", "4+4 layers", 9.0, 1.1, 1.0, 1.2)]
    ) == [
        "2 model chunks / 4 model chunks: assumes that a chunk costs it.",
        f"2 model chunks: {more}.",
    ]


def test_a_command_is_data_and_stands_in_backticks_only_where_all_is_text() -> None:
    flags = ("--pipeline-model-parallel-layout", "Et*4|t*4L")
    best = Prediction("layout", "4+4 layers", 500.0, 1.4, 1.3, 1.5, flags=flags)
    said = sentences.of_what_if(WhatIf(best=best, advice="4+4 layers: 500 ms a step"))
    assert said is not None
    assert (said.text, said.command) == (
        "4+4 layers: 500 ms a step.",
        "--pipeline-model-parallel-layout 'Et*4|t*4L'",
    )
    assert said.plain == f"{said.text} `{said.command}`"
    assert sentences.of_what_if(WhatIf()) is None


def test_predictions_that_are_noise_are_left_out_and_counted() -> None:
    best = Prediction("layout", "4+4 layers", 500.0, 1.4, 1.35, 1.45)
    within = Prediction("chunks", "2 model chunks", 650.0, 1.08, 0.88, 1.28)  # no number of steps would tell
    noise = Prediction("layout", "5+3 layers", 600.0, 1.17, 0.6, 3.5, more_steps=9)
    clear = Prediction("balanced", "spread evenly", 350.0, 2.0, 1.6, 2.4)
    found = WhatIf(candidates=(best, within, noise, clear), best=best)
    assert sentences.worth_showing(found) == [best, clear]
    assert sentences.left_out(found) == "2 predictions are left out: what they gain is within the uncertainty."
    assert sentences.left_out(replace(found, best=noise, candidates=(best, noise, clear))) is None
    noisy = WhatIf(candidates=(noise, replace(noise, what="6+2 layers")))
    assert sentences.worth_showing(noisy) == []
    assert (sentences.left_out(noisy) or "").startswith("2 predictions are left out: what they gain ")
