"""What a report says of a fleet, as text."""

from __future__ import annotations

from pathlib import Path

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.report.text import sentences


def of_fleet(fleet: Fleet) -> tuple[sentences.Finding, ...]:
    """What happened over the whole run."""
    return (*sentences.ends(fleet), *sentences.changes(fleet, Path("job")))


def findings(fleet: Fleet) -> tuple[str, ...]:
    return tuple(f"{each.text} `{each.command}`" if each.command else each.text for each in of_fleet(fleet))


def notes(fleet: Fleet) -> tuple[str, ...]:
    return tuple(sentences.run_notes(fleet))
