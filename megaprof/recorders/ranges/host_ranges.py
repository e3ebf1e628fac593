"""Adds ranges that Kineto does not record to its trace: our ranges without CPU activity, and garbage collections.

Kineto records user annotations only with CPU activity, and that is the expensive part. Without it a window costs next
to no time, but its kernels belong to no microbatch. So the host times the ranges (0.3 us each) and adds them to the
trace as the user annotations that they would have been. Kernels are attributed by their launch calls, which CUDA
activity does record. Both clocks count nanoseconds since the epoch.
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
    """Appends ``ranges`` to the events of ``trace``, an uncompressed Kineto trace, in place.

    Reads and writes only the ranges and both ends of the file. Raises ValueError if the file does not look like
    Kineto's (torch 2.6 to 2.13), and leaves it unchanged.
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
    """Returns the base that Kineto counts from; 0 without one. Kineto writes it before the events, after metadata of
    any length. Raises ValueError for a trace without events."""
    head = b""
    while _EVENTS not in head:
        if not (chunk := trace.read(_CHUNK)):
            raise ValueError("the trace has no events")
        head += chunk
    base = _BASE.search(head)
    return 0 if base is None else int(base[1])


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
