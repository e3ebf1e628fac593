"""A rehearsal in words, for the terminal."""

from __future__ import annotations

import shlex

from rich.console import Console

from megaprof.analysis.report.printing import heading, show_table, text
from megaprof.analysis.report.tables import Column, TableView, row
from megaprof.analysis.report.text import words
from megaprof.rehearse.rehearsal import Rehearsal
from megaprof.tune.words import milliseconds

_GIB = 1 << 30
_STAGES = (
    Column("stage"),
    Column("layers", "name"),
    Column("forward", unit="ms"),
    Column("backward", unit="ms"),
    Column("bubble", unit="%"),
    Column("memory", unit="GiB"),
    Column("measured", "text"),
)
#: How many other layouts are printed; the JSON has all of them.
_MOST_LAYOUTS = 4


def sentences(rehearsal: Rehearsal) -> list[str]:
    """Returns how long a step is predicted to take and why, whether it fits, and what would be better."""
    step, ranks = rehearsal.step_ms, words.counted(rehearsal.sizes.world, "rank")
    measured = min(rehearsal.measured_ms / step.value, 1.0)
    said = [
        f"A step on {ranks} ({rehearsal.sizes}) should take {milliseconds(step)} ms. {words.percent(measured)} "
        f"of it was measured here, and {words.percent(1 - measured)} computed from bytes and links."
    ]
    too_large = [
        f"stage {stage.stage}: {stage.memory / _GIB:.3g} of {stage.capacity / _GIB:.3g} GiB"
        for stage in rehearsal.stages
        if stage.memory is not None and stage.capacity is not None and stage.memory > stage.capacity
    ]
    if too_large:
        with_best = f"with {rehearsal.best.what} it does" if rehearsal.best else "no other layout is known to fit"
        said.append(f"It does not fit on {', '.join(too_large)}; {with_best}.")
    elif rehearsal.fits is None:
        said.append("Whether it fits is not known: no memory of a device was recorded.")
    said += [rehearsal.limited_by] if rehearsal.limited_by else []
    said += [
        f"{each.what} would take {milliseconds(each.step_ms)} ms: {shlex.join(each.flags)}"
        for each in rehearsal.layouts[:_MOST_LAYOUTS]
    ]
    said += [f"This assumes that {'; '.join(rehearsal.assumes)}."]
    return [*said, "The losses of a rehearsal mean nothing: its ranks had no others."]


def stages(rehearsal: Rehearsal) -> TableView:
    """Returns the table of the stages."""
    rows = (
        row(
            str(stage.stage),
            "+".join(words.ABSENT if count is None else str(count) for count in stage.layers),
            words.number(stage.forward_ms),
            words.number(stage.backward_ms),
            f"{100 * stage.bubble_fraction:.0f}",
            None if stage.memory is None else f"{stage.memory / _GIB:.1f}",
            f"as rank {stage.rank}" if stage.like is None else f"taken from stage {stage.like}",
        )
        for stage in rehearsal.stages
    )
    return TableView("stages, per step", _STAGES, tuple(rows))


def show(rehearsal: Rehearsal, console: Console) -> None:
    """Prints a rehearsal."""
    heading(console, "Rehearsal")
    for line in sentences(rehearsal):
        console.print(text(line))
    show_table(console, stages(rehearsal))
    if rehearsal.best_command is not None:
        console.print(text("The best command found:\n  " + shlex.join(rehearsal.best_command)), soft_wrap=True)
