"""Who is slow: one rule for a stage beside the other stages, a rank beside its peers, and a time beside what it was."""

from __future__ import annotations

import math

#: By how much a time must exceed the one that it is compared with, as a fraction of that.
EXCESS = 0.10


def exceeds(own: float, usual: float, *, error: float = 0.0, errors: float = 0.0, least: float = EXCESS) -> bool:
    """Whether ``own`` is above ``usual`` (of the same unit) by more than the fraction ``least`` and by more than
    ``errors`` standard errors. ``error``: the standard error of own / usual, as a fraction of it.

    Compared on logarithms: what disturbs a time multiplies it. Nothing exceeds a time that is not above zero.
    """
    if own <= 0 or usual <= 0:
        return False
    return math.log(own / usual) > max(math.log1p(least), errors * error)
