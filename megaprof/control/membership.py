"""Which run this rank belongs to: its lowest rank says so in ``run.json``, and all others read it there.

A job that is started into the same directory takes it over; an earlier one that still runs steps back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from megaprof.control.directory import RUN, ControlDirectory
from megaprof.formats.job.records import Absent, BadRecord
from megaprof.formats.job.run import RunRecord, read_run

#: A rank may begin so much earlier or later than the lowest one, in seconds: what is older is an earlier run's.
_APART = 3600.0


class Membership:
    """`run` is the run that this rank belongs to, None as long as it does not know; `ousted`: the directory is another
    job's now."""

    def __init__(self, own: RunRecord, *, leads: bool, complain: Callable[[str], None]) -> None:
        """`own`: the run as this rank would describe it. `complain` is told, for people, what is wrong."""
        self._own = own
        self._leads = leads
        self._complain = complain
        self._announced = False
        self.run: RunRecord | None = None
        self.ousted = False

    @property
    def name(self) -> str:
        """What this rank's answers say that they belong to."""
        return (self._own if self.run is None else self.run).run

    def look(self, control: ControlDirectory) -> None:
        """Say which run this is, or learn it. Raises OSError, and Unsafe."""
        if self._leads:
            self._announce(control)
        else:
            self._learn(control)

    def leave(self, control: ControlDirectory) -> None:
        """The lowest rank says that the run has ended, unless that of a later job stands there. Raises as `look`."""
        if not self._leads or self.run is None:
            return
        other = _read(control)
        if other is not None and other.run == self.run.run:
            control.write(RUN, {**self.run.as_record(), "ended": time.time()})

    def _announce(self, control: ControlDirectory) -> None:
        other = _read(control) if self._announced else None
        if other is not None and other.run == self._own.run:
            return
        self.ousted = other is not None and other.ended is None
        if other is not None and self.ousted:
            self.run = None
            self._complain(
                f"another job, process {other.pid} on {other.host}, has taken over {control.path}; "
                "give each job a --profile-dir of its own"
            )
            return
        control.write(RUN, self._own.as_record())
        self._announced = True
        self.run = self._own

    def _learn(self, control: ControlDirectory) -> None:
        """The files of a run that crashed may lie there still."""
        run = _read(control)
        if run is None:
            return
        if self.run is not None and run.run == self.run.run:
            self.ousted = False
        elif run.ended is None:
            # All ranks of a job begin at about the same time.
            limit = _APART if self.run is None else self._apart(self.run)
            if run.sizes.world == self._own.world and self._apart(run) < limit:
                self.run = run
            else:
                self.ousted = self.run is not None

    def _apart(self, run: RunRecord) -> float:
        return abs(run.started - self._own.started)


def _read(control: ControlDirectory) -> RunRecord | None:
    """The run that the directory holds, if nobody else can have written it."""
    with suppress(Absent, BadRecord), control.folder() as folder:
        return read_run(folder, control.owner)
    return None
