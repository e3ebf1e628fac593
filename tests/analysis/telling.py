"""What a report says of a fleet, as text."""

from __future__ import annotations

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.report import sentences


def findings(fleet: Fleet) -> tuple[str, ...]:
    return tuple(finding.plain for finding in sentences.of_fleet(fleet))


def notes(fleet: Fleet) -> tuple[str, ...]:
    return tuple(sentences.notes_of(fleet))
