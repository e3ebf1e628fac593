"""The stage report on a terminal: tables that fit 80 columns, colour only where a terminal shows it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.report.fleet_terminal import COMMAND, fleet_lines, show_table
from megaprof.analysis.report.fleet_words import notes_of
from megaprof.analysis.report.report import Report, TargetReport
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.stages import Stage, TargetStages
from megaprof.analysis.trace.calls import GROUPS
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.metadata import ModelChunk

_MOST_TRACES = 8
_ABSENT = "-"
# Predictions that gain less than this are in the JSON only.
_WORTH_SHOWING = 1.01


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    for target in report.targets:
        _show_target(target, console)
    if report.warnings:
        _heading(console, "Files")
        _show_lines(console, "!", "yellow", report.warnings)
    folder = report.source.parent if report.source.is_file() else report.source
    _heading(console, "Traces" if report.traces else "Timelines")
    console.print(_text(str(folder.absolute())), soft_wrap=True)
    if report.timelines:
        console.print(f"  {len(report.timelines)} timelines")
    for path in report.traces[:_MOST_TRACES]:
        console.print(_text("  " + _relative(path, folder)), soft_wrap=True)
    if len(report.traces) > _MOST_TRACES:
        console.print(f"  and {len(report.traces) - _MOST_TRACES} more")
    if report.traces:
        console.print(_text("Open one: drag it into https://ui.perfetto.dev, or load it in chrome://tracing"))


def _show_target(target: TargetReport, console: Console) -> None:
    measured, verdict = target.measured, target.verdict
    _heading(console, measured.target + (f" ({measured.role})" if measured.role else ""))
    if target.fleet is not None:
        _show_fleet(target.fleet, console)
    for line in _summary(measured):
        console.print(_text(line))
    per_step = _per_step_table(measured, spread=True)
    unbounded = console.options.update(max_width=10_000)
    if console.measure(per_step, options=unbounded).maximum > console.width:
        per_step = _per_step_table(measured, spread=False)
    console.print(per_step)
    if (waiting := _waiting_table(measured)) is not None:
        console.print(waiting)
    if any(s.forward_per_microbatch_ms or s.backward_per_microbatch_ms for s in measured.stages):
        console.print(_per_microbatch_table(measured))
    with_modules = [stage for stage in measured.stages if stage.modules_ms]
    if with_modules:
        console.print(_modules_table(max(with_modules, key=lambda s: s.compute_ms.mean if s.compute_ms else 0.0)))
    if verdict.imbalance is not None:
        console.print(_text(f"imbalance {verdict.imbalance:.2f} (slowest stage / mean stage, compute only)"))
    style = "bold red" if verdict.slowest_stage is not None else "green" if verdict.imbalance else ""
    for note in verdict.notes:
        console.print(_text(note[:1].upper() + note[1:], style))
    for cause in verdict.causes:
        why = f"Why ({cause.kind.replace('_', ' ')}): {cause.evidence}. "
        costs = f"It costs {_number(cause.excess_ms)} ms {cause.basis}."
        console.print(_text(why + costs))
    _show_what_if(target.what_if, console)
    _show_lines(console, "!", "yellow", measured.warnings)


def _show_fleet(fleet: Fleet, console: Console) -> None:
    for line, style in fleet_lines(fleet):
        console.print(_text(line, style), soft_wrap=line.startswith(COMMAND))
    show_table(fleet, console)
    for note in notes_of(fleet):
        console.print(_text(note[:1].upper() + note[1:], "dim"))
    console.print("\nIn detail:")


def _show_what_if(found: WhatIf, console: Console) -> None:
    if found.replay_error is None or found.measured_ms is None or found.replay_ms is None:
        return
    console.print()
    error = f"{found.replay_error.mean:+.1%}"
    if found.replay_error.count > 1:
        error += f" ± {found.replay_error.stdev:.1%}"
    replay = f"What if: the replayed step takes {_number(found.replay_ms)} ms, {_number(found.measured_ms)} ms measured"
    console.print(_text(f"{replay} ({error} in the pipeline)"))
    shown = [each for each in found.candidates if each.speedup >= _WORTH_SHOWING]
    if shown:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("predicted")
        table.add_column("step, ms", justify="right", no_wrap=True)
        table.add_column("speedup", justify="right", no_wrap=True)
        for each in shown:
            uncertainty = f"{each.uncertainty_ms:.0f}" if each.step_ms >= 100 else _number(each.uncertainty_ms)
            step = f"{_number(each.step_ms)} ±{uncertainty}"
            remarks = [f"assumes that {each.assumes}"] * bool(each.assumes) + [each.memory] * bool(each.memory)
            table.add_row(_text("; ".join([each.what, *map(str, remarks)])), step, f"{each.speedup:.2f}")
        console.print(table)
    if found.advice:
        console.print(_text(found.advice[:1].upper() + found.advice[1:], "bold green" if found.best else ""))
    if found.best:
        console.print(_text("  " + shlex.join(found.best.flags)), soft_wrap=True)
        if found.best.memory:
            console.print(_text(f"! {found.best.memory}", "yellow"))
    if found.costs:
        costs = ", ".join(f"{kind} {_number(sum(cost))} ms" for kind, cost in found.costs.by_kind.items())
        assumptions = "".join(f"; {each}" for each in found.costs.assumptions)
        console.print(_text(f"Costs per microbatch, from {found.costs.source}: {costs}{assumptions}", "dim"))
    _show_lines(console, "!", "yellow", found.warnings)


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
    exposed = [
        group
        for group in GROUPS
        if getattr(measured.sizes, group) > 1 and (group != "pp" or any(s.exposed_ms[group] for s in measured.stages))
    ]
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


def _waiting_table(measured: TargetStages) -> Table | None:
    """Where the rest of the step went, as far as it is known; None where nothing is."""
    columns = {
        "bubble:\nwarm-up": [stage.bubble_split["warmup_ms"] for stage in measured.stages],
        "\nsteady": [stage.bubble_split["steady_ms"] for stage in measured.stages],
        "\ncool-down": [stage.bubble_split["cooldown_ms"] for stage in measured.stages],
        "gradient\ntail": [stage.dp_tail_ms for stage in measured.stages],
        "waiting for\nthe host": [stage.host_bound_ms for stage in measured.stages],
    }
    shown = {name: spreads for name, spreads in columns.items() if any(s and s.mean > 0 for s in spreads)}
    if not shown:
        return None
    table = _table("waiting per step, ms")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for number, stage in enumerate(measured.stages):
        table.add_row(*_stage_cells(stage), *(_mean(spreads[number]) for spreads in shown.values()))
    return table


def _modules_table(stage: Stage) -> Table:
    """Passes through the modules of one stage, where the capture held their ranges."""
    table = Table(
        title=f"modules of stage {stage.pp}, ms per pass (median, and fastest to slowest)",
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("module", no_wrap=True)
    table.add_column("passes", justify="right")
    table.add_column("time", justify="right", no_wrap=True)
    for name, spread in stage.modules_ms.items():
        table.add_row(_text(name), str(spread.count), _range(spread))
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


def _describe(chunks: Sequence[ModelChunk | None]) -> str:
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
