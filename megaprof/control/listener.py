"""A rank's part in the control directory, on its background thread: it writes its status and answers the request.

Rank 0 writes ``run.json``, and the others read there which run they belong to. A job that is started in the
same directory takes it over, and an earlier job that still runs steps back. All ranks read the same request. One that
is not there any more is withdrawn.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from megaprof.capture.agenda import Demand
from megaprof.capture.process import process
from megaprof.config.values import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.control.blame import is_stuck
from megaprof.control.directory import ControlDirectory, RunningJob, Unsafe, names_of, read, write
from megaprof.control.request import check
from megaprof.formats.job import (
    CAPTURE,
    COLLECTIVES,
    RUN,
    STATUS,
    Answer,
    Calls,
    InFlight,
    RankStatus,
    Refused,
    Request,
    RunRecord,
    State,
    interval,
)
from megaprof.formats.metadata import SESSION_VARIABLE
from megaprof.formats.names import host, shard
from megaprof.formats.phrases import Unanswerable, printable
from megaprof.parallel.topology import AXES
from megaprof.recorders import build_recorders, flight
from megaprof.recorders.timeline_steps import Key
from megaprof.runtime.isolation import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session


#: Seconds for which the end of a job waits for its last status.
_END_SECONDS = 2.0
#: Seconds after the time-out of a request until its job removes it: the command that should have done so is gone.
_GRACE = 30.0
#: The most characters of a reason in a status.
LONGEST_REASON = 1000
#: A target counts as one that nobody runs if it was not called while others were called this often.
_CALLS_OF_OTHERS = 2
#: How many looks at a counter of calls the average time between two calls is taken over.
_LOOKS = 32


def _demanded(request: Request, run: RunRecord, session: Session, directory: str) -> Demand:
    """Returns what is to be captured for a request, with files in ``directory``. If that cannot be, it is over already,
    and says why."""
    demand = Demand(request.target, None, -1, request.steps, (), request=request.id)
    try:
        config = check(request, run, directory)
        if session.off is not None:
            raise Refused(f"profiling is off on this rank since a fault: {session.off}")
        if "nsys" in config.tool and SESSION_VARIABLE not in os.environ:
            raise Refused("this process does not run under nsys ('megaprof nsys' prints the command to start it with)")
        demand.role, demand.holding = _role_of(request, session), config.holding
        demand.recorders = build_recorders(config, session.writer)
    except (Refused, ValueError) as fault:
        demand.reason, demand.over = str(fault), True
    except Exception as fault:  # a tool's
        logger.warning("megaprof: request %s is refused: %r", request.id, fault)
        demand.reason, demand.over = f"it cannot be prepared: {fault!r}", True
    return demand


def _role_of(request: Request, session: Session) -> str | None:
    """Returns the role whose calls are counted. Raises Refused if nobody makes such calls."""
    target = TRAIN_ACTOR if request.target == TRAIN_OVERALL else request.target
    calls = session.agenda.calls
    seen = {role for name, role in calls if name == target}
    if not seen and sum(calls.values()) >= _CALLS_OF_OTHERS:
        runs = ", ".join(sorted({name if role is None else f"{name} of {role}" for name, role in calls}))
        raise Refused(f"nobody has run {target} in this job so far; what runs is {runs}")
    wanted = session.role if request.role is None else request.role
    if not seen or wanted in (seen if request.role is None else {*seen, session.role}):
        return wanted
    if request.role is None and len(seen) == 1:
        return seen.pop()
    roles = ", ".join(sorted(filter(None, seen)))
    hint = f"{target} runs as {roles}: name one with --role" if roles else f"{target} has no roles: leave --role out"
    raise Refused(hint if request.role is None else f"unknown role {wanted!r}; {hint}")


class Listener:
    """One session's part in the control directory of its job. The training thread may call `close`."""

    def __init__(self, session: Session, directory: str | os.PathLike[str]) -> None:
        """`directory`: the save directory, or a local one in its place."""
        self._coords = coords = session.coords
        self._session = session
        self.every = interval(coords.sizes.world)
        """Seconds between two looks."""
        self._directory = Path(os.path.abspath(directory))
        self._control = ControlDirectory(self._directory, session.role, own=True)
        self.path = self._control.path
        self._leads = coords.rank == 0
        self._own = RunRecord.new(coords, session.layout, session.role, self.every)
        self._run: RunRecord | None = None
        self._ousted = False
        self._request: Request | None = None
        self._obsolete_at = 0.0  # when the request may be removed, by the monotonic clock
        #: When the rank last moved before the standstill that is written, and how long that had lasted then; None:
        #: nothing is written. At first 0: an earlier run may have left a file.
        self._stood_since: float | None = 0.0
        self._stood_for = 0.0
        # A world of exchanges alone is not checked: gloo keeps none.
        self._flight_checked = coords.rank > 0 or coords.sizes.world == coords.sizes.pp
        self._calls: dict[Key, deque[tuple[float, int]]] = {}  # when how many had begun
        # Where the host and the device are, and since when, in wall-clock seconds.
        self._host: tuple[object, float] = None, 0.0
        self._device: tuple[object, float] = None, 0.0
        self.closed = False
        """True once it looks no more: the job has ended, or others could write to its directory."""

    def start(self) -> bool:
        """Looks every now and then on the background thread. Returns False, and does nothing, if another session of
        this process has a listener in the same directory."""
        if self.path in process.listeners:
            logger.warning(
                "megaprof: another model of this process already answers in %s; give install_hooks a role", self.path
            )
            return False
        process.listeners[self.path] = self
        process.background.add(self.look, self.every)
        return True

    @property
    def job(self) -> RunningJob | None:
        """The job as a command would find it; None as long as the rank does not know its run."""
        return None if self._run is None else RunningJob(self._directory, self._run)

    def look(self) -> None:
        """Looks once. The background thread calls it every `every` seconds."""
        if self.closed:
            return
        now = time.monotonic()
        for key, count in dict(self._session.agenda.calls).items():
            looks = self._calls.setdefault(key, deque(maxlen=_LOOKS))
            if not looks or looks[-1][1] != count:
                looks.append((now, count))
        try:
            # Each by itself: whatever is wrong with requests, the status still shows that the rank is alive.
            with self._complaining(), self._control.open() as control:
                first = self._announce if self._leads else self._learn
                for step in (first, self._look_for_request, self._write_status):
                    with self._complaining():
                        step(control)
        except Unsafe as fault:  # others could write to it: nothing is read or written there any more
            self._ends()
            self._withdraw()
            logger.warning("megaprof: %s; profiling on demand and status are off, training goes on", fault)

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            why = fault.strerror or fault
            logger.once("megaprof: the control directory %s does not answer: %s; training goes on", self.path, why)

    def _announce(self, control: int) -> None:
        """Writes which run this is, unless a job that was started later has taken the directory over."""
        written = read(control, RUN, RunRecord)
        other = written is not None and written.run != self._own.run and written.ended is None
        # At the first look, the other run is an earlier one.
        self._ousted = other and (self._run is not None or self._ousted)
        if self._ousted and written is not None:
            self._run = None
            logger.once(
                "megaprof: another job, process %d on %s, has taken over %s; give each job a --profile-dir of its own; "
                "training goes on",
                *(written.pid, written.host, self.path),
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
        session, run = self._session, None if self._ousted else self._run
        request = read(control, CAPTURE, Request)  # whoever asks next replaces what is no request
        if run is None or request is None or request.run != run.run:
            request = None
        elif self._request is None or self._request.id != request.id:
            self._obsolete_at = time.monotonic() + request.timeout + _GRACE
            logger.debug("megaprof: request %s (%s): %s", request.id, request.by, request.target)
        elif self._leads and time.monotonic() > self._obsolete_at:
            with suppress(FileNotFoundError):
                os.unlink(CAPTURE, dir_fd=control)
            request = None
        self._request = request
        if session.demand is not None and (request is None or request.id != session.demand.request):
            self._withdraw()
        if run is not None and request is not None and session.demand is None:
            is_asked = True
            with suppress(ValueError):  # of another version of megaprof: the answer says what is wrong
                is_asked = request.selector.selects(self._coords)
            if is_asked:
                session.demand = _demanded(request, run, session, str(self._directory))
        demand, first = session.demand, None if request is None else request.first
        if demand is None or request is None or request.id != demand.request:
            return
        if first is not None and demand.first < 0 and not demand.over:
            demand.first = first
            # Only now: a call that began before that did not see it.
            begun = session.agenda.calls.get(demand.counted, 0)
            if begun > first and not demand.seen:
                demand.reason = f"call {first} was over when the rank heard of it; {begun} had begun"
                demand.over = True

    def _withdraw(self) -> None:
        """Gives the capture up. A window that is open is finished all the same, and so are those that follow it."""
        demand, session = self._session.demand, self._session
        if demand is None or not demand.taken or not demand.records or session.off is not None:
            session.demand = None

    def _answer(self, *, ended: bool) -> Answer | None:
        """Returns the answer to the request in hand; None without one. ``ended``: it is the last one."""
        demand, session = self._session.demand, self._session
        if demand is None:
            return None
        state: State = "done"
        records, reason = demand.records, demand.reason  # once, and in this order: the training thread goes on
        if records and session.off is not None:
            reason = f"profiling went off on this rank after a fault: {session.off}"
        elif records or len(demand.written) < demand.saved:
            state, reason = "recording" if demand.taken else "accepted", None
            if ended:
                reason = "the job ended before it was finished"
        elif lost := [str(step) for step, files in zip(demand.taken, demand.written, strict=False) if not files]:
            reason = reason or f"no file of step {', '.join(lost)} was written, as the log of this rank says"
        folder = shard(self._coords.rank, self._coords.sizes.world)
        return Answer(
            demand.request,
            state if reason is None else "failed",
            calls=session.agenda.calls.get(demand.counted, 0),
            seconds=self._seconds(demand.counted),
            reason=None if reason is None else printable(reason[:LONGEST_REASON]),
            steps=tuple(demand.taken),
            files=tuple(os.path.join(folder, name) for names in demand.written for name in names),
        )

    def _write_status(self, control: int, *, ended: bool = False) -> None:
        if self._ousted:
            return  # the directory is another job's
        status = self._describe(ended=ended)
        *folders, file = names_of(STATUS, status.rank, self._coords.sizes.world)
        with self._control.open(*folders, create=True, control=control) as folder:
            write(folder, file, status)
        self._write_in_flight(status)

    def _write_in_flight(self, status: RankStatus) -> None:
        """Writes what the rank has in flight when it stands still, and again when it has stood for twice as long,
        because it may still have computed before. Removes that, or what an earlier run left, when the rank moves: so
        all files there are of one standstill. `megaprof hang` reads them as it reads dumps of torch's watchdog."""
        if status.past_first_step and not self._flight_checked:
            self._flight_checked = True
            why = f"torch keeps none of them: set {flight.SIZE}={flight.USUAL} before the first process group is made"
            try:
                kept = bool(flight.entries())
            except Unanswerable as missing:
                kept, why = False, str(missing)
            if not kept:
                logger.warning("megaprof: if this job hangs, its collectives will not show why: %s", why)
        since = status.moved if not status.ended and is_stuck(status, status.time) else None
        stood_for = status.stuck(status.time)
        if since == self._stood_since and (since is None or stood_for < 2 * self._stood_for):
            return
        *folders, file = names_of(COLLECTIVES, status.rank, self._coords.sizes.world)
        if since is None:
            with suppress(FileNotFoundError), self._control.open(*folders) as folder:
                os.unlink(file, dir_fd=folder)
        elif status.run is None:
            return
        else:
            with suppress(Unanswerable):
                called, groups = flight.in_flight(flight.entries()), flight.groups()
                record = InFlight(run=status.run, rank=status.rank, entries=called, pg_config=groups)
                with self._control.open(*folders, create=True) as folder:
                    write(folder, file, record)
        self._stood_since, self._stood_for = since, stood_for

    def _describe(self, *, ended: bool) -> RankStatus:
        """Returns the rank's status now."""
        session, timeline = self._session, self._session.timeline
        begun = dict(session.agenda.calls)
        running, position = process.parts.now, None if timeline is None else timeline.position()
        device = None if timeline is None else timeline.device_position()
        now, place = time.time(), None if device is None else replace(device, since=0.0)
        if place != self._device[0]:
            self._device = place, now
        state = position, running, sum(begun.values())
        if state != self._host[0]:
            self._host = state, now
        calls = []
        for key, number in begun.items():
            timed = None if timeline is None else timeline.by_key.get(key)
            finished = None if timed is None else timed.finished
            step, count = finished or (session.agenda.wishes[key].last, None)
            calls.append(Calls(*key, number, self._seconds(key), step, count))
        return RankStatus(
            run=None if self._run is None else self._run.run,
            rank=self._coords.rank,
            coords={axis: getattr(self._coords, axis) for axis in AXES},
            host=host(),
            name=socket.gethostname()[:64],
            pid=os.getpid(),
            time=now,
            interval=self.every,
            since=self._host[1],
            calls=tuple(calls),
            position=position,
            part=running[0] if running is not None and position is None else None,
            device_position=None if device is None else replace(device, since=self._device[1]),
            recent=None if timeline is None else timeline.recent(),
            waits=None if timeline is None else timeline.waits(),
            capture=self._answer(ended=ended),
            ended=ended,
            off=session.off is not None,
            why=None if session.off is None else printable(session.off[:LONGEST_REASON]),
        )

    def _seconds(self, key: Key) -> float | None:
        """Returns the seconds from one call of a target and role to the next, lately; None before there were two."""
        timeline = self._session.timeline
        # Looks are too coarse for a few steps, and the timeline's figure is about the same steps as their length.
        if timeline is not None and (timed := timeline.by_key.get(key)) is not None and timed.times:
            return timed.seconds()
        looks = self._calls.get(key)
        if looks is None or len(looks) < 2:
            return None
        (began, first), (ended, last) = looks[0], looks[-1]
        return (ended - began) / (last - first)

    def close(self) -> None:
        """Writes a last status, which says that the rank has ended. Its windows are closed and their files finished."""
        if self.closed:
            return
        background, done = process.background, threading.Event()

        def goodbye() -> None:
            try:
                with suppress(OSError, Unsafe), self._control.open() as control:
                    with suppress(OSError):
                        self._write_status(control, ended=True)
                    run = read(control, RUN, RunRecord) if self._leads else None
                    if run is not None and run.run == self._own.run:
                        write(control, RUN, replace(run, ended=time.time()))
            finally:
                background.remove(goodbye)
                done.set()

        # On the background thread: a file system that does not answer must not hold up the end of the job.
        background.add(goodbye, 0.0)
        self._ends()
        done.wait(_END_SECONDS)

    def _ends(self) -> None:
        self.closed = True
        process.background.remove(self.look)
        if process.listeners.get(self.path) is self:
            del process.listeners[self.path]
