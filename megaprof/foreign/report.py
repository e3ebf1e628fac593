"""Makes the report on recordings without megaprof's ranges: its facts as data, and as tables and sentences."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megaprof.analysis.notes import Note
from megaprof.analysis.report.tables import Cell, Column, Section, TableView, row
from megaprof.analysis.report.text.notes import clause, with_texts
from megaprof.analysis.report.text.words import number, percent, some
from megaprof.foreign.facts import Foreign, RankFacts, facts_of
from megaprof.foreign.recordings import Recording

#: What recordings without our ranges lack, and how to record it next time.
_LIMITS = (
    "These recordings hold no ranges of megaprof's, so they show no bubbles, and no layout can be predicted. To see "
    "more, record with --profile-target train_actor --profile-select per-stage"
)
_OF_STAGES = (
    "Stages and microbatches follow from the exchanges of the pipeline group, whose order is that of 1F1B; work before "
    "the first exchange of a step and after the last one does not count. "
)
_TIMES = "a\nstep", "recorded", "compute", "exposed", "idle", "host\nbound"
_OF_RANK = Column("from", "text"), Column("steps"), *map(Column, _TIMES)
_OF_EXPOSED = (
    *(Column(name, "text") for name in ("operation", "group")),
    *map(Column, ("kernels", "ms", "of\nrecorded")),
)
_PASSES = "forward", "backward", "both, per\nmicrobatch", "a\nstep", "exchanges", "of a\nstep"
_OF_STAGE = tuple(map(Column, ("microbatches", *_PASSES)))


def report_on(recordings: Sequence[Recording], sizes: Mapping[str, int]) -> tuple[Foreign, Section]:
    """Returns what the recordings of a job show, as data and for people. ``sizes`` is as in `facts_of`."""
    facts = facts_of([recording for recording in recordings if recording.untimed is None], dict(sizes))
    untimed = (
        Note("skipped", files=(recording.path.name,), said=clause(recording.untimed))
        for recording in recordings
        if recording.untimed is not None
    )
    facts = replace(facts, warnings=with_texts((*untimed, *facts.warnings)))
    late = (
        f"{each.folder}{': ' if each.folder else ''}rank {each.rank} came last to {each.operation} of {each.group} "
        f"{each.times} of {each.matched} times: there the others' kernels took {number(each.waited_ms)} ms longer"
        for each in facts.late
    )
    limits = (_OF_STAGES if facts.stages else "") + _LIMITS
    tables = tuple(_tables(facts))
    return facts, Section("Recordings without ranges of megaprof's", limits, tables, tuple(late), facts.warnings)


def _tables(foreign: Foreign) -> list[TableView]:
    """Returns the facts of every rank, its exposed communication (first that of the rank that loses most to it), and
    the stages, if the exchanges show them."""
    folders = {rank.window: os.path.dirname(rank.file) for rank in foreign.ranks}
    several = len(folders) > 1
    ranks, exposed, stages = [], [], []

    def name(rank: RankFacts) -> list[str | int]:
        return ["?" if rank.rank is None else rank.rank, *([rank.window] if several else [])]

    for rank in foreign.ranks:
        times = rank.step_ms, rank.span_ms, rank.compute_ms, rank.exposed_ms, rank.idle_ms, rank.host_bound_ms
        ranks.append(row(*name(rank), Cell(rank.rank_from, code=rank.file), rank.steps, *map(number, times)))
    for rank in sorted(foreign.ranks, key=lambda rank: -rank.exposed_ms):
        for each in rank.exposed:
            group = f"{each.axis}: {each.group}" if each.axis else each.group
            share = percent(each.ms / rank.span_ms if rank.span_ms else None)
            exposed.append(row(*name(rank), each.operation, group, each.calls, number(each.ms), share))
    for stage in foreign.stages:
        of_stage = stage.forward_ms, stage.backward_ms, stage.microbatch_ms, stage.step_ms, stage.exchange_ms
        share = percent(stage.exchange_ms / stage.step_ms if stage.step_ms else None)
        which = f"{stage.stage} of {stage.stages}{f', {stage.folder}' if stage.folder else ''}"
        stages.append(row(which, some(stage.ranks), stage.microbatches, *map(number, of_stage), share))
    windows = [row(window, folder) for window, folder in folders.items() if folder]
    named = Column("rank", "name"), *([Column("window")] if several else [])
    of_stages = Column("stage", "name"), Column("ranks", "name"), *_OF_STAGE
    views = [
        TableView("per rank, ms", (*named, *_OF_RANK), tuple(ranks), len(named)),
        TableView("windows", (Column("window", "name"), Column("folder", "text")), tuple(windows)),
        TableView("exposed communication", (*named, *_OF_EXPOSED), tuple(exposed), len(named)),
        TableView("stages, from exchanges, not from ranges, ms", of_stages, tuple(stages), 2),
    ]
    return [view for view in views if view.rows]
