"""Prints the stage report on a terminal: tables fit 80 columns, and colour appears only if the terminal shows it."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaprof.analysis.diagnosis.stages import Stage, TargetStages
from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.report.fleet_terminal import show_over_the_run
from megaprof.analysis.report.foreign_terminal import show_foreign
from megaprof.analysis.report.printing import (
    STYLES,
    heading,
    number_columns,
    show_finding,
    show_warnings,
    stage_cells,
    stage_table,
    table,
    text,
)
from megaprof.analysis.report.text import causes, sentences, what_if
from megaprof.analysis.report.text.words import (
    ABSENT,
    counted,
    layers,
    mean,
    number,
    percent,
    reach,
    sentence,
    speedup,
    title,
    with_spread,
    within,
)
from megaprof.analysis.samples import Spread
from megaprof.analysis.trace.calls import GROUPS
from megaprof.analysis.trace.nsys.files import is_nsys
from megaprof.analysis.what_if.what_if import WhatIf

_MOST_TRACES = 8


def show(report: Report, console: Console) -> None:
    """Prints the whole report.

    It begins with whether there are other runs, and whether the job hangs or was killed. If there are many targets, a
    table of them follows. Each target shows its verdict before its tables.
    """
    if report.of_several is not None:
        console.print(text(report.of_several), soft_wrap=True)
    for finding in sentences.of_standstills([report.standstill] if report.standstill else []):
        show_finding(console, finding)
    if len(report.targets) > sentences.FEW_TARGETS:
        _show_overview(report, console)
    for target in report.targets:
        _show_target(target, console)
    if report.foreign is not None:
        show_foreign(report.foreign, console)
    if report.warnings:
        heading(console, "Files")
        show_warnings(console, report.warnings)
    folder = report.path.parent if report.path.is_file() else report.path
    heading(console, "Traces" if report.traces else "Timelines")
    console.print(text(str(folder.absolute())), soft_wrap=True)
    if report.timelines:
        console.print(f"  {counted(len(report.timelines), 'timeline')}")
    for path in report.traces[:_MOST_TRACES]:
        console.print(text("  " + _relative(path, folder)), soft_wrap=True)
    if len(report.traces) > _MOST_TRACES:
        console.print(f"  and {len(report.traces) - _MOST_TRACES} more")
    if not all(map(is_nsys, report.traces)):
        console.print(text("To open one, drag it into https://ui.perfetto.dev or load it in chrome://tracing"))
    if report.traces and report.foreign is None:  # recordings that megaprof did not make cannot be merged
        console.print(text("All ranks of a step on one timeline, in https://ui.perfetto.dev:"))
        console.print(text(f"  megaprof open {shlex.quote(report.source)}"), soft_wrap=True)


def _show_target(target: TargetReport, console: Console) -> None:
    measured = target.measured
    heading(console, title(*target.key))
    for finding in target.ends:
        show_finding(console, finding)
    for line in _summary(target):
        console.print(text(line))
    _show_verdict(target, console)
    if target.fleet is not None:
        show_over_the_run(target, target.fleet, console)
    _show_per_step(target, console)
    if (waiting := _waiting_table(measured)) is not None:
        console.print(waiting)
    if any(s.forward_per_microbatch_ms or s.backward_per_microbatch_ms for s in measured.stages):
        console.print(_per_microbatch_table(measured))
    if (lengths := causes.lengths(target.diagnosis)) is not None:
        console.print(text(lengths))
    with_modules = [stage for stage in measured.stages if stage.modules_ms]
    if with_modules:
        console.print(_modules_table(max(with_modules, key=lambda s: s.compute_ms.mean if s.compute_ms else 0.0)))
    _show_what_if(target.what_if, console)
    show_warnings(console, measured.warnings)


def _show_overview(report: Report, console: Console) -> None:
    made = table(left=["target", "role", "verdict"])
    number_columns(made, "imbalance", "step time, ms")
    for target in report.targets:
        name, role = target.key
        verdict = target.in_brief()
        made.add_row(
            text(name),
            text(role or ""),
            text(verdict.text, STYLES[verdict.severity]),
            target.shown_imbalance or ABSENT,
            number(target.judged_step_ms),
        )
    heading(console, counted(len(report.targets), "target"))
    console.print(made)


def _show_verdict(target: TargetReport, console: Console) -> None:
    measured, predictions = target.measured, target.what_if
    if measured.imbalance is not None:
        console.print(text(f"imbalance {measured.imbalance:.2f} (slowest stage / average stage, compute only)"))
    if target.basis is not None:
        console.print(text(target.basis))
    first, *others = target.findings
    show_finding(console, first)
    for finding in others:
        show_finding(console, finding, quiet=True)
    if target.advice is not None:
        show_finding(console, target.advice)
        if predictions.best and (held := what_if.activations(predictions.best, predictions)):
            console.print(text(sentence(held)))
    if target.capture is not None:
        show_finding(console, target.capture)


def _show_what_if(predictions: WhatIf, console: Console) -> None:
    if predictions.replay_error is None or predictions.measured_ms is None or predictions.replay_ms is None:
        return
    console.print()
    off = percent(predictions.replay_ms / predictions.measured_ms - 1.0, sign=True)
    if predictions.replay_error.count > 1:
        low, high = (
            percent(error, sign=True) for error in (predictions.replay_error.min, predictions.replay_error.max)
        )
        off += f"; single steps {low} to {high}"
    console.print(
        text(
            f"What if: replayed, the step takes {number(predictions.replay_ms)} ms instead of "
            f"{number(predictions.measured_ms)} ms ({off})"
        )
    )
    if shown := what_if.worth_showing(predictions):
        predicted = table(left=["predicted"])
        number_columns(predicted, "step, ms", "speedup")
        for change in shown:
            name = text(what_if.name_of(change, predictions))
            predicted.add_row(name, within(change.step_ms, change.reach_ms), speedup(change.speedup, change.reach))
        console.print(predicted)
        for change in shown:
            if change.flags and change != predictions.best:  # the flags of the best one are in the advice
                console.print(
                    text(f"{what_if.name_of(change, predictions)}: {shlex.join(change.flags)}"), soft_wrap=True
                )
        for caveat in what_if.caveats(predictions):
            console.print(text(caveat, "dim"))
    if (withheld := what_if.left_out(predictions)) is not None:
        console.print(text(withheld, "dim"))
    if predictions.costs:
        console.print(text(what_if.of_costs(predictions.costs), "dim"))
    show_warnings(console, predictions.warnings)


def _summary(target: TargetReport) -> list[str]:
    measured, fleet = target.measured, target.fleet
    lines = [", ".join([*sentences.facts(measured), str(measured.sizes)])]
    if fleet is not None:
        first, last = fleet.coverage.steps
        lines.insert(0, f"all timelines: {counted(fleet.coverage.ranks, 'rank')}, steps {first}-{last}")
    if measured.step_time_ms:
        basis = f", {sentences.basis(measured)}" if measured.sizes.pp > 1 else ""
        lines.append(f"step time {with_spread(measured.step_time_ms)} ms{basis}")
    return lines


def _show_per_step(target: TargetReport, console: Console) -> None:
    """Prints one table if the terminal is wide enough.

    Otherwise it leaves out the spreads, and if that is not enough, it puts exposed communication in a second table.
    """
    measured = target.measured

    def is_shown(group: str) -> bool:
        spreads = [stage.exposed_ms[group] for stage in measured.stages]
        if group == "unknown":
            return any(spread.mean for spread in spreads if spread)
        return getattr(measured.sizes, group) > 1 and (group != "pp" or any(spreads))

    exposed = [group for group in GROUPS if is_shown(group)]
    unbounded = console.options.update(max_width=10_000)
    for spread, beside in ((True, exposed), (False, exposed), (False, [])):
        made = _per_step_table(target, beside, spread=spread)
        if console.measure(made, options=unbounded).maximum <= console.width:
            break
    console.print(made)
    if beside != exposed:
        apart = stage_table("exposed communication per step, ms", *exposed)
        for stage in measured.stages:
            apart.add_row(*stage_cells(stage), *(mean(stage.exposed_ms[group]) for group in exposed))
        console.print(apart)


def _per_step_table(target: TargetReport, exposed: list[str], *, spread: bool) -> Table:
    measured = target.measured
    several = any(stage.forward_ms and stage.forward_ms.count > 1 for stage in measured.stages)
    cell = with_spread if spread else mean
    columns = (*measured.passes, "compute", *(f"exposed\n{group}" for group in exposed), "bubble")
    made = stage_table("per step, ms (mean ± standard deviation)" if spread and several else "per step, ms", *columns)
    for stage in measured.shown:
        made.add_row(
            *stage_cells(stage),
            cell(stage.forward_ms),
            *([] if measured.forward_only else [cell(stage.backward_ms)]),
            Text(cell(stage.compute_ms), "bold" if target.marked(stage) else ""),
            *(cell(stage.exposed_ms[group]) for group in exposed),
            cell(stage.bubble_ms) + ("" if stage.bubble_fraction is None else f" ({stage.bubble_fraction:.0%})"),
        )
    return made


def _waiting_table(measured: TargetStages) -> Table | None:
    """Returns a table of where the rest of the step went, as far as it is known; None if nothing is known."""
    columns = {
        "bubble:\nwarm-up": [stage.bubble_split["warmup_ms"] for stage in measured.stages],
        "\nsteady": [stage.bubble_split["steady_ms"] for stage in measured.stages],
        "\ncool-down": [stage.bubble_split["cooldown_ms"] for stage in measured.stages],
        "gradient\ntail": [stage.dp_tail_ms for stage in measured.stages],
        "gradients\nfinalised": [stage.gradients_ms for stage in measured.stages],
        "waiting for\nthe host": [stage.host_bound_ms for stage in measured.stages],
    }
    shown = {name: spreads for name, spreads in columns.items() if any(s and s.mean > 0 for s in spreads)}
    if not shown:
        return None
    made = stage_table("beside computing, per step, ms", *shown)
    for place, stage in enumerate(measured.stages):
        made.add_row(*stage_cells(stage), *(mean(spreads[place]) for spreads in shown.values()))
    return made


def _modules_table(stage: Stage) -> Table:
    """Returns a table of the passes through the modules of one stage. The capture must hold ranges of modules."""
    made = table(f"modules of stage {stage.pp}, ms per pass (median, and fastest to slowest)")
    made.add_column("module", no_wrap=True)
    number_columns(made, "passes", "time")
    for name, spread in stage.modules_ms.items():
        made.add_row(text(name), str(spread.count), reach(spread))
    return made


def _per_microbatch_table(measured: TargetStages) -> Table:
    made = stage_table("per microbatch, ms (median, and fastest to slowest)", *measured.passes)

    def row(cells: tuple[str, str, Text], forward: Spread | None, backward: Spread | None) -> None:
        made.add_row(*cells, reach(forward), *([] if measured.forward_only else [reach(backward)]))

    for stage in measured.shown:
        row(stage_cells(stage), stage.forward_per_microbatch_ms, stage.backward_per_microbatch_ms)
        for chunk in stage.chunks if len(stage.chunks) > 1 else ():
            row(("", f"chunk {chunk.chunk}", text(layers([chunk.holds]))), chunk.forward_ms, chunk.backward_ms)
    return made


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.relative_to(folder))
    except ValueError:
        return str(path)
