"""How long a stage, or one of its ranks, computes for one microbatch, and how sure that is; and what a cause is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megaprof.analysis.stages.stages import ChunkTimes, Stage
from megaprof.formats import ranges

#: By how many standard errors a slow stage or rank must exceed the others.
NOISE = 2.0
#: Fewer samples of a pass than this say nothing about noise.
FEWEST = 3

# Standard error of a median of n normal samples is 1.2533 sigma / sqrt(n), and sigma is 1.4826 times their median
# absolute deviation (both asymptotic; Rousseeuw & Croux 1993).
_MEDIAN_ERROR = 1.2533 * 1.4826


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
    group: str | None = None
    """The axis of a communication: ``tp``, ``ep``, ``cp``, ``pp`` or ``dp``."""


@dataclass(frozen=True)
class Load:
    """What one rank computes for one microbatch."""

    stage: Stage
    """The stage that the rank is on."""
    rank: int
    """Its global number."""
    median: float
    """Milliseconds of the median microbatch."""
    error: float
    """Standard error of ``median``, in milliseconds."""
    quick_by_chunk: dict[int, float]
    """Milliseconds of the quickest forward and backward, by model chunk."""

    @property
    def quick(self) -> float:
        """Milliseconds of the quickest microbatch."""
        return sum(self.quick_by_chunk.values())

    @property
    def layers(self) -> int | None:
        """Decoder layers on all chunks; None where the traces do not say."""
        held = [chunk.holds.layers if chunk.holds else None for chunk in self.stage.chunks]
        return sum(n for n in held if n is not None) if None not in held else None

    @property
    def extras(self) -> list[str]:
        """What the stage holds beside decoder layers, in words."""
        return [extra for chunk in self.stage.chunks for extra in extras_of(chunk)]


def load_of(stage: Stage, rank: int, chunks: Sequence[ChunkTimes]) -> Load | None:
    """None when there are too few samples of a pass, or passes whose chunk is unknown."""
    quick: dict[int, float] = {}
    median = squared_error = 0.0
    for chunk in chunks:
        combined = chunk.compute_ms[ranges.COMBINED]
        separate = [chunk.compute_ms[kind] for kind in (ranges.FORWARD, ranges.BACKWARD)]
        # A combined pass is a forward and a backward at once; the few separate ones beside it are its warm-up.
        passes: list[Sequence[float]] = [combined] if combined else [each for each in separate if each]
        if not passes or any(len(each) < FEWEST for each in passes):
            return None
        median += sum(statistics.median(each) for each in passes)
        quick[chunk.chunk] = sum(min(each) for each in passes)
        squared_error += sum(_error(each) ** 2 for each in passes)
    if not quick or (chunks[0].holds is not None and None in {chunk.holds for chunk in chunks}):
        return None
    return Load(stage, rank, median, math.sqrt(squared_error), quick)


def slowest(stage: Stage, without: Iterable[int] = ()) -> Load | None:
    """The load of the stage's slowest rank, which is the stage's own: the others wait for it. None when a rank's is
    not known; ``without``: ranks that are left aside, as long as others remain."""
    chosen = {rank: chunks for rank, chunks in stage.by_rank.items() if rank not in set(without)} or stage.by_rank
    loads = [load_of(stage, rank, chunks) for rank, chunks in chosen.items()]
    known = [load for load in loads if load is not None]
    return max(known, key=lambda load: load.median) if known and len(known) == len(loads) else None


def _error(samples: Sequence[float]) -> float:
    middle = statistics.median(samples)
    deviation = statistics.median(abs(sample - middle) for sample in samples)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(samples))


def extras_of(chunk: ChunkTimes) -> list[str]:
    """What a chunk holds beside decoder layers."""
    if chunk.holds is None:
        return []
    held = {"the embedding": chunk.holds.embedding, "MTP layers": chunk.holds.mtp, "the loss": chunk.holds.loss}
    return [name for name, present in held.items() if present]
