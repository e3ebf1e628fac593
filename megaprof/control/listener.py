"""The listening side, on the background thread of every rank: status out, orders in."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaprof.artifacts.writer import Writer
from megaprof.control import records
from megaprof.control.capture import Capture, Meter
from megaprof.control.gate import Gate
from megaprof.control.paths import Paths
from megaprof.control.records import Absent, BadRecord, Owner
from megaprof.control.request import Answer, Refused, Request
from megaprof.control.run import Run, interval, read_run
from megaprof.control.status import SIZE, fitted, of_rank
from megaprof.parallel.topology import WorldLayout
from megaprof.recorders.timeline.progress import Watch
from megaprof.runtime.background import Background
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session


#: Orders that one look goes through; there is one at a time.
_ORDERS = 32
#: A rank may begin so much earlier or later than the lowest one, in seconds: what is older is an earlier run's.
_APART = 3600.0
#: How many orders that a rank has finished with are remembered.
_REMEMBERED = 256
#: How long the end of a job waits for its last words.
_END_SECONDS = 2.0


def listen(
    session: Session,
    layout: WorldLayout | None,
    writer: Writer,
    directory: str | os.PathLike[str],
    *,
    every: float | None = None,
) -> Listener | None:
    """A listener for ``session``, not started yet; None where another session of this process is in its place."""
    listener = Listener(session, layout, writer, directory, every=every)
    if any(other.paths == listener.paths and not other.closed for other in _listeners):
        logger.warning(
            "megaprof: another model of this process already answers in %s; give install_hooks a role",
            listener.paths.root,
        )
        return None
    _listeners.add(listener)
    return listener


class Listener:
    """One session's part in its job's control directory. ``close`` may be called from the training thread."""

    def __init__(
        self,
        session: Session,
        layout: WorldLayout | None,
        writer: Writer,
        directory: str | os.PathLike[str],
        *,
        every: float | None = None,
    ) -> None:
        """``every``: seconds between two looks, `interval` of the world unless given."""
        self._session = session
        self._writer = writer
        self._directory = Path(os.path.abspath(directory))
        self._background: Background | None = None
        self._every = interval(session.coords.sizes.world) if every is None else every
        self.paths = Paths.of(self._directory, session.role, session.coords.sizes.world)
        self._leads = session.coords.rank == 0
        self._meter = Meter()
        self._watches = (Watch(), Watch())
        self._started = time.time()
        self._own = Run.new(session.coords, layout, session.config.target, session.role, self._every)
        self.run: Run | None = None
        self._ousted = False
        self._owner: Owner | None = None
        self._gate: Gate | None = None
        self._capture: Capture | None = None
        self._written: Answer | None = None
        self._handled: dict[str, None] = {}
        self._followers: list[Callable[[Listener], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._complained: set[str] = set()
        self.closed = False

    def start(self, background: Background) -> None:
        self._background = background
        # The lowest rank lets requests in, for all others.
        background.add(self.look, min(self._every, 1.0) if self._leads else self._every)

    def follow(self, task: Callable[[Listener], None], at_end: Callable[[], None] = lambda: None) -> None:
        """Call ``task`` after each look, while there is a run, and ``at_end`` at the end of it."""
        self._followers.append(task)
        self._at_end.append(at_end)

    @property
    def owner(self) -> Owner | None:
        return self._owner

    @property
    def busy(self) -> bool:
        """True while a capture is in this rank's hands, or in those of any rank as far as this one decides."""
        return self._capture is not None or (self._gate is not None and self._gate.current is not None)

    def look(self) -> None:
        """What the background thread does every ``every`` seconds."""
        if self.closed:
            return
        self._meter.look(dict(self._session.calls))
        # Each by itself: whatever is wrong with requests, status still says that the rank is alive.
        parts = (self._join, self._look_at_requests, self._look_at_orders, self._follow_capture, self._write_status)
        for part in parts:
            try:
                part()
            except OSError as fault:
                self._complain(f"the control directory {self.paths.root} does not answer: {fault.strerror or fault}")
        for task in list(self._followers) if self.run is not None else ():
            try:
                task(self)
            except Exception as fault:  # what follows must not end what it follows
                self._followers.remove(task)
                logger.error("megaprof: %s is off: %r", type(task).__name__, fault, exc_info=True)

    def step_time(self, target: str) -> tuple[int, float | None]:
        """How many calls of ``target`` have begun in the session's role, and how long one takes lately, in ms."""
        key = (target, self._session.role)
        timeline = self._session.timeline
        recent = None if timeline is None else timeline.recent(target)
        between = self._meter.seconds(key)
        usual = recent.step_ms if recent is not None else None if between is None else 1e3 * between
        return self._session.calls.get(key, 0), usual

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
        if self._capture is not None:
            self._capture.look()
            self._capture.end("the job ended before it was finished")
            with suppress(OSError):
                self._answer(self._capture)
        with suppress(OSError):
            self._write_status(ended=True)
        if self._leads and self.run is not None:
            with suppress(OSError, Absent, BadRecord):
                if read_run(self.paths.root).run == self.run.run:  # and not that of a job that was started meanwhile
                    records.write(self.paths.run, {**self.run.as_record(), "ended": time.time()})

    def _join(self) -> None:
        if self._owner is None:
            own = self.paths.status(self._session.coords.rank)
            own.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            # In the place of what an earlier run left there, perhaps as another user.
            self._owner = Owner.of(records.write(own, self._status()))
        if self._leads:
            self._announce(self._owner)
        else:
            self._learn(self._owner)

    def _announce(self, owner: Owner) -> None:
        """Say which run this is, and again when that is gone; a later job in the same directory takes over."""
        if self._gate is None:
            self._gate = Gate(self.paths, self._own, owner)
            records.write(self.paths.run, self._own.as_record())
            self.run = self._own
            return
        other: Run | None = None
        with suppress(Absent, BadRecord):
            other = read_run(self.paths.root)
            if other.run == self._own.run:
                return
        self._ousted = other is not None and other.ended is None
        if other is not None and self._ousted:
            self.run = None
            self._complain(
                f"another job, process {other.pid} on {other.host}, has taken over {self.paths.root}; "
                "give each job a --profile-dir of its own"
            )
            return
        self.paths.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        records.write(self.paths.run, self._own.as_record())
        self.run = self._own

    def _learn(self, owner: Owner) -> None:
        """Which run this is: the files of one that crashed may lie here still."""
        with suppress(Absent, BadRecord):
            run = read_run(self.paths.root, owner)
            if self.run is not None and run.run == self.run.run:
                self._ousted = False
            elif run.ended is None:
                # All ranks of a job begin at about the same time.
                apart, limit = self._apart(run), _APART if self.run is None else self._apart(self.run)
                if run.sizes.world == self._own.world and apart < limit:
                    if self._capture is not None:
                        self._capture.cancel("the order came from an earlier run")
                        self._capture = None
                    self.run = run
                else:
                    self._ousted = self.run is not None

    def _apart(self, run: Run) -> float:
        return abs(run.started - self._started)

    def _look_at_requests(self) -> None:
        if self._gate is not None and self.run is not None:
            self._gate.look()

    def _look_at_orders(self) -> None:
        if self.run is None:
            return
        ids, gone = self._list_orders()
        for identity in ids:
            if self._capture is not None and self._capture.request.id == identity:
                if identity in gone:
                    self._go(self._capture)
            elif identity not in self._handled:
                self._take(identity)
        if self._capture is not None and self._capture.request.id not in ids:
            self._capture.cancel("it was withdrawn")

    def _list_orders(self) -> tuple[list[str], set[str]]:
        ids: list[str] = []
        gone: set[str] = set()
        with suppress(FileNotFoundError), os.scandir(self.paths.orders) as entries:
            for number, entry in enumerate(entries):
                if number >= 2 * _ORDERS:
                    break
                if entry.name.endswith(".go.json") and not entry.name.startswith("."):
                    gone.add(entry.name.removesuffix(".go.json"))
                elif entry.name.endswith(".json") and not entry.name.startswith("."):
                    ids.append(entry.name.removesuffix(".json"))
        return sorted(ids), gone

    def _take(self, identity: str) -> None:
        run = self.run
        try:
            record = records.read(self.paths.order(identity), self._owner)
            if run is None or record.get("run") != run.run:
                return  # of an earlier run, or of the next one, of which run.json tells in a moment
            request = Request.from_record(record, run)
        except Absent:
            return
        except (BadRecord, Refused) as fault:
            self._forget(identity)
            logger.debug("megaprof: order %s is ignored: it %s", identity, fault)
            return
        if not request.selector.selects(self._session.coords):
            self._forget(identity)
            return
        busy = self._capture
        if busy is not None:
            self._forget(identity)
            rank = self._session.coords.rank
            self._write_answer(identity, Answer(rank, "refused", reason=f"busy with {busy.request.id}"))
            return
        self._capture = Capture(request, self._session, self._writer, self._directory, self._meter)
        self._written = None

    def _go(self, capture: Capture) -> None:
        with suppress(Absent, BadRecord, ValueError):
            record = records.read(self.paths.go(capture.request.id), self._owner)
            if record.get("run") == capture.request.run:
                capture.go(records.whole(record, "first", 0, 1 << 62))

    def _follow_capture(self) -> None:
        capture = self._capture
        if capture is None:
            return
        capture.look()
        self._answer(capture)
        if capture.over:
            self._forget(capture.request.id)
            self._capture = None

    def _answer(self, capture: Capture) -> None:
        if capture.answer != self._written:
            self._write_answer(capture.request.id, capture.answer)
            self._written = capture.answer

    def _write_answer(self, identity: str, answer: Answer) -> None:
        path = self.paths.answer(identity, answer.rank)
        run = self._own if self.run is None else self.run
        with suppress(FileNotFoundError):  # nobody waits for it any more
            if path.parent != self.paths.answers / identity:
                path.parent.mkdir(mode=0o755, exist_ok=True)
            records.write(path, answer.as_record(run.run))

    def _forget(self, identity: str) -> None:
        self._handled[identity] = None
        if len(self._handled) > _REMEMBERED:
            del self._handled[next(iter(self._handled))]

    def _write_status(self, *, ended: bool = False) -> None:
        if self._ousted:
            return  # the directory is another job's
        path, status = self.paths.status(self._session.coords.rank), self._status(ended=ended)
        try:
            records.overwrite(path, status, SIZE)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            records.overwrite(path, status, SIZE)

    def _status(self, *, ended: bool = False) -> dict[str, Any]:
        status = of_rank(
            self._session,
            run=None if self.run is None else self.run.run,
            every=self._every,
            seconds=self._meter.seconds,
            watches=self._watches,
            capture=None if self._capture is None else (self._capture.request.id, self._capture.answer),
            ended=ended,
        )
        return fitted(status)

    def _complain(self, message: str) -> None:
        if message not in self._complained and len(self._complained) < 8:
            self._complained.add(message)
            logger.warning("megaprof: %s; training goes on", message)


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
