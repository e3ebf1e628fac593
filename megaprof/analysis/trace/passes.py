"""Passes through a stage. One type serves both for traces that were read and for schedules that were replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Time = TypeVar("Time", int, float)


@dataclass(frozen=True, slots=True)
class Pass(Generic[Time]):
    """The work of one stage on one microbatch, or its work between passes, from ``start`` to ``end``.

    Times are in nanoseconds. Measured times are integers on the wall clock of the rank's host. Replayed times are
    floats that count from the beginning of the step.
    """

    kind: str
    """``forward``, ``backward`` or ``combined``; between passes ``finalize_grads`` or the operation of an exchange."""
    stage: int
    """Pipeline rank."""
    chunk: int | None
    """Model chunk of the stage; None if it is unknown, or if there is none."""
    microbatch: int | None
    """Microbatch of the step, and that of the forward for a combined pass; None if it is unknown, or if there is
    none."""
    start: Time
    """When it began: on the GPU, if that was captured."""
    end: Time
    """When it ended: on the GPU, if that was captured."""
    rank: int | None = None
    """Global rank; None if the pass was replayed."""

    @property
    def phase(self) -> str:
        """``kind``, as `megaprof.simulate` documents it."""
        return self.kind

    @property
    def start_ms(self) -> float:
        """``start`` in milliseconds."""
        return self.start / 1e6

    @property
    def end_ms(self) -> float:
        """``end`` in milliseconds."""
        return self.end / 1e6
