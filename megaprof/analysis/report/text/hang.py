"""Puts a `Hang` into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from megaprof.analysis.collectives.hang import Awaited, Culprit, Hang, Why
from megaprof.analysis.report.text.notes import clause, with_texts
from megaprof.analysis.report.text.words import capital, ranks, sentence
from megaprof.analysis.trace.groups import axis_of
from megaprof.formats.phrases import counted

#: What to say of a culprit, and where the ranks that wait are named after it.
_SENTENCES: dict[Why, str] = {
    "absent": "{who} did not {come} {operation}",
    "held_up": "{who} did not {come} {operation}, because it waits for rank {waits_for}",
    "no_dump": "{who} left no dump: it has died, or its file is not here. {Waits} for it in {operation}",
    "unreadable": "{waits} for {who}, of which nothing is known, in {operation}",
    "stuck": "{who} does not finish {operation}, which others of the group have finished: look at its GPU",
    "not_begun": "the GPU of {who} has not begun {operation}, which others have: look at what runs on it",
    "crossed": "{waits} for {who} in {operation}, while it waits itself in {instead}",
    "differs": "in the same group, {who} called {instead} where {waiting} called {operation}",
}
_ALSO = ("absent", "held_up", "stuck", "not_begun")


def sentences(hang: Hang) -> Iterator[str]:
    """Yields which ranks keep the job waiting, and in which operations; then notes about the dumps."""
    yield from map(_culprit, (*hang.culprits, *hang.held_up))
    for awaited in hang.unended:
        called = f"{capital(ranks(awaited.ranks))} all called {_operation(awaited)}, and it does not end."
        yield f"{called} No rank is to blame: look at their GPUs and at the network between them. {_since(awaited)}"
    if (hang.culprits or hang.held_up) and hang.behind:
        they = "it waits for them" if hang.behind == 1 else "they wait for them or for each other"
        yield f"{counted(hang.behind, 'other rank')} cannot go on, because {they}."
    if not hang.culprits and not hang.held_up and not hang.unended:
        waiting = f"{counted(hang.behind, 'rank')} with something in flight" if hang.behind else "nothing in flight"
        yield f"No rank keeps another waiting in a collective: the dumps show {waiting}."
    if hang.missing and not any(culprit.why == "no_dump" for culprit in hang.culprits):
        yield f"No dump of {ranks(hang.missing)} is here."
    yield from (sentence(clause(note)) for note in hang.warnings)


def in_words(hang: Hang) -> Hang:
    """Returns ``hang`` with the texts of its warnings."""
    return replace(hang, warnings=with_texts(hang.warnings))


def _culprit(culprit: Culprit) -> str:
    awaited, waiting = culprit.awaited, culprit.waiting
    who = ranks([culprit.rank]) + ("" if culprit.stage is None else f" (stage {culprit.stage})")
    waits = f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    finding = _SENTENCES[culprit.why].format(
        who=who,
        come="answer" if awaited.number is None else "come to",
        operation=_operation(awaited),
        waiting=ranks(waiting),
        waits=waits,
        Waits=capital(waits),
        instead=culprit.instead,
        waits_for=culprit.waits_for,
    )
    also = f" {capital(waits)} for it." if waiting and culprit.why in _ALSO else ""
    return f"{sentence(finding)}{also} {_since(awaited)}"


def _operation(awaited: Awaited) -> str:
    """Returns an operation in words: ``_all_gather_base number 87749, of 2048x1x5120 elements, in the tp group of ranks
    8-11``."""
    number = "" if awaited.number is None else f" number {awaited.number}"
    shapes = " and ".join("x".join(map(str, shape)) for shape in awaited.sizes if shape)
    group = axis_of(awaited.group) or awaited.group
    size = f", of {shapes} element{'s' * (shapes != '1')}," if shapes else ""
    members = f"of {ranks(awaited.ranks)}" if number else "between ranks {} and {}".format(*awaited.ranks)
    return f"{awaited.operation}{number}{size} in the {group} group {members}"


def _since(awaited: Awaited) -> str:
    return f"That was called at {datetime.fromtimestamp(awaited.since, UTC):%Y-%m-%d %H:%M:%S} UTC."
