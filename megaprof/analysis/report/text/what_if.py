"""Puts predictions into sentences: changes of a run that would be faster, what they assume, and which one to make."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.report.text.sentences import Finding
from megaprof.analysis.table.table import EMBEDDING, LOSS
from megaprof.analysis.what_if.changes import Prediction, switch_of
from megaprof.analysis.what_if.contents import Assumption, CostFit
from megaprof.analysis.what_if.layouts import parse_layout
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.analysis.words import counted, number, percent, sentence, speedup

#: Explains the letters of a layout, for layouts that have no shorter name.
LETTERS = "In a layout, E is the embedding, t a layer, t*6 six of them, m MTP, L the loss, and | begins the next chunk."
_GIB = 1 << 30
#: The name of a change by hand that changes nothing.
AS_CAPTURED = "as captured"
_TIMES = {0.5: "half", 2.0: "twice"}
_PACKINGS = {
    "balanced": "the same sequences in microbatches that take equally long",
    "tokens": "the same sequences in microbatches with equally many tokens",
    "pooled": "the sequences of all replicas dealt anew, so that all take equally long",
    "long-first": "the same microbatches, long ones first",
    "long-last": "the same microbatches, long ones last",
    "alternating": "the same microbatches, long and short ones in turns",
}
_ASSUMED: dict[Assumption, str] = {
    "kinds_alike": "all kinds of layers take the same time",
    "ends_hidden": "no chunk holds layers alone, so how layers, embedding and loss share this time is not certain",
    "mtp_like_layer": "an MTP layer takes as long as a decoder layer",
}


def name_of(change: Prediction, predictions: WhatIf) -> str:
    """Returns a change of the run in a few words: ``5+3 layers``."""
    stages = len(change.layers) or 1
    counts = list(change.layers)
    if change.layout and change.kind != "chunks":  # a name for those that differ in their number
        counts = [piece.count("t") for piece in parse_layout(change.layout, stages)]
    layers = " and ".join("+".join(map(str, counts[at : at + stages])) for at in range(0, len(counts), stages))
    layers += " layers"
    if change.kind == "by_hand":
        return _by_hand(change, predictions, layers)
    names = {
        "layout": layers,
        "chunks": f"{counted(change.chunks or 1, 'model chunk')} per stage, {layers}",
        "balanced": "the measured work spread evenly over the stages",
        "microbatches": f"{counted(change.microbatches or 0, 'microbatch')} of {_times(change.tokens)} the size",
        "overlap": "exchanges that overlap with compute also while the pipeline fills and drains",
        "packing": _packing(change),
        "even_packing": "all microbatches and replicas take equally long",
        "recompute": "recomputation of all layers",
    }
    return names[change.kind]


def _packing(change: Prediction) -> str:
    fewer = "the same sequences" + (f" in {counted(change.microbatches, 'microbatch')}" if change.microbatches else "")
    return _PACKINGS.get(change.packing or "", fewer)


def _by_hand(change: Prediction, predictions: WhatIf, layers: str) -> str:
    other = change.packing in _PACKINGS or change.packing is None  # else the packing names them
    # The numbers of layers say everything, unless there are MTP layers somewhere.
    plain, stages = "m" not in (change.layout or ""), len(change.layers)
    now = len(parse_layout(predictions.layout, stages)) // stages if predictions.layout else 1
    parts = (
        (layers if plain else change.layout) if change.layout != predictions.layout else None,
        f"{counted(change.chunks, 'model chunk')} per stage instead of {now}" if change.chunks else None,
        counted(change.microbatches, "microbatch") if change.microbatches and other else None,
        f"{_times(change.step_tokens)} the tokens in a step" if change.step_tokens != 1.0 else None,
        f"transfers of {change.p2p_ms:.3g} ms" if change.p2p_ms is not None else None,
        _packing(change) if change.packing else None,
    )
    return ", ".join(filter(None, parts)) or AS_CAPTURED


def _times(factor: float) -> str:
    return _TIMES.get(factor, f"{factor:.3g} times")


def assumptions(change: Prediction) -> Iterator[str]:
    """Yields the assumptions of a prediction, as clauses."""
    if change.kind == "balanced":
        yield "layers can be divided"
    if change.kind == "even_packing":
        yield "sequences can be divided"
    if change.kind == "overlap":
        yield "exchanges beside passes make these no longer"
    if change.tokens != 1.0:
        yield "a microbatch's time is in proportion to its tokens"
        if change.p2p_ms is None and len(change.layers) != 1:
            yield f"an exchange takes anything from as long as now to {_times(change.tokens)} as long"
    if change.chunks is not None:
        overlapped = "" if change.chunks == 1 else ", and exchanges overlap with compute, as by Megatron-LM's default"
        yield f"a chunk costs what its layers cost, and each pass as much beside them as now{overlapped}"


def memory(change: Prediction, predictions: WhatIf) -> str | None:
    """Returns a clause about the memory that a change needs. If memory was measured, it names the stage that is closest
    to its limit, or furthest above it; otherwise it says why a change may need more than there is, or is None."""
    if change.needed is not None and predictions.allowed is not None and predictions.allocated is not None:
        both = zip(change.needed, predictions.allowed, strict=True)
        _, stage = max((need / most, stage) for stage, (need, most) in enumerate(both))
        needed, allowed, measured = (
            by_stage[stage] / _GIB for by_stage in (change.needed, predictions.allowed, predictions.allocated)
        )
        return (
            f"{'' if change.fits else 'does not fit: '}stage {stage} would need about {needed:.1f} of the "
            f"{allowed:.1f} GiB that it may have at its peak, by scaling the measured {measured:.1f} GiB"
        )
    if change.activations > 1.0:
        return f"every microbatch holds {_times(change.activations)} the activations"
    needs, now = [held * change.activations for held in change.in_flight or ()], predictions.in_flight or ()
    if not change.exceeds(now):
        return None
    return (
        f"stage {needs.index(max(needs))} would hold the activations of {max(needs):g} layers x microbatches at once, "
        f"and no stage holds more than {max(now)} now"
    )


def layout_advice(predictions: WhatIf, framework: str | None = None) -> Finding | None:
    """Returns which layout to change to, with its flags and the options of ``framework``, or says that no layout is
    better. None if nothing was predicted."""
    if predictions.advice is None:
        return None
    text = " ".join(map(sentence, filter(None, (_advice(predictions), _beside_layouts(predictions)))))
    if predictions.best is None:
        return Finding("layout", "open", text)
    host_flags = None if predictions.host_options is None else f"{framework}: {shlex.join(predictions.host_options)}"
    return Finding("layout", "fine", text, shlex.join(predictions.best.flags), host_flags)


def _beside_layouts(predictions: WhatIf) -> str | None:
    """Returns the fastest change beside layouts with as many chunks that certainly gains, if it is faster than the
    advised one."""
    others = (change for change in worth_showing(predictions) if change.kind in ("chunks", "microbatches", "overlap"))
    fitting = (change for change in others if change.fits is not False)
    first, best = max(fitting, key=lambda change: change.speedup.value, default=None), predictions.best
    if first is None or (best is not None and first.speedup.value <= best.speedup.value):
        return None
    text = "faster, " if best is None else "faster still, "
    text += f"if the assumptions below hold: {name_of(first, predictions)}, {times_as_fast(first)}"
    text += " (its flags are further below)" if first.flags else ""
    return "; ".join(filter(None, (text, memory(first, predictions))))


def _advice(predictions: WhatIf) -> str:
    if predictions.advice == "slow_ranks":
        return f"no other split of the layers gains {percent(LEAST)} where every rank is as quick as its peers"
    first = predictions.best or predictions.quickest or next(iter(predictions.candidates), None)
    if predictions.advice == "no_other" or first is None:
        return "no other layout of these layers exists with as many stages and chunks"
    name, times = name_of(first, predictions), times_as_fast(first)
    if predictions.advice == "change":
        instead = f"{number(first.step_ms.value)} ms a step instead of {number(predictions.measured_ms)} ms"
        names = {change.layout: name_of(change, predictions) for change in predictions.candidates}
        alike = [names.get(layout, layout) for layout in predictions.alike]
        ranged = predictions.costs is not None and predictions.costs.from_ranges
        tell = "more steps" if ranged else "a capture with --profile-ranges layer"
        others = " or ".join(alike[:3]) + " or others" * (len(alike) > 3)
        return f"{name}: {times}, {instead}" + f"; {others} may be faster still: {tell} would show" * bool(alike)
    would = f"{name} would be {times}"
    if predictions.advice == "none_fits":
        return f"no layout that fits was found to be better: {would}, and {memory(first, predictions)}"
    if predictions.advice == "none_better":
        return f"with the same number of model chunks no other split of the layers gains {percent(LEAST)}: {would}"
    text = f"no other layout with as many chunks surely gains {percent(LEAST)}: the best one, {name}, would be {times}"
    if predictions.advice == "open":
        wanted = predictions.more_steps + (predictions.replay_error.count if predictions.replay_error else 0)
        return f"{text}; a capture of {wanted} steps would show it"
    return text + "; only a run with it, as by `megaprof tune`, shows that" * (first.speedup.value > 1.0 + LEAST)


def packing_advice(predictions: WhatIf, framework: str | None = None, context: int = 1) -> Finding | None:
    """Returns what another packing of the same sequences would gain, and the options of ``framework`` for it.
    ``context``: the number of ranks over which a sequence is divided."""
    if not predictions.packings or predictions.measured_ms is None:
        return None
    first, even = predictions.packings[0], predictions.packings[-1]
    at_most = f"; perfectly even microbatches would be {times_as_fast(even)}"
    if first is even or first.speedup.low <= 1.0 + LEAST:
        text = f"no other packing of the same sequences surely gains {percent(LEAST)}{at_most}"
        return Finding("packing", "open", sentence(text))
    step = f"{number(first.step_ms.value)} ms a step instead of {number(predictions.measured_ms)} ms"
    text = f"{times_as_fast(first)}, {step}" + at_most * (even.speedup.value > first.speedup.value)
    switch = switch_of(framework, -(-(predictions.most_tokens or 0) // context))
    host_flags = None if switch is None else f"{framework}: {shlex.join(switch)}"
    return Finding("packing", "fine", sentence(f"{name_of(first, predictions)}: {text}"), None, host_flags)


def times_as_fast(change: Prediction) -> str:
    """Returns a speedup: ``1.13 (1.08 to 1.18) times as fast``. It is ``per token`` if the number of tokens changes."""
    return f"{speedup(change.speedup)} times as fast{' per token' * (change.step_tokens != 1.0)}"


def worth_showing(predictions: WhatIf) -> list[Prediction]:
    """Returns the predictions that certainly gain something, and the best one; of several with one name, the fastest.
    The JSON has all predictions."""
    shown: dict[str, Prediction] = {}
    for change in predictions.candidates:
        if change == predictions.best or change.speedup.low > 1.0 + LEAST:
            other = shown.setdefault(name_of(change, predictions), change)
            if other != predictions.best and change.speedup.value > other.speedup.value:
                shown[name_of(change, predictions)] = change
    return list(shown.values())


def remarks(predictions: WhatIf) -> list[str]:
    """Returns what is said below the shown predictions: what they assume and need, each with its predictions (``2, 3
    model chunks``), and what layers cost."""
    about: dict[str, dict[str, list[str]]] = {}
    for change in (shown := worth_showing(predictions)):
        number, _, what = name_of(change, predictions).partition(" ")
        assumed = " and that ".join(assumptions(change))
        for caveat in (f"on the assumption that {assumed}" if assumed else None, memory(change, predictions)):
            if caveat is not None:
                about.setdefault(caveat, {}).setdefault(what, []).append(number)
    letters = any("|" in flag for change in shown for flag in change.flags)
    named = {caveat: [f"{', '.join(numbers)} {what}" for what, numbers in of.items()] for caveat, of in about.items()}
    lines = [f"{' / '.join(names)}: {caveat}." for caveat, names in named.items()]
    return [*lines, *[LETTERS] * letters, *([costs_line(predictions.costs)] if predictions.costs else [])]


def notes_on(change: Prediction, predictions: WhatIf) -> list[str]:
    """Returns what a change that a person chose assumes, needs, and does to the activations, in sentences."""
    count = "microbatches are the global batch size / (micro batch size x data-parallel size)"
    letters = any("|" in text for text in (*change.flags, name_of(change, predictions)))
    clauses = [
        count if change.microbatches is not None else None,
        *(f"assumes that {assumption}" for assumption in assumptions(change)),
        memory(change, predictions),
        LETTERS if letters else None,
    ]
    return [sentence(clause) for clause in clauses if clause is not None]


def costs_line(fit: CostFit) -> str:
    source = "layer ranges" if fit.from_ranges else "the stages' times"
    took = {kind: cost.forward_ms + cost.backward_ms for kind, cost in fit.by_kind.items()}
    # Times of whole passes do not show an end that takes less than they differ, or that is long in forwards alone.
    unseen = [] if fit.from_ranges else [kind for kind in (EMBEDDING, LOSS) if number(took.get(kind)) == number(0.0)]
    costs = (f"{kind} {number(ms)} ms" for kind, ms in took.items() if kind not in unseen)
    text = (
        "Costs of a microbatch in the quicker passes, with exposed communication and waiting for the host, from "
        f"{source}: {', '.join(costs)}"
    )
    if unseen and "ends_hidden" not in fit.assumptions:
        text += f"; these do not show what {' and '.join(unseen)} {'takes' if len(unseen) == 1 else 'take'}"
    return "; ".join([text, *(_ASSUMED[assumption] for assumption in fit.assumptions)])
