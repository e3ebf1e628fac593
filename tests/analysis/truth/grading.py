"""How good a diagnosis is, against the truth: one table says which names mean the same fault.

A fault is worth what it costs alone, averaged over all steps. A named cause is there if it costs `NOTHING` of the step
alone, or with all others fixed, or in the steps in which it is present. Messages between stages take time in every
pipeline, so they have a price. A price may be that of the cause alone or, if the diagnosis says so, with the causes
before it fixed; of a cause that is not present in all steps, that of the steps in which it is, or the average.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from megaprof.parallel.topology import WorldLayout
from tests.analysis.truth.drawing import NOTHING, incidental
from tests.analysis.truth.engines import Advised, Named, Said
from tests.analysis.truth.files import sizes_of
from tests.analysis.truth.pipelines import Fault, Pipeline, Priced

#: A fault that is worth this part of the step must be named; one of `SOME`, may be.
MUCH, SOME = 0.05, 0.02
#: Where no interval is given, a price is right within this part of the step or of itself.
WITHIN, OF_ITSELF = 0.02, 0.25
#: A pipeline whose filling takes this part of a balanced step has few microbatches: a fact, which no fault made.
FILLING = 0.10

#: The names, at the same place, by which a fault counts as named.
SAME: dict[str, tuple[str, ...]] = {
    "layers": ("layers",),
    "embedding_or_loss": ("embedding_or_loss", "embedding", "loss"),
    "recomputation": ("recomputation", "slow_backward"),
    "slow_backward": ("slow_backward", "recomputation"),
    "slow_forward": ("slow_forward",),
    "slow_stage": ("slow_stage", "slow_rank", "unexplained", "rest"),
    "slow_chunk": ("slow_chunk",),
    "slow_rank": ("slow_rank",),
    "slow_link": ("slow_link",),
    "late_entry": ("late_entry",),
    "data_wait": ("data_wait",),
    "loader": ("data_wait",),
    "uneven_microbatches": ("uneven_microbatches",),
    "communication": ("communication",),
    "host_bound": ("host_bound",),
    "stalls": ("stalls",),
    "unequal_replicas": ("unequal_replicas",),
}
#: Names of work that has to be done somewhere: neutral is when it is spread evenly.
_TO_SPREAD = ("layers", "embedding_or_loss", "embedding", "loss")
#: Names that say where a fault is and not what: they are there, but do not count as found.
_VAGUE = ("unexplained", "rest", "slow_stage")
_OF_STAGE = {
    "layers",
    "embedding_or_loss",
    "recomputation",
    "slow_backward",
    "slow_forward",
    "slow_stage",
    "slow_chunk",
    "slow_rank",
}


def names_of(fault: Fault, pipeline: Pipeline) -> tuple[str, ...]:
    """By which names at its place a fault counts as named: `SAME`, and what no data could tell apart."""
    names = SAME[fault.kind]
    end = fault.stage in (0, pipeline.stages - 1)
    if pipeline.stages == 2 and fault.kind in ("layers", "embedding_or_loss"):
        # Two stages with three unknown contents.
        names += ("layers", "embedding_or_loss")
    if fault.kind == "slow_stage" and end:
        # What is longer in forwards and backwards alike may as well be the embedding or the loss.
        names += ("embedding_or_loss",)
    if fault.kind == "slow_chunk" and end and fault.chunk == (0 if fault.stage == 0 else pipeline.chunks - 1):
        names += ("embedding_or_loss",)
    if fault.kind == "slow_link" and pipeline.stages == 2:
        # There is no other link to compare with.
        names += ("communication",)
    return names


def same_place(named: Named, fault: Fault, pipeline: Pipeline) -> bool:
    if fault.kind == "communication":
        # Collectives of a CPU trace and of Nsight Systems name no group; where there are several, nobody can tell.
        nameless = pipeline.recording in ("cpu trace", "nsys") and fault.group in ("tp", "cp", "ep")
        return named.group == fault.group or (nameless and named.group == "unknown")
    if fault.kind == "slow_link":
        # Both ends: the stage that sends forwards or the one that sends backwards.
        at = fault.stage or 0
        return named.group == "pp" if named.kind == "communication" else named.stage in (at, at + 1)
    if fault.kind == "loader" and fault.replica is not None and named.ranks:
        return named.stage == fault.stage and rank_of(fault, pipeline) == named.ranks[0]
    if fault.kind in ("slow_rank", "late_entry") and named.ranks:
        return rank_of(fault, pipeline) in named.ranks
    if fault.kind == "slow_rank":
        # A stage says less than a rank.
        return named.stage == fault.stage and named.kind in _VAGUE
    if fault.kind in ("stalls", "unequal_replicas", "host_bound", "data_wait"):
        return True
    return named.stage == fault.stage


def rank_of(fault: Fault, pipeline: Pipeline) -> int:
    layout = WorldLayout(sizes_of(pipeline))
    return layout.rank_of(tp=fault.peer or 0, dp=fault.replica or 0, pp=fault.stage or 0)


@dataclass(frozen=True)
class Judged:
    """One fault: what it is worth (a part of the step), and whether it was named."""

    kind: str
    where: str
    worth: float
    drawn: bool
    named: bool


@dataclass(frozen=True)
class Claim:
    """One name: whether it is there, its price, and the truth (parts of the step); None: no price, or no such fault."""

    kind: str
    name: str
    there: bool
    price: float | None
    low: float | None
    high: float | None
    truth: float | None
    inside: bool | None


@dataclass(frozen=True)
class LayoutClaim:
    """One predicted layout and its true speedup."""

    layout: str
    speedup: float
    low: float
    high: float
    truth: float
    best: bool

    @property
    def inside(self) -> bool:
        return self.low <= self.truth <= self.high


@dataclass(frozen=True)
class Graded:
    """All of one pipeline. ``seconds``: CPU time of the engine; ``failure``: what it raised."""

    number: int
    recording: str
    step_ms: float
    faults: tuple[Judged, ...]
    claims: tuple[Claim, ...]
    layouts: tuple[LayoutClaim, ...]
    seconds: float = 0.0
    failure: str | None = None

    @property
    def healthy(self) -> bool:
        return not any(fault.drawn for fault in self.faults)


def grade(number: int, priced: Priced, said: Said) -> Graded:
    pipeline = priced.pipeline
    step_ms = float(priced.length(priced.all).mean())
    beside = incidental(pipeline)
    named = [each for each in said.named if not _few_microbatches(each, pipeline)]
    before = _Before([], [])
    claims, found = [], set()
    for each in named:
        fault, exact = _meant(each, priced)
        before = before if said.in_order else _Before([], [])
        claims.append(_claim(each, fault, exact, priced, before, step_ms))
        if fault is not None and exact:
            found.add(fault)
    faults = tuple(
        Judged(f.kind, _where(f), float(priced.price(f).mean()) / step_ms, f not in beside, f in found)
        for f in pipeline.faults
    )
    layouts = tuple(claim for each in said.advised if (claim := _layout(each, priced)) is not None)
    return Graded(number, pipeline.recording, step_ms, faults, tuple(claims), layouts)


def _few_microbatches(named: Named, pipeline: Pipeline) -> bool:
    depth = pipeline.stages - 1
    return named.kind == "few_microbatches" and depth / (pipeline.chunks * pipeline.microbatches + depth) > FILLING


def _meant(named: Named, priced: Priced) -> tuple[Fault | None, bool]:
    """The fault that is meant, and whether by its name; the dearest one where it may be several."""
    pipeline = priced.pipeline
    there = sorted(sorted(priced.all, key=repr), key=lambda f: -_most(f, priced))
    for fault in there:
        if named.kind in names_of(fault, pipeline) and same_place(named, fault, pipeline):
            return fault, True
    for fault in there:
        if named.kind in _VAGUE and fault.kind in _OF_STAGE and same_place(named, fault, pipeline):
            return fault, False
    return None, False


def _active(fault: Fault, gains: np.ndarray) -> float:
    """Milliseconds of a step in which it is there."""
    return float((gains if fault.steps is None else gains[list(fault.steps)]).mean())


def _most(fault: Fault, priced: Priced) -> float:
    """What it is worth at the most: alone, or when all others are mended."""
    others = priced.all - {fault}
    return max(_active(fault, priced.price(fault)), _active(fault, priced.price(fault, others)))


@dataclass
class _Before:
    """What was named before: faults that are gone since, those that are spread evenly, and milliseconds."""

    mended: list[Fault]
    spread: list[Fault]
    debt_ms: float = 0.0
    """By how much the step is longer for what gains only together with what is named next, and is said to cost
    nothing by itself."""


def _claim(named: Named, fault: Fault | None, exact: bool, priced: Priced, before: _Before, step_ms: float) -> Claim:
    parts = [None if ms is None else float(ms) / step_ms for ms in (named.price, named.low, named.high)]
    price, low, high = parts
    if fault is None:
        return Claim(named.kind, str(named), False, price, low, high, None, None)
    there = _most(fault, priced) >= NOTHING * step_ms
    # What goes by another name has the neutral of that name.
    spread = named.kind in _TO_SPREAD and fault.kind not in _TO_SPREAD
    again = fault in before.mended or fault in before.spread
    others = [f for f in before.mended if f != fault], [f for f in before.spread if f != fault]
    gains = priced.price(fault, *others, to_spread=spread)
    (before.spread if spread else before.mended).append(fault)
    # What is not there in all steps costs so much in those, or less on average: either may be told.
    truths = [ms / step_ms for ms in dict.fromkeys((float(gains.mean()), _active(fault, gains)))]
    if price == low == high == 0.0:
        before.debt_ms += min(float(gains.mean()), 0.0)
        return Claim(named.kind, str(named), there, price, low, high, truths[0], None)
    truths = [truth + before.debt_ms / step_ms for truth in truths]
    before.debt_ms = 0.0
    inside = None
    if price is not None and exact and not again:
        if low is not None and high is not None:
            inside = any(low <= truth <= high for truth in truths)
        else:
            inside = any(abs(price - truth) <= max(WITHIN, OF_ITSELF * truth) for truth in truths)
    return Claim(named.kind, str(named), there, price, low, high, truths[0], inside)


def _where(fault: Fault) -> str:
    parts = [str(fault.stage)] if fault.stage is not None else [fault.group] if fault.group else []
    if fault.kind in ("slow_rank", "late_entry"):
        parts.append(f"replica {fault.replica}" if fault.peer is None else f"peer {fault.peer}")
    if fault.steps is not None:
        parts.append(f"in {len(fault.steps)} steps")
    return " ".join(parts)


def _layout(advised: Advised, priced: Priced) -> LayoutClaim | None:
    """None for a layout that is no other arrangement of the same layers on the same stages."""
    pipeline = priced.pipeline
    held = layers_of(advised.layout, pipeline.stages)
    chunks = held.shape[1]
    if held.sum() != sum(map(sum, pipeline.layers)) or (chunks > 1 and pipeline.microbatches % pipeline.stages):
        return None
    if chunks != pipeline.chunks and any(f.kind == "slow_chunk" for f in pipeline.faults):
        return None
    return LayoutClaim(advised.layout, advised.speedup, advised.low, advised.high, priced.speedup(held), advised.best)


def layers_of(layout: str, stages: int) -> np.ndarray:
    """Layers by stage and chunk of a ``--pipeline-model-parallel-layout``, whose pieces end with ``|``."""
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    pieces = [piece.count("t") for piece in text.split("|")]
    return np.array(pieces, dtype=float).reshape(-1, stages).T
