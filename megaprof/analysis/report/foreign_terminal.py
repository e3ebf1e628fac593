"""Prints recordings without megaprof's ranges on a terminal."""

from __future__ import annotations

import os

from rich.console import Console

from megaprof.analysis.foreign.facts import Foreign, RankFacts
from megaprof.analysis.report.printing import heading, number_columns, show_warnings, table, text
from megaprof.analysis.report.text import sentences
from megaprof.analysis.report.text.words import number, percent, sentence, some

_MOST_ROWS = 16


def show_foreign(foreign: Foreign, console: Console) -> None:
    """Prints the facts of every rank, and what these recordings cannot show."""
    heading(console, "Recordings without ranges of megaprof's")
    folders = {rank.window: os.path.dirname(rank.file) for rank in foreign.ranks}
    made = table("per rank, ms", left=["rank", "window" if len(folders) > 1 else "from"])
    number_columns(made, "steps", "a step", "recorded", "compute", "exposed", "idle", "host bound")
    for rank in foreign.ranks[:_MOST_ROWS]:
        times = (rank.step_ms, rank.span_ms, rank.compute_ms, rank.exposed_ms, rank.idle_ms, rank.host_bound_ms)
        origin = str(rank.window) if len(folders) > 1 else rank.rank_from
        made.add_row(called(rank), text(origin), str(rank.steps), *map(number, times))
    console.print(made)
    for window, folder in folders.items():
        if folder:
            console.print(text(f"window {window}: {folder}"))
    if len(foreign.ranks) > _MOST_ROWS:
        console.print(f"and {len(foreign.ranks) - _MOST_ROWS} more ranks")
    _show_exposed(foreign, console)
    _show_stages(foreign, console)
    for late in foreign.late[:4]:
        console.print(text(sentence(sentences.of_late(late))))
    console.print(text(sentences.of_foreign(foreign) + "."))
    show_warnings(console, foreign.warnings)


def _show_stages(foreign: Foreign, console: Console) -> None:
    if not foreign.stages:
        return
    made = table(f"{sentences.FROM_EXCHANGES}, ms", left=["stage", "ranks"])
    number_columns(
        made, "microbatches", "forward", "backward", "both, per microbatch", "a step", "exchanges", "of a step"
    )
    for stage in foreign.stages[:_MOST_ROWS]:
        times = (stage.forward_ms, stage.backward_ms, stage.microbatch_ms, stage.step_ms, stage.exchange_ms)
        made.add_row(
            text(f"{stage.stage} of {stage.stages}"),
            some(stage.ranks),
            str(stage.microbatches),
            *map(number, times),
            percent(stage.exchange_ms / stage.step_ms if stage.step_ms else None),
        )
    console.print(made)


def called(rank: RankFacts) -> str:
    """Returns the number of a rank, or a question mark if it is not known."""
    return "?" if rank.rank is None else str(rank.rank)


def _show_exposed(foreign: Foreign, console: Console) -> None:
    """Prints the exposed communication of the rank that loses most to it. One rank is enough to see which operations
    are exposed."""
    worst = max(foreign.ranks, key=lambda rank: rank.exposed_ms, default=None)
    if worst is None or not worst.exposed:
        return
    made = table(f"exposed communication of rank {called(worst)}", left=["operation", "group"])
    number_columns(made, "kernels", "ms", "of recorded")
    for operation in worst.exposed[:_MOST_ROWS]:
        group = f"{operation.axis}: {operation.group}" if operation.axis else operation.group
        share = percent(operation.ms / worst.span_ms if worst.span_ms else None)
        made.add_row(text(operation.operation), text(group), str(operation.calls), number(operation.ms), share)
    console.print(made)
