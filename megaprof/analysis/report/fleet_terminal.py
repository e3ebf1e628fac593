"""The whole run on all ranks, on a terminal: what is slow first, then a small table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.trends import Percentiles
from megaprof.analysis.report.fleet_words import findings_of, parted
from megaprof.analysis.report.words import number

_TICKS = "▁▂▃▄▅▆▇█"
_WIDTH = 20
COMMAND = "  "
#: Stages that are listed; of more, the slowest.
_MOST_STAGES = 16


def fleet_lines(fleet: Fleet) -> list[tuple[str, str]]:
    """Lines and their styles, to be printed above the table; what begins with `COMMAND` in one piece, to be copied."""
    lines = [(f"all timelines: {fleet.ranks} ranks, steps {fleet.steps[0]}-{fleet.steps[1]}", "")]
    slow = bool(fleet.stragglers or any(stage.shifts for stage in fleet.stages) or fleet.step_shifts or fleet.ended)
    slow = slow or bool(fleet.synchronisation_shifts or fleet.stage_synchronisation)
    for finding in findings_of(fleet):
        said, command = parted(finding)
        lines.append((said, "bold red" if slow else "green"))
        if command:
            lines.append((COMMAND + command, ""))
    return lines


def show_table(fleet: Fleet, console: Console) -> None:
    """Percentiles over the run, and how the times went."""
    table = Table(
        title="over the run, ms per step",
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("")
    table.add_column("ranks", justify="right")
    for name in ("p50", "p95", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"steps {fleet.steps[0]}-{fleet.steps[1]}", no_wrap=True)
    if fleet.step is not None:
        table.add_row("step time", "", *_cells(fleet.step), sparkline(fleet.step_ms))
    known = [ms for ms in fleet.synchronisation_ms if ms is not None]
    if known:
        table.add_row(
            "gradient sync", "", number(sorted(known)[len(known) // 2]), "", "", "", sparkline(fleet.synchronisation_ms)
        )
    shown = sorted(fleet.stages, key=lambda stage: -stage.compute.p50 if stage.compute else 0.0)[:_MOST_STAGES]
    for stage in fleet.stages:
        if stage in shown:
            row = sparkline(stage.compute_ms)
            table.add_row(f"stage {stage.pp} compute", str(stage.ranks), *_cells(stage.compute), row)
    console.print(table)
    if len(shown) < len(fleet.stages):
        console.print(f"the slowest {len(shown)} of {len(fleet.stages)} stages; all are in the JSON", style="dim")


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """A row of blocks from the lowest value to the highest, a blank where there is none; flat below 10 % of change."""
    size = max(1, math.ceil(len(values) / width))
    parts = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    middles = [sorted(part)[len(part) // 2] if part else None for part in parts]
    known = [v for v in middles if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = max(high - low, 0.1 * high, 1e-9)
    return "".join(" " if v is None else _TICKS[round((v - low) / span * (len(_TICKS) - 1))] for v in middles)


def _cells(times: Percentiles | None) -> tuple[str, str, str, str]:
    if times is None:
        return "-", "-", "-", "-"
    return number(times.p50), number(times.p95), number(times.p99), number(times.max)
