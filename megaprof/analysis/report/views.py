"""The tables of a report and of two captures, for every output."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.diagnosis.stages import Stage
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.report.diff import Difference, StageDiff, TargetDiff
from megaprof.analysis.report.drawn import PHASES
from megaprof.analysis.report.report import Report, TargetReport
from megaprof.analysis.report.tables import Cell, Column, Emphasis, Piece, TableView, row, stacked, table
from megaprof.analysis.report.text.what_if import name_of, worth_showing
from megaprof.analysis.samples import Spread, mean_of
from megaprof.analysis.table.iterations import OF_RL, STEP, Iterations
from megaprof.analysis.trace.groups import GROUPS
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.analysis.words import (
    ABSENT,
    counted,
    layers,
    mean,
    number,
    percent,
    ratio,
    reach,
    spans,
    speedup,
    with_spread,
    within,
)

_STAGE = (Column("stage"), Column("ranks", "name"), Column("layers", "name"))
_MARKS = {True: "*", False: "~", None: "?"}
MARKS = "* beyond the spread of the samples; ~ within it; ? too few samples to tell"
_TICKS = "▁▂▃▄▅▆▇█"
_WIDTH = 20
_PERCENTILES = ("p50", "p95", "p99", "max")


def targets_table(report: Report) -> TableView:
    briefs = [target.in_brief() for target in report.targets]
    rows = [
        {
            Column("target", "text"): Cell(target.target, link=f"#t{place}"),
            Column("role", "text"): target.role or "",
            Column("verdict", "text"): Cell(brief.text, "" if brief.severity == "open" else brief.severity),
            Column("imbalance"): ratio(target.imbalance),
            Column("step time", unit="ms"): number(target.step_ms or None),
        }
        for place, (target, brief) in enumerate(zip(report.targets, briefs, strict=True))
    ]
    return table(counted(len(rows), "target"), rows)


def iterations_table(found: Iterations | None) -> TableView | None:
    """Returns where an iteration of the host's loop goes, its parts in order; None if that is not known."""
    if found is None:
        return None
    rows = []
    for part in found.parts:
        alone = part.rank_ms - part.ms > LEAST * found.ms
        often = f"1 in {round(1.0 / part.often)}" if part.often < 0.5 else percent(part.often)
        rows.append(
            {
                Column("part", "name"): _OF_ITERATION.get(part.name, part.name.replace("_", " ")),
                Column("an iteration", unit="ms"): number(part.ms),
                Column("share", "bars"): Cell(bars=(stacked([(part.name, part.ms, "")]),)),
                Column("of it"): percent(part.ms / found.ms),
                Column("iterations\nwith it"): often,
                Column("longest", unit="ms"): number(part.longest_ms),
                Column("rank with\nmost of it", unit="ms"): f"{part.rank}: {number(part.rank_ms)}" if alone else "",
            }
        )
    title = (
        f"where an iteration of a rank goes: {number(found.ms)} ms, average of {counted(found.count, 'iteration')}; "
        f"{percent(max(1.0 - found.step_ms / found.ms, 0.0))} lies outside of the schedule on every rank"
    )
    return table(title, rows)


def roles_table(targets: Sequence[TargetReport]) -> TableView | None:
    """Returns what the ranks of each role do in a step of reinforcement learning, which is an iteration of theirs, and
    how long it would be with other rollouts; None if there are no such steps."""
    roles: list[tuple[TargetReport, Iterations, dict[str, float]]] = []
    for target in targets:
        if (found := target.iterations) is None or not found.ms_of(*OF_RL):
            continue
        phases = {name: found.ms_of(*parts) for name, (_, parts) in PHASES.items()}
        phases["log-probs" if target.forward_only else "training"] += found.ms_of(*STEP)
        phases["other"] = round(found.ms - sum(phases.values()), 6)
        roles.append((target, found, phases))
    if not roles:
        return None
    shown = [name for name in PHASES if any(phases[name] for _, _, phases in roles)]
    rows = []
    for target, found, phases in roles:
        pieces = ((PHASES[name][0], phases[name], f"{name}: {number(phases[name])} ms") for name in shown)
        shares = [percent(phases[name] / found.ms) for name in shown]
        shares += [number(found.quicker_rollout_ms), number(found.rollout_ahead_ms)] * ("rollout" in shown)
        rows.append(row(target.role or target.target, number(found.ms), Cell(bars=(stacked(pieces),)), *shares))
    columns = [Column("role", "name"), Column("a step", unit="ms"), Column("share", "bars"), *map(Column, shown)]
    columns += [Column("rollout\n20% quicker", unit="ms"), Column("rollout\nahead", unit="ms")] * ("rollout" in shown)
    title = "what the ranks do in a step of reinforcement learning"
    title += "" if "rollout" in shown else "; none was seen to wait for a rollout after it gave its weights away"
    return TableView(title, tuple(columns), tuple(rows), legend=tuple((PHASES[name][0], name) for name in shown))


#: The parts of an iteration whose names are not those of the data.
_OF_ITERATION = {
    "data_wait": "waiting for data",
    "exchanges": "exchanges and other stages",
    "gradients": "gradients, with waiting",
    "data": "data between steps",
    "between": "unknown, with waiting",
}


def target_tables(target: TargetReport) -> list[TableView]:
    """Returns the tables of a target's stages, without those that would be empty."""
    return [
        view for view in (_steps(target), _rest_of_step(target), _microbatches(target), _modules(target)) if view.rows
    ]


def _key(stage: Stage) -> tuple[str, str, str]:
    return str(stage.pp), spans(stage.ranks, 4), layers(chunk.holds for chunk in stage.chunks)


def _steps(target: TargetReport) -> TableView:
    """Returns where the time of a step goes on each stage. The parts of a bar add up to the step."""
    exposed = [group for group in GROUPS if _is_shown(target, group)]
    spreads = [
        {
            "compute": stage.compute_ms,
            **stage.exposed_ms,
            "gradients": stage.gradients_ms,
            "host": stage.host_bound_ms,
            "data": stage.data_wait_ms,
            "bubble": stage.bubble_ms,
        }
        for stage in target.shown
    ]
    drawn = [(kind, name) for kind, name in _PARTS.items() if any(mean_of(parts[kind]) for parts in spreads)]
    rows = [
        row(
            *_key(stage),
            Cell(bars=(stacked((kind, mean_of(ms), _hint(stage, kind, ms)) for kind, ms in parts.items()),)),
            *(with_spread(getattr(stage, f"{kind}_ms")) for kind in (*target.passes, "compute")),
            with_spread(stage.bubble_ms)
            + ("" if stage.bubble_fraction is None else f" ({percent(stage.bubble_fraction)})"),
            *(with_spread(stage.exposed_ms[group]) for group in exposed),
            emphasis="most" if target.marked(stage) else "",
        )
        for stage, parts in zip(target.shown, spreads, strict=True)
    ]
    several = any(spread.count > 1 for parts in spreads for spread in parts.values() if spread)
    names = *target.passes, "compute", "bubble", *(f"exposed\n{group}" for group in exposed)
    return TableView(
        "where the time of a step goes, ms" + (" (mean ± standard deviation)" if several else ""),
        (*_STAGE, Column("shares", "bars"), *map(Column, names)),
        tuple(rows),
        len(_STAGE),
        tuple(drawn),
    )


#: The parts of a step, with names.
_PARTS = {
    "compute": "compute",
    **{group: f"exposed {group}" for group in GROUPS},
    "gradients": "rest behind all passes",
    "host": "waiting for the host",
    "data": "waiting for data",
    "bubble": "bubble",
}


def _is_shown(target: TargetReport, group: str) -> bool:
    """Returns whether exposed communication of a group has a column: if it is not known, only if there is the group."""
    spreads = [stage.exposed_ms[group] for stage in target.stages]
    if group == "unknown":
        return any(map(mean_of, spreads))
    return getattr(target.sizes, group) > 1 and (group != "pp" or any(spreads))


def _hint(stage: Stage, kind: str, spread: Spread | None) -> str:
    split = stage.bubble_split if kind == "bubble" else {}
    parts = ", ".join(f"{part.removesuffix('_ms')} {mean(spread)}" for part, spread in split.items() if mean_of(spread))
    return f"{kind} {mean(spread)} ms" + (f" ({parts})" if parts else "")


def _rest_of_step(target: TargetReport) -> TableView:
    """Returns where the rest of the step goes, as far as it is known."""
    columns = {
        "bubble:\nwarm-up": [stage.bubble_split["warmup_ms"] for stage in target.shown],
        "bubble:\nsteady": [stage.bubble_split["steady_ms"] for stage in target.shown],
        "bubble:\ncool-down": [stage.bubble_split["cooldown_ms"] for stage in target.shown],
        "dp behind\nall passes": [stage.dp_tail_ms for stage in target.shown],
        "rest behind\nall passes": [stage.gradients_ms for stage in target.shown],
        "waiting for\nthe host": [stage.host_bound_ms for stage in target.shown],
        "waiting\nfor data": [stage.data_wait_ms for stage in target.shown],
    }
    columns = {name: spreads for name, spreads in columns.items() if any(map(mean_of, spreads))}
    rows = [row(*_key(stage), *map(mean, times)) for stage, *times in zip(target.shown, *columns.values(), strict=True)]
    heads = (*_STAGE, *map(Column, columns))
    return TableView("beside computing, per step, ms", heads, tuple(rows) if columns else (), len(_STAGE))


def _microbatches(target: TargetReport) -> TableView:
    """Returns how long the passes of one microbatch take, on each stage and in each of its model chunks."""
    timed: list[tuple[tuple[str, str, str], list[Spread | None]]] = []
    for stage in target.shown:
        timed.append((_key(stage), [getattr(stage, f"{kind}_per_microbatch_ms") for kind in target.passes]))
        for chunk in stage.chunks if len(stage.chunks) > 1 else ():
            times = [getattr(chunk, f"{kind}_ms") for kind in target.passes]
            timed.append((("", f"chunk {chunk.chunk}", layers([chunk.holds])), times))

    def whisker(kind: str, ms: Spread) -> tuple[Piece, ...]:
        hint = f"{kind}: median {number(ms.median)} ms"
        return Piece(f"{kind} reach", ms.min, ms.max - ms.min, hint), Piece(f"{kind} middle", ms.median, 0.0, hint)

    rows = []
    for key, spreads in timed:
        bars = [whisker(kind, ms) for kind, ms in zip(target.passes, spreads, strict=True) if ms]
        rows.append(row(*key, Cell(bars=tuple(bars)), *map(reach, spreads)))
    columns = *_STAGE, Column("spread", "bars"), *map(Column, target.passes)
    is_known = any(spread for _, spreads in timed for spread in spreads)
    title = "how long microbatches take, ms (median and range)"
    return TableView(title, columns, tuple(rows) if is_known else (), len(_STAGE))


def _modules(target: TargetReport) -> TableView:
    """Returns the passes through the modules of the slowest stage on which ranges of modules were captured."""
    stages = [stage for stage in target.stages if stage.modules_ms]
    stage = max(stages, key=lambda stage: mean_of(stage.compute_ms) or 0.0, default=None)
    rows = [] if stage is None else [row(name, s.count, reach(s)) for name, s in stage.modules_ms.items()]
    title = "" if stage is None else f"modules of stage {stage.pp}, ms per pass (median and range)"
    return TableView(title, (Column("module", "name"), Column("passes"), Column("time")), tuple(rows))


def run_table(fleet: Fleet, most: int | None = None) -> TableView:
    """Returns the percentiles of the times of a run, and how they developed. ``most``: the largest number of stages;
    if there are more, the slowest ones."""
    rows = []
    if fleet.times.step is not None:
        times = (number(getattr(fleet.times.step, name)) for name in _PERCENTILES)
        rows.append(row("step, longest rank", "", *times, sparkline(fleet.times.step_ms)))
    synchronisation_ms = fleet.synchronisation.synchronisation_ms
    if known_ms := sorted(ms for ms in synchronisation_ms if ms is not None):
        middle, line = number(known_ms[len(known_ms) // 2]), sparkline(synchronisation_ms)
        rows.append(row("gradients, last rank", "", middle, "", "", "", line))
    slowest = sorted(fleet.stages, key=lambda stage: -stage.compute.p50 if stage.compute else 0.0)[:most]
    for stage in fleet.stages:
        if stage in slowest:
            times = (number(getattr(stage.compute, name, None)) for name in _PERCENTILES)
            rows.append(row(f"stage {stage.pp} passes", stage.ranks, *times, sparkline(stage.compute_ms)))
    steps = Column("steps {}-{}".format(*fleet.coverage.steps), "name")
    left_out = "" if len(slowest) == len(fleet.stages) else f" (the slowest {most} of {len(fleet.stages)} stages)"
    columns = Column("what", "name"), Column("rank count"), *map(Column, _PERCENTILES), steps
    return TableView(f"over the run, ms per step{left_out}", columns, tuple(rows))


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


def what_if_table(predictions: WhatIf) -> TableView | None:
    """Returns the measured step, its replay, and the predictions worth showing; None without a replay."""
    measured, replayed, error = predictions.measured_ms, predictions.replay_ms, predictions.replay_error
    if measured is None or replayed is None or error is None:
        return None
    off = f"replayed, off by {percent(replayed / measured - 1.0, sign=True)}"
    if error.count > 1:
        off += f" (single steps: {percent(error.min, sign=True)} to {percent(error.max, sign=True)})"

    def bar(kind: str, ms: float) -> Cell:
        return Cell(bars=(stacked([(kind, ms, "")]),))

    rows = [row(what, bar("before", ms), number(ms), "") for what, ms in (("as captured", measured), (off, replayed))]
    for change in worth_showing(predictions):
        best = change == predictions.best
        rows.append(
            row(
                Cell(name_of(change, predictions), code=shlex.join(change.flags)),
                bar("best" if best else "after", change.step_ms.value),
                within(change.step_ms),
                speedup(change.speedup),
                emphasis="most" if best else "",
            )
        )
    columns = Column("change", "text"), Column("step", "bars"), Column("step", unit="ms"), Column("speedup")
    return TableView("what if: before and after", columns, tuple(rows))


def diff_table(target: TargetDiff) -> TableView:
    def bar(stage: StageDiff, side: str) -> tuple[Piece, ...]:
        times = {kind: getattr(stage.changes[f"{kind}_ms"], side) for kind in ("compute", "bubble")}
        return stacked((kind, ms, f"{side}: {kind} {number(ms)} ms") for kind, ms in times.items())

    rows = []
    for stage in target.stages:
        changes = [stage.changes[quantity] for quantity in target.quantities]
        cells = [Cell(f"{before_and_after(change)}\n{mark(change)}", emphasis(change)) for change in changes]
        layers_held = " → ".join(dict.fromkeys((stage.layers_before or ABSENT, stage.layers_after or ABSENT)))
        rows.append(row(stage.pp, layers_held, Cell(bars=(bar(stage, "before"), bar(stage, "after"))), *cells))
    columns = Column("stage"), Column("layers", "name"), Column("before, above after", "bars")
    names = [Column(quantity.removesuffix("_ms")) for quantity in target.quantities]
    legend = ("compute", "compute"), ("bubble", "bubble")
    return TableView("per step, ms", (*columns, *names), tuple(rows), 2, legend)


def before_and_after(change: Difference) -> str:
    return f"{number(change.before)} → {number(change.after)}"


def mark(change: Difference) -> str:
    """Returns by how much a quantity changed, and whether that is chance: see `MARKS`."""
    return "" if change.change is None else f"{percent(change.change, sign=True)} {_MARKS[change.beyond_spread]}"


def emphasis(change: Difference) -> Emphasis:
    """Returns whether a quantity became surely larger or smaller."""
    if not change.beyond_spread or change.change is None:
        return ""
    return "slow" if change.change > 0 else "fine"
