"""One rank's part in captures on demand: it reads `capture.json`, and captures what stands there.

All ranks read the same file, and each judges it by the same rules. A request that is not there any more is withdrawn.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.artifacts.writer import Writer
from megaprof.control.requests import check
from megaprof.control.status import Meter
from megaprof.control.task import CaptureTask
from megaprof.formats.files import Directory
from megaprof.formats.job import records
from megaprof.formats.job.records import Absent, BadRecord
from megaprof.formats.job.requests import NAME, Refused, Request
from megaprof.formats.job.run import RunRecord
from megaprof.formats.job.status import CaptureState
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session

#: Seconds after the time-out of a request for which whoever asked may still remove it.
_GRACE = 30.0


class Captures:
    """The request that stands in `capture.json`, and what this rank does about it. Methods raise OSError."""

    def __init__(self, session: Session, writer: Writer, directory: Path, meter: Meter, *, leads: bool) -> None:
        """`directory`: where the files of a capture go. `leads`: this is the job's lowest rank, which says of a
        request that no rank can carry out why not, and removes one that nobody waits for any more."""
        self._session = session
        self._writer = writer
        self._directory = directory
        self._meter = meter
        self._leads = leads
        self._until = 0.0
        self._refused: CaptureState | None = None
        self.request: Request | None = None
        """What is asked for, None where nothing is."""
        self.task: CaptureTask | None = None
        """The capture in this rank's hands, None where there is none."""

    @property
    def state(self) -> CaptureState | None:
        """What this rank says to the request, for its status."""
        return self._refused if self.task is None else self.task.state

    @property
    def busy(self) -> bool:
        """Whether something is asked for, or still being captured here."""
        return self.request is not None or (self.task is not None and not self.task.over)

    def look(self, control: Directory, run: RunRecord | None) -> None:
        """Begins with a new request, goes on with the one in hand, or drops it."""
        self._read(control, run)
        request, task = self.request, self.task
        if task is not None and (request is None or request.id != task.request.id):
            task.cancel("it was withdrawn")
            if task.over:
                self.task = task = None
        if request is not None and task is None and request.selector.selects(self._session.coords):
            task = self.task = CaptureTask(request, self._session, self._writer, self._directory, self._meter)
        if task is None:
            return
        if request is not None and request.id == task.request.id and request.first is not None:
            task.go(request.first)
        task.look()

    def end(self) -> None:
        """The job ends: say for the last time how far the capture is."""
        if self.task is not None:
            self.task.look()
            self.task.end("the job ended before it was finished")

    def _read(self, control: Directory, run: RunRecord | None) -> None:
        before, self.request = self.request, None
        if run is None:
            return
        try:
            request = records.read(control, NAME, Request)
        except (Absent, BadRecord):  # whoever asks next replaces what is no request
            self._refused = None
            return
        try:
            check(request, run)
        except Refused as refusal:
            self._refuse(request, str(refusal))
            return
        self._refused = None
        if before is None or before.id != request.id:
            self._until = time.monotonic() + request.timeout + _GRACE
            logger.debug("megaprof: request %s (%s): %s", request.id, request.by, request.target)
        elif self._leads and time.monotonic() > self._until:  # whoever asked is gone
            control.unlink(NAME)
            return
        self.request = request

    def _refuse(self, request: Request, reason: str) -> None:
        if self._leads and (self._refused is None or self._refused.request != request.id):
            logger.info("megaprof: request %s is refused: %s", request.id, reason)
            self._refused = CaptureState(request.id, "refused", reason=reason)
