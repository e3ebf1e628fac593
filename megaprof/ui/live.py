"""Running jobs as the live page shows them, and captures that are asked for from the page."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from megaprof.config.windows import TARGETS
from megaprof.control.blame import find_culprits
from megaprof.control.job import NoJob, find_job
from megaprof.control.requester import Outcome, Requester, requester_for
from megaprof.formats.job.requests import Refused
from megaprof.formats.phrases import counted
from megaprof.metrics.figures import SLOW, StageFigures, Summary, summarise
from megaprof.metrics.look import View, look_at, verdict, waited_for
from megaprof.ui.kept import Kept

#: Jobs whose looks are remembered, and looks at each.
MOST_JOBS, MOST_POINTS = 16, 1200
#: Seconds between two looks at least.
_LEAST_SECONDS = 1.0
#: Seconds for which a page waits for a look: statuses of thousands of ranks take some to read.
PATIENCE = 5.0
_SLOWEST = 8


class Busy(Exception):
    """A capture that was asked for from here is still under way."""


@dataclass(frozen=True)
class Point:
    """One look, for the curves."""

    at: float
    """Wall-clock seconds."""
    run: str
    """The run's random name: a job that began again is another one."""
    step_ms: float | None
    """Milliseconds of a step."""
    imbalance: float | None
    """Compute of the slowest stage over the mean of all stages."""


@dataclass(frozen=True)
class CaptureProgress:
    """What became, or becomes, of a capture that was asked for."""

    text: str
    """In words."""
    severity: str
    """``open`` while it is under way, ``fine`` when all was captured, ``slow`` when it was not."""
    files: tuple[str, ...] = ()
    """What was written."""


@dataclass(frozen=True)
class Now:
    """What the page shows."""

    at: float
    """Wall-clock seconds."""
    state: str
    """``runs``, ``starts``, ``hangs``, ``died``, ``ended``, ``absent`` where there is no job, or ``unseen`` before the
    first look."""
    absent: str | None = None
    """Why there is no job; None where there is one."""
    view: View | None = None
    """Where every rank stands; None without a job."""
    summary: Summary | None = None
    """What the status files come to; None without a job."""
    said: str | None = None
    """What is wrong, in a sentence; None where nothing is."""
    waiting: tuple[str, ...] = ()
    """Whom the others wait for, a clause each."""
    history: tuple[Point, ...] = ()
    """The looks so far, the newest last."""
    capture: CaptureProgress | None = None
    """The last capture that was asked for here; None before one was."""

    @property
    def every(self) -> float:
        """Seconds until there is more to see."""
        return max(_LEAST_SECONDS, self.view.job.run.interval if self.view else 0.0)

    @property
    def slowest(self) -> list[StageFigures]:
        """The stages with a slow rank, the one furthest above its peers first."""
        stages = self.summary.stages if self.summary else ()
        slow = [stage for stage in stages if stage.above_peers > SLOW]
        return sorted(slow, key=lambda stage: -stage.above_peers)[:_SLOWEST]

    @property
    def to_capture(self) -> str:
        """The ranks that a capture shows most with: slow ones beside one of their peers, else one of every stage."""
        slow = self.view.slow if self.view else None
        return "per-stage" if slow is None else ",".join(map(str, sorted((*slow.ranks[:_SLOWEST], slow.peer))))

    @property
    def targets(self) -> list[str]:
        """What can be captured: first what the job has done."""
        statuses = self.view.statuses.values() if self.view else ()
        done = dict.fromkeys(call.target for status in statuses for call in status.calls)
        return [*(name for name in done if name in TARGETS), *(name for name in TARGETS if name not in done)]


class LiveJob:
    """One job, or a role's part of it: the last looks at it, and the capture that was asked for last."""

    def __init__(self, directory: Path, role: str | None) -> None:
        self._directory, self._role = directory, role
        self._history: deque[Point] = deque(maxlen=MOST_POINTS)
        self._looks = Kept(self._look, lambda now: now.every)
        self._told: CaptureProgress | None = None
        self._capturing: asyncio.Task[None] | None = None
        self._asking = False

    @property
    def captures(self) -> bool:
        """Whether a capture is under way."""
        return self._asking or (self._capturing is not None and not self._capturing.done())

    async def now(self) -> Now:
        """Returns a look that is as fresh as the job's statuses; where looking takes long, the one before."""
        found = await self._looks.get(PATIENCE) or Now(time.time(), "unseen")
        return replace(found, history=tuple(self._history), capture=self._told)

    def _look(self) -> Now:
        at = time.time()
        try:
            job = find_job(self._directory, self._role)
            view = look_at(job, patient=False)
        except NoJob as fault:
            return Now(at, "absent", absent=str(fault))
        summary = summarise(job.run, view.statuses.values())
        if view.silence is None and job.starting(view.statuses):
            return Now(at, "starts", view=view, summary=summary)
        if view.state in ("runs", "hangs"):
            self._history.append(Point(at, job.run.run, summary.step_ms, summary.imbalance))
        return Now(at, view.state, None, view, summary, verdict(view), tuple(waited_for(view)))

    async def capture(self, target: str, steps: int, select: str) -> None:
        """Asks for one, and returns as soon as the request lies there. Raises Refused, and Busy."""
        if self.captures:
            raise Busy("a capture that was asked for here is still under way")
        self._asking = True
        try:
            requester = await run_in_threadpool(self._ask, target, steps, select)
        finally:
            self._asking = False
        self._capturing = asyncio.create_task(self._carry(requester))

    def _ask(self, target: str, steps: int, select: str) -> Requester:
        try:
            requester = requester_for(
                self._directory, target, role=self._role, steps=steps, select=select, by="megaprof ui"
            )
        except NoJob as fault:
            raise Refused(str(fault)) from None
        requester.submit()
        return requester

    async def _carry(self, requester: Requester) -> None:
        """From the request to the files."""
        what = requester.request.target
        try:
            while (outcome := await run_in_threadpool(requester.advance)) is None:
                self._told = CaptureProgress(f"{what}: {requester.state}", "open")
                await asyncio.sleep(requester.pause)
            self._told = _told(what, outcome)
        except Refused as refusal:
            self._told = CaptureProgress(f"{what}: refused: {refusal}", "slow")
        finally:
            requester.withdraw()

    async def close(self) -> None:
        """What was asked for and has not begun is withdrawn."""
        if self._capturing is not None:
            self._capturing.cancel()
            await asyncio.gather(self._capturing, return_exceptions=True)


def _told(target: str, outcome: Outcome) -> CaptureProgress:
    if outcome.reason is not None:
        return CaptureProgress(f"{target}: {outcome.reason}", "slow", outcome.files)
    steps = f"step{'' if len(outcome.steps) == 1 else 's'} {', '.join(map(str, outcome.steps))}"
    return CaptureProgress(f"{target}: captured {steps} on {counted(outcome.captured, 'rank')}", "fine", outcome.files)


def state_of(directory: Path) -> str | None:
    """Returns whether the job there ``runs`` or ``hangs``, at one quick look; None where it gave no sign of life
    lately."""
    try:
        job = find_job(directory)
    except NoJob:
        return None
    leader = job.leader() if job.run.ended is None else None
    if leader is None or leader.late(time.time()):
        return None
    statuses = job.statuses()
    return "hangs" if find_culprits(job.run, statuses, job.now(statuses, None)).still else "runs"


class LiveJobs:
    """The jobs that were looked at last."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[Path, str | None], LiveJob] = OrderedDict()

    def job(self, directory: Path, role: str | None) -> LiveJob:
        """Returns a job, of which the looks so far are remembered."""
        found = self._jobs.setdefault((directory, role), LiveJob(directory, role))
        self._jobs.move_to_end((directory, role))
        for key in [key for key, each in self._jobs.items() if not each.captures][:-MOST_JOBS]:
            del self._jobs[key]
        return found

    async def close(self) -> None:
        """Withdraws what was asked for and has not begun."""
        await asyncio.gather(*(job.close() for job in self._jobs.values()))
