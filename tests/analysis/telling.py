"""What a report says of a fleet, as text."""

from __future__ import annotations

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.report.fleet_words import findings_of, notes_of


def findings(fleet: Fleet) -> tuple[str, ...]:
    return tuple(findings_of(fleet))


def notes(fleet: Fleet) -> tuple[str, ...]:
    return tuple(notes_of(fleet))
