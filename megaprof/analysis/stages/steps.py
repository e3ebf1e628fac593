"""One step of all captured ranks on one time axis: how long it took, and who waited for whom, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megaprof.analysis.clocks.exchanges import Meeting, meetings
from megaprof.analysis.notes import Note
from megaprof.analysis.stages.consistency import OPENED, Findings, comparable, opened_apart, shifted
from megaprof.analysis.trace.calls import WHOLE_STEP, Call
from megaprof.analysis.trace.intervals import Intervals, difference, intersection, intervals, total, union
from megaprof.formats import ranges


@dataclass(frozen=True)
class Bubble:
    """Nanoseconds that one rank waited for other stages. The parts are None where the stages have no common clock."""

    total: int
    """All of it."""
    warmup: int | None
    """Before its first backward began; forward-only: before its first forward."""
    steady: int | None
    """In between."""
    cooldown: int | None
    """After its last forward."""


@dataclass(frozen=True)
class Step:
    """One step on all captured ranks."""

    ms: float | None
    """How many milliseconds it took; None where a rank's part is incomplete."""
    one_clock: bool
    """Whether all ranks are on one time axis."""
    waits: bool
    """Whether its stages waited for each other: it is whole, and of one run."""
    bounds: tuple[int, int]
    """From the first stage's start to the last one's end, in nanoseconds on that axis."""
    offset: dict[int, int]
    """Nanoseconds that put each rank on it."""
    uncertain_ns: int | None
    """How uncertain these are; None where all ranks have one clock, or no axis."""
    waited: dict[int, Intervals]
    """When each rank waited inside gradient finalisation, on its own clock."""
    met: dict[int, Meeting]
    """The exchanges of each rank, split into waiting and transferring."""

    def bubble(self, call: Call) -> Bubble | None:
        """Returns None where there is no bubble to measure: the step is incomplete, of different runs, or more than
        a pipeline."""
        if call.metadata.sizes.pp == 1:
            return Bubble(0, 0, 0, 0)  # nobody to wait for
        if self.ms is None or not self.waits or call.label == WHOLE_STEP:
            return None
        rank = call.rank
        busy = difference(call.busy, self.waited.get(rank, intervals(())))
        if rank in self.met:
            busy = union(np.concatenate((busy, self.met[rank].transfer)))
        if not self.one_clock:
            return Bubble(max(0, round(self.ms * 1e6) - total(busy)), None, None, None)
        offset = self.offset.get(rank, 0)
        start, end = self.bounds[0] - offset, self.bounds[1] - offset
        idle = difference(intervals([(start, end)]), busy)
        filled, drained = _edges(call)
        warmup = total(intersection(idle, intervals([(start, max(start, filled))])))
        cooldown = total(intersection(idle, intervals([(min(max(filled, drained), end), end)])))
        return Bubble(total(idle), warmup, total(idle) - warmup - cooldown, cooldown)

    def exposed_ns(self, call: Call, group: str) -> int | None:
        """Exposed communication of one group, as far as this step tells more than the call alone."""
        rank, known = call.rank, call.exposed_ns[group]
        if group == "pp" and call.metadata.sizes.pp > 1:
            return total(self.met[rank].transfer) if rank in self.met else None
        if group == "dp" and known and call.gpu is None:
            return known - total(self.waited.get(rank, intervals(())))
        return known

    def gradients_ns(self, call: Call) -> int | None:
        """Work outside of passes, as finalising gradients is: what neither exposed communication nor waiting has."""
        if call.gpu is not None:
            return call.gpu.outside_ns
        if call.has_kernels:
            return None
        # With data parallelism all of it counts as that group's communication.
        own = total(call.finalize) - total(self.waited.get(call.rank, intervals(())))
        return own if call.metadata.sizes.dp == 1 else 0

    def tail_ns(self, call: Call) -> int | None:
        """Data-parallel communication after the last pass, nothing computing beside it."""
        if call.gpu is not None:
            return call.gpu.tail
        if call.has_kernels:
            return None
        if call.metadata.sizes.dp == 1:
            return 0
        return total(call.finalize) - total(self.waited.get(call.rank, intervals(())))


def lay_out(step: Sequence[Call], findings: Findings) -> Step:
    """``step``: the calls of one step, one a rank. What stands in the way is added to ``findings``."""
    clocks = comparable(list(step))
    for note in clocks.problems:
        findings.warn(note, block=clocks.different_runs)
    offset = clocks.offset
    extents = [shifted(call, offset) for call in step]
    bounds = min(begin for begin, _ in extents), max(end for _, end in extents)
    apart = max(begin for begin, _ in extents) - bounds[0]
    if clocks.one_clock and any(call.after_opening for call in step) and apart > OPENED * (bounds[1] - bounds[0]):
        findings.warn(Note("entered_apart_by_nsys", steps=(step[0].step,), ms=(apart / 1e6,)))
    apart_by_torch = opened_apart(step)
    if apart_by_torch is not None:
        findings.warn(Note("step_disturbed", steps=(step[0].step,), why=apart_by_torch))
    whole = apart_by_torch is None and not any(call.incomplete for call in step)
    length = bounds[1] - bounds[0] if clocks.one_clock else max(end - begin for begin, end in extents)
    return Step(
        ms=length / 1e6 if whole else None,
        one_clock=clocks.one_clock,
        waits=whole and not clocks.different_runs,
        bounds=bounds,
        offset=offset,
        uncertain_ns=clocks.uncertain_ns,
        waited={c.rank: _waited(c, step, offset if clocks.one_clock else None) for c in step if c.gpu is None},
        met=meetings(step, offset) if clocks.one_clock else {},
    )


def _edges(call: Call) -> tuple[int, int]:
    """Returns when the pipeline was filled (its first backward began) and when it began to drain (its last forward
    ended)."""
    forwards = [p for p in call.phases if p.kind in (ranges.FORWARD, ranges.COMBINED)]
    backwards = [p for p in call.phases if p.kind in (ranges.BACKWARD, ranges.COMBINED)]
    first = backwards or forwards
    start, end = call.extent
    return min((p.start for p in first), default=start), max((p.end for p in forwards), default=end)


def _waited(call: Call, step: Sequence[Call], offset: Mapping[int, int] | None) -> Intervals:
    """Returns where gradient finalisation waited for a rank that had not come to it yet, on the clock of ``call``.
    ``offset`` puts ranks on one clock; None where nothing does.

    A collective cannot end before all its ranks have begun it: one that was open when the last of them came was
    waiting until then. Who takes part is not in a CPU trace: the ranks of the same stage, and for tied embeddings the
    first and the last stage; without data parallelism everything that is waited for is another stage.
    """
    metadata, found = call.metadata, call.collectives
    ends = (0, metadata.sizes.pp - 1)
    others = [
        other
        for other in step
        if other is not call
        and len(other.finalize)
        and (
            metadata.sizes.dp == 1
            or other.stage == metadata.coords.pp
            or {other.stage, metadata.coords.pp} == set(ends)
        )
    ]
    if not others or offset is None:
        return found if metadata.sizes.dp == 1 else intervals(())
    own = offset.get(call.rank, 0)
    last = max(int(other.finalize[0, 0]) + offset.get(other.rank, 0) - own for other in others)
    open_then = found[(found[:, 0] < last) & (found[:, 1] >= last)]
    return intervals((start, last) for start, _ in open_then.tolist())
