"""Why a stage computes for long: more layers, what stands beside them, one chunk, one kind of pass, or none of these.

What a stage should take is reckoned from the others: milliseconds per layer of the chunks that hold nothing but layers.
Where no trace says how many layers a chunk holds, chunks are compared by what stands beside the layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from megaprof.analysis.stages.loads import Cause, Load, extras_of
from megaprof.analysis.stages.slow import EXCESS
from megaprof.analysis.stages.stages import ChunkTimes
from megaprof.analysis.stages.words import counted, number
from megaprof.analysis.stages.words import stages as stages_in_words
from megaprof.formats import ranges

#: How far apart the times per layer of different stages may lie for "more layers" to explain a slow stage.
PER_LAYER = 0.25
#: How much of the excess the other chunks, or passes of the other kind, may hold for one alone to be named.
_ELSEWHERE = 0.25

_NAMES = {ranges.FORWARD: "slow_forward", ranges.BACKWARD: "slow_backward"}


def explain(stage: int, slow: Collection[int], loads: Sequence[Load]) -> tuple[Cause, ...]:
    """The causes of one of the ``slow`` stages, one at least. ``loads``: of all stages."""
    own = next(load for load in loads if load.stage.pp == stage)
    others = [load for load in loads if load is not own]
    usual = [load for load in others if load.stage.pp not in slow] or others
    mean = statistics.fmean(load.quick for load in loads)
    excess = own.quick - mean
    unknown = [load for load in loads if load.layers is None]
    if unknown:
        return _by_flags(own, usual, unknown, excess, mean, every=len(unknown) == len(loads))
    kinds = {kind for load in loads for chunk in load.stage.chunks if chunk.holds for kind in chunk.holds.kinds or ()}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        return (_unexplained(own, excess, f"layers of different kinds ({listed}) have no common time per layer"),)
    if any(not load.layers for load in loads):
        without = stages_in_words(load.stage.pp for load in loads if not load.layers)
        return (_unexplained(own, excess, f"{without} holds no layer to compare with"),)
    plain = _plain_times(usual, _layers_of)
    if plain:
        return _by_plain_layers(own, loads, usual, plain, excess, mean)
    return _by_count(own, usual, loads, excess, mean)


def _by_flags(
    own: Load, usual: list[Load], unknown: list[Load], excess: float, mean: float, *, every: bool
) -> tuple[Cause, ...]:
    """Without numbers of layers."""
    missing = stages_in_words(load.stage.pp for load in unknown)
    reason = f"the traces of {missing} do not say how many layers {'it holds' if len(unknown) == 1 else 'they hold'}"
    plain = _plain_times(usual, _one_each) if every else {}
    if not plain or not _alike(plain.values()):
        return (_unexplained(own, excess, reason),)
    one = statistics.median(plain.values())
    flagged = [chunk for chunk in own.stage.chunks if extras_of(chunk)]
    ordinary = _plain_times([own], _one_each)
    if flagged and all(_alike((time, one)) for time in ordinary.values()):
        beyond = own.quick_of(chunk.chunk for chunk in flagged) - one * len(flagged)
        if beyond > EXCESS * mean and not _in_one_pass(own, usual, _one_each, flagged):
            held = counted(len(flagged), "chunk")
            evidence = (
                f"{reason}; on stage {own.stage.pp} {held if len(flagged) > 1 else 'the chunk'} with "
                f"{_and(own.extras)} takes {number(own.quick_of(chunk.chunk for chunk in flagged))} ms per microbatch, "
                f"a chunk without takes {number(one)} ms, as measured on {stages_in_words(plain)}"
            )
            return (_beside(own, evidence, min(beyond, excess), mean),)
    return _residue(own, usual, _one_each, excess, mean, reason)


def _by_count(own: Load, usual: list[Load], loads: Sequence[Load], excess: float, mean: float) -> tuple[Cause, ...]:
    """Every other stage holds an embedding or a loss, so that its time per layer is only an upper bound.

    More layers explain the slow stage when its own time per layer does not exceed any such bound.
    """
    per_layer, mean_layers = _per_layer(own), _mean_layers(loads)
    bound = min(_per_layer(load) for load in usual)
    if _layers(own) > mean_layers and per_layer <= (1 + PER_LAYER) * bound:
        part = min(excess, min(per_layer, bound) * (_layers(own) - mean_layers))
        return (_more_layers(own, usual, part),)
    beside = (
        f"; it also holds {_and(own.extras)}, which cannot be told apart from a slow rank here (layouts are predicted "
        "as if it were that)"
        if own.extras
        else ""
    )
    return _residue(own, usual, _layers_of, excess, mean, _layer_facts(own, usual) + beside)


def _by_plain_layers(
    own: Load, loads: Sequence[Load], usual: list[Load], plain: dict[int, float], excess: float, mean: float
) -> tuple[Cause, ...]:
    """Chunks of nothing but layers on other stages (``plain``) give the time of one layer to compare with."""
    layer = statistics.median(plain.values())
    facts = _layer_facts(own, usual)
    if not _alike(plain.values()):
        return (_unexplained(own, excess, "the time per layer differs between stages: " + facts),)
    ordinary = _plain_times([own], _layers_of)  # empty when every chunk of it holds an embedding or a loss
    if any(not _alike((time, layer)) for time in ordinary.values()):
        return _residue(own, usual, _layers_of, excess, mean, facts)
    causes = []
    part = layer * (_layers(own) - _mean_layers(loads))
    beyond = own.quick - layer * _layers(own)
    if part > EXCESS * mean:
        causes.append(_more_layers(own, usual, min(part, excess)))
    if own.extras and beyond > EXCESS * mean:
        if _in_one_pass(own, usual, _layers_of, own.stage.chunks):
            causes += _residue(own, usual, _layers_of, min(beyond, excess), mean, facts)
        else:
            evidence = (
                f"besides {_count(own)} stage {own.stage.pp} holds {_and(own.extras)}, which takes "
                f"{number(beyond)} ms per microbatch; a layer takes {number(layer)} ms, as measured on "
                f"{stages_in_words(plain)}"
            )
            causes.append(_beside(own, evidence, min(beyond, excess), mean))
    return tuple(causes) or _residue(own, usual, _layers_of, excess, mean, facts)


_Weight = Callable[[ChunkTimes], float]  # how much a chunk holds, in units that cost the same


def _layers_of(chunk: ChunkTimes) -> float:
    return float(chunk.holds.layers or 0) if chunk.holds else 0.0


def _one_each(chunk: ChunkTimes) -> float:
    return 1.0


def _residue(
    own: Load, usual: Sequence[Load], weight: _Weight, excess: float, mean: float, facts: str
) -> tuple[Cause, ...]:
    """One chunk of the stage, one kind of pass, about one forward more in the backward; or unexplained."""
    stage = own.stage.pp
    if (chunk := _in_one_chunk(own, usual, weight)) is not None:
        took, more = own.quick_of([chunk]), _more(own, usual, weight, [chunk])
        evidence = (
            f"of the {len(own.stage.chunks)} chunks of stage {stage} only chunk {chunk} is slow: it takes "
            f"{number(took)} ms per microbatch, as much on the other stages takes {number(took - more)} ms"
        )
        return (
            _beyond("slow_chunk", own, evidence, more, f"other chunks hold less than {_ELSEWHERE:.0%} of the excess"),
        )
    if (kind := _in_one_pass(own, usual, weight, own.stage.chunks)) is None:
        return (_unexplained(own, excess, facts),)
    every = [each.chunk for each in own.stage.chunks]
    took, more = own.quick_of(every, kind), _more(own, usual, weight, every, kind)
    forward = own.quick_of(every, ranges.FORWARD)
    compared = f"{number(took)} ms per microbatch instead of {number(took - more)} ms"
    other = "backwards" if kind == ranges.FORWARD else "forwards"
    if kind == ranges.BACKWARD and 1 / (1 + PER_LAYER) <= more / forward <= 1 + PER_LAYER:
        evidence = (
            f"backwards of stage {stage} take {compared}, which is about one forward more ({number(forward)} ms): this "
            "stage seems to recompute activations and the others do not"
        )
        threshold = f"the excess is in backwards alone and differs from a forward by less than {PER_LAYER:.0%}"
        return (_beyond("recomputation", own, evidence, more, threshold),)
    evidence = f"only the {kind}s of stage {stage} are slow: they take {compared}, its {other} take what they should"
    return (_beyond(_NAMES[kind], own, evidence, more, f"{other} hold less than {_ELSEWHERE:.0%} of the excess"),)


def _in_one_chunk(own: Load, usual: Sequence[Load], weight: _Weight) -> int | None:
    """The chunk that holds the excess, where there are several and none beside layers in it."""
    if len(own.stage.chunks) < 2:
        return None
    more = {chunk.chunk: _more(own, usual, weight, [chunk.chunk]) for chunk in own.stage.chunks if not extras_of(chunk)}
    if len(more) < len(own.stage.chunks) and len(more) < 2:
        return None
    worst = max(more, key=lambda chunk: more[chunk])
    rest = sum(abs(ms) for chunk, ms in more.items() if chunk != worst)
    return worst if more[worst] > 0 and rest <= _ELSEWHERE * more[worst] else None


def _in_one_pass(own: Load, usual: Sequence[Load], weight: _Weight, chunks: Iterable[ChunkTimes]) -> str | None:
    """The kind of pass that holds the excess of some chunks, where there are both."""
    each = [chunk.chunk for chunk in chunks]
    if {kind for _, kind in own.passes} != set(_NAMES):
        return None
    forward, backward = (_more(own, usual, weight, each, kind) for kind in _NAMES)
    kind, more, rest = (
        (ranges.FORWARD, forward, backward) if forward > backward else (ranges.BACKWARD, backward, forward)
    )
    # What a pass of a healthy chunk differs by is no excess of the other kind.
    return kind if more > 0 and abs(rest) <= _ELSEWHERE * more else None


def _more(own: Load, usual: Sequence[Load], weight: _Weight, chunks: Collection[int], kind: str | None = None) -> float:
    """Milliseconds per microbatch that some chunks of a stage take more than as much takes on the other stages."""
    one = _unit(usual, weight, kind)
    held = sum(weight(chunk) for chunk in own.stage.chunks if chunk.chunk in chunks)
    return own.quick_of(chunks, kind) - one * held


def _unit(usual: Sequence[Load], weight: _Weight, kind: str | None) -> float:
    """Milliseconds of one unit of weight: of chunks of nothing but layers, else of those that take least."""
    plain = list(_times(usual, weight, kind, beside=False))
    return statistics.median(plain) if plain else min(_times(usual, weight, kind, beside=True), default=0.0)


def _times(loads: Sequence[Load], weight: _Weight, kind: str | None, *, beside: bool) -> Iterator[float]:
    """Milliseconds per unit of weight, by stage."""
    for load in loads:
        chunks = [chunk for chunk in load.stage.chunks if weight(chunk) > 0 and (beside or not extras_of(chunk))]
        if chunks:
            yield load.quick_of([chunk.chunk for chunk in chunks], kind) / sum(map(weight, chunks))


def _plain_times(loads: Iterable[Load], weight: _Weight) -> dict[int, float]:
    """Milliseconds per unit of weight of the chunks that hold nothing but layers, by stage; only stages with such
    chunks."""
    return {load.stage.pp: ms for load in loads for ms in _times([load], weight, None, beside=False)}


def _alike(times: Collection[float]) -> bool:
    return max(times) <= (1 + PER_LAYER) * min(times)


def _named(kind: str, own: Load, evidence: str, part: float, threshold: str) -> Cause:
    return Cause(kind=kind, stage=own.stage.pp, evidence=evidence, threshold=threshold, excess_ms=part)


def _beyond(kind: str, own: Load, evidence: str, more: float, threshold: str) -> Cause:
    basis = "per microbatch, compared with what as much takes on the other stages"
    return Cause(kind=kind, stage=own.stage.pp, evidence=evidence, threshold=threshold, excess_ms=more, basis=basis)


def _beside(own: Load, evidence: str, part: float, mean: float) -> Cause:
    threshold = f"more than {EXCESS:.0%} of the average over stages ({number(mean)} ms)"
    return _named("embedding_or_loss", own, evidence, part, threshold)


def _more_layers(own: Load, others: Sequence[Load], part: float) -> Cause:
    threshold = f"times per layer differ by less than {PER_LAYER:.0%}, where a stage holds nothing but layers"
    return _named("layers", own, _layer_facts(own, others), part, threshold)


def _unexplained(own: Load, excess: float, evidence: str) -> Cause:
    threshold = "neither its layers, an embedding or loss, one of its chunks nor one kind of pass explains it"
    return _named("unexplained", own, evidence, excess, threshold)


def _layers(load: Load) -> int:
    return load.layers or 0


def _per_layer(load: Load) -> float:
    return load.quick / _layers(load)


def _mean_layers(loads: Sequence[Load]) -> float:
    return statistics.fmean(_layers(load) for load in loads)


def _layer_facts(own: Load, others: Sequence[Load]) -> str:
    plain = [load for load in others if not load.extras] or others
    times = _interval([_per_layer(load) for load in plain], number)
    per_layer = number(_per_layer(own))
    where = stages_in_words(load.stage.pp for load in plain)
    against = _interval([_layers(load) for load in others], str)
    elsewhere = f"the same per layer on {where}" if per_layer == times else f"{times} ms on {where}"
    return (
        f"stage {own.stage.pp} holds {_count(own)} against {against}: {per_layer} ms per layer in the quickest "
        f"microbatch, {elsewhere}"
    )


def _interval(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def _count(load: Load) -> str:
    return counted(_layers(load), "layer")


def _and(things: list[str]) -> str:
    return " and ".join(dict.fromkeys(things))
