"""Where a rank stands and how fast it has been, for whoever asks from another thread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from megaprof.formats.ranges import RangeName

#: Steps that the recent figures are the medians of.
RECENT_STEPS = 32
BETWEEN = "between"


@dataclass(frozen=True)
class Position:
    """Where a rank is inside a schedule call."""

    target: str
    """What the call is for: ``train_actor``, ``train_log_probs``, ..."""
    step: int
    """The call's step number."""
    phase: str
    """The label of the open range (`megaprof.formats.ranges`), or ``between`` two of them."""
    microbatch: int | None
    """From 0 on; None where the phase belongs to none."""
    chunk: int | None
    """Model chunk, from 0 on; None where the phase belongs to none."""
    since: float
    """When it was first seen there: wall clock, seconds."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Recent:
    """How fast the last steps of one target were: medians, in milliseconds per step."""

    target: str
    """Of which target: ``train_actor``, ``train_log_probs``, ..."""
    steps: int
    """How many steps the medians are of, at most `RECENT_STEPS`."""
    step_ms: float
    """The whole step."""
    forward_ms: float
    """All forward passes."""
    backward_ms: float
    """All backward passes."""
    combined_ms: float
    """All passes that run a forward and a backward together."""
    finalize_ms: float
    """Finishing the gradients."""
    p2p_ms: float | None
    """Exchanges between stages; None on the GPU's clock, which does not see them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class OwnCost:
    """What the timeline costs its process."""

    step_us: float
    """On the training thread, per step: median, in microseconds."""
    fraction: float
    """The same as a fraction of the step, 0 to 1."""
    background_fraction: float
    """CPU time of the background thread, as a fraction of one processor, 0 to 1."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tally:
    """The last steps of every target. Filled and read on the background thread."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[dict[str, float]]] = {}
        self._latest: str | None = None
        self._began = time.monotonic()

    def add(self, target: str, milliseconds: dict[str, float], own_ms: float) -> None:
        """One step: ``milliseconds`` by kind of event, with ``step`` for the whole (``p2p`` may be missing); ``own_ms``
        is what the timeline cost the training thread in it."""
        steps = self._steps.setdefault(target, deque(maxlen=RECENT_STEPS))
        steps.append(milliseconds | {"own": own_ms})
        self._latest = target

    def recent(self, target: str | None = None) -> Recent | None:
        """Of ``target``; without one, of the training step where there is any, else of what ran last."""
        chosen = target or ("train_actor" if "train_actor" in self._steps else self._latest)
        steps = list(self._steps.get(chosen or "", ()))
        if not steps or chosen is None:
            return None

        def median(name: str) -> float:
            return statistics.median(step.get(name, 0.0) for step in steps)

        return Recent(
            target=chosen,
            steps=len(steps),
            step_ms=median("step"),
            forward_ms=median("forward"),
            backward_ms=median("backward"),
            combined_ms=median("combined"),
            finalize_ms=median("finalize"),
            p2p_ms=median("p2p") if all("p2p" in step for step in steps) else None,
        )

    def cost(self, background_seconds: float) -> OwnCost | None:
        """``background_seconds``: CPU time of the background thread so far. None before the first step."""
        recent = self.recent()
        if recent is None:
            return None
        own = statistics.median(step["own"] for step in self._steps[recent.target])
        elapsed = max(time.monotonic() - self._began, 1e-9)
        return OwnCost(1e3 * own, own / recent.step_ms if recent.step_ms else 0.0, background_seconds / elapsed)


class Watch:
    """Since when a position has not changed, as far as its observer looked."""

    def __init__(self) -> None:
        self._last: Any = None
        self._since = 0.0

    def since(self, state: Any) -> float:
        if state != self._last:
            self._last, self._since = state, time.time()
        return self._since


def position(target: str, step: int, name: RangeName | None, since: float) -> Position:
    """``name``: the range that is open; None between two of them."""
    if name is None:
        return Position(target, step, BETWEEN, None, None, since)
    return Position(target, step, name.label, name.fields.get("mb"), name.fields.get("chunk"), since)
