"""Reads what a rank did in a single step, from the events in its timeline."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from megaprof.analysis.fleet.reading import Key
from megaprof.analysis.trace.passes import Pass
from megaprof.formats import ranges
from megaprof.formats import timeline as format
from megaprof.formats.steps import codes


def call_of(key: Key, files: Iterable[Path], step: int, index: int = 0) -> list[Pass[int]]:
    """Returns one call of ``step`` on the rank with these ``files``, as a pass named after its target, followed by
    everything in it in order; an empty list if the files do not have it. If the step ran more than once, the last run
    counts."""
    calls: list[tuple[int, list[Pass[int]]]] = []
    for path in files:
        with suppress(format.UnreadableTimeline):
            timeline = format.read_timeline(path)
            for row in np.flatnonzero((timeline.steps["step"] == step) & (timeline.steps["index"] == index)).tolist():
                fixed, events = timeline.steps[row], timeline.events(row)
                metadata = timeline.metadata[fixed["metadata"]]
                if events is not None and Key(metadata.target, metadata.role, metadata.sizes) == key:
                    begin_ns, length_ns, coords = int(fixed["start_ns"]), 1000 * int(fixed["duration"]), metadata.coords
                    passes = [Pass(key.target, coords.pp, None, None, begin_ns, begin_ns + length_ns, coords.rank)]
                    times = np.stack(
                        (events.code, begin_ns + 1000 * events.start, begin_ns + 1000 * events.end), axis=1
                    )
                    for code, start, end in times.tolist():
                        if (name := codes.name(code)) is not None:
                            chunk, microbatch = name.fields.get("chunk"), name.fields.get("mb")
                            passes.append(Pass(name.label, coords.pp, chunk, microbatch, start, end, coords.rank))
                    calls.append((begin_ns, passes))
    return max(calls, key=lambda call: call[0])[1] if calls else []


def longest_pass(key: Key, files: Iterable[Path], step: int) -> Pass[int] | None:
    """Returns the longest pass in ``step`` of the rank with these ``files``; None if the files do not have one."""
    passes = (inner_pass for inner_pass in call_of(key, files, step) if inner_pass.kind in ranges.PASSES)
    return max(passes, key=lambda inner_pass: inner_pass.end - inner_pass.start, default=None)
