"""Writes what a rank has in flight once it stands still, and removes that when the rank moves again: so all files there
are of one standstill. `megaprof hang` reads them as it reads dumps of torch's watchdog."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

from megaprof.control import directory as places
from megaprof.control.blame import is_stuck
from megaprof.formats.files import Directory
from megaprof.formats.flight import Entry, settled
from megaprof.formats.job import records
from megaprof.formats.job.status import InFlight, RankStatus
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import flight
from megaprof.runtime.logs import logger

#: A record is bounded: so many calls that have not ended, first those that are the first of their kind, and so many
#: shapes of each.
_MOST, _SHAPES = 200, 4


class StandstillWriter:
    """One rank's part, on its background thread."""

    def __init__(self, coords: RankCoords) -> None:
        rank, sizes = coords.rank, coords.sizes
        self._folder = places.folder_of(places.COLLECTIVES, rank, sizes.world)
        self._name = places.name_of(rank)
        #: When the rank last moved before the standstill that is written; None: nothing is written. At first 0: an
        #: earlier run may have left a file.
        self._moved: float | None = 0.0
        # A world of exchanges alone is not checked: gloo keeps none.
        self._checked = rank > 0 or sizes.world == sizes.pp

    def look(self, control: Directory, status: RankStatus) -> None:
        """Writes what is in flight if the rank has begun to stand still; removes it if the rank moves. Raises OSError
        and Unsafe."""
        if status.past_first_step and not self._checked:
            self._checked = True
            self._check()
        moved = status.moved if is_stuck(status, status.time) else None
        if status.run is None or moved == self._moved:
            return
        if moved is None:
            self.leave(control)
        else:
            self._write(control, status)
        self._moved = moved

    def leave(self, control: Directory) -> None:
        """Removes the file, also that of an earlier run."""
        if self._moved is None:
            return
        with suppress(FileNotFoundError), places.folder(control, *self._folder) as folder:
            folder.unlink(self._name)

    def _write(self, control: Directory, status: RankStatus) -> None:
        try:
            called = flight.entries()
        except flight.NoFlightRecorder:
            return
        record = InFlight(run=str(status.run), rank=status.rank, entries=_kept(called), pg_config=flight.groups())
        with places.folder(control, *self._folder, create=True) as folder:
            records.write(folder, self._name, record)

    def _check(self) -> None:
        """Logs once, after the first steps, if torch keeps no collectives."""
        why = f"torch keeps none of them: set {flight.SIZE}={flight.USUAL} before the first process group is made"
        try:
            if flight.entries():
                return
        except flight.NoFlightRecorder as missing:
            why = str(missing)
        logger.warning("megaprof: if this job hangs, its collectives will not show why: %s", why)


def _kept(called: Iterable[Entry]) -> list[Entry]:
    """Returns, in the order of the calls, the last collective of each group and the first calls that have not ended."""
    last: dict[str, int] = {}
    pending: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    entries = settled(called)
    for place, entry in enumerate(entries):
        entry.record_id = place  # two rings count by themselves
        group = entry.process_group[0]
        if not entry.is_p2p:
            last[group] = place
        if not entry.ended:
            pending[group, entry.profiling_name if entry.is_p2p else ""].append(place)
    first = sorted(ordered for places in pending.values() for ordered in enumerate(places))[:_MOST]
    kept = [entries[place] for place in sorted({*last.values(), *(place for _, place in first)})]
    for entry in kept:
        entry.input_sizes, entry.input_dtypes = entry.input_sizes[:_SHAPES], entry.input_dtypes[:_SHAPES]
    return kept
