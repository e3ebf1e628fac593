"""A pass through a stage: the one type for it, whether a trace was read or a schedule was replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megaprof.parallel.schedules import PassId

Time = TypeVar("Time", int, float)


@dataclass(frozen=True, slots=True)
class Pass(Generic[Time]):
    """One stage at work on one microbatch, or on what lies between passes, from ``start`` to ``end``.

    Times are nanoseconds: whole ones on the wall clock of the rank's host where they were measured, floats since the
    beginning of the step where they were replayed.
    """

    kind: str
    """``forward``, ``backward`` or ``combined``; ``finalize_grads`` or an exchange's operation between them."""
    stage: int
    """Pipeline rank."""
    chunk: int | None
    """Model chunk of the stage; None where it is not known, or where there is none."""
    microbatch: int | None
    """Microbatch of the step, likewise; of a combined pass the forward's."""
    start: Time
    """When it began: on the GPU, where that was captured."""
    end: Time
    """When it ended, likewise."""
    rank: int | None = None
    """Global rank; None where it was replayed."""

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
    """A pass with what its trace says of it; all times in nanoseconds."""

    host: tuple[int, int] = (0, 0)
    """When the host was in it: `start` and `end`, where no GPU was captured."""
    exposed: Mapping[str, int] = field(default_factory=dict)
    """The part in which a collective ran and nothing computed, by `groups.USES` without the pipeline's."""
    gpu_ns: int | None = None
    """How long the GPU computed for it; None where no GPU was captured."""
    gpu_working_ns: int | None = None
    """How long it took there without exposed communication and waiting for the host; likewise."""
    backward: PassId | None = None
    """The backward in a combined pass."""

    @property
    def duration_ns(self) -> int:
        """The host's time."""
        return self.host[1] - self.host[0]

    @property
    def exposed_ns(self) -> int:
        """The part in which a collective ran and nothing computed."""
        return sum(self.exposed.values())

    @property
    def compute_ns(self) -> int:
        """Computation alone."""
        return self.duration_ns - self.exposed_ns if self.gpu_ns is None else self.gpu_ns

    @property
    def working_ns(self) -> int:
        """All of it without exposed communication and waiting for the host."""
        return self.compute_ns if self.gpu_working_ns is None else self.gpu_working_ns


@dataclass(frozen=True, slots=True)
class Exchange:
    """One of a rank's exchanges with neighbouring stages; times in nanoseconds on the wall clock of its host."""

    label: str
    """Megatron's operation, or the wait for an overlapped one (`megaprof.formats.ranges`)."""
    posted: int
    """When the host came to it; of a GPU's, when it launched the kernel."""
    done: int
    """When the host went on."""
    start: int
    """When it began: on the GPU, if it is a kernel."""
    end: int
    """When it ended, likewise."""
