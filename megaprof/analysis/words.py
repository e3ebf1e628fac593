"""Puts numbers, stages and layers into words, so that they look the same in all parts of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megaprof.analysis.samples import Interval, Spread
from megaprof.formats.metadata import ModelChunk
from megaprof.formats.phrases import ago as ago
from megaprof.formats.phrases import counted as counted
from megaprof.formats.phrases import listed
from megaprof.parallel.selectors import join_spans, spans_of

ABSENT = "-"


def number(ms: float | None) -> str:
    """Returns milliseconds with three significant digits, or as whole milliseconds from 100 ms on; ``-`` for None."""
    if ms is None:
        return ABSENT
    digits = 0 if abs(ms) >= 99.95 else 1 if abs(ms) >= 9.995 else 2
    return f"{round(ms, digits) + 0.0:.{digits}f}"  # adding zero makes -0.00 0.00


def speedup(factor: Interval) -> str:
    """Returns a factor and its interval: ``1.13 (1.08 to 1.18)``."""
    return f"{factor.value:.2f} ({factor.low:.2f} to {factor.high:.2f})"


def within(ms: Interval | None) -> str:
    """Returns milliseconds and their interval: ``806 (775 to 842)``; ``-`` for None."""
    return ABSENT if ms is None else f"{number(ms.value)} ({number(ms.low)} to {number(ms.high)})"


def ratio(value: float | None) -> str:
    """Returns a ratio with two decimals; ``-`` for None."""
    return ABSENT if value is None else f"{value:.2f}"


def mean(spread: Spread | None) -> str:
    """Returns the mean, such as ``216``; ``-`` for None."""
    return number(spread.mean) if spread else ABSENT


def with_spread(spread: Spread | None) -> str:
    """Returns mean and standard deviation, both with the digits that the latter allows: ``39.9 ±0.3``. A single sample
    has the mean only; None gives ``-``."""
    if spread is None or spread.count == 1:
        return mean(spread)
    # Up to the first significant digit of the deviation.
    digits = 2 if spread.stdev <= 0 else min(2, max(0, -math.floor(math.log10(spread.stdev))))
    return f"{spread.mean:.{digits}f} ±{spread.stdev:.{digits}f}"


def reach(spread: Spread | None) -> str:
    """Returns the median with the smallest and the largest value: ``20.1 (19.8 - 22.4)``; ``-`` for None."""
    if spread is None:
        return ABSENT
    return f"{number(spread.median)} ({number(spread.min)} - {number(spread.max)})"


def milliseconds(ms: float) -> str:
    """Returns milliseconds with their unit: ``61.5 ms``, ``12.3 s``."""
    return f"{ms / 1000:.1f} s" if ms >= 10_000 else f"{number(ms)} ms"


def percent(fraction: float | None, *, sign: bool = False) -> str:
    """Returns a fraction as percent: ``12%``, with one digit after the point below 10 %; ``-`` for None.

    ``sign``: the fraction is a change. It has a sign, and a change to ten times as much or more is written as a factor:
    ``240 times``, ``thousands of times``.
    """
    if fraction is None:
        return ABSENT
    if sign and fraction >= 9.0:
        return "thousands of times" if fraction >= 1e3 else f"{fraction + 1:.3g} times"
    points = 100 * fraction
    text = f"{points:+.{0 if abs(points) >= 9.95 else 1}f}%".replace("-0.0%", "+0.0%")
    return text if sign else text.lstrip("+")


def stages(numbers: Iterable[int]) -> str:
    """Returns ``stage 3`` or ``stages 0, 2-5``: consecutive stages become a range."""
    return _plural("stage", list(numbers))


def ranks(numbers: Sequence[int], most: int = 8) -> str:
    """Returns ``rank 37`` or ``ranks 32-39``. If there are more than ``most`` parts, it names the first ones and counts
    the rest."""
    return _plural("rank", numbers, most)


def steps(numbers: Sequence[int]) -> str:
    """Returns ``step 3``, ``steps 2, 5`` or ``steps 3-9``; for more than three parts, ``12 steps from 3 to 40``."""
    if len(spans(numbers).split(", ")) > 3:
        return f"{len(numbers)} steps from {min(numbers)} to {max(numbers)}"
    return _plural("step", numbers)


def _plural(noun: str, numbers: Sequence[int], most: int | None = None) -> str:
    return f"{noun if len(numbers) == 1 else noun + 's'} {spans(numbers, most)}"


def spans(numbers: Iterable[int], most: int | None = None) -> str:
    """Returns ``3, 8-10``. If there are more than ``most`` parts, it names the first ones and counts the rest."""
    parts = join_spans(spans_of(numbers), ",").split(",")
    return listed(parts, len(parts) if most is None else most)


def layers(chunks: Iterable[ModelChunk | None]) -> str:
    """Returns what some chunks hold: the sum of their layers, and what else they hold. ``?`` if it is not known.

    Examples: ``emb+6``, ``4``, ``2+loss``.
    """
    contents = [chunk for chunk in chunks if chunk is not None]
    if not contents or any(chunk.layers is None for chunk in contents):
        return "?"
    parts = [str(sum(chunk.layers or 0 for chunk in contents))]
    if any(chunk.embedding for chunk in contents):
        parts.insert(0, "emb")
    if mtp := sum(chunk.mtp or 0 for chunk in contents):
        parts.append(f"{mtp}mtp")
    if any(chunk.loss for chunk in contents):
        parts.append("loss")
    return "+".join(parts)


def title(target: str, role: str | None) -> str:
    """Returns the name of a target with its role: ``train_actor``, ``train_log_probs (ref)``."""
    return f"{target} ({role})" if role else target


def capital(text: str) -> str:
    """Returns ``text`` with a capital letter."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Returns ``text`` with a capital letter and a full stop."""
    return capital(text) + ("" if text.endswith((".", "!", "?", ":")) else ".")
