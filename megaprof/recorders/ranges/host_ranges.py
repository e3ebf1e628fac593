"""Our ranges in a trace that Kineto recorded with CUDA activity alone, and others that Kineto does not record.

Kineto records user annotations with CPU activity only, and that is what costs: without it a window takes next to no
time, but its kernels belong to no microbatch. So the ranges are timed by the host (0.3 us each) and added to the trace
as the user annotations that they would have been; kernels are attributed by their launch calls, which CUDA activity
does record. Both clocks count nanoseconds since the epoch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from megaprof.recorders.ranges.emit import LoggedRange

_TAIL = re.compile(rb'\s*\],\s*"traceName"')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = b'"traceEvents"'
_CHUNK = 1 << 16


def add_ranges(trace: Path, ranges: Sequence[LoggedRange]) -> None:
    """Append ``ranges`` to the events of ``trace``, an uncompressed Kineto trace, in place.

    Costs no more than the ranges and both ends of the file. Raises ValueError when the file does not look like Kineto's
    (torch 2.6 to 2.13), and leaves it as it is.
    """
    if not ranges:
        return
    with open(trace, "r+b") as file:
        base = _base_time(file)
        start = max(0, file.seek(0, os.SEEK_END) - _CHUNK)
        file.seek(start)
        tail = file.read()
        ends = list(_TAIL.finditer(tail))
        if not ends:
            raise ValueError(f"{trace} has no end of Kineto's, so our ranges cannot be added to it")
        position = ends[-1].start()
        empty = tail[:position].rstrip().endswith(b"[")
        events = ",\n".join(json.dumps(_event(r, base)) for r in ranges).encode()
        file.seek(start + position)
        file.write((b"\n" if empty else b",\n") + events + tail[position:])


def _base_time(trace: BinaryIO) -> int:
    """Kineto counts from a base that it writes before the events, behind metadata of any length; 0 without one."""
    head = b""
    while _EVENTS not in head:
        if not (chunk := trace.read(_CHUNK)):
            raise ValueError("the trace has no events")
        head += chunk
    found = _BASE.search(head)
    return 0 if found is None else int(found[1])


def _event(logged: LoggedRange, base: int) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": logged.name,
        "pid": os.getpid(),
        "tid": logged.thread,
        "ts": (logged.start - base) / 1000,
        "dur": (logged.end - logged.start) / 1000,
        "args": {"clock": "host"},
    }
