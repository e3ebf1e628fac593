"""A standstill of a job: where, for how long, and which ranks the others waited for.

The rule (`limit`) is the same for a job that runs, where `megaprof status` looks at the status files of its ranks, and
for one that is read afterwards, where `megaprof report` looks at the steps of its timelines. A step that stood still
counts for no time, neither in a report nor in the recent times of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

#: A rank stands still when it has not moved for this many seconds, and for this many times the length of its steps.
STUCK_SECONDS, STUCK_STEPS = 10.0, 5
#: In its first step, which compiles and loads, it stands still only after this many seconds.
FIRST_STEP_SECONDS = 300.0


def limit(usual_seconds: float, least: float = STUCK_SECONDS) -> float:
    """Returns the seconds after which a rank in a step stands still, for steps that usually take ``usual_seconds``."""
    return max(least, STUCK_STEPS * usual_seconds)


@dataclass(frozen=True)
class Standing:
    """A rank that the others waited for, and where it was."""

    rank: int
    """Global rank."""
    stage: int
    """Pipeline rank."""
    phase: str | None = None
    """Label of the range that it was in, such as ``forward``; None if not known."""
    microbatch: int | None = None
    """Microbatch of that range."""
    chunk: int | None = None
    """Model chunk of that range."""


@dataclass(frozen=True)
class Standstill:
    """A step in which the job stood still, or in the middle of which it ended."""

    step: int
    """Number of the step."""
    seconds: float
    """Seconds for which nothing has moved; afterwards, by how much longer than usual the step was. 0 if the job ended
    while it moved."""
    waited_for: tuple[Standing, ...]
    """Ranks that the others waited for; empty if not known."""
    waiting: int
    """Number of ranks that waited."""
    outcome: Literal["went_on", "last", "unfinished", "lasts"]
    """``went_on``: other steps followed. ``last``: the step ended, and none followed. ``unfinished``: the job ended in
    the middle of it. ``lasts``: the job is still there."""
    target: str | None = None
    """Target of the step, if the job has several; otherwise None."""
    inside: bool | None = True
    """False if the job stood still after the step, outside of the schedule, as in a checkpoint or a rollout; None if
    only a timeline would have shown whether it was in the step or after it."""


def completed(standstills: Iterable[Standstill], last: Standstill | None) -> tuple[Standstill, ...]:
    """Returns `standstills` of a job's timelines with the ranks that were waited for in the step in which it ended.

    A rank that is killed does not write its last step. But its status file says where it stood, and `last` is the
    standstill by the status files.
    """
    return tuple(
        replace(stood, waited_for=last.waited_for)
        if last is not None and not stood.waited_for and (stood.step, stood.outcome) == (last.step, "unfinished")
        else stood
        for stood in standstills
    )
