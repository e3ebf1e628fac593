"""One rank's part in captures on demand: it reads `capture.json`, and captures what stands there.

All ranks read the same file. A request that is not there any more is withdrawn. Everything here runs on the background
thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.artifacts.writer import Writer
from megaprof.capture.agenda import Demand
from megaprof.capture.compat import held_by
from megaprof.config.windows import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.control.requests import check, recorder_config
from megaprof.control.status import LONGEST_REASON, Reporter
from megaprof.formats.files import Directory
from megaprof.formats.job import records
from megaprof.formats.job.records import CAPTURE, Absent, BadRecord, Refused, Request, RunRecord
from megaprof.formats.job.status import FINAL, CaptureState, State
from megaprof.formats.names import shard
from megaprof.formats.nsys import SESSION_VARIABLE
from megaprof.formats.phrases import printable
from megaprof.recorders import build_recorders
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session

#: Seconds after the time-out of a request until its job removes it: the command that should have done so is gone.
_GRACE = 30.0
#: A target counts as one that nobody runs if it was not called while others were called this often.
_CALLS_OF_OTHERS = 2


class Captures:
    """The request in `capture.json`, and what this rank does about it. Methods raise OSError."""

    def __init__(self, session: Session, writer: Writer, directory: Path, reporter: Reporter, *, leads: bool) -> None:
        """`directory`: where the files of a capture go. `leads`: this is the job's lowest rank, which removes a request
        that nobody waits for any more."""
        self._session = session
        self._writer = writer
        self._directory = directory
        self._reporter = reporter
        self._leads = leads
        self._until = 0.0
        self.request: Request | None = None
        """The request to this job; None if there is none."""
        self.task: CaptureTask | None = None
        """What this rank captures; None if it captures nothing."""

    @property
    def state(self) -> CaptureState | None:
        """The rank's answer to the request, for its status."""
        return None if self.task is None else self.task.state

    @property
    def busy(self) -> bool:
        """True while something is asked for, or is being captured here."""
        return self.request is not None or self.task is not None

    def look(self, control: Directory, run: RunRecord | None) -> None:
        """Begins with a new request to `run`, goes on with the one in hand, or drops it."""
        self._read(control, run)
        request = self.request
        if self.task is not None and (request is None or request.id != self.task.state.request):
            self.withdraw("it was withdrawn")
        if run is not None and request is not None and self.task is None and self._is_asked(request):
            self.task = CaptureTask(request, run, self._session, self._writer, self._directory, self._reporter)
        if self.task is not None:
            of_task = request is not None and request.id == self.task.state.request
            self.task.look(request.first if request is not None and of_task else None)

    def withdraw(self, reason: str) -> None:
        """Gives the capture up. A window that is open is finished all the same, and so are those that follow it."""
        if self.task is not None:
            self.task.cancel(reason)
            if self.task.over or not self.task.records:
                self.task = None

    def end(self) -> None:
        """The job ends: brings the answer up to date for the last time."""
        if self.task is not None:
            self.task.look(None)
            self.task.end("the job ended before it was finished")

    def _read(self, control: Directory, run: RunRecord | None) -> None:
        before, self.request = self.request, None
        try:
            request = records.read(control, CAPTURE, Request)
        except (Absent, BadRecord):  # whoever asks next replaces what is no request
            return
        if run is None or request.run != run.run:
            return
        if before is None or before.id != request.id:
            self._until = time.monotonic() + request.timeout + _GRACE
            logger.debug("megaprof: request %s (%s): %s", request.id, request.by, request.target)
        elif self._leads and time.monotonic() > self._until:
            control.unlink(CAPTURE)
            return
        self.request = request

    def _is_asked(self, request: Request) -> bool:
        try:
            return request.selector.selects(self._session.coords)
        except ValueError:
            return True  # of another version of megaprof: the answer says what is wrong


class CaptureTask:
    """One request on this rank, from its arrival to the finished files."""

    def __init__(
        self, request: Request, run: RunRecord, session: Session, writer: Writer, directory: Path, reporter: Reporter
    ) -> None:
        self.state = CaptureState(request.id, "accepted")
        """The rank's answer now."""
        self._session = session
        self._reporter = reporter
        self._demand: Demand | None = None
        try:
            check(request, run)
            self._demand = self._demand_of(request, writer, directory)
            self._answer("accepted")
        except (Refused, ValueError) as fault:
            self._answer("failed", str(fault))
        except Exception as fault:  # a tool's
            logger.warning("megaprof: request %s is refused: %r", request.id, fault)
            self._answer("failed", f"it cannot be prepared: {fault!r}")

    @property
    def over(self) -> bool:
        """True once the answer does not change any more."""
        return self.state.state in FINAL

    @property
    def records(self) -> bool:
        """True while one of its windows is open or will open."""
        demand = self._demand
        if demand is None:
            return False
        return demand.closed < len(demand.taken) or not demand.over

    def look(self, first: int | None) -> None:
        """Brings the answer up to date. `first` is the number of the first call to capture; None while that is not
        chosen, or the request is withdrawn."""
        demand = self._demand
        if first is not None and demand is not None and demand.first < 0 and not self.over:
            self._begin(demand, first)
        if self.over or demand is None:
            return
        records = self.records  # once: the training thread goes on
        if not records and self._session.demand is demand:
            self._session.demand = None
        if records and self._session.off is not None:
            self._answer("failed", f"profiling went off on this rank after a fault: {self._session.off}")
        elif records or len(demand.written) < demand.saved:
            self._answer("recording" if demand.taken else "accepted")
        elif demand.reason is not None:
            self._answer("failed", demand.reason)
        else:
            self._answer("done")

    def cancel(self, reason: str) -> None:
        """Gives it up, unless a window has been opened."""
        demand = self._demand
        if self.over or (demand is not None and demand.taken):
            return
        if demand is not None and self._session.demand is demand:
            self._session.demand = None
        self._answer("failed", reason)

    def end(self, reason: str) -> None:
        """The job ends: it failed unless it is over."""
        if not self.over:
            self._answer("failed", reason)

    def _demand_of(self, request: Request, writer: Writer, directory: Path) -> Demand:
        """Returns what the training thread is to capture. Raises Refused, ValueError, and what a tool raises."""
        if self._session.off is not None:
            raise Refused(f"profiling is off on this rank since a fault: {self._session.off}")
        config = recorder_config(request, str(directory))
        if "nsys" in config.tool and SESSION_VARIABLE not in os.environ:
            raise Refused("this process does not run under nsys ('megaprof nsys' prints the command to start it with)")
        role = self._role_of(request)
        recorders = build_recorders(config, writer)
        return Demand(request.target, role, -1, request.steps, recorders, holding=held_by(config))

    def _role_of(self, request: Request) -> str | None:
        """Returns the role whose calls are counted. Raises Refused if nobody makes such calls."""
        target = TRAIN_ACTOR if request.target == TRAIN_OVERALL else request.target
        our_role, wanted = self._session.role, request.role
        calls = dict(self._session.calls)
        seen = sorted({role or "" for name, role in calls if name == target})
        if not seen and sum(calls.values()) >= _CALLS_OF_OTHERS:
            runs = ", ".join(sorted({name if role is None else f"{name} of {role}" for name, role in calls}))
            raise Refused(f"nobody has run {target} in this job so far; what runs is {runs}")
        if wanted is not None:
            if wanted not in seen and wanted != our_role and seen:
                roles = [role for role in seen if role]
                hint = f"{target} runs as {', '.join(roles)}" if roles else f"{target} has no roles: leave --role out"
                raise Refused(f"unknown role {wanted!r}; {hint}")
            return wanted
        if not seen or (our_role or "") in seen:
            return our_role
        if len(seen) > 1:
            raise Refused(f"{target} runs as {', '.join(seen)}: name one with --role")
        return seen[0]

    def _begin(self, demand: Demand, first: int) -> None:
        """Has the training thread capture from call `first` on; nothing if that call has begun already."""
        demand.first = first
        self._session.demand = demand
        # Only now: a call that began before it was set did not see it.
        begun = self._session.calls.get(demand.counted, 0)
        if begun > first and not demand.seen:
            self._session.demand = None
            self._answer("failed", f"call {first} was over when the rank heard of it; {begun} had begun")

    def _answer(self, state: State, reason: str | None = None) -> None:
        demand, folder = self._demand, shard(self._session.coords)
        key = None if demand is None else demand.counted
        self.state = CaptureState(
            self.state.request,
            state,
            calls=0 if key is None else self._session.calls.get(key, 0),
            seconds=None if key is None else self._reporter.seconds(key),
            reason=None if reason is None else printable(reason[:LONGEST_REASON]),
            steps=() if demand is None else tuple(demand.taken),
            files=()
            if demand is None
            else tuple(os.path.join(folder, name) for names in demand.written for name in names),
        )
