"""The stage report on a terminal: tables that fit 80 columns, colour only where a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.report import Report, TargetReport
from megaprof.analysis.samples import Spread
from megaprof.analysis.stages import Stage, TargetStages
from megaprof.analysis.traces import Chunk

_MOST_TRACES = 8
_ABSENT = "-"


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    for target in report.targets:
        _show_target(target, console)
    if report.warnings:
        _heading(console, "Files")
        _show_lines(console, "!", "yellow", report.warnings)
    _heading(console, "Traces")
    folder = report.source.parent if report.source.is_file() else report.source
    console.print(_text(str(folder.absolute())), soft_wrap=True)
    for path in report.traces[:_MOST_TRACES]:
        console.print(_text("  " + _relative(path, folder)), soft_wrap=True)
    if len(report.traces) > _MOST_TRACES:
        console.print(f"  and {len(report.traces) - _MOST_TRACES} more")
    console.print(_text("Open one: drag it into https://ui.perfetto.dev, or load it in chrome://tracing"))


def _show_target(target: TargetReport, console: Console) -> None:
    measured, verdict = target.measured, target.verdict
    _heading(console, measured.target + (f" ({measured.role})" if measured.role else ""))
    for line in _summary(measured):
        console.print(_text(line))
    per_step = _per_step_table(measured, spread=True)
    unbounded = console.options.update(max_width=10_000)
    if console.measure(per_step, options=unbounded).maximum > console.width:
        per_step = _per_step_table(measured, spread=False)
    console.print(per_step)
    if any(s.forward_per_microbatch_ms or s.backward_per_microbatch_ms for s in measured.stages):
        console.print(_per_microbatch_table(measured))
    if verdict.imbalance is not None:
        console.print(_text(f"imbalance {verdict.imbalance:.2f} (slowest stage / mean stage, compute only)"))
    style = "bold red" if verdict.slowest_stage is not None else "green" if verdict.imbalance else ""
    for note in verdict.notes:
        console.print(_text(note[:1].upper() + note[1:], style))
    for cause in verdict.causes:
        why = f"Why ({cause.kind.replace('_', ' ')}): {cause.evidence}. "
        costs = f"It costs {_number(cause.excess_ms)} ms per microbatch over the mean stage."
        console.print(_text(why + costs))
    _show_lines(console, "!", "yellow", measured.warnings)


def _summary(measured: TargetStages) -> list[str]:
    parts = [
        f"step{'s' if len(measured.steps) > 1 else ''} {_steps(measured.steps)}",
        measured.schedule or "unknown schedule",
        str(measured.sizes),
    ]
    if measured.microbatches is not None:
        parts.insert(2, f"{measured.microbatches} microbatches")
    if measured.forward_only:
        parts.append("forward only")
    lines = [", ".join(parts)]
    if measured.step_time_ms:
        basis = f", {measured.step_time_basis}" if measured.sizes.pp > 1 else ""
        lines.append(f"step time {_with_spread(measured.step_time_ms)} ms{basis}")
    return lines


def _per_step_table(measured: TargetStages, *, spread: bool) -> Table:
    title = "per step, ms (mean ± standard deviation)" if spread and _several(measured) else "per step, ms"
    cell = _with_spread if spread else _mean
    table = _table(title)
    exposed = [g for g in ("tp", "ep", "cp", "dp") if getattr(measured.sizes, g) > 1]
    passes = ["forward"] if measured.forward_only else ["forward", "backward"]
    for name in (*passes, "compute", *(f"exposed\n{group}" for group in exposed), "bubble"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    slowest = max((s.compute_ms.mean for s in measured.stages if s.compute_ms), default=0.0)
    for stage in measured.stages:
        is_slowest = stage.compute_ms is not None and stage.compute_ms.mean == slowest and len(measured.stages) > 1
        table.add_row(
            *_stage_cells(stage),
            cell(stage.forward_ms),
            *([] if measured.forward_only else [cell(stage.backward_ms)]),
            Text(cell(stage.compute_ms), "bold" if is_slowest else ""),
            *(cell(stage.exposed_ms[group]) for group in exposed),
            cell(stage.bubble_ms) + ("" if stage.bubble_fraction is None else f" ({stage.bubble_fraction:.0%})"),
        )
    return table


def _per_microbatch_table(measured: TargetStages) -> Table:
    table = _table("per microbatch, ms (median, and fastest to slowest)")
    table.add_column("forward", justify="right", no_wrap=True)
    if not measured.forward_only:
        table.add_column("backward", justify="right", no_wrap=True)

    def row(cells: tuple[str, str, Text], forward: Spread | None, backward: Spread | None) -> None:
        table.add_row(*cells, _range(forward), *([] if measured.forward_only else [_range(backward)]))

    for stage in measured.stages:
        row(_stage_cells(stage), stage.forward_per_microbatch_ms, stage.backward_per_microbatch_ms)
        for chunk in stage.chunks if len(stage.chunks) > 1 else ():
            cells = ("", f"chunk {chunk.chunk}", _text(_describe([chunk.holds])))
            row(cells, chunk.forward_ms, chunk.backward_ms)
    return table


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="dim", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("ranks")
    table.add_column("layers", no_wrap=True)
    return table


def _stage_cells(stage: Stage) -> tuple[str, str, Text]:
    ranks = ", ".join(map(str, stage.ranks[:4])) + (", ..." if len(stage.ranks) > 4 else "")
    return str(stage.pp), ranks, _text(_describe([chunk.holds for chunk in stage.chunks]))


def _describe(chunks: Sequence[Chunk | None]) -> str:
    """Layers of some chunks, added up, and what is beside them: ``emb+6``, ``4``, ``2+loss``."""
    known = [chunk for chunk in chunks if chunk is not None]
    if not known or any(chunk.layers is None for chunk in known):
        return "?"
    layers = sum(chunk.layers or 0 for chunk in known)
    parts = [str(layers)]
    if any(chunk.embedding for chunk in known):
        parts.insert(0, "emb")
    if mtp := sum(chunk.mtp or 0 for chunk in known):
        parts.append(f"{mtp}mtp")
    if any(chunk.loss for chunk in known):
        parts.append("loss")
    return "+".join(parts)


def _several(measured: TargetStages) -> bool:
    return any(stage.forward_ms and stage.forward_ms.count > 1 for stage in measured.stages)


def _mean(spread: Spread | None) -> str:
    return _number(spread.mean) if spread else _ABSENT


def _with_spread(spread: Spread | None) -> str:
    if spread is None:
        return _ABSENT
    return _number(spread.mean) + (f" ±{_number(spread.stdev)}" if spread.count > 1 else "")


def _range(spread: Spread | None) -> str:
    if spread is None:
        return _ABSENT
    return f"{_number(spread.median)} ({_number(spread.min)} - {_number(spread.max)})"


def _number(ms: float) -> str:
    """Three significant digits, and never fewer than the whole milliseconds."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]}-{steps[-1]}"
    return ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.relative_to(folder))
    except ValueError:
        return str(path)


def _heading(console: Console, title: str) -> None:
    console.print()
    console.print(_text(title, "bold"))


def _show_lines(console: Console, mark: str, style: str, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(_text(f"{mark} {line}", style))


def _text(content: str, style: str = "") -> Text:
    """Names come from files: neither markup nor control characters of theirs reach the terminal."""
    return Text("".join(c if c.isprintable() else "\ufffd" for c in content), style)
