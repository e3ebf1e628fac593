"""`collectives/rank00000.json`: what a rank has in flight while it stands still. The rank removes it when it moves."""

from __future__ import annotations

from megaprof.formats.flight import Entry, GroupConfig
from megaprof.formats.job.records import Name, Record
from megaprof.formats.job.status import Coordinate


class InFlight(Record, frozen=True):
    """A dump of torch's flight recorder without the past."""

    run: Name
    """The run that it belongs to."""
    rank: Coordinate
    """The global rank."""
    entries: list[Entry]
    """The calls that have not ended, and the last collective of each group, in the order of the calls."""
    pg_config: dict[str, GroupConfig]
    """The rank's process groups, by torch's name."""
