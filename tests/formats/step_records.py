"""Step records from the times of single events, as a test has them, and the events of a step that was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.timeline import Microseconds, Timeline


@dataclass(frozen=True)
class StepRecord:
    """One schedule call on one rank."""

    metadata: int
    """Number of its metadata record in the file, from 0."""
    shape: int
    """Number of its shape record in the file, from 0."""
    step: int
    """The step, in the host's numbering."""
    index: int
    """Which call of this step, from 0."""
    start_ns: int
    """Wall clock of its start, in nanoseconds."""
    duration: int
    """Length in microseconds."""
    starts: Sequence[int] | Microseconds
    """Start of every event of the shape, ascending, in microseconds since the step's start."""
    ends: Sequence[int] | Microseconds
    """End of every event, likewise."""
    totals: dict[str, int]
    """Microseconds by kind of event (`codes.KINDS`)."""
    own: int = 0
    """Microseconds that recording took on the training thread."""
    flags: int = 0
    """``DEVICE_CLOCK`` and the others, added up."""

    def begun(self) -> tuple[int, int, int, int]:
        return self.index, self.flags, self.step, self.start_ns

    def spent(self) -> tuple[int, ...]:
        return self.duration, *(self.totals.get(kind, 0) for kind in codes.KINDS.values()), self.own

    def times(self) -> bytes:
        """Raises ValueError for events that are not in the order of their starts."""
        pairs = np.stack([np.asarray(self.starts, dtype=np.int64), np.asarray(self.ends, dtype=np.int64)], axis=-1)
        return format.pack_times(pairs[None])[0]


def step_record(step: StepRecord) -> bytes:
    return format.step_record(step.metadata, step.shape, step.begun(), step.spent(), step.times())


@dataclass(frozen=True)
class Events:
    """The events of one step in the order of their starts; an enclosing one comes before what it encloses. Times are in
    microseconds since the step's start."""

    code: npt.NDArray[np.int64]
    start: Microseconds
    end: Microseconds


def events_of(timeline: Timeline, position: int) -> Events | None:
    """The events of step ``steps[position]``; None if it has none, or if they are damaged."""
    present, times = timeline.times([position])
    if not len(present):
        return None
    return Events(timeline.shapes[timeline.steps["shape"][position]], times[0, :, 0], times[0, :, 1])
