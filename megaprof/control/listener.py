"""The listening side, on the background thread of every rank: status out, orders in."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.artifacts.writer import Writer
from megaprof.control import directory as places
from megaprof.control.directory import ControlDirectory
from megaprof.control.gate import Gate
from megaprof.control.job import RunningJob
from megaprof.control.membership import Membership
from megaprof.control.orders import Orders
from megaprof.control.status import Meter, Reporter
from megaprof.formats.files import Owner, Unsafe
from megaprof.formats.job.run import RunRecord, interval
from megaprof.formats.job.status import SIZE
from megaprof.parallel.topology import WorldLayout
from megaprof.runtime.background import Background
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session


#: How long the end of a job waits for its last words, in seconds.
_END_SECONDS = 2.0
_MOST_COMPLAINTS = 8


def listen(
    session: Session,
    layout: WorldLayout | None,
    writer: Writer,
    directory: str | os.PathLike[str],
    *,
    every: float | None = None,
) -> Listener | None:
    """A listener for `session`, not started yet; None where another session of this process is in its place."""
    listener = Listener(session, layout, writer, directory, every=every)
    if any(other.path == listener.path and not other.closed for other in _listeners):
        logger.warning(
            "megaprof: another model of this process already answers in %s; give install_hooks a role", listener.path
        )
        return None
    _listeners.add(listener)
    return listener


class Listener:
    """One session's part in its job's control directory. `close` may be called from the training thread."""

    def __init__(
        self,
        session: Session,
        layout: WorldLayout | None,
        writer: Writer,
        directory: str | os.PathLike[str],
        *,
        every: float | None = None,
    ) -> None:
        """`every`: seconds between two looks, `interval` of the world unless given."""
        coords = session.coords
        self._session = session
        self._background: Background | None = None
        self._every = interval(coords.sizes.world) if every is None else every
        self._directory = Path(os.path.abspath(directory))
        self._part = places.part(session.role)
        self.path = places.path_of(self._directory, self._part)
        """The control directory."""
        self._leads = coords.rank == 0
        self._status = places.status(coords.rank, coords.sizes.world)
        self._owner: Owner | None = None
        self._gate: Gate | None = None
        self._meter = Meter()
        self._reporter = Reporter(session, self._meter, self._every)
        self._own = RunRecord.new(coords, layout, session.config.target, session.role, self._every)
        self._membership = Membership(self._own, leads=self._leads, complain=self._complain)
        self._orders = Orders(session, writer, self._directory, self._meter, self._membership)
        self._followers: list[Callable[[Listener], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._complained: set[str] = set()
        self.closed = False

    def start(self, background: Background) -> None:
        """Look every now and then on the thread of `background`."""
        self._background = background
        # The lowest rank lets requests in, for all others.
        background.add(self.look, min(self._every, 1.0) if self._leads else self._every)

    def follow(self, task: Callable[[Listener], None], at_end: Callable[[], None] = lambda: None) -> None:
        """Call `task` after each look, while there is a run, and `at_end` at the end of it."""
        self._followers.append(task)
        self._at_end.append(at_end)

    @property
    def job(self) -> RunningJob | None:
        """The job as a command would find it; None as long as the rank does not know its run."""
        run = self._membership.run
        return None if run is None else RunningJob(self._directory, self._part, run)

    @property
    def busy(self) -> bool:
        """True while a capture is in this rank's hands, or in those of any rank as far as this one decides."""
        return self._orders.task is not None or (self._gate is not None and self._gate.current is not None)

    def step_time(self, target: str) -> tuple[int, float | None]:
        """How many calls of `target` have begun in the session's role, and how long one takes lately, in ms."""
        key = (target, self._session.role)
        timeline = self._session.timeline
        recent = None if timeline is None else timeline.recent(*key)
        between = self._meter.seconds(key)
        usual = recent.step_ms if recent is not None else None if between is None else 1e3 * between
        return self._session.calls.get(key, 0), usual

    def look(self) -> None:
        """What the background thread does every `every` seconds."""
        if self.closed:
            return
        self._meter.look(dict(self._session.calls))
        try:
            with ControlDirectory.own(self._directory, self._part, self._owner) as control:
                self._look(control)
        except OSError as fault:
            self._complain(f"the control directory {self.path} does not answer: {fault.strerror or fault}")
        except Unsafe as fault:
            self._refuse(str(fault))
            return
        for task in list(self._followers) if self._membership.run is not None else ():
            try:
                task(self)
            except Exception as fault:  # what follows must not end what it follows
                self._followers.remove(task)
                logger.error("megaprof: %s is off: %r", type(task).__name__, fault, exc_info=True)

    def _look(self, control: ControlDirectory) -> None:
        parts = (self._join, self._look_at_requests, self._orders.look, self._orders.follow, self._write_status)
        # Each by itself: whatever is wrong with requests, status still says that the rank is alive.
        for part in parts:
            try:
                part(control)
            except OSError as fault:
                self._complain(f"the control directory {self.path} does not answer: {fault.strerror or fault}")

    def _join(self, control: ControlDirectory) -> None:
        if self._owner is None:
            # In the place of what an earlier run left there.
            status = self._reporter.describe(None, None)
            self._owner = control.owner = control.write(self._status, status.as_record(), create=True)
        if self._leads and self._gate is None:
            self._gate = Gate(control, self._own)
        self._membership.look(control)

    def _look_at_requests(self, control: ControlDirectory) -> None:
        if self._gate is not None and self._membership.run is not None:
            self._gate.look(control)

    def _write_status(self, control: ControlDirectory, *, ended: bool = False) -> None:
        if self._membership.ousted:
            return  # the directory is another job's
        run = self._membership.run
        status = self._reporter.describe(None if run is None else run.run, self._orders.state, ended=ended)
        control.overwrite(self._status, status.as_record(), SIZE)

    def close(self) -> None:
        """The job, or this part of it, ends: say so. Its windows are closed and their files finished."""
        if self.closed:
            return
        self.closed = True
        background, said = self._background, threading.Event()
        if background is None:
            self._say_goodbye()
            return

        def goodbye() -> None:
            try:
                self._say_goodbye()
            finally:
                background.remove(goodbye)
                said.set()

        # On the background thread: a file system that does not answer must not hold up the end of the job.
        background.add(goodbye, 0.0)
        background.remove(self.look)
        said.wait(_END_SECONDS)

    def _say_goodbye(self) -> None:
        for task in self._at_end:
            task()
        with suppress(OSError, Unsafe), ControlDirectory.own(self._directory, self._part, self._owner) as control:
            with suppress(OSError):
                self._orders.end(control)
            with suppress(OSError):
                self._write_status(control, ended=True)
            with suppress(OSError):
                self._membership.leave(control)

    def _refuse(self, reason: str) -> None:
        """The directory is not ours alone: nothing is read or written there any more."""
        self.closed = True
        if self._background is not None:
            self._background.remove(self.look)
        if self._orders.task is not None:
            self._orders.task.cancel(reason)
        for task in self._at_end:
            task()
        logger.warning("megaprof: %s; profiling on demand and status are off, training goes on", reason)

    def _complain(self, message: str) -> None:
        if message not in self._complained and len(self._complained) < _MOST_COMPLAINTS:
            self._complained.add(message)
            logger.warning("megaprof: %s; training goes on", message)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
