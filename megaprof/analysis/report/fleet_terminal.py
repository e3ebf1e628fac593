"""Prints the whole run on all ranks on a terminal: first what is slow, then a small table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.trends import Percentiles
from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.report.printing import number_columns, show_finding, table, text
from megaprof.analysis.report.text.words import ABSENT, number

_TICKS = "▁▂▃▄▅▆▇█"
_WIDTH = 20
#: At most this many stages are listed; if there are more, the slowest ones.
_MOST_STAGES = 16


def show_over_the_run(target: TargetReport, fleet: Fleet, console: Console) -> None:
    """Prints what changed over the run, the percentiles of the times, and how the times developed."""
    for finding in target.changes:
        show_finding(console, finding, quiet=True)
    made = table("over the run, ms per step", left=[""])
    number_columns(made, "rank count", "p50", "p95", "p99", "max")
    made.add_column(f"steps {fleet.coverage.steps[0]}-{fleet.coverage.steps[1]}", no_wrap=True)
    if fleet.times.step is not None:
        made.add_row("step, longest rank", "", *_cells(fleet.times.step), sparkline(fleet.times.step_ms))
    if (middle := fleet.synchronisation.median_ms) is not None:
        made.add_row(
            "gradients, last rank", "", number(middle), "", "", "", sparkline(fleet.synchronisation.synchronisation_ms)
        )
    shown = sorted(fleet.stages, key=lambda stage: -stage.compute.p50 if stage.compute else 0.0)[:_MOST_STAGES]
    for stage in fleet.stages:
        if stage in shown:
            row = sparkline(stage.compute_ms)
            made.add_row(f"stage {stage.pp} compute", str(stage.ranks), *_cells(stage.compute), row)
    console.print(made)
    if len(shown) < len(fleet.stages):
        console.print(f"the slowest {len(shown)} of {len(fleet.stages)} stages; all are in the JSON", style="dim")
    for note in target.notes:
        console.print(text(note, "dim"))


def sparkline(values: Sequence[float | None]) -> str:
    """Returns a row of blocks, scaled from the lowest value to the highest.

    A missing value is a blank. Changes below 10 % look small, because the scale spans at least 10 % of the highest
    value.
    """
    size = max(1, math.ceil(len(values) / _WIDTH))
    parts = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    middles = [sorted(part)[len(part) // 2] if part else None for part in parts]
    numbers = [v for v in middles if v is not None]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    span = max(high - low, 0.1 * high, 1e-9)
    return "".join(" " if v is None else _TICKS[round((v - low) / span * (len(_TICKS) - 1))] for v in middles)


def _cells(times: Percentiles | None) -> tuple[str, ...]:
    if times is None:
        return (ABSENT,) * 4
    return number(times.p50), number(times.p95), number(times.p99), number(times.max)
