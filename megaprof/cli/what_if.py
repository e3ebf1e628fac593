"""``megaprof what-if DIR``: predicts the effect of a change to a captured run that the user chooses."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from megaprof.analysis.report.report import Report, TargetReport
from megaprof.analysis.report.text.what_if import AS_CAPTURED, name_of, notes_on, times_as_fast
from megaprof.analysis.what_if.changeable import Changeable, chosen, stages_after
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import options_of
from megaprof.analysis.words import number, percent, title, within
from megaprof.cli import UsageError, add_input_option, print_json, say
from megaprof.cli.report import report_on
from megaprof.formats.inputs import path_of
from megaprof.formats.phrases import Unanswerable

EXAMPLES = (
    "megaprof what-if traces --layout 5,3",
    "megaprof what-if traces --microbatches 16 --packing balanced",
    "megaprof what-if traces --layout 'Et*5|t*3L' --json",
)
#: The metavar and the help of each change that can be chosen.
CHOICES = {
    "layout": ("LAYOUT", "decoder layers of each stage, such as 5,3, or Megatron's --pipeline-model-parallel-layout"),
    "chunks": ("N", "model chunks per stage"),
    "microbatches": ("N", "microbatches per step"),
    "p2p": ("MS", "duration of one transfer between stages, in milliseconds"),
    "tokens": (
        "same|more",
        "with --microbatches: keep the tokens of the step (same), or the size of a microbatch (more) (default: same)",
    ),
    "packing": (
        "PLAN",
        "how to pack the same sequences: balanced, tokens (equally many per microbatch), pooled (over all replicas), "
        "long-first, long-last, alternating, fewer (microbatches)",
    ),
}


@dataclass(frozen=True)
class WhatIfAnswer:
    """The predicted effect of a chosen change on a target. Everything else stays as it was captured."""

    target: str
    """The target, such as ``train_actor``."""
    role: str | None
    """The model's role; None without one."""
    what: str
    """The change, in words."""
    measured_ms: float
    """The measured step in milliseconds."""
    microbatches: int
    """Microbatches per step, with the change."""
    prediction: Prediction
    """The step with the change."""
    bubble: float | None
    """Bubble as a fraction of the step, averaged over stages, with the change; None if the report has none. Without a
    change, this and ``imbalance`` are those of the report's tables."""
    imbalance: float | None
    """Compute of the slowest stage / of the average stage, with the change; None if the report has none."""
    host_options: tuple[str, ...] | None
    """The change as options of the host that trained; None if that host takes Megatron's flags."""
    caveats: tuple[str, ...]
    """Sentences on the assumptions of the prediction, its memory, and its steps if they are not the report's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=path_of, help="directory of captured traces, also remote (s3://...)")
    for name, (value, text) in CHOICES.items():
        parser.add_argument(f"--{name}", metavar=value, default="", help=text)
    parser.add_argument("--target", metavar="NAME", help="target (default: the first that can be changed)")
    parser.add_argument("--role", metavar="NAME", help="role, if several were captured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_input_option(parser, runs=True)


def run(arguments: argparse.Namespace) -> int:
    """Predicts, and prints lines or JSON. Raises Unanswerable, and UsageError for a change that cannot be chosen."""
    report = report_on(arguments.dir, arguments.run)
    answer = answer_to(report, {name: getattr(arguments, name) for name in CHOICES}, arguments.target, arguments.role)
    if arguments.json:
        print_json(answer)
    else:
        for line in in_words(answer):
            say(line)
    return 0


def answer_to(
    report: Report, choices: Mapping[str, str], target: str | None = None, role: str | None = None
) -> WhatIfAnswer:
    """Returns the prediction of `changeable.chosen` for a target of a report. Raises Unanswerable, and UsageError for a
    change that has no prediction."""
    target_report, changeable = _find_target(report, target, role)
    try:
        choice = chosen(changeable, choices)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None
    after = stages_after(target_report, changeable, choice)
    return WhatIfAnswer(
        *target_report.key,
        what=name_of(choice.prediction, target_report.what_if),
        measured_ms=changeable.baseline.step_ms,
        microbatches=choice.setting.microbatches,
        prediction=choice.prediction,
        bubble=after.bubble,
        imbalance=after.imbalance,
        host_options=options_of(
            target_report.framework, target_report.role, choice.prediction.flags, changeable.stages
        ),
        caveats=(
            *notes_on(choice.prediction, target_report.what_if),
            *(note.text for note in target_report.what_if.warnings),
        ),
    )


def _find_target(report: Report, target: str | None, role: str | None) -> tuple[TargetReport, Changeable]:
    matching = [
        (each, changeable)
        for each, changeable in zip(report.targets, report.by_hand, strict=True)
        if target in (None, each.target) and role in (None, each.role)
    ]
    if not matching:
        captured = ", ".join(" ".join(filter(None, each.key)) for each in report.targets) or "none"
        raise UsageError(f"there is no such target; captured: {captured}")
    for each, changeable in matching:
        if changeable is not None:
            return each, changeable
    first, _ = matching[0]
    advice = first.advice.text if first.advice else "nothing was captured"
    reason = next((note.text for note in (first.withheld, *first.what_if.warnings) if note is not None), advice)
    raise Unanswerable(f"nothing can be predicted: {reason.partition(' predicted: ')[2] or reason}")


def in_words(answer: WhatIfAnswer) -> list[str]:
    prediction = answer.prediction
    surely = "" if prediction.speedup.holds(1.0) else f"{'faster' if prediction.speedup.value > 1.0 else 'slower'}, "
    step = f"{within(prediction.step_ms)} ms instead of {number(answer.measured_ms)} ms: {surely}"
    step += times_as_fast(prediction) + ", within the uncertainty" * (not surely)
    if answer.what == AS_CAPTURED:
        step = f"{number(answer.measured_ms)} ms; nothing is changed"
    imbalance = "" if answer.imbalance is None else f", imbalance {answer.imbalance:.2f}"
    lines = [
        f"{title(answer.target, answer.role)}: {answer.what}",
        f"step: {step}",
        f"bubble {percent(answer.bubble)}, averaged over the stages{imbalance}, in the steps of the report's tables",
        f"flags: {shlex.join(prediction.flags)}" if prediction.flags else "",
        f"the host's options: {shlex.join(answer.host_options)}" if answer.host_options else "",
        *answer.caveats,
    ]
    return [line for line in lines if line]
