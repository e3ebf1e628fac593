"""How long a stage, or one of its ranks, computes for one microbatch, and how sure that is; and what a cause is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaprof.analysis.stages.samples import MEDIAN_ERROR, scatter
from megaprof.analysis.stages.stages import ChunkTimes, Stage
from megaprof.formats import ranges

#: By how many standard errors a slow stage or rank must exceed the others.
NOISE = 2.0
#: Fewer samples of a pass than this say nothing about noise.
FEWEST = 3

Sizes = Mapping[tuple[int, int, int | None], float]
"""The work of a microbatch as a multiple of the usual one, by step, call and microbatch."""


@dataclass(frozen=True)
class Cause:
    """One reason for lost time."""

    kind: str
    """``layers``, ``slow_rank``, ... (docs/report.md has all)."""
    stage: int | None
    """Where; None for the whole pipeline."""
    evidence: str
    """The numbers that show it, a clause without a full stop."""
    threshold: str
    """From when on it is named."""
    excess_ms: float
    """Milliseconds lost, of what ``basis`` says."""
    basis: str = "per microbatch, compared with the average over stages"
    """``per step``, ``per microbatch, compared with its peers``, ..."""
    rank: int | None = None
    """Which rank it is; None where it is not a single rank."""
    ranks: tuple[int, ...] = ()
    """The ranks that it is one of, or all of, where they wait for each other; empty where it is not several."""
    group: str | None = None
    """The axis of a communication: ``tp``, ``ep``, ``cp``, ``pp`` or ``dp``."""
    gain_ms: float | None = None
    """Milliseconds by which the step would be shorter without it; None where that is not known."""


class Typical(NamedTuple):
    """One kind of pass through one chunk, in milliseconds."""

    median: float
    """The median microbatch's."""
    error: float
    """Standard error of that."""
    quick: float
    """The quickest microbatch's."""


@dataclass(frozen=True)
class Load:
    """What one rank computes for one microbatch."""

    stage: Stage
    """The stage that the rank is on."""
    rank: int
    """Its global number."""
    passes: dict[tuple[int, str], Typical]
    """By model chunk and kind of pass."""

    @property
    def median(self) -> float:
        """Milliseconds of the median microbatch."""
        return sum(each.median for each in self.passes.values())

    @property
    def error(self) -> float:
        """Standard error of ``median``, in milliseconds."""
        return math.hypot(*(each.error for each in self.passes.values()))

    @property
    def quick(self) -> float:
        """Milliseconds of the quickest microbatch."""
        return sum(each.quick for each in self.passes.values())

    def quick_of(self, chunks: Iterable[int], kind: str | None = None) -> float:
        """Milliseconds of the quickest microbatch on some chunks, in passes of one kind or in all."""
        of = set(chunks)
        return sum(each.quick for (chunk, own), each in self.passes.items() if chunk in of and kind in (None, own))

    @property
    def layers(self) -> int | None:
        """Decoder layers on all chunks; None where the traces do not say."""
        held = [chunk.holds.layers if chunk.holds else None for chunk in self.stage.chunks]
        return sum(n for n in held if n is not None) if None not in held else None

    @property
    def extras(self) -> list[str]:
        """What the stage holds beside decoder layers, in words."""
        return [extra for chunk in self.stage.chunks for extra in extras_of(chunk)]


def load_of(stage: Stage, rank: int, chunks: Sequence[ChunkTimes], sizes: Sizes | None = None) -> Load | None:
    """None when there are too few samples of a pass, or passes whose chunk is unknown. ``sizes``: every microbatch's
    work as a multiple of the usual one; times are given for the usual one."""
    found: dict[tuple[int, str], Typical] = {}
    for chunk in chunks:
        combined = chunk.compute_ms[ranges.COMBINED]
        separate = [kind for kind in (ranges.FORWARD, ranges.BACKWARD) if chunk.compute_ms[kind]]
        # A combined pass is a forward and a backward at once; the few separate ones beside it are its warm-up.
        kinds = [ranges.COMBINED] if combined else separate
        if not kinds or any(len(chunk.compute_ms[kind]) < FEWEST for kind in kinds):
            return None
        for kind in kinds:
            samples = [each.ms / (sizes or {}).get(each.key, 1.0) for each in chunk.compute_ms[kind]]
            error = MEDIAN_ERROR * scatter(samples) / math.sqrt(len(samples))
            found[chunk.chunk, kind] = Typical(statistics.median(samples), error, min(samples))
    if not found or (chunks[0].holds is not None and None in {chunk.holds for chunk in chunks}):
        return None
    return Load(stage, rank, found)


def slowest(stage: Stage, without: Iterable[int] = (), sizes: Sizes | None = None) -> Load | None:
    """The load of the stage's slowest rank, which is the stage's own: the others wait for it. None when a rank's is
    not known; ``without``: ranks that are left aside, as long as others remain; ``sizes`` as for `load_of`."""
    chosen = {rank: chunks for rank, chunks in stage.by_rank.items() if rank not in set(without)} or stage.by_rank
    loads = [load_of(stage, rank, chunks, sizes) for rank, chunks in chosen.items()]
    known = [load for load in loads if load is not None]
    return max(known, key=lambda load: load.median) if known and len(known) == len(loads) else None


def extras_of(chunk: ChunkTimes) -> list[str]:
    """What a chunk holds beside decoder layers."""
    if chunk.holds is None:
        return []
    held = {"the embedding": chunk.holds.embedding, "MTP layers": chunk.holds.mtp, "the loss": chunk.holds.loss}
    return [name for name, present in held.items() if present]
