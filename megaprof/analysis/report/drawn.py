"""The step of every target that the HTML report draws: one rank per stage, on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megaprof.analysis.clocks.clocks import align
from megaprof.analysis.clocks.matching import Ends, ends_of, links_between
from megaprof.analysis.report.document import Report
from megaprof.analysis.trace.calls import Call, calls_of
from megaprof.analysis.trace.traces import Trace, UnreadableTrace, read_trace
from megaprof.formats import ranges
from megaprof.formats.names import parse_artifact_name

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
    """The latest step of every target, on the lowest captured rank of every stage, clocks aligned.

    Reads the traces of those steps once more, one at a time; those of timelines are in the report.
    """
    latest = {target.key: target.measured.steps[-1] for target in report.targets if target.measured.steps}
    found: dict[_Key, dict[int, tuple[Call, Ends]]] = {}
    for trace in chain(_traces(report.traces, set(latest.values())), report.drawn):
        calls = calls_of(trace)
        ends = ends_of(trace.metadata, calls)
        for call in calls:
            key, coords = (call.label, call.metadata.role), call.metadata.coords
            if latest.get(key) != call.step or call.index:
                continue
            stages = found.setdefault(key, {})
            if coords.pp not in stages or coords.rank < stages[coords.pp][0].metadata.coords.rank:
                stages[coords.pp] = call, ends
    return {key: _aligned(latest[key], [stages[pp] for pp in sorted(stages)]) for key, stages in found.items()}


def _traces(paths: Iterable[Path], steps: set[int]) -> Iterator[Trace]:
    for path in paths:
        name = parse_artifact_name(path.name)
        if name is not None and name.step not in steps:
            continue
        try:
            yield read_trace(path)
        except UnreadableTrace:
            continue  # the report has read it, and would have said so


def _aligned(step: int, stages: list[tuple[Call, Ends]]) -> StepTimeline:
    ends = {call.metadata.coords.rank: each for call, each in stages}
    hosts = {rank: each.metadata.host for rank, each in ends.items()}
    alignment = align(hosts, [link for link, _ in links_between(ends)])
    notes = [*alignment.sentences(), *alignment.warnings] if len(set(hosts.values())) > 1 else list(alignment.warnings)
    if any(call.has_kernels and call.gpu is None for call, _ in stages):
        notes.append("these are the host's times: when work was given to the GPU, not when the GPU did it")
    rows = tuple(Row(call, alignment.offset(call.metadata.coords.rank)) for call, _ in stages)
    return StepTimeline(step, rows, tuple(notes))


def boxes(step: StepTimeline) -> dict[str, Any]:
    """Rows for the script: times in microseconds from the step's start. ``boxes`` is flat, five numbers each: start
    (behind the start of the box before), duration, kind, microbatch and chunk (-1: unknown or none)."""
    first = min(row.call.extent[0] + row.offset_ns for row in step.rows)
    names = sorted({each.kind for row in step.rows for each in row.call.laid_out})
    numbers = {name: number for number, name in enumerate(names)}
    rows = []
    for row in step.rows:
        call, shift = row.call, row.offset_ns - first
        flat, before = [], 0
        for box in call.laid_out:
            start, end = (round((time + shift) / 1000) for time in (box.start, box.end))
            unknown = (-1 if value is None else value for value in (box.microbatch, box.chunk))
            flat += [start - before, end - start, numbers[box.kind], *unknown]
            before = start
        coords = call.metadata.coords
        span = [round((time + shift) / 1000) for time in call.extent]
        rows.append({"stage": coords.pp, "rank": coords.rank, "span": span, "boxes": flat})
    return {"names": names, "kinds": list(map(_kind, names)), "chunks": step.chunks, "rows": rows}


def _kind(name: str) -> str:
    return name if name in _KINDS else "exchange"
