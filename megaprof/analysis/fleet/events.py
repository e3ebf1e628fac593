"""Reads what a rank did in a single step, from the events in its timeline."""

from __future__ import annotations

from megaprof.analysis.fleet.reading import FleetReading, Key
from megaprof.analysis.trace.passes import Pass
from megaprof.formats import ranges
from megaprof.formats.steps import codes


def call_of(reading: FleetReading, key: Key, rank: int, step: int, index: int = 0) -> list[Pass[int]]:
    """Returns one call of ``step`` on a rank, as a pass named after its target, followed by everything in it in order;
    an empty list if its files do not have it. If the step ran more than once, the last run counts."""
    latest: list[Pass[int]] = []
    for timeline, rows in reading.timelines.steps_of(reading.files.get(key, {}).get(rank, ()), key):
        steps = timeline.steps[rows]
        for row in rows[(steps["step"] == step) & (steps["index"] == index)].tolist():
            fixed, events = timeline.steps[row], timeline.events(row)
            begin_ns, coords = int(fixed["start_ns"]), timeline.metadata[fixed["metadata"]].coords
            if events is None or (latest and latest[0].start >= begin_ns):
                continue
            end_ns = begin_ns + 1000 * int(fixed["duration"])
            latest = [Pass(key.target, coords.pp, None, None, begin_ns, end_ns, coords.rank)]
            spans = (events.start.tolist(), events.end.tolist())
            for code, start, end in zip(events.code.tolist(), *spans, strict=True):
                if (name := codes.name(code)) is not None:
                    chunk, microbatch = name.fields.get("chunk"), name.fields.get("mb")
                    times = begin_ns + 1000 * start, begin_ns + 1000 * end
                    latest.append(Pass(name.label, coords.pp, chunk, microbatch, times[0], times[1], coords.rank))
    return latest


def longest_pass(reading: FleetReading, key: Key, rank: int, step: int) -> Pass[int] | None:
    """Returns the longest pass of a rank in ``step``; None if its files do not have one."""
    passes = (each for each in call_of(reading, key, rank, step) if each.kind in ranges.PASSES)
    return max(passes, key=lambda each: each.end - each.start, default=None)
