"""Puts the verdict into sentences: the causes of lost time and their prices, the most expensive first; possible causes;
and what would show whether they are real."""

from __future__ import annotations

from pathlib import Path

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.notes import Note
from megaprof.analysis.report.text.evidence import costs_only_there, evidence, name_of
from megaprof.analysis.report.text.sentences import Finding, step_of, trigger, unmoved
from megaprof.analysis.samples import mean_of
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.analysis.words import capital, counted, milliseconds, percent, steps
from megaprof.formats.job import Standstill
from megaprof.formats.phrases import listed
from megaprof.parallel.selectors import join_spans, spans_of

#: At most this many causes of a target are named in a table of targets.
_IN_BRIEF = 3
#: Microbatches that differ by less than this factor count as equal.
_ALIKE = 1.005
#: Tests all GPUs of a host, for the case of a single slow rank. Megatron-LM 0.18 and later have this script.
_TEST_GPU = "torchrun --nproc_per_node=gpu megatron/training/gpu_sniff_test.py"


def findings(
    measured: TargetStages,
    diagnosis: Diagnosis | None,
    withheld: Note | None,
    job: Path | None = None,
) -> tuple[Finding, ...]:
    """Returns the verdict: the causes, the most expensive first, then possible causes, and then lost time without a
    known cause.

    ``withheld``: why there is no diagnosis; ``job``: the directory in which the job can be asked for a capture.
    """
    if diagnosis is None:
        why = withheld.text if withheld else "nothing was recorded"
        return (Finding("no_verdict", "open", f"No cause of lost time is named: {why}."),)
    statements = [_finding(place, measured, diagnosis, job) for place in range(len(diagnosis.causes))]
    if not statements:
        surely = "" if diagnosis.sure else " surely"
        text = f"No lasting cause{surely} costs more than {percent(LEAST)} of the step."
        if not diagnosis.sure and not diagnosis.perhaps and diagnosis.clocks:
            text += " The steps differ too much to rule one out."
        waits_ms = max((mean_of(stage.host_bound_ms) or 0.0 for stage in measured.shown), default=0.0)
        unpriced = measured.profiled and waits_ms > LEAST * diagnosis.step_ms
        if unpriced:
            text += f" A stage waits {milliseconds(waits_ms)} for the host; how much of that the profiler causes is not"
            text += " known."
        statements.append(Finding("no_cause", "fine" if diagnosis.sure and not unpriced else "open", text))
    for cause in _first_to_fix(diagnosis):
        text = f"Perhaps {name_of(cause)}: {price(cause, diagnosis.causes, diagnosis, 'may cost')}"
        # It is not known here whether the job still runs, so the sentence holds for any run like it.
        text += f"; {counted(diagnosis.steps + cause.more_steps, 'step')} would show" * (cause.more_steps > 0)
        statements.append(Finding("perhaps", "open", f"{text}."))
    if diagnosis.rest_ms > LEAST * diagnosis.step_ms:
        lost = f"{milliseconds(diagnosis.rest_ms)} ({percent(diagnosis.rest_ms / diagnosis.step_ms)} of the step)"
        text = f"Single passes that took longer than usual, each at another place, cost {lost}."
        statements.append(Finding("rest", "open", text))
    return tuple(statements)


def in_brief(
    diagnosis: Diagnosis | None,
    fleet: Fleet | None,
    standstill: Standstill | None = None,
    surely_in: Diagnosis | None = None,
) -> Finding:
    """Returns the verdict in a few words, for a table of targets.

    ``standstill``: the step in which the job stands still or was killed. ``surely_in``: a diagnosis that this one is
    compared with. A cause that is certain there and only possible here is named as well; otherwise it would look new
    there.
    """
    if standstill is not None and not standstill.inside:
        return Finding("in_brief", "open", f"{unmoved(standstill)[:1].lower()}{unmoved(standstill)[1:]}")
    if standstill is not None:
        text = "stands still in" if standstill.outcome == "lasts" else "ended in the middle of"
        return Finding("in_brief", "slow", f"{text} {step_of(standstill)}")
    standstills = () if fleet is None else fleet.standstills
    still = sorted(standstill.step for standstill in standstills if standstill.seconds)
    certain = [f"stood still in {steps(still)}"] if still else []
    certain += [f"ended in the middle of step {each.step}" for each in standstills if not each.seconds]
    possible = []
    if diagnosis is not None:
        # In milliseconds, not percent: the step time beside it includes the time that megaprof took; prices do not.
        certain += [_amount(cause, diagnosis) for cause in diagnosis.causes]
        named = {name_of(cause) for cause in surely_in.causes} if surely_in is not None else set()
        unsure = (cause for cause in diagnosis.perhaps if name_of(cause) in named and cause.price.value > 0.0)
        possible = [f"perhaps {_amount(cause, diagnosis)}" for cause in unsure]
    if certain or possible:
        shown = [listed(certain, _IN_BRIEF)] * bool(certain) + possible
        return Finding("in_brief", "slow" if certain else "open", ", ".join(shown))
    if diagnosis is None:
        return Finding("in_brief", "open", "no verdict")
    text = f"nothing{' surely' * (not diagnosis.sure)} costs {percent(LEAST)} of the step"
    return Finding("in_brief", "fine" if diagnosis.sure else "open", text)


def _amount(cause: Cause, diagnosis: Diagnosis) -> str:
    """Returns a cause with its price in a few words: ``slow rank 3 (143 ms)``, ``slow rank 3 (up to 25.7 ms)``."""
    up_to, ms = _shown(cause, diagnosis)
    return f"{name_of(cause)} ({up_to}{milliseconds(ms)})"


def _shown(cause: Cause, diagnosis: Diagnosis) -> tuple[str, float]:
    """Returns a price in milliseconds. If it may be nothing, because it is not certain or another cause hides it,
    returns ``up to`` and its upper end."""
    sure = cause.price.low > LEAST * diagnosis.step_ms
    return ("", cause.price.value) if sure else ("up to ", max(0.0, cause.price.high))


def price(cause: Cause, above: tuple[Cause, ...], diagnosis: Diagnosis, costs: str = "costs") -> str:
    """Returns what a cause costs once those ``above`` are fixed, in a clause. No price assumes that there are more
    microbatches."""
    (up_to, ms), whole, at = _shown(cause, diagnosis), diagnosis.step_ms, cause.price
    fixed = "with the causes above fixed, " * any(other.kind != "few_microbatches" for other in above)
    average = " a step on average" * (not up_to and cause.share < 1.0)
    text = f"{fixed}this {costs} {up_to}{milliseconds(ms)}{average} ({percent(ms / whole)} of the step)"
    if up_to:
        return text
    low, high = milliseconds(at.low), milliseconds(at.high)
    text += f", between {low.removesuffix(' ms') if high.endswith(' ms') else low} and {high}" * (low != high)
    if cause.share == 1.0 or not costs_only_there(cause):
        return text
    when = "these steps" if round(cause.share * cause.steps) > 1 else "that step"
    return f"{text}: {milliseconds(cause.while_ms)} {'since then' if cause.since is not None else f'in {when}'}"


def _finding(place: int, measured: TargetStages, diagnosis: Diagnosis, job: Path | None) -> Finding:
    cause, command = diagnosis.causes[place], None
    text = f"{evidence(cause, measured)} {capital(price(cause, diagnosis.causes[:place], diagnosis))}."
    if len(cause.ranks) > 1 and cause.kind == "slow_rank" and job is not None:
        text += " While the job runs, a capture shows which of them it is:"
        command = trigger(job, measured.target, join_spans(spans_of(cause.ranks), ","))
    elif (cause.kind, len(cause.ranks), cause.reason or "machine") == ("slow_rank", 1, "machine") and (
        measured.framework == "megatron-lm"
    ):
        text += " On its host, while no job has the GPUs, this says whether one of them is slow (Megatron-LM 0.18 on):"
        command = _TEST_GPU
    return Finding(cause.kind, "slow", text, command)


def _first_to_fix(diagnosis: Diagnosis) -> list[Cause]:
    """Returns the possible causes that may turn out to be the one to fix first. Of others, nobody needs to know more
    yet."""
    dearest = max((cause.price.value for cause in diagnosis.causes), default=0.0)
    return [cause for cause in diagnosis.perhaps if cause.price.high > dearest]


def more_steps(diagnosis: Diagnosis, predicted: WhatIf) -> int:
    """Returns how many more steps would show what to do first: which cause costs most, and which layout is faster."""
    return max(predicted.more_steps, *(cause.more_steps for cause in _first_to_fix(diagnosis)), 0)


def capture_advice(
    measured: TargetStages, diagnosis: Diagnosis | None, predicted: WhatIf, job: Path | None
) -> Finding | None:
    """Returns how to capture enough steps to answer what is open; None if more steps would show nothing.

    ``job``: the directory in which the running job can be asked for a capture. None: the answer is an option for the
    start of a job.
    """
    if diagnosis is None or not measured.steps or not (more := more_steps(diagnosis, predicted)):
        return None
    wanted = diagnosis.steps + more
    # Fewer than three steps do not show whether the first one was still warming up.
    begin = measured.steps[0] if len(measured.steps) > 2 else measured.steps[-1] + 1
    command = f"--profile-steps {measured.target}={begin}:{begin + wanted}"
    text = f"To be more certain, capture {counted(wanted, 'step')} instead of {diagnosis.steps}"
    if job is None:
        return Finding("capture", "open", f"{text}, with this option of the job:", command)
    return Finding("capture", "open", f"{text} while the job runs:", trigger(job, measured.target, steps=wanted))


def lengths(diagnosis: Diagnosis | None) -> str | None:
    """Returns a line about the content of microbatches, and how far their lengths explain their times. None if the
    content is not known, or if all microbatches are alike."""
    content = None if diagnosis is None else diagnosis.lengths
    if content is None or max(content.squares, content.tokens_ratio) < _ALIKE:
        return None
    tokens, sequences = (
        f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
        for low, high in (content.tokens, content.sequences)
    )
    of = content.explained
    return (
        f"microbatches: {tokens} tokens in {sequences} sequence{'s' * (sequences != '1')}; the longest has "
        f"{content.squares:.2g} times the mean sum of squared lengths and {content.tokens_ratio:.2g} times the mean "
        f"tokens; lengths explain {percent(of.value)} ({percent(of.low)} to {percent(of.high)}) of how long they take"
    )
