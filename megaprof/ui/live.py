"""Running jobs as the live page shows them, and captures that are requested from that page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

from megaprof.analysis import words
from megaprof.cli.look import View, ending_sentences, look_at, verdict, waiting_clauses
from megaprof.config.values import TARGETS
from megaprof.control.blame import find_culprits
from megaprof.control.directory import find_job
from megaprof.control.request import Requester, requester_for
from megaprof.formats.phrases import Unanswerable, counted

#: The fewest seconds between two looks.
_LEAST_SECONDS = 1.0
#: Seconds for which a page waits for a look: reading the statuses of thousands of ranks takes a few.
PATIENCE = 5.0
_SLOWEST = 8


@dataclass(frozen=True)
class CaptureProgress:
    text: str
    severity: str
    """``open`` while it is under way, ``fine`` if everything was captured, ``slow`` if not."""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Now:
    state: str
    """``runs``, ``starts``, ``hangs``, ``died``, ``ended``, ``absent`` if there is no job, or ``unseen`` before the
    first look."""
    absent: str | None = None
    view: View | None = None
    said: str | None = None
    """The problem in a sentence; None if there is none."""
    waiting: tuple[str, ...] = ()
    """The ranks that the others wait for, one clause per rank; then where a job stood that has died."""
    capture: CaptureProgress | None = None
    """The last capture that was requested here; None before the first one."""

    @property
    def every(self) -> float:
        """Seconds until there is something new to see."""
        return max(_LEAST_SECONDS, self.view.job.run.interval if self.view else 0.0)

    @property
    def captures(self) -> bool:
        """Whether the job can be asked for a capture: it has not ended, and its processes still exist."""
        return self.state == "unseen" or (self.view is not None and self.view.silence is None)

    @property
    def to_capture(self) -> str:
        """The ranks to suggest for a capture: slow ones and one of their peers, or else one rank of every stage."""
        slow = self.view.slow if self.view else None
        return "per-stage" if slow is None else ",".join(map(str, sorted((*slow.ranks[:_SLOWEST], slow.peer))))

    @property
    def targets(self) -> list[str]:
        statuses = self.view.statuses.values() if self.view else ()
        done = dict.fromkeys(call.target for status in statuses for call in status.calls)
        return [*(name for name in done if name in TARGETS), *(name for name in TARGETS if name not in done)]


Found = TypeVar("Found")


class Kept(Generic[Found]):
    """Calls ``look`` on a thread and keeps its result for a while. Pages that ask at the same time share one call."""

    def __init__(self, look: Callable[[], Found], seconds: Callable[[Found], float]) -> None:
        self._look, self._seconds = look, seconds
        self._found: Found | None = None
        self._until = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def get(self, patience: float | None) -> Found | None:
        """Returns the result of a look. If looking takes longer than `patience` (seconds; None: no limit), returns the
        previous result, or None if there is none. Raises what the look raised."""
        if self._found is None or monotonic() > self._until:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._renew())
            await asyncio.wait({self._looking}, timeout=patience)
            if self._looking.done():
                self._looking.result()  # raises what the look raised
        return self._found

    async def _renew(self) -> None:
        self._found = await run_in_threadpool(self._look)
        self._until = monotonic() + self._seconds(self._found)


class LiveJob:
    """One job, or a role's part of it: the last look at it, and the capture that was requested last."""

    def __init__(self, directory: Path, role: str | None) -> None:
        self._directory, self._role = directory, role
        self._looks = Kept(self._look, lambda now: now.every)
        self._capture: CaptureProgress | None = None
        self._capturing: asyncio.Task[None] | None = None

    async def now(self) -> Now:
        """Returns a look that is as fresh as the job's statuses, or the previous one if looking takes long."""
        return replace(await self._looks.get(PATIENCE) or Now("unseen"), capture=self._capture)

    def _look(self) -> Now:
        try:
            job = find_job(self._directory, self._role)
            view = look_at(job, patient=False)
        except Unanswerable as fault:
            return Now("absent", absent=str(fault))
        if view.silence is None and job.starting(view.statuses):
            return Now("starts", view=view)
        clauses = *waiting_clauses(view), *(ending_sentences(view) if view.state == "died" else ())
        return Now(view.state, None, view, verdict(view), clauses)

    async def capture(self, target: str, steps: int, select: str) -> None:
        """Requests a capture, and returns as soon as the request is written. Raises Unanswerable and Refused."""
        ask = partial(requester_for, self._directory, target, role=self._role, steps=steps, select=select)
        requester = await run_in_threadpool(ask, by="megaprof ui")
        await run_in_threadpool(requester.submit)
        self._capturing = asyncio.create_task(self._carry(requester))

    async def _carry(self, requester: Requester) -> None:
        what = requester.request.target
        try:
            while (outcome := await run_in_threadpool(requester.advance)) is None:
                self._capture = CaptureProgress(f"{what}: {requester.state}", "open")
                await asyncio.sleep(requester.pause)
            done = f"captured {words.steps(outcome.steps)} on {counted(outcome.captured, 'rank')}"
            severity = "fine" if outcome.reason is None else "slow"
            self._capture = CaptureProgress(f"{what}: {outcome.reason or done}", severity, outcome.files)
        finally:
            requester.withdraw()

    async def close(self) -> None:
        """Withdraws the last request, if its capture has not begun."""
        if self._capturing is not None:
            self._capturing.cancel()
            await asyncio.gather(self._capturing, return_exceptions=True)


def state_of(directory: Path) -> str | None:
    """Returns ``runs`` or ``hangs``, from one quick look at the job in a directory; None if there is no job, or none
    that gave a sign of life lately."""
    try:
        job = find_job(directory)
    except Unanswerable:
        return None
    leader = job.leader() if job.run.ended is None else None
    if leader is None or leader.late(time.time()):
        return None
    statuses = job.statuses()
    return "hangs" if find_culprits(job.run, statuses, job.now(statuses, None)).still else "runs"
