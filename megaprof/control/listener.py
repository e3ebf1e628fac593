"""A rank's part in the control directory, on its background thread: it writes its status and answers the request.

The lowest rank writes ``run.json``, and the others read there which run they belong to. A job that is started in the
same directory takes it over, and an earlier job that still runs steps back. All ranks read the same request. One that
is not there any more is withdrawn.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megaprof.capture.process import process
from megaprof.control.blame import is_stuck
from megaprof.control.capture import LONGEST_REASON, Capture
from megaprof.control.directory import (
    ControlDirectory,
    RunningJob,
    Unsafe,
    folder_of,
    name_of,
    read,
    write,
)
from megaprof.formats.flight import Entry, settled
from megaprof.formats.job import (
    CAPTURE,
    COLLECTIVES,
    RUN,
    STATUS,
    Calls,
    InFlight,
    RankStatus,
    Request,
    RunRecord,
    interval,
)
from megaprof.formats.names import host
from megaprof.formats.phrases import printable
from megaprof.parallel.topology import AXES, RankCoords, WorldLayout
from megaprof.recorders import flight
from megaprof.recorders.timeline_steps import ChangeClock, Key
from megaprof.runtime.background import Background
from megaprof.runtime.isolation import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session


#: Seconds for which the end of a job waits for its last status.
_END_SECONDS = 2.0
#: Seconds after the time-out of a request until its job removes it: the command that should have done so is gone.
_GRACE = 30.0
#: How many looks at a counter of calls the average time between two calls is taken over.
_LOOKS = 32
#: A record of what is in flight is bounded: so many calls that have not ended, first those that are the first of their
#: kind, and so many shapes of each.
_MOST, _SHAPES = 200, 4


class StandstillWriter:
    """Writes what a rank has in flight once it stands still, and removes that when the rank moves again: so all files
    there are of one standstill. `megaprof hang` reads them as it reads dumps of torch's watchdog."""

    def __init__(self, coords: RankCoords, control: ControlDirectory) -> None:
        rank, sizes = coords.rank, coords.sizes
        self._control = control
        self._folder = folder_of(COLLECTIVES, rank, sizes.world)
        self._name = name_of(rank)
        #: When the rank last moved before the standstill that is written; None: nothing is written. At first 0: an
        #: earlier run may have left a file.
        self._moved: float | None = 0.0
        # A world of exchanges alone is not checked: gloo keeps none.
        self._checked = rank > 0 or sizes.world == sizes.pp

    def look(self, status: RankStatus) -> None:
        """Writes what is in flight if the rank has begun to stand still; removes it if the rank moves. Raises OSError
        and Unsafe."""
        if status.past_first_step and not self._checked:
            self._checked = True
            self._check()
        moved = status.moved if is_stuck(status, status.time) else None
        if status.run is None or moved == self._moved:
            return
        if moved is None:
            self.leave()
        else:
            self._write(status)
        self._moved = moved

    def leave(self) -> None:
        """Removes the file, also that of an earlier run."""
        if self._moved is not None:
            with suppress(FileNotFoundError), self._control.open(*self._folder) as folder:
                os.unlink(self._name, dir_fd=folder)

    def _write(self, status: RankStatus) -> None:
        try:
            called = flight.entries()
        except flight.NoFlightRecorder:
            return
        record = InFlight(run=str(status.run), rank=status.rank, entries=_kept(called), pg_config=flight.groups())
        with self._control.open(*self._folder, create=True) as folder:
            write(folder, self._name, record)

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


class Listener:
    """One session's part in the control directory of its job. The training thread may call `close`."""

    def __init__(self, session: Session, layout: WorldLayout | None, directory: str | os.PathLike[str]) -> None:
        """`directory`: the save directory, or a local one in its place."""
        self._coords = coords = session.coords
        self._session = session
        self._background: Background | None = None
        self.every = interval(coords.sizes.world)
        """Seconds between two looks."""
        self._directory = Path(os.path.abspath(directory))
        self._control = ControlDirectory(self._directory, session.role, own=True)
        self.path = self._control.path
        self._leads = coords.rank == 0
        self._own = RunRecord.new(coords, layout, session.config.target, session.role, self.every)
        self._run: RunRecord | None = None
        self._ousted = False
        self._request: Request | None = None
        self._obsolete_at = 0.0  # when the request may be removed, by the monotonic clock
        self._capture: Capture | None = None
        self._standstill = StandstillWriter(coords, self._control)
        self._calls: dict[Key, deque[tuple[float, int]]] = {}  # when how many had begun
        self._host_moved, self._device_moved = ChangeClock(), ChangeClock()
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
        return None if self._run is None else RunningJob(self._directory, self._session.role, self._run)

    @property
    def busy(self) -> bool:
        """True while a capture is asked for, or is being made by this rank."""
        return self._request is not None or self._capture is not None

    def step_time(self, target: str) -> tuple[int, float | None]:
        """Returns how many calls of `target` have begun in the session's role, and how long one takes lately, in ms;
        without a timeline, how far apart they begin."""
        key, timeline = (target, self._session.role), self._session.timeline
        recent = None if timeline is None else timeline.tally.recent(*key)
        seconds = self._seconds(key)
        apart = None if seconds is None else 1e3 * seconds
        return self._session.calls.get(key, 0), apart if recent is None else recent.step_ms

    def look(self) -> None:
        """Looks once. The background thread calls it every `every` seconds."""
        if self.closed:
            return
        now = time.monotonic()
        for key, count in dict(self._session.calls).items():
            looks = self._calls.setdefault(key, deque(maxlen=_LOOKS))
            if not looks or looks[-1][1] != count:
                looks.append((now, count))
        try:
            # Each by itself: whatever is wrong with requests, the status still shows that the rank is alive.
            with self._complaining(), self._control.open() as control:
                with self._complaining():
                    (self._announce if self._leads else self._learn)(control)
                with self._complaining():
                    self._look_for_request(control)
                with self._complaining():
                    self._write_status(control)
        except Unsafe as fault:
            self._refuse(str(fault))

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            self._complain(f"the control directory {self.path} does not answer: {fault.strerror or fault}")

    def _announce(self, control: int) -> None:
        """Writes which run this is, unless a job that was started later has taken the directory over."""
        written = read(control, RUN, RunRecord)
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
            write(control, RUN, self._own)
        self._run = self._own

    def _learn(self, control: int) -> None:
        """Reads which run this rank belongs to. A killed job may have left its own run there, and a job that was
        started later may have written its own: so it is the one that began nearest to this rank's start."""
        written = read(control, RUN, RunRecord)
        if written is None:
            return
        ours = self._run is not None and written.run == self._run.run
        if written.ended is None or ours:
            began = self._own.started
            nearer = self._run is None or abs(written.started - began) < abs(self._run.started - began)
            self._ousted = not (ours or nearer)
            self._run = written if nearer else self._run

    def _look_for_request(self, control: int) -> None:
        """Begins with a new request, goes on with the one in hand, or drops it."""
        run = None if self._ousted else self._run
        self._request = request = self._request_to(run, control)
        if self._capture is not None and (request is None or request.id != self._capture.answer.request):
            self._withdraw("it was withdrawn")
        if run is not None and request is not None and self._capture is None and self._is_asked(request):
            self._capture = Capture(request, run, self._session, self._directory, self._seconds)
        if self._capture is not None:
            in_hand = request is not None and request.id == self._capture.answer.request
            self._capture.look(request.first if request is not None and in_hand else None)

    def _request_to(self, run: RunRecord | None, control: int) -> Request | None:
        """Returns the request to `run`; None if there is none. Whoever asks next replaces what is no request."""
        request = read(control, CAPTURE, Request)
        if run is None or request is None or request.run != run.run:
            return None
        if self._request is None or self._request.id != request.id:
            self._obsolete_at = time.monotonic() + request.timeout + _GRACE
            logger.debug("megaprof: request %s (%s): %s", request.id, request.by, request.target)
        elif self._leads and time.monotonic() > self._obsolete_at:
            with suppress(FileNotFoundError):
                os.unlink(CAPTURE, dir_fd=control)
            return None
        return request

    def _is_asked(self, request: Request) -> bool:
        try:
            return request.selector.selects(self._coords)
        except ValueError:
            return True  # of another version of megaprof: the answer says what is wrong

    def _withdraw(self, reason: str) -> None:
        """Gives the capture up. A window that is open is finished all the same, and so are those that follow it."""
        if self._capture is not None:
            self._capture.cancel(reason)
            if self._capture.answer.final or not self._capture.records:
                self._capture = None

    def _write_status(self, control: int, *, ended: bool = False) -> None:
        if self._ousted:
            return  # the directory is another job's
        status = self._describe(ended=ended)
        names = folder_of(STATUS, status.rank, self._coords.sizes.world)
        with self._control.open(*names, create=True, control=control) as folder:
            write(folder, name_of(status.rank), status)
        if ended:
            self._standstill.leave()
        else:
            self._standstill.look(status)

    def _describe(self, *, ended: bool) -> RankStatus:
        """Returns the rank's status now."""
        session, timeline = self._session, self._session.timeline
        begun = dict(session.calls)
        running, position = process.parts.now, None if timeline is None else timeline.position()
        device = None if timeline is None else timeline.device_position()
        if device is not None:
            device = replace(device, since=self._device_moved.since(replace(device, since=0.0)))
        finished = {} if timeline is None else timeline.calls()
        calls = []
        for key in dict.fromkeys((*begun, *finished)):
            step, count = finished.get(key, (None, None))
            calls.append(Calls(*key, begun.get(key), self._seconds(key), step, count))
        return RankStatus(
            run=None if self._run is None else self._run.run,
            rank=self._coords.rank,
            coords={axis: getattr(self._coords, axis) for axis in AXES},
            host=host(),
            name=socket.gethostname()[:64],
            pid=os.getpid(),
            time=time.time(),
            interval=self.every,
            since=self._host_moved.since((position, running, sum(begun.values()))),
            calls=tuple(calls),
            position=position,
            part=running[0] if running is not None and position is None else None,
            device_position=device,
            recent=None if timeline is None else timeline.tally.recent(),
            waits=None if timeline is None else timeline.tally.waits,
            capture=None if self._capture is None else self._capture.answer,
            ended=ended,
            off=session.off is not None,
            why=None if session.off is None else printable(session.off[:LONGEST_REASON]),
        )

    def _seconds(self, key: Key) -> float | None:
        """Returns the seconds from one call of a target and role to the next, lately; None before there were two."""
        timeline = self._session.timeline
        # Looks are too coarse for a few steps, and the timeline's figure is about the same steps as their length.
        if timeline is not None and key in timeline.tally:
            return timeline.tally.seconds(key)
        looks = self._calls.get(key)
        if looks is None or len(looks) < 2:
            return None
        (began, first), (ended, last) = looks[0], looks[-1]
        return (ended - began) / (last - first)

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
        if self._capture is not None:
            self._capture.end()
        with suppress(OSError, Unsafe), self._control.open() as control:
            with suppress(OSError):
                self._write_status(control, ended=True)
            run = read(control, RUN, RunRecord) if self._leads else None
            if run is not None and run.run == self._own.run:
                write(control, RUN, replace(run, ended=time.time()))

    def _refuse(self, reason: str) -> None:
        """Turns control off: others could write to the directory, so nothing is read or written there any more."""
        self._ends()
        if self._background is not None:
            self._background.remove(self.look)
        self._withdraw(reason)
        logger.warning("megaprof: %s; profiling on demand and status are off, training goes on", reason)

    def _complain(self, message: str) -> None:
        if message not in self._complained:
            self._complained.add(message)
            logger.warning("megaprof: %s; training goes on", message)
