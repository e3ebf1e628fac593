"""One request on one rank. Everything here runs on the background thread."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.artifacts.writer import Writer
from megaprof.capture.agenda import Demand
from megaprof.capture.compat import held_by
from megaprof.config.windows import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.control.requests import recorder_config
from megaprof.control.status import Meter
from megaprof.formats.job.requests import Refused, Request
from megaprof.formats.job.status import FINAL, CaptureState, State
from megaprof.formats.names import shard
from megaprof.formats.nsys import SESSION_VARIABLE
from megaprof.formats.phrases import printable
from megaprof.recorders import build_recorders
from megaprof.recorders.timeline.progress import Key
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session


#: How long files may take to be finished after the last window closed, in seconds.
_FINISHING = 900.0
#: Characters of a reason at most.
_LONGEST_REASON = 1000
#: A target counts as one that nobody runs if it was not called while others were called so often.
_CALLS_OF_OTHERS = 2


class CaptureTask:
    """One request, from its arrival to the finished files. `state` is what the rank says of it now."""

    def __init__(self, request: Request, session: Session, writer: Writer, directory: Path, meter: Meter) -> None:
        self.request = request
        self._session = session
        self._directory = directory
        self._meter = meter
        self._demand: Demand | None = None
        self._until = time.monotonic() + request.timeout
        self._finished_by: float | None = None
        self._key: Key = (request.target, request.role)
        self.state = CaptureState(request.id, "accepted")
        try:
            self._prepare(writer)
        except (Refused, ValueError) as fault:
            self._say("refused", str(fault))
        except Exception as fault:  # of a tool's
            logger.warning("megaprof: request %s is refused: %r", request.id, fault)
            self._say("refused", f"it cannot be prepared: {fault!r}")

    @property
    def over(self) -> bool:
        """Whether the state is the last one."""
        return self.state.state in FINAL

    def _prepare(self, writer: Writer) -> None:
        if self._session.off is not None:
            raise Refused(f"profiling is off on this rank since a fault: {self._session.off}")
        config = recorder_config(self.request, str(self._directory))
        if "nsys" in config.tool and SESSION_VARIABLE not in os.environ:
            raise Refused("this process does not run under nsys ('megaprof nsys' prints the command to start it with)")
        self._key = self._counted()
        recorders = build_recorders(config, writer)
        self._demand = Demand(
            self.request.target, self._key[1], -1, self.request.steps, recorders, holding=held_by(config)
        )
        self._report()

    def _counted(self) -> Key:
        """Returns the target and role whose calls are counted. Raises Refused if nobody makes such calls."""
        target = TRAIN_ACTOR if self.request.target == TRAIN_OVERALL else self.request.target
        own, asked = self._session.role, self.request.role
        calls = dict(self._session.calls)
        seen = sorted({role or "" for name, role in calls if name == target})
        if not seen and sum(calls.values()) >= _CALLS_OF_OTHERS:
            runs = ", ".join(sorted({name if role is None else f"{name} of {role}" for name, role in calls}))
            raise Refused(f"nobody has run {target} in this job so far; what runs is {runs}")
        if asked is not None:
            if asked not in seen and asked != own and seen:
                known = [role for role in seen if role]
                hint = f"{target} runs as {', '.join(known)}" if known else f"{target} has no roles: leave --role out"
                raise Refused(f"unknown role {asked!r}; {hint}")
            return target, asked
        if not seen or (own or "") in seen:
            return target, own
        if len(seen) > 1:
            raise Refused(f"{target} runs as {', '.join(seen)}: name one with --role")
        return target, seen[0]

    def go(self, first: int) -> None:
        """Has the training thread capture from call `first` on."""
        demand, session = self._demand, self._session
        if self.state.state != "accepted" or demand is None:
            return
        demand.first = first
        session.demand = demand
        # Only now: a call that began before it was set did not see it.
        if session.calls.get(self._key, 0) > first and not demand.seen:
            demand.cancelled = True
            session.demand = None
            begun = session.calls.get(self._key, 0)
            self._say("missed", f"call {first} was over when the order came, {begun} had begun")
            return
        self._say("armed")

    def cancel(self, reason: str) -> None:
        """Gives the request up. A window that is open is finished all the same."""
        demand = self._demand
        if self.over or (demand is not None and demand.taken):
            return
        if demand is not None:
            demand.cancelled = True
            if self._session.demand is demand:
                self._session.demand = None
        self._say("failed", reason)

    def end(self, reason: str) -> None:
        """The job ends: the request fails unless it is over."""
        if not self.over:
            self._say("failed", reason)

    def look(self) -> None:
        """Brings `state` up to date."""
        demand = self._demand
        if self.over or demand is None:
            return
        if self.state.state == "accepted" and self.state.seconds is None:
            self._report()
        if time.monotonic() > self._until:
            self.cancel(f"it was not carried out within {self.request.timeout:.0f} s")
        if self._session.off is not None and not demand.over:
            self._say("failed", f"profiling went off on this rank after a fault: {self._session.off}")
        elif demand.over and demand.closed >= len(demand.taken):
            self._finish(demand)
        elif demand.taken:
            self._say("recording")

    def _finish(self, demand: Demand) -> None:
        if self._session.demand is demand:
            self._session.demand = None
        now = time.monotonic()
        if self._finished_by is None:
            self._finished_by = now + _FINISHING
        if len(demand.written) < demand.saved and now < self._finished_by:
            self._say("recording")
        elif demand.reason is not None:
            self._say("failed" if demand.taken else "missed", demand.reason)
        else:
            self._say("done")

    def _report(self) -> None:
        """Says how many calls have begun, from which the command chooses the first one to capture."""
        self.state = CaptureState(
            self.request.id,
            self.state.state,
            calls=self._session.calls.get(self._key, 0),
            seconds=self._meter.seconds(self._key),
        )

    def _say(self, state: State, reason: str | None = None) -> None:
        demand, own = self._demand, shard(self._session.coords)
        self.state = CaptureState(
            self.request.id,
            state,
            calls=self._session.calls.get(self._key, 0),
            seconds=self._meter.seconds(self._key),
            reason=None if reason is None else printable(reason[:_LONGEST_REASON]),
            steps=() if demand is None else tuple(demand.taken),
            files=() if demand is None else tuple(os.path.join(own, name) for each in demand.written for name in each),
        )
