"""Running jobs, looked at again and again while somebody watches, and captures that are asked for from the page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megaprof.config.windows import TARGETS
from megaprof.control.blame import find_culprits
from megaprof.control.job import NoJob, find_job
from megaprof.control.requester import Outcome, Requester, selected_ranks
from megaprof.control.requests import new_request
from megaprof.formats.job.requests import Refused
from megaprof.formats.phrases import counted
from megaprof.metrics.compute import SLOW, StageFigures, Summary, summarise
from megaprof.metrics.look import View, look_at, verdict, waited_for

#: Jobs that are watched at a time, pages that watch one, and looks that are remembered.
MOST_WATCHED, MOST_WATCHING, MOST_POINTS = 16, 16, 1200
#: Seconds between two looks at least, for which a job is watched on when nobody looks, and between two signs of life.
_LEAST_SECONDS, _LINGER, SIGN_OF_LIFE = 1.0, 300.0, 15.0
#: Seconds for which a page waits for its first look: statuses of thousands of ranks take some to read.
PATIENCE = 5.0
_LOOK_SECONDS = 0.2
_SLOWEST = 8

Result = TypeVar("Result")


class Busy(Exception):
    """Too much is under way at once; the message says what."""


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
class Told:
    """What became, or becomes, of a capture that was asked for."""

    text: str
    """In words."""
    severity: str
    """``open`` while it is under way, ``fine`` when all was captured, ``slow`` when it was not."""
    files: tuple[str, ...] = ()
    """What was written, below the save directory."""


@dataclass(frozen=True)
class Now:
    """What the page shows."""

    number: int
    """Of the look, from 1."""
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
    capture: Told | None = None
    """The last capture that was asked for here; None before one was."""

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


class Watcher:
    """One job, or a role's part of it."""

    def __init__(self, directory: Path, role: str | None, threads: ThreadPoolExecutor) -> None:
        self._directory, self._role, self._threads = directory, role, threads
        self._history: deque[Point] = deque(maxlen=MOST_POINTS)
        self._now = Now(0, time.time(), "unseen")
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._capturing: asyncio.Task[None] | None = None
        self._asking, self._ended = False, False
        self._listeners, self._left = 0, time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether nobody watches, and no capture is under way."""
        return not self._listeners and (self._capturing is None or self._capturing.done())

    def check_room(self) -> None:
        """Raises Busy where too many pages watch it."""
        if self._listeners >= MOST_WATCHING:
            raise Busy(f"{MOST_WATCHING} pages watch this job already")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """As long as somebody watches."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._listeners -= 1
            self._left = time.monotonic()

    async def follow(self) -> AsyncIterator[Now | None]:
        """Every look from now on, the last one first; None where there was none for a while."""
        seen = 0
        while not self._ended:
            try:
                async with self._changed:
                    await asyncio.wait_for(self._later_than(seen), SIGN_OF_LIFE)
                    now = self._now
            except asyncio.TimeoutError:
                yield None
                continue
            if now.number > seen:
                seen = now.number
                yield now

    async def _later_than(self, number: int) -> None:
        await self._changed.wait_for(lambda: self._now.number > number or self._ended)

    async def latest(self) -> Now:
        """The last look, or a first one. Where that takes long, what was seen before: looks come by themselves."""
        if self._now.number == 0 or self._task is None or self._task.done():
            with suppress(asyncio.TimeoutError):
                await self._show(await asyncio.wait_for(self._in_thread(self._look), PATIENCE))
        return self._now

    async def _watch(self) -> None:
        while self._listeners or time.monotonic() - self._left < _LINGER:
            now = await self._in_thread(self._look)
            await self._show(now)
            await asyncio.sleep(max(_LEAST_SECONDS, now.view.job.run.interval if now.view else 0.0))

    async def _show(self, now: Now) -> None:
        if now.view is not None and now.summary is not None and now.state in ("runs", "hangs"):
            run = now.view.job.run.run
            self._history.append(Point(now.at, run, now.summary.step_ms, now.summary.imbalance))
        async with self._changed:
            told = self._now.capture
            self._now = replace(now, number=self._now.number + 1, history=tuple(self._history), capture=told)
            self._changed.notify_all()

    async def _tell(self, told: Told) -> None:
        async with self._changed:
            self._now = replace(self._now, number=self._now.number + 1, capture=told)
            self._changed.notify_all()

    def _look(self) -> Now:
        at = time.time()
        try:
            job = find_job(self._directory, self._role)
            view = look_at(job, patient=False)
        except NoJob as fault:
            return Now(0, at, "absent", absent=str(fault))
        summary = summarise(job.run, view.statuses.values())
        if view.silence is None and job.starting(view.statuses):
            return Now(0, at, "starts", view=view, summary=summary)
        return Now(0, at, view.state, None, view, summary, verdict(view), tuple(waited_for(view)))

    async def capture(self, target: str, steps: int, select: str) -> None:
        """Ask for one, and return as soon as the request lies there. Raises Refused, and Busy."""
        if self._asking or (self._capturing is not None and not self._capturing.done()):
            raise Busy("a capture that was asked for here is still under way")
        self._asking = True
        try:
            requester = await self._in_thread(lambda: self._ask(target, steps, select))
        finally:
            self._asking = False
        self._capturing = asyncio.create_task(self._carry(requester))

    def _ask(self, target: str, steps: int, select: str) -> Requester:
        try:
            job = find_job(self._directory, self._role)
            if (silent := job.silence()) is not None:
                raise Refused(silent)
        except NoJob as fault:
            raise Refused(str(fault)) from None
        role = None if self._role is None else job.run.role  # the directory has it sanitised
        request = new_request(job.run, target, role=role, steps=steps, select=select, options={}, by="megaprof ui")
        requester = Requester(job, request, selected_ranks(job.run, request))
        requester.submit()
        return requester

    async def _carry(self, requester: Requester) -> None:
        """From the request to the files."""
        what, told = requester.request.target, ""
        try:
            while (outcome := await self._in_thread(requester.advance)) is None:
                if requester.state != told:
                    told = requester.state
                    await self._tell(Told(f"{what}: {told}", "open"))
                await asyncio.sleep(_LOOK_SECONDS)
            await self._tell(_told(what, outcome))
        except Refused as refusal:
            await self._tell(Told(f"{what}: refused: {refusal}", "slow"))
        finally:
            requester.withdraw()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def end(self) -> None:
        """Nothing more is shown to anybody."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def close(self) -> None:
        """Nobody watches any more, and what was asked for and has not begun is withdrawn."""
        tasks = [task for task in (self._task, self._capturing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _told(target: str, outcome: Outcome) -> Told:
    if outcome.reason is not None:
        return Told(f"{target}: {outcome.reason}", "slow", outcome.files)
    steps = f"step{'' if len(outcome.steps) == 1 else 's'} {', '.join(map(str, outcome.steps))}"
    return Told(f"{target}: captured {steps} on {counted(outcome.ranks, 'rank')}", "fine", outcome.files)


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


class Jobs:
    """The jobs that are watched."""

    def __init__(self) -> None:
        # A look may wait for a silent job's next sign of life: each job has a thread for its looks and one to ask.
        self._threads = ThreadPoolExecutor(2 * MOST_WATCHED, thread_name_prefix="megaprof-ui")
        self._watchers: dict[tuple[Path, str | None], Watcher] = {}

    async def watcher(self, directory: Path, role: str | None) -> Watcher:
        """The watcher of a job. Raises Busy."""
        key = directory, role
        while key not in self._watchers:  # another page may have asked for it while one is closed
            if len(self._watchers) < MOST_WATCHED:
                self._watchers[key] = Watcher(directory, role, self._threads)
                break
            idle = next((other for other, each in self._watchers.items() if each.idle), None)
            if idle is None:
                raise Busy(f"{MOST_WATCHED} jobs are watched already")
            await self._watchers.pop(idle).close()
        return self._watchers[key]

    async def end(self) -> None:
        """Every answer that goes on ends."""
        await asyncio.gather(*(watcher.end() for watcher in self._watchers.values()))

    async def close(self) -> None:
        """Stop all of it."""
        await asyncio.gather(*(watcher.close() for watcher in self._watchers.values()))
        self._threads.shutdown(wait=False, cancel_futures=True)
