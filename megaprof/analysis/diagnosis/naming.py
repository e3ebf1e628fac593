"""Names a term by how its excess is spread over kinds of passes and over steps."""

from __future__ import annotations

import numpy as np

from megaprof.analysis.diagnosis.policy import CERTAIN, MINOR, MOST
from megaprof.analysis.table.table import Floats

BOTH, FORWARD, BACKWARD, AGAIN = "both", "slow_forward", "slow_backward", "recomputation"


def looks(excess_ms: Floats, whole: Floats) -> str:
    """Returns which kind of pass is longer by the ``excess_ms`` [k] of a stage whose passes take ``whole`` [k]. A
    backward that is longer by one forward recomputes it."""
    if of_both(excess_ms):
        return BOTH
    forward, backward = float(excess_ms[0]), float(excess_ms[1])
    if forward > backward:
        return FORWARD
    return AGAIN if abs(backward - float(whole[0])) < MINOR * float(whole[0]) else BACKWARD


def of_both(excess_ms: Floats) -> np.typing.NDArray[np.bool_]:
    """Returns whether all kinds of passes share ``excess_ms`` [..., k], instead of one having nearly all of it."""
    shared: np.typing.NDArray[np.bool_] = excess_ms.min(axis=-1) >= MINOR * excess_ms.max(axis=-1)
    return shared


def active(size: Floats) -> np.typing.NDArray[np.bool_]:
    """Returns the steps in which a cause is present: its ``size`` [t] is above half of its 90th percentile."""
    present: np.typing.NDArray[np.bool_] = size > MOST * np.quantile(size, CERTAIN)
    return present if present.any() else np.ones(len(size), dtype=bool)
