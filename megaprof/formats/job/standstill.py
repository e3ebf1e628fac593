"""A job that stood still: where, for how long, and whom the others waited for.

The rule is one for a job that runs and for one that is read afterwards: `megaprof status` looks at the status files of
its ranks, `megaprof report` at the steps of its timelines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A rank stands still when it has not moved for this many seconds, and for this many of its steps.
STUCK_SECONDS, STUCK_STEPS = 10.0, 5
#: In its first step, which compiles and loads, it stands still only after this many seconds.
FIRST_STEP_SECONDS = 300.0


@dataclass(frozen=True)
class Standing:
    """A rank that the others waited for, and where it stood."""

    rank: int
    """Its global rank."""
    stage: int
    """Its pipeline rank."""
    phase: str | None = None
    """The label of the range that it was in, such as ``forward``; None where that is not known."""
    microbatch: int | None = None
    """The microbatch of that range."""
    chunk: int | None = None
    """The model chunk of that range."""


@dataclass(frozen=True)
class Standstill:
    """A step in which the job stood still, or in the middle of which it ended."""

    step: int
    """Its number."""
    seconds: float
    """For how long nothing moved; 0 where the job ended while it moved."""
    waited_for: tuple[Standing, ...]
    """The ranks that the others waited for, by number; empty where that is not known."""
    waiting: int
    """How many ranks waited."""
    outcome: Literal["went_on", "last", "unfinished", "lasts"]
    """``went_on``: other steps followed; ``last``: the step ended, and none followed; ``unfinished``: the job ended in
    the middle of it; ``lasts``: the job still stands there."""
