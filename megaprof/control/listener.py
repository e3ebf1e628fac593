"""A rank's part in the control directory, on its background thread: it writes its status and looks for a request.

The lowest rank writes ``run.json``, and the others read there which run they belong to. A job that is started in the
same directory takes it over, and an earlier job that still runs steps back.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megaprof.artifacts.writer import Writer
from megaprof.capture.process import process
from megaprof.control import directory as places
from megaprof.control.captures import Captures
from megaprof.control.job import RunningJob
from megaprof.control.standstills import StandstillWriter
from megaprof.control.status import Reporter
from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.job import records
from megaprof.formats.job.records import Absent, BadRecord, RunRecord, interval
from megaprof.parallel.topology import WorldLayout
from megaprof.runtime.background import Background
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session


#: Seconds for which the end of a job waits for its last status.
_END_SECONDS = 2.0


class Listener:
    """One session's part in the control directory of its job. The training thread may call `close`."""

    def __init__(
        self,
        session: Session,
        layout: WorldLayout | None,
        writer: Writer,
        directory: str | os.PathLike[str],
        *,
        every: float | None = None,
    ) -> None:
        """`every`: `interval` of the world unless given."""
        coords = session.coords
        self._session = session
        self._background: Background | None = None
        self.every = interval(coords.sizes.world) if every is None else every
        """Seconds between two looks."""
        self._directory = Path(os.path.abspath(directory))
        self._part = places.part(session.role)
        self.path = places.path_of(self._directory, self._part)
        """The control directory."""
        self._leads = coords.rank == 0
        self._coords = coords
        self._probed: os.stat_result | None = None
        self._reporter = Reporter(session, self.every)
        self._own = RunRecord.new(coords, layout, session.config.target, session.role, self.every)
        self._run: RunRecord | None = None
        self._ousted = False
        self._standstill = StandstillWriter(coords)
        self._captures = Captures(session, writer, self._directory, self._reporter, leads=self._leads)
        self._complained: set[str] = set()
        self.closed = False
        """True once it looks no more: the job has ended, or others could write to its directory."""

    def start(self, background: Background) -> bool:
        """Looks every now and then on the thread of `background`. Returns False, and does nothing, if another session
        of this process has a listener in the same directory."""
        if self.path in process.answers:
            logger.warning(
                "megaprof: another model of this process already answers in %s; give install_hooks a role", self.path
            )
            return False
        self._background = background
        process.answers[self.path] = self
        background.add(self.look, self.every)
        return True

    @property
    def job(self) -> RunningJob | None:
        """The job as a command would find it; None as long as the rank does not know its run."""
        return None if self._run is None else RunningJob(self._directory, self._part, self._run)

    @property
    def busy(self) -> bool:
        """True while a capture is asked for, or is being made by this rank."""
        return self._captures.busy

    def step_time(self, target: str) -> tuple[int, float | None]:
        """Returns how many calls of `target` have begun in the session's role, and how long one takes lately, in ms."""
        key = (target, self._session.role)
        return self._session.calls.get(key, 0), self._reporter.step_ms(key)

    def look(self) -> None:
        """Looks once. The background thread calls it every `every` seconds."""
        if self.closed:
            return
        self._reporter.look()
        try:
            with self._opened() as control:
                self._look(control)
        except OSError as fault:
            self._complain(f"the control directory {self.path} does not answer: {fault.strerror or fault}")
        except Unsafe as fault:
            self._refuse(str(fault))

    def _opened(self) -> Directory:
        control, self._probed = places.open_own(self._directory, self._part, self._probed)
        return control

    def _look(self, control: Directory) -> None:
        # Each by itself: whatever is wrong with requests, the status still shows that the rank is alive.
        for part in (self._announce if self._leads else self._learn, self._look_for_requests, self._write_status):
            try:
                part(control)
            except OSError as fault:
                self._complain(f"the control directory {self.path} does not answer: {fault.strerror or fault}")

    def _announce(self, control: Directory) -> None:
        """Writes which run this is, unless a job that was started later has taken the directory over."""
        written = _run_in(control)
        other = written is not None and written.run != self._own.run and written.ended is None
        # At the first look, the other run is an earlier one.
        self._ousted = other and (self._run is not None or self._ousted)
        if self._ousted and written is not None:
            self._run = None
            self._complain(
                f"another job, process {written.pid} on {written.host}, has taken over {self.path}; "
                "give each job a --profile-dir of its own"
            )
            return
        if written is None or written.run != self._own.run:
            records.write(control, records.RUN, self._own)
        self._run = self._own

    def _learn(self, control: Directory) -> None:
        """Reads which run this rank belongs to. A killed job may have left its own run there, and a job that was
        started later may have written its own: so it is the one that began nearest to this rank's start."""
        written = _run_in(control)
        if written is None:
            return
        ours = self._run is not None and written.run == self._run.run
        if written.ended is None or ours:
            nearer = self._run is None or self._apart(written) < self._apart(self._run)
            self._ousted = not (ours or nearer)
            self._run = written if nearer else self._run

    def _apart(self, run: RunRecord) -> float:
        return abs(run.started - self._own.started)

    def _look_for_requests(self, control: Directory) -> None:
        self._captures.look(control, None if self._ousted else self._run)

    def _write_status(self, control: Directory, *, ended: bool = False) -> None:
        if self._ousted:
            return  # the directory is another job's
        run, rank, world = self._run, self._coords.rank, self._coords.sizes.world
        status = self._reporter.describe(None if run is None else run.run, self._captures.state, ended=ended)
        with places.folder(control, *places.folder_of(places.STATUS, rank, world), create=True) as folder:
            records.write(folder, places.name_of(rank), status)
        if ended:
            self._standstill.leave(control)
        else:
            self._standstill.look(control, status)

    def close(self) -> None:
        """Writes a last status, which says that the rank has ended. Its windows are closed and their files finished."""
        if self.closed:
            return
        self._ends()
        background, done = self._background, threading.Event()
        if background is None:
            self._say_goodbye()
            return

        def goodbye() -> None:
            try:
                self._say_goodbye()
            finally:
                background.remove(goodbye)
                done.set()

        # On the background thread: a file system that does not answer must not hold up the end of the job.
        background.add(goodbye, 0.0)
        background.remove(self.look)
        done.wait(_END_SECONDS)

    def _ends(self) -> None:
        self.closed = True
        if process.answers.get(self.path) is self:
            del process.answers[self.path]

    def _say_goodbye(self) -> None:
        self._captures.end()
        with suppress(OSError, Unsafe), self._opened() as control:
            with suppress(OSError):
                self._write_status(control, ended=True)
            run = _run_in(control) if self._leads else None
            if run is not None and run.run == self._own.run:
                records.write(control, records.RUN, replace(run, ended=time.time()))

    def _refuse(self, reason: str) -> None:
        """Turns control off: others could write to the directory, so nothing is read or written there any more."""
        self._ends()
        if self._background is not None:
            self._background.remove(self.look)
        self._captures.withdraw(reason)
        logger.warning("megaprof: %s; profiling on demand and status are off, training goes on", reason)

    def _complain(self, message: str) -> None:
        if message not in self._complained:
            self._complained.add(message)
            logger.warning("megaprof: %s; training goes on", message)


def _run_in(control: Directory) -> RunRecord | None:
    with suppress(Absent, BadRecord):
        return records.read(control, records.RUN, RunRecord)
    return None
