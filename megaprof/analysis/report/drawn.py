"""Steps as reports and pages draw them: captured ones, one rank per stage on one clock, and simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaprof.analysis.clocks.exchanges import aligned
from megaprof.analysis.report.document import Report
from megaprof.analysis.simulation.simulate import Simulation
from megaprof.analysis.trace.calls import Call
from megaprof.analysis.trace.passes import Pass
from megaprof.formats import ranges

_KINDS = (ranges.FORWARD, ranges.BACKWARD, ranges.COMBINED, ranges.FINALIZE_GRADS, "exchange")

_Key = tuple[str, str | None]  # target and role


@dataclass(frozen=True)
class Row:
    """One stage of a drawn step."""

    call: Call
    """What one of its ranks did."""
    offset_ns: int
    """Nanoseconds to add to its times, so that all rows are on one clock."""


@dataclass(frozen=True)
class StepTimeline:
    """One step of one target."""

    step: int
    """Its number."""
    rows: tuple[Row, ...]
    """One for every captured stage, by pipeline rank."""
    notes: tuple[str, ...]
    """What must be known about its clocks, clauses."""

    @property
    def kinds(self) -> list[str]:
        """Kinds of boxes that there are, in the order of a legend."""
        there = {_kind(each.kind) for row in self.rows for each in row.call.laid_out}
        return [kind for kind in _KINDS if kind in there]

    @property
    def chunks(self) -> int:
        """Model chunks of a stage, at most."""
        return max(max(len(row.call.metadata.chunks), 1) for row in self.rows)


def timelines(report: Report) -> dict[_Key, StepTimeline]:
    """The latest step of every target, on the lowest captured rank of every stage, clocks aligned."""
    chosen: dict[_Key, dict[int, Call]] = {}
    for call in report.drawn:
        place, stages = call.metadata.coords, chosen.setdefault((call.label, call.role), {})
        best = stages.get(place.pp)
        # Of a call that was captured twice the later one counts.
        if not call.index and (best is None or (place.rank, -call.start) < (best.rank, -best.start)):
            stages[place.pp] = call
    return {key: _aligned([stages[pp] for pp in sorted(stages)]) for key, stages in chosen.items()}


def _aligned(calls: list[Call]) -> StepTimeline:
    """Calls of one step, one a stage."""
    alignment = aligned(calls)
    several = len(set(alignment.hosts.values())) > 1
    notes = [*alignment.sentences(), *alignment.warnings] if several else list(alignment.warnings)
    if any(call.has_kernels and call.gpu is None for call in calls):
        notes.append("these are the host's times: when work was given to the GPU, not when the GPU did it")
    rows = tuple(Row(call, alignment.offset(call.rank)) for call in calls)
    return StepTimeline(calls[0].step, rows, tuple(notes))


def boxes(step: StepTimeline) -> dict[str, Any]:
    """Rows for the script: times in microseconds from the step's start. ``boxes`` is flat, five numbers each: start
    (behind the start of the box before), duration, kind, microbatch and chunk (-1: unknown or none)."""
    first = min(row.call.extent[0] + row.offset_ns for row in step.rows)
    calls = [(row.call, row.offset_ns - first) for row in step.rows]
    return _packed([(c.stage, c.rank, c.extent, c.laid_out, shift) for c, shift in calls], step.chunks)


def boxes_of(replayed: Simulation) -> dict[str, Any]:
    """The same of a simulated step, whose rows are of no rank."""
    stages: list[list[Pass[float]]] = [[] for _ in range(replayed.schedule.stages)]
    for each in replayed.events:
        stages[each.stage].append(each)
    whole = (0.0, 1e6 * replayed.step_ms)
    return _packed([(stage, None, whole, own, 0) for stage, own in enumerate(stages)], replayed.schedule.chunks)


def _packed(rows: Sequence[tuple[int, int | None, Sequence[float], Sequence[Any], int]], chunks: int) -> dict[str, Any]:
    """``rows``: stage, rank, start and end in nanoseconds, passes, and nanoseconds to add to all of them."""
    names = sorted({each.kind for _, _, _, passes, _ in rows for each in passes})
    numbers = {name: number for number, name in enumerate(names)}
    packed = []
    for stage, rank, extent, passes, shift in rows:
        flat, before = [], 0
        for box in passes:
            start, end = (round((time + shift) / 1000) for time in (box.start, box.end))
            unknown = (-1 if value is None else value for value in (box.microbatch, box.chunk))
            flat += [start - before, end - start, numbers[box.kind], *unknown]
            before = start
        span = [round((time + shift) / 1000) for time in extent]
        packed.append({"stage": stage, "rank": rank, "span": span, "boxes": flat})
    return {"names": names, "kinds": list(map(_kind, names)), "chunks": chunks, "rows": packed}


def _kind(name: str) -> str:
    return name if name in _KINDS else "exchange"
