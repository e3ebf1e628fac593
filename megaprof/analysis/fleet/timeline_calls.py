"""The last steps of a timeline as a trace has them, so that the stage report is made of either.

One rank per stage is enough for it: all the others are in the fleet's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.clocks.clocks import align
from megaprof.analysis.clocks.exchanges import MOST_UNCERTAIN, uncertainty
from megaprof.analysis.clocks.matching import ends_of, links_between
from megaprof.analysis.fleet.reading import Key
from megaprof.analysis.trace.calls import Call, calls_of
from megaprof.analysis.trace.gpu import Allocations
from megaprof.analysis.trace.traces import Trace, TracedRange
from megaprof.formats import codes, ranges
from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata, MicrobatchRanges
from megaprof.formats.names import parse_artifact_name
from megaprof.formats.ranges import RangeName
from megaprof.parallel.topology import Place

#: Steps of which details are shown, ...
LAST_STEPS = 20
#: ... fewer where all their events would be more than this.
MOST_EVENTS = 400_000
_FEWEST_STEPS = 3
_LEFT_OUT = format.FAILED | format.CAPTURED


def detail_of(
    key: Key,
    places: Sequence[Place],
    files: Mapping[int, tuple[Path, ...]],
    suspects: AbstractSet[int] = frozenset(),
    without: AbstractSet[int] = frozenset(),
    steps: Sequence[int] = (),
) -> tuple[Call, ...]:
    """The calls of ``steps`` on one rank per stage, by default of the last ones. ``places``: the ranks of ``key`` that
    may be shown, their timelines in ``files`` by rank; ``suspects``: slow ranks; ``without``: steps that do not
    count."""
    ranks = column(places, suspects)
    steps = steps or _common([_calls(key, files[rank]) for rank in ranks], without)
    if not steps:
        return ()
    traces = {rank: found for rank in ranks if (found := _traces(key, files[rank], set(steps)))}
    told, traces = _on_one_clock(traces)
    calls = [call for by_step in traces.values() for trace in by_step.values() for call in calls_of(trace)]
    return tuple(replace(call, reasons=(*call.reasons, *told)) for call in calls)


def longest_pass(key: Key, files: Iterable[Path], step: int) -> RangeName | None:
    """The range in which a rank with these ``files`` was longest in ``step``; None where the files do not tell."""
    trace = _traces(key, files, {step}).get(step)
    inside = [] if trace is None else [r for r in trace.ranges if r.name.label in ranges.PASSES]
    return max(inside, key=lambda r: r.end - r.start).name if inside else None


def column(places: Iterable[Place], suspects: AbstractSet[int] = frozenset()) -> list[int]:
    """One rank per stage: of the pipelines that most stages are known of and that hold the fewest suspects, the one
    with the lowest coordinates. What is said of the layout is not to be a slow machine's."""
    pipelines: dict[tuple[int, int, int], dict[int, int]] = {}
    for place in places:
        pipelines.setdefault((place.dp, place.cp, place.tp), {})[place.pp] = place.rank
    best = min(pipelines, key=lambda at: (-len(pipelines[at]), len(suspects & set(pipelines[at].values())), at))
    return [rank for _, rank in sorted(pipelines[best].items())]


def _calls(key: Key, files: Iterable[Path]) -> dict[int, tuple[int, int]]:
    """Step: flags of its calls together, and how many events they have; of the last files that hold enough of them."""
    found: dict[int, tuple[int, int]] = {}
    for timeline in _read(sorted(files, key=_first_step, reverse=True), events=False):
        own = timeline.steps[_of_key(timeline, key)]
        own = own[own["duration"] > 0]  # the GPU did not say when it was done with the others
        for step, flags, shape in zip(own["step"].tolist(), own["flags"].tolist(), own["shape"].tolist(), strict=True):
            before = found.get(step, (0, 0))
            found[step] = before[0] | flags, before[1] + timeline.shapes[shape].size
        if sum(not flags & _LEFT_OUT for flags, _ in found.values()) >= 4 * LAST_STEPS:
            break
    return found


def _read(files: Iterable[Path], *, events: bool) -> Iterator[format.Timeline]:
    """Yields the timelines that can be read."""
    for path in files:
        with suppress(format.UnreadableTimeline):
            yield format.read_timeline(path, events=events)


def _first_step(path: Path) -> tuple[int, str]:
    name = parse_artifact_name(path.name)
    return name.step if name else 0, path.name


def _of_key(timeline: format.Timeline, key: Key) -> npt.NDArray[np.bool_]:
    own = [n for n, each in enumerate(timeline.metadata) if Key(each.target, each.role, each.sizes) == key]
    return np.isin(timeline.steps["metadata"], own)


def _common(calls: Sequence[dict[int, tuple[int, int]]], without: AbstractSet[int]) -> list[int]:
    """The last steps that all ranks have whole, or, where there are none, without the times of their events."""
    everywhere = set(calls[0]).intersection(*calls[1:]) - without
    for bad in (_LEFT_OUT | format.INCOMPLETE, _LEFT_OUT):
        steps = sorted(step for step in everywhere if not any(each[step][0] & bad for each in calls))
        if steps:
            events = max(1, sum(each[steps[-1]][1] for each in calls))
            return steps[-max(_FEWEST_STEPS, min(LAST_STEPS, MOST_EVENTS // events)) :]
    return []


def _traces(key: Key, files: Iterable[Path], steps: set[int]) -> dict[int, Trace]:
    """One rank's trace of every step."""
    newest: dict[tuple[int, int], tuple[int, Trace]] = {}
    for timeline in _read(sorted(files, key=_first_step), events=True):
        wanted = _of_key(timeline, key) & np.isin(timeline.steps["step"], sorted(steps))
        memory = timeline.holding(format.MEMORY)
        for position in np.flatnonzero(wanted).tolist():
            step = timeline.steps[position]
            at, start = (int(step["step"]), int(step["index"])), int(step["start_ns"])
            if at not in newest or newest[at][0] <= start:  # a step that ran again counts as it ran last
                metadata = timeline.metadata[step["metadata"]]
                trace = _trace(timeline.path, metadata, step, timeline.events(position))
                allocated = format.Memory.unpack(memory[position])
                newest[at] = start, replace(trace, memory=allocated and _allocations(allocated, start))
    found: dict[int, Trace] = {}
    for (number, _), (_, trace) in sorted(newest.items()):
        before = found.get(number)
        found[number] = trace if before is None else replace(before, ranges=before.ranges + trace.ranges)
    return found


def _trace(path: Path, metadata: Metadata, step: Any, events: format.Events | None) -> Trace:
    number = int(step["step"])
    if events is None:
        metadata = replace(
            metadata, ranges=MicrobatchRanges(False, "the step was recorded without the times of its microbatches")
        )
    return Trace(
        path=path,
        metadata=replace(metadata, steps=(number, number)),
        ranges=tuple(sorted(_ranges(metadata, step, events), key=lambda r: (r.start, -r.end))),
        timeline="device" if step["flags"] & format.DEVICE_CLOCK else "host",
    )


def _allocations(memory: format.Memory, start: int) -> Allocations:
    """Returns the allocations of a step that begins at ``start`` with as much as it ends with, and has its peak
    between."""
    found = np.array([memory.allocated, memory.peak])
    return Allocations(np.array([start, start + 1]), found, memory.capacity or None)


def _ranges(metadata: Metadata, step: Any, events: format.Events | None) -> list[TracedRange]:
    begin, end, place = int(step["start_ns"]), 1000 * int(step["duration"]), metadata.coords
    inside: list[TracedRange] = []
    if events is not None:
        for code, first, last in zip(events.code.tolist(), events.start.tolist(), events.end.tolist(), strict=True):
            if (name := codes.name(code)) is not None:
                inside.append(TracedRange(name, begin + 1000 * first, begin + 1000 * last))
                end = max(end, 1000 * last)
    fields: dict[str, int | None] = {"step": int(step["step"])}
    fields |= {axis: getattr(place, axis) for axis in ("pp", "tp", "cp", "ep", "dp")}
    return [TracedRange(RangeName(metadata.target, fields), begin, begin + end), *inside]


_Traces = dict[int, dict[int, Trace]]  # by rank and step


def _on_one_clock(traces: _Traces) -> tuple[tuple[str, ...], _Traces]:
    """Times of GPUs on one clock, and what must be told of that.

    A step begins on the GPU when it has finished what was before, which is not when the host began it: so each step is
    aligned on its own, by which phase must have waited for which. Clocks of hosts are aligned with the step
    (`stages.consistency`).
    """
    if len(traces) < 2 or all(trace.timeline != "device" for by_step in traces.values() for trace in by_step.values()):
        return (), traces
    moved: _Traces = {rank: dict(by_step) for rank, by_step in traces.items()}
    worst = 0
    for step in set[int]().union(*traces.values()):
        own = {rank: by_step[step] for rank, by_step in traces.items() if step in by_step}
        ends = {rank: ends_of(trace.metadata, calls_of(trace)) for rank, trace in own.items()}
        alignment = align(dict.fromkeys(own), [link for link, _ in links_between(ends)])
        uncertain = uncertainty(alignment)
        if uncertain is None or uncertain > MOST_UNCERTAIN * _longest(own.values()):
            why = "on the GPU's clock and laid beside each other by the hosts' clocks at the start of the step"
            return (f"the stages' times are {why}",), traces
        worst = max(worst, uncertain)
        host = own[min(own)].metadata.host or f"rank {min(own)}"
        for rank, trace in own.items():
            moved[rank][step] = _moved(trace, alignment.offset(rank), host)
    return (
        f"the stages' steps were aligned on the GPU's clock by which phase waits for which, to {worst / 1e6:.2g} ms",
    ), moved


def _longest(traces: Iterable[Trace]) -> int:
    """Nanoseconds of the longest call."""
    return max(r.end - r.start for trace in traces for r in trace.ranges if r.name.fields.get("step") is not None)


def _moved(trace: Trace, by: int, host: str) -> Trace:
    moved = tuple(TracedRange(r.name, r.start + by, r.end + by) for r in trace.ranges)
    memory = trace.memory and replace(trace.memory, times=trace.memory.times + by)
    return replace(trace, ranges=moved, metadata=replace(trace.metadata, host=host), memory=memory)
