"""The step of every target that the HTML report draws: one rank per stage, on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megaprof.analysis.clocks.clocks import align
from megaprof.analysis.clocks.timelines import (
    EXCHANGE,
    Ends,
    Timeline,
    capture_of,
    ends_of,
    links_between,
    timelines_of,
)
from megaprof.analysis.report.document import Report
from megaprof.analysis.trace.traces import Trace, UnreadableTrace, read_trace
from megaprof.formats import ranges

_KINDS = (ranges.FORWARD, ranges.BACKWARD, ranges.COMBINED, ranges.FINALIZE_GRADS, EXCHANGE)

_Key = tuple[str, str | None]  # target and role


@dataclass(frozen=True)
class Row:
    """One stage of a drawn step."""

    timeline: Timeline
    """The passes and exchanges of one of its ranks."""
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
        there = {box.kind for row in self.rows for box in row.timeline.boxes}
        return [kind for kind in _KINDS if kind in there]

    @property
    def chunks(self) -> int:
        """Model chunks of a stage, at most."""
        return max(max(len(row.timeline.metadata.chunks), 1) for row in self.rows)


def timelines(report: Report) -> dict[_Key, StepTimeline]:
    """The latest step of every target, on the lowest captured rank of every stage, clocks aligned.

    Reads the traces of those steps once more, one at a time; those of timelines are in the report.
    """
    latest = {target.key: target.measured.steps[-1] for target in report.targets if target.measured.steps}
    found: dict[_Key, dict[int, tuple[Timeline, Ends]]] = {}
    for trace in chain(_traces(report.traces, set(latest.values())), report.drawn):
        ends = ends_of(trace)
        for timeline in timelines_of(trace):
            key, coords = (timeline.label, timeline.metadata.role), timeline.metadata.coords
            if latest.get(key) != timeline.step or timeline.index:
                continue
            stages = found.setdefault(key, {})
            if coords.pp not in stages or coords.rank < stages[coords.pp][0].metadata.coords.rank:
                stages[coords.pp] = timeline, ends
    return {key: _aligned(latest[key], [stages[pp] for pp in sorted(stages)]) for key, stages in found.items()}


def _traces(paths: Iterable[Path], steps: set[int]) -> Iterator[Trace]:
    for path in paths:
        capture = capture_of(path)
        if capture is not None and capture.step not in steps:
            continue
        try:
            yield read_trace(path)
        except UnreadableTrace:
            continue  # the report has read it, and would have said so


def _aligned(step: int, stages: list[tuple[Timeline, Ends]]) -> StepTimeline:
    ends = {timeline.metadata.coords.rank: each for timeline, each in stages}
    hosts = {rank: each.metadata.host for rank, each in ends.items()}
    alignment = align(hosts, [link for link, _ in links_between(ends)])
    notes = [*alignment.sentences(), *alignment.warnings] if len(set(hosts.values())) > 1 else list(alignment.warnings)
    if any(timeline.host_time for timeline, _ in stages):
        notes.append("these are the host's times: when work was given to the GPU, not when the GPU did it")
    rows = tuple(Row(timeline, alignment.offset(timeline.metadata.coords.rank)) for timeline, _ in stages)
    return StepTimeline(step, rows, tuple(notes))


def boxes(step: StepTimeline) -> dict[str, Any]:
    """Rows for the script: times in microseconds from the step's start. ``boxes`` is flat, five numbers each: start
    (behind the start of the box before), duration, kind, microbatch and chunk (-1: unknown or none)."""
    first = min(row.timeline.start + row.offset_ns for row in step.rows)
    names = sorted({box.name for row in step.rows for box in row.timeline.boxes})
    numbers = {name: number for number, name in enumerate(names)}
    kinds = {box.name: _KINDS.index(box.kind) for row in step.rows for box in row.timeline.boxes}
    rows = []
    for row in step.rows:
        timeline, shift = row.timeline, row.offset_ns - first
        flat, before = [], 0
        for box in timeline.boxes:
            start, end = (round((time + shift) / 1000) for time in (box.start, box.end))
            unknown = (-1 if value is None else value for value in (box.microbatch, box.chunk))
            flat += [start - before, end - start, numbers[box.name], *unknown]
            before = start
        coords = timeline.metadata.coords
        span = [round((time + shift) / 1000) for time in (timeline.start, timeline.end)]
        rows.append({"stage": coords.pp, "rank": coords.rank, "span": span, "boxes": flat})
    kind_names = [_KINDS[kinds[name]] for name in names]
    return {"names": names, "kinds": kind_names, "chunks": step.chunks, "rows": rows}
