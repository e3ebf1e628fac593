"""A request to capture on one rank: whether it can be carried out here, and how far it has come.

Everything here runs on the background thread. The training thread looks at one attribute, `Session.demand`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.capture.agenda import Demand
from megaprof.capture.compat import held_by
from megaprof.config.values import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.control.request import check, recorder_config
from megaprof.formats.job import Answer, Refused, Request, RunRecord, State
from megaprof.formats.metadata import SESSION_VARIABLE
from megaprof.formats.names import shard
from megaprof.formats.phrases import printable
from megaprof.recorders import build_recorders
from megaprof.recorders.timeline_steps import Key
from megaprof.runtime.isolation import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session

#: The most characters of a reason in a status.
LONGEST_REASON = 1000
#: A target counts as one that nobody runs if it was not called while others were called this often.
_CALLS_OF_OTHERS = 2


class Capture:
    """One request on this rank, from its arrival to the finished files."""

    def __init__(
        self,
        request: Request,
        run: RunRecord,
        session: Session,
        directory: Path,
        seconds: Callable[[Key], float | None],
    ) -> None:
        """``directory``: where the files go. ``seconds``: how far apart the calls of a target and role are."""
        self.answer = Answer(request.id, "accepted")
        """What the rank says now."""
        self._session = session
        self._seconds = seconds
        self._demand: Demand | None = None
        try:
            check(request, run)
            if session.off is not None:
                raise Refused(f"profiling is off on this rank since a fault: {session.off}")
            config = recorder_config(request, str(directory))
            if "nsys" in config.tool and SESSION_VARIABLE not in os.environ:
                raise Refused(
                    "this process does not run under nsys ('megaprof nsys' prints the command to start it with)"
                )
            role = _role_of(request, session)
            recorders = build_recorders(config, session.writer)
            self._demand = Demand(request.target, role, -1, request.steps, recorders, holding=held_by(config))
            self._say("accepted")
        except (Refused, ValueError) as fault:
            self._say("failed", str(fault))
        except Exception as fault:  # a tool's
            logger.warning("megaprof: request %s is refused: %r", request.id, fault)
            self._say("failed", f"it cannot be prepared: {fault!r}")

    @property
    def records(self) -> bool:
        """True while one of its windows is open or will open."""
        demand = self._demand
        return demand is not None and (demand.closed < len(demand.taken) or not demand.over)

    def look(self, first: int | None) -> None:
        """Brings the answer up to date. `first` is the number of the first call to capture; None while that is not
        chosen, or the request is withdrawn."""
        demand = self._demand
        if first is not None and demand is not None and demand.first < 0 and not self.answer.final:
            demand.first = first
            self._session.demand = demand
            # Only now: a call that began before it was set did not see it.
            begun = self._session.calls.get(demand.counted, 0)
            if begun > first and not demand.seen:
                self._session.demand = None
                self._say("failed", f"call {first} was over when the rank heard of it; {begun} had begun")
        if self.answer.final or demand is None:
            return
        records = self.records  # once: the training thread goes on
        if not records and self._session.demand is demand:
            self._session.demand = None
        if records and self._session.off is not None:
            self._say("failed", f"profiling went off on this rank after a fault: {self._session.off}")
        elif records or len(demand.written) < demand.saved:
            self._say("recording" if demand.taken else "accepted")
        elif demand.reason is not None:
            self._say("failed", demand.reason)
        else:
            self._say("done")

    def cancel(self, reason: str) -> None:
        """Gives it up, unless a window has been opened."""
        demand = self._demand
        if not self.answer.final and (demand is None or not demand.taken):
            if demand is not None and self._session.demand is demand:
                self._session.demand = None
            self._say("failed", reason)

    def end(self) -> None:
        """Brings the answer up to date for the last time: the job ends."""
        self.look(None)
        if not self.answer.final:
            self._say("failed", "the job ended before it was finished")

    def _say(self, state: State, reason: str | None = None) -> None:
        demand, folder = self._demand, shard(self._session.coords)
        reason = None if reason is None else printable(reason[:LONGEST_REASON])
        if demand is None:
            self.answer = Answer(self.answer.request, state, reason=reason)
            return
        self.answer = Answer(
            self.answer.request,
            state,
            calls=self._session.calls.get(demand.counted, 0),
            seconds=self._seconds(demand.counted),
            reason=reason,
            steps=tuple(demand.taken),
            files=tuple(os.path.join(folder, name) for names in demand.written for name in names),
        )


def _role_of(request: Request, session: Session) -> str | None:
    """Returns the role whose calls are counted. Raises Refused if nobody makes such calls."""
    target = TRAIN_ACTOR if request.target == TRAIN_OVERALL else request.target
    our_role, wanted = session.role, request.role
    calls = dict(session.calls)
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
