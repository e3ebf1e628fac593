"""The kernel summary of a trace, made in the process of the test."""

from __future__ import annotations

from typing import Any, TextIO

from megaprof.artifacts.kernels import KernelSummary, read_events


def summarise(file: TextIO) -> dict[str, Any]:
    """Returns the summary of an uncompressed trace. Raises ValueError for a file that is no whole trace."""
    summary = KernelSummary()
    for event in read_events(file):
        summary.add(event)
    return summary.result({})
