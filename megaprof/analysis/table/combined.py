"""A forward and a backward that run as one, divided for a table that has them apart.

With ``overlap_moe_expert_parallel_comm`` Megatron runs them layer by layer in turns, so that neither has a time of its
own. What they take together does not depend on where they are divided, nor does a replay, in which they run as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaprof.analysis.trace.passes import MeasuredPass
from megaprof.formats import ranges

#: Kind, chunk and microbatch of a pass, and where in the recorded one it begins and ends, from 0 to 1.
Part = tuple[str, "int | None", "int | None", float, float]


def forward_share(forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """Which part of a combined pass is its forward's: as long as those that ran alone, at the step's beginning, against
    backwards that did so, at its end. Half of it where there are none."""
    if not len(forwards) or not len(backwards):
        return 0.5
    forward, backward = float(np.median(forwards)), float(np.median(backwards))
    return forward / (forward + backward) if forward + backward > 0 else 0.5


def parts(each: MeasuredPass, share: float) -> tuple[Part, ...]:
    """The passes in a recorded one: itself, or the halves of a combined one. ``share`` is the forward's."""
    if each.kind != ranges.COMBINED or each.backward is None:
        return ((each.kind, each.chunk, each.microbatch, 0.0, 1.0),)
    other = each.backward
    return (
        (ranges.FORWARD, each.chunk, each.microbatch, 0.0, share),
        (ranges.BACKWARD, other.chunk, other.microbatch, share, 1.0),
    )
