"""Whether headline, verdict, causes, findings and advice of a report tell one story."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megaprof.analysis.report import sentences
from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.what_if.layouts import layers_per_stage, parse_layout

_OF_LAYERS = ("layers", "embedding_or_loss")


def contradictions(target: TargetReport) -> list[str]:
    """What two parts of a report say differently, in a few words each."""
    return [*_of_verdict(target), *_of_causes(target), *_of_stragglers(target), *_of_layouts(target)]


def _of_verdict(target: TargetReport) -> Iterator[str]:
    verdict, found = target.verdict, target.verdict.comparison
    if found is None:
        return
    if verdict.imbalance != found.median_ms / found.average_ms:
        yield "the imbalance is another statistic than the verdict's"
    said = sentences.of_verdict(verdict)
    if said is None or (said.severity == "slow") != (verdict.slowest_stage is not None):
        yield "the sentence and the slowest stage of the verdict"
    for cause in verdict.causes:
        if cause.kind in _OF_LAYERS and cause.stage not in verdict.slow_stages:
            yield f"{cause.kind} is the cause on stage {cause.stage}, which is not slow"


def _of_causes(target: TargetReport) -> Iterator[str]:
    gains = [-1.0 if cause.gain_ms is None else cause.gain_ms for cause in target.verdict.causes]
    if gains != sorted(gains, reverse=True):
        yield "what costs most is not the first cause"
    step = target.measured.step_time_ms
    if step is not None and any(gain > step.mean for gain in gains):
        yield "a cause costs more than the step"


def _of_stragglers(target: TargetReport) -> Iterator[str]:
    found, best = target.what_if, target.what_if.best
    slow = [cause for cause in target.verdict.causes if cause.kind == "slow_rank"]
    if best is not None and best.kind == "no_straggler":
        assert found.measured_ms is not None
        gain = found.measured_ms - best.step_ms
        named = {rank for cause in slow for rank in (cause.ranks or (cause.rank,))}
        if not set(found.mended) <= named:
            yield "the advice mends a rank that no cause names"
        for cause in slow:
            if set(cause.ranks or (cause.rank,)) & set(found.mended) and cause.gain_ms != pytest.approx(max(gain, 0.0)):
                yield f"a slow rank costs {cause.gain_ms} ms, and mending it gains {gain} ms"
        if found.advice is None or f"{best.step_ms:.0f}" not in found.advice:
            yield "the advice has another figure than its prediction"
    if slow and any(each.kind in ("layout", "chunks") for each in found.candidates):
        yield "layouts are compared beside a slow rank"
    if target.fleet is None:
        return
    texts = [finding.kind for finding in sentences.of_fleet(target.fleet)]
    lasting = [s for s in target.fleet.stragglers if s.what == "compute" and s.until is None]
    if "nothing_slow" in texts and (len(texts) > 1 or lasting):
        yield "nothing is slow, and something is"
    gains = {cause.ranks or (cause.rank,): cause.gain_ms for cause in slow}
    for straggler in lasting:
        if straggler.ranks in gains and straggler.gain_ms != gains[straggler.ranks]:
            yield "the finding and the cause of a slow rank cost differently"


def _of_layouts(target: TargetReport) -> Iterator[str]:
    found, verdict = target.what_if, target.verdict
    shown = [each for each in sentences.worth_showing(found) if each.kind == "layout"]
    if found.advice is not None and "no other split of the layers is better" in found.advice and shown:
        yield "no other split is better, below one that is"
    if found.best is None or found.best.kind != "layout":
        return
    if verdict.comparison is not None and verdict.comparison.outcome in ("chance", "some_microbatches"):
        yield "a layout is advised, and the stages cannot be told apart"
    if "too noisy" in (found.advice or ""):
        yield "a layout is advised, and it is too noisy to advise"
    stages = target.measured.sizes.pp
    assert found.best.layout is not None
    assert found.layout is not None
    before, after = (layers_per_stage(parse_layout(each, stages), stages) for each in (found.layout, found.best.layout))
    # Of several slow stages another one may hold the pipeline more: the causes say which.
    of_layers = [cause.stage for cause in verdict.causes if cause.kind in _OF_LAYERS and cause.stage is not None]
    if of_layers and after[of_layers[0]] >= before[of_layers[0]]:
        yield f"stage {of_layers[0]} costs most for its layers, and the advised layout leaves them there"
