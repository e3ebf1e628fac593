"""Puts a `Hang` into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from megaprof.analysis.collectives.hang import Awaited, Culprit, Hang, HeldUp
from megaprof.analysis.report.text.notes import clause, told
from megaprof.analysis.report.text.words import sentence
from megaprof.analysis.trace.groups import axis_of
from megaprof.formats.phrases import counted
from megaprof.parallel.selectors import Selector


def sentences(hang: Hang) -> Iterator[str]:
    """Yields which ranks keep the job waiting, and in which operations; then notes about the dumps."""
    for culprit in hang.culprits:
        yield _culprit(culprit)
    for held in hang.held_up:
        yield _held_up(held)
    for awaited in hang.unended:
        yield (
            f"{_ranks(awaited.ranks)} all called {_operation(awaited)}, and it does not end: look at their GPUs and at "
            f"the network between them. {_since(awaited)}"
        )
    if (hang.culprits or hang.held_up) and hang.behind:
        they = "it waits for them" if hang.behind == 1 else "they wait for them or for each other"
        yield f"{counted(hang.behind, 'other rank')} cannot go on, because {they}."
    if not hang.culprits and not hang.held_up and not hang.unended:
        waiting = f"{counted(hang.behind, 'rank')} with something in flight" if hang.behind else "nothing in flight"
        yield f"No rank keeps another waiting in a collective: the dumps show {waiting}."
    if hang.missing and not any(culprit.why == "no_dump" for culprit in hang.culprits):
        yield f"No dump of {_ranks(hang.missing).lower()} is here."
    yield from (sentence(clause(note)) for note in hang.warnings)


def plain(hang: Hang) -> dict[str, Any]:
    """Returns the JSON of ``hang`` as plain data."""
    told_of: dict[str, Any] = msgspec.to_builtins(replace(hang, warnings=told(hang.warnings)))
    return told_of


def _held_up(held: HeldUp) -> str:
    who = _who(held.rank, held.stage)
    why = f"because it waits for rank {held.waits_for}"
    return f"{who} did not {_come_to(held.awaited)}, {why}. {_wait(held.waiting)} for it. {_since(held.awaited)}"


def _culprit(culprit: Culprit) -> str:
    who, awaited = _who(culprit.rank, culprit.stage), culprit.awaited
    operation = _operation(awaited)
    waiting = _ranks(culprit.waiting)
    waits = _wait(culprit.waiting)
    if culprit.why == "absent":
        finding = f"{who} did not {_come_to(awaited)}. {waits} for it."
    elif culprit.why == "no_dump":
        finding = f"{who} left no dump: it has died, or its file is not here. {waits} for it in {operation}."
    elif culprit.why == "stuck":
        finding = f"{who} does not finish {operation}, which others of the group have finished: look at its GPU."
    elif culprit.why == "not_begun":
        finding = f"The GPU of {who.lower()} has not begun {operation}, which others have: look at what runs on it."
    elif culprit.why == "crossed":
        finding = f"{waits} for {who.lower()} in {operation}, while it waits for them in another group."
    else:
        finding = f"{who} called {culprit.instead} where {waiting.lower()} called {operation}."
    if culprit.why in ("stuck", "not_begun") and culprit.waiting:
        finding = f"{finding} {waits} for it."
    return f"{finding} {_since(awaited)}"


def _who(rank: int, stage: int | None) -> str:
    return f"Rank {rank}" if stage is None else f"Rank {rank} (stage {stage})"


def _wait(ranks: tuple[int, ...]) -> str:
    return f"{_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'}"


def _come_to(awaited: Awaited) -> str:
    return f"{'come to' if awaited.number is not None else 'answer'} {_operation(awaited)}"


def _operation(awaited: Awaited) -> str:
    """Returns an operation in words: ``_all_gather_base 87749 (2048x1x5120) of the tp group of ranks 8-11``."""
    number = "" if awaited.number is None else f" {awaited.number}"
    shapes = ", ".join("x".join(map(str, shape)) for shape in awaited.sizes if shape)
    group = axis_of(awaited.group) or awaited.group
    size = f" ({shapes})" if shapes else ""
    return f"{awaited.operation}{number}{size} of the {group} group of {_ranks(awaited.ranks).lower()}"


def _since(awaited: Awaited) -> str:
    return f"That was called at {datetime.fromtimestamp(awaited.since, UTC):%Y-%m-%d %H:%M:%S} UTC."


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"Rank{'s' if len(ranks) != 1 else ''} {Selector.of_ranks(ranks)}"
