"""One rank's part in the requests that the gate lets through: it looks for orders, takes one at a time, and answers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.artifacts.writer import Writer
from megaprof.control import directory as places
from megaprof.control.directory import ORDERS, ControlDirectory
from megaprof.control.membership import Membership
from megaprof.control.requests import read_request
from megaprof.control.status import Meter
from megaprof.control.task import CaptureTask
from megaprof.formats.job.records import Absent, BadRecord
from megaprof.formats.job.requests import REFUSED, Answer, Refused, Start
from megaprof.formats.job.run import RunRecord
from megaprof.formats.job.status import CaptureState
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session

#: Entries that one look goes through; there is one order at a time.
_LOOKED_AT = 64
#: How many orders that a rank has finished with are remembered.
_REMEMBERED = 256


class Orders:
    """`task` is the capture in this rank's hands, None when there is none. Methods raise OSError, and Unsafe."""

    def __init__(self, session: Session, writer: Writer, directory: Path, meter: Meter, membership: Membership) -> None:
        """`directory`: where the files of a capture go."""
        self._session = session
        self._writer = writer
        self._directory = directory
        self._meter = meter
        self._membership = membership
        self._written: Answer | None = None
        self._handled: dict[str, None] = {}
        self.task: CaptureTask | None = None

    @property
    def state(self) -> CaptureState | None:
        """The capture in this rank's hands, for its status."""
        task = self.task
        return None if task is None else CaptureState(task.request.id, task.answer.state, task.answer.reason)

    def look(self, control: ControlDirectory) -> None:
        """Take an order, start with it, or drop it."""
        run = self._membership.run
        if run is None:
            return
        if self.task is not None and self.task.request.run != run.run:
            self.task.cancel("the order came from an earlier run")
            self.task = None
        ordered, started = self._list(control)
        for identity in ordered:
            if self.task is not None and self.task.request.id == identity:
                if identity in started:
                    self._start(control, self.task)
            elif identity not in self._handled:
                self._take(control, run, identity)
        if self.task is not None and self.task.request.id not in ordered:
            self.task.cancel("it was withdrawn")

    def follow(self, control: ControlDirectory) -> None:
        """See how far the capture is, and answer."""
        task = self.task
        if task is None:
            return
        task.look()
        self._answer(control, task)
        if task.over:
            self._forget(task.request.id)
            self.task = None

    def end(self, control: ControlDirectory) -> None:
        """The job ends: answer for the last time."""
        if self.task is not None:
            self.task.look()
            self.task.end("the job ended before it was finished")
            self._answer(control, self.task)

    def _list(self, control: ControlDirectory) -> tuple[list[str], set[str]]:
        names: list[str] = []
        with suppress(FileNotFoundError), control.folder(ORDERS) as orders:
            names = orders.names(_LOOKED_AT)
        started = {identity for name in names if (identity := places.parse_start(name)) is not None}
        return sorted(identity for name in names if (identity := places.parse_request(name)) is not None), started

    def _take(self, control: ControlDirectory, run: RunRecord, identity: str) -> None:
        try:
            record = control.read(places.order(identity), control.owner)
            if record.get("run") != run.run:
                return  # of an earlier run, or of the next one, of which run.json tells in a moment
            request = read_request(record, run)
        except Absent:
            return
        except (BadRecord, Refused) as fault:
            self._forget(identity)
            logger.debug("megaprof: order %s is ignored: %s", identity, fault)
            return
        if not request.selector.selects(self._session.coords):
            self._forget(identity)
        elif self.task is not None:
            self._forget(identity)
            reason = f"busy with {self.task.request.id}"
            self._write(control, identity, Answer(self._session.coords.rank, REFUSED, reason=reason))
        else:
            self.task = CaptureTask(request, self._session, self._writer, self._directory, self._meter)
            self._written = None

    def _start(self, control: ControlDirectory, task: CaptureTask) -> None:
        with suppress(Absent, BadRecord, ValueError):
            start = Start.from_record(control.read(places.start(task.request.id), control.owner))
            if (start.run, start.id) == (task.request.run, task.request.id):
                task.go(start.first)

    def _answer(self, control: ControlDirectory, task: CaptureTask) -> None:
        if task.answer != self._written:
            self._write(control, task.request.id, task.answer)
            self._written = task.answer

    def _write(self, control: ControlDirectory, identity: str, answer: Answer) -> None:
        *folder, name = places.answer(identity, answer.rank, self._session.coords.sizes.world)
        # Not with the directories above it: without them, nobody waits for it any more.
        with suppress(FileNotFoundError), control.folder(*folder[:2]):
            control.write((*folder, name), answer.as_record(self._membership.name), create=True)

    def _forget(self, identity: str) -> None:
        self._handled[identity] = None
        if len(self._handled) > _REMEMBERED:
            del self._handled[next(iter(self._handled))]
