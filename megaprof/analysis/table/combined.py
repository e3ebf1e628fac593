"""Divides combined passes (a forward and a backward that run as one), because a table has them separately.

With ``overlap_moe_expert_parallel_comm``, Megatron alternates between their layers, so that neither has a time of its
own. Where they are divided changes neither their sum nor a replay, in which they run as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaprof.analysis.trace.passes import MeasuredPass
from megaprof.formats import ranges

#: Kind, chunk and microbatch of a pass, and where in the recorded one it begins and ends, from 0 to 1.
Part = tuple[str, "int | None", "int | None", float, float]


def forward_share(forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """Returns the fraction of a combined pass that counts as its forward. It follows from the forwards that ran alone
    at the beginning of the step and the backwards that ran alone at its end; without any, it is a half."""
    if not len(forwards) or not len(backwards):
        return 0.5
    forward, backward = float(np.median(forwards)), float(np.median(backwards))
    return forward / (forward + backward) if forward + backward > 0 else 0.5


def parts(measured_pass: MeasuredPass, share: float) -> tuple[Part, ...]:
    """Returns the pass itself, or both halves of a combined pass. ``share``: the fraction that is its forward."""
    if measured_pass.kind != ranges.COMBINED or measured_pass.backward is None:
        return ((measured_pass.kind, measured_pass.chunk, measured_pass.microbatch, 0.0, 1.0),)
    backward = measured_pass.backward
    return (
        (ranges.FORWARD, measured_pass.chunk, measured_pass.microbatch, 0.0, share),
        (ranges.BACKWARD, backward.chunk, backward.microbatch, share, 1.0),
    )
