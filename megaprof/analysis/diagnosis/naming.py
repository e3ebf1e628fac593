"""What a term that is not neutral is called, from how its excess is spread over kinds of passes and over steps."""

from __future__ import annotations

import numpy as np

from megaprof.analysis.table.table import QUARTILE, Floats

BOTH, FORWARD, BACKWARD, AGAIN = "both", "slow_forward", "slow_backward", "recomputation"


def looks(excess: Floats, whole: Floats) -> str:
    """Returns which kind of pass has the excess [k] of a stage whose passes take ``whole`` [k]. A backward that is
    longer by one forward computes that again."""
    if of_both(excess):
        return BOTH
    forward, backward = float(excess[0]), float(excess[1])
    if forward > backward:
        return FORWARD
    return AGAIN if abs(backward - float(whole[0])) < QUARTILE * float(whole[0]) else BACKWARD


def of_both(excess: Floats) -> np.typing.NDArray[np.bool_]:
    """Returns whether every kind of pass has the excess [..., k], and not one of them nearly all of it."""
    found: np.typing.NDArray[np.bool_] = excess.min(axis=-1) >= QUARTILE * excess.max(axis=-1)
    return found


def active(size: Floats) -> np.typing.NDArray[np.bool_]:
    """Returns in which steps a cause is there: those in which its ``size`` [t] is at least half of what it can be."""
    much = float(np.quantile(size, 0.9))
    found: np.typing.NDArray[np.bool_] = size > 0.5 * much
    return found if found.any() else np.ones(len(size), dtype=bool)


def began(there: np.typing.NDArray[np.bool_]) -> int | None:
    """Returns since which step a cause is there: 0 for one that was there from the first step on, None for one that
    comes and goes.

    No other step leaves fewer exceptions: steps before it in which the cause is there, and steps from it on in which
    it is not. A cause comes and goes when the exceptions are more than a quarter of the steps in which it is there, and
    where only one step is before it, or from it on: of few steps one or another is quicker or slower by chance.
    """
    missing_after = (~there)[::-1].cumsum()[::-1]
    there_before = there.cumsum() - there
    exceptions = there_before + missing_after
    first = int(np.argmin(exceptions))
    lasting = first == 0 or 1 < first < len(there) - 1
    return first if lasting and exceptions[first] <= QUARTILE * there.sum() else None
