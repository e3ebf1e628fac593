"""Passes through a stage. One type serves both for traces that were read and for schedules that were replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megaprof.parallel.schedules import PassId

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


@dataclass(frozen=True, slots=True)
class MeasuredPass(Pass[int]):
    """A pass that was measured in a trace; all times are in nanoseconds."""

    host: tuple[int, int] = (0, 0)
    """When the host was in it; the same as `start` and `end` if no GPU was captured."""
    exposed: Mapping[str, int] = field(default_factory=dict)
    """The time in which a collective ran and nothing computed, by `groups.USES` except the pipeline's."""
    gpu_ns: int | None = None
    """The time that the GPU computed for it; None if no GPU was captured."""
    gpu_working_ns: int | None = None
    """The time on the GPU without exposed communication and waiting for the host; None if no GPU was captured."""
    backward: PassId | None = None
    """The backward in a combined pass; None for other passes."""

    @property
    def duration_ns(self) -> int:
        """The time that the host was in it."""
        return self.host[1] - self.host[0]

    @property
    def exposed_ns(self) -> int:
        """The time in which a collective ran and nothing computed."""
        return sum(self.exposed.values())

    @property
    def compute_ns(self) -> int:
        """The time of computation alone."""
        return self.duration_ns - self.exposed_ns if self.gpu_ns is None else self.gpu_ns

    @property
    def working_ns(self) -> int:
        """The whole time without exposed communication and waiting for the host."""
        return self.compute_ns if self.gpu_working_ns is None else self.gpu_working_ns


@dataclass(frozen=True, slots=True)
class Exchange:
    """One of a rank's exchanges with neighbouring stages; times in nanoseconds on the wall clock of its host."""

    label: str
    """Megatron's operation, or the wait for an overlapped one (`megaprof.formats.ranges`)."""
    posted: int
    """When the host reached it; if it is a kernel, when the host launched it."""
    done: int
    """When the host went on."""
    start: int
    """When it began: on the GPU, if it is a kernel."""
    end: int
    """When it ended: on the GPU, if it is a kernel."""
