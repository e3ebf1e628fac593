"""The asking side: from a request to the files, step by step, never waiting itself.

First every selected rank answers how far its calls have come, then one call number that lies ahead of all of them is
chosen for all. So every rank starts with the same step, and no rank ever waits for another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from megaprof.control import directory
from megaprof.control.directory import ANSWERS, REQUESTS, RUN, ControlDirectory
from megaprof.control.job import RunningJob
from megaprof.formats.checks import counted
from megaprof.formats.files import Owner, Unsafe
from megaprof.formats.job import requests as states
from megaprof.formats.job.records import Absent, BadRecord
from megaprof.formats.job.requests import Answer, Refusal, Refused, Request, Start
from megaprof.formats.job.run import RunRecord, read_run

#: How much later than the estimate says the first step is, and how long a step time that is not known is waited for.
_SAFETY = 1.5
_PATIENCE = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of a request."""

    reason: str | None
    """Why not every selected rank captured the steps; None when all did."""
    steps: tuple[int, ...]
    """The numbers of the captured steps."""
    files: tuple[str, ...]
    """What was written, relative to the save directory."""
    ranks: int
    """How many ranks captured."""


def first_call(calls: int, seconds: float | None, answers_age: float, latency: float, look: float) -> int:
    """The number of the first call to capture: the next one that none can have begun when all have heard of it.

    `calls` had begun at most, `seconds` apart (None: not known, so the next but one), when the answers were given
    `answers_age` seconds ago and up to `latency` seconds before that; hearing of it takes another `latency`,
    which is what the way there and back took before, and a `look`.
    """
    if seconds is None:
        return calls + 1
    ahead = _SAFETY * (answers_age + 2 * latency + look)
    return calls + 1 + math.ceil(ahead / max(seconds, 1e-6))


class Requester:
    """Carries one request through. Methods raise Refused when it will come to nothing."""

    def __init__(self, job: RunningJob, request: Request, ranks: Iterable[int]) -> None:
        """`ranks` are those that `request.select` selects. Nothing is asked yet."""
        self.request = request
        self.ranks = tuple(ranks)
        """Who is asked, by number."""
        self._job = job
        self._run = job.run
        self._missing = set(self.ranks)
        self._open = set(self.ranks)
        self._answers: dict[int, Answer] = {}
        self._heard: dict[int, float] = {}
        self._gone = False
        self._began = 0.0
        self._all_heard: float | None = None
        self._gone_at = 0
        self._owner: Owner | None = None

    def submit(self) -> None:
        """Ask, where that is not done yet."""
        if self._owner is None:
            self._began = time.monotonic()
            self._owner = _submit(self._job, self.request)

    @property
    def state(self) -> str:
        """For people: what it is waiting for."""
        if self._gone:
            begun = [a.calls for a in self._answers.values()]
            recording = sum(a.state == states.RECORDING for a in self._answers.values())
            if recording:
                return f"recording on {recording} of {len(self._answers)}"
            left = max(self._gone_at - max(begun, default=0), 0)
            seconds = min((a.seconds for a in self._answers.values() if a.seconds is not None), default=None)
            return f"starts in about {counted(left, 'call')}" + ("" if seconds is None else f", {left * seconds:.0f} s")
        if self._missing:
            return f"waiting for {len(self._missing)} of {len(self._open)} to answer"
        return "waiting for the first steps"

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return sorted(self._missing)

    @property
    def left_behind(self) -> str:
        """For people: what becomes of the request when nobody waits for it any more."""
        answers = self._answers.values()
        if recording := sum(each.state == states.RECORDING for each in answers):
            return (
                f"request {self.request.id}: withdrawn, but {recording} of {len(answers)} ranks record already; they "
                f"finish, and their files come to {self._job.directory}"
            )
        if done := [file for each in answers for file in each.files]:
            return f"request {self.request.id}: withdrawn; {len(done)} files were written already"
        return f"request {self.request.id}: withdrawn before any rank recorded; nothing is captured"

    def advance(self) -> Outcome | None:
        """One look at what has come, the first one of which asks; the outcome when there is one."""
        self.submit()
        try:
            with self._job.control() as control:
                outcome = self._advance(control)
        except (OSError, Unsafe) as fault:
            self.withdraw()
            raise Refused(f"the job's control directory does not answer: {fault}") from None
        except Refused:
            self.withdraw()
            raise
        if outcome is not None:
            self.withdraw()
        return outcome

    def withdraw(self) -> None:
        """Nothing more is wanted: what has not begun will not begin."""
        name = self.request.id
        with suppress(OSError, Unsafe), self._job.control() as control:
            control.unlink(directory.order(name), directory.start(name), directory.request(name))

    def _advance(self, control: ControlDirectory) -> Outcome | None:
        now = time.monotonic()
        if not self._gone and not self._answers:
            self._look_for_refusal(control)
        self._read_answers(control, now)
        waited = now - self._began
        if not self._gone:
            refused = next((a for a in self._answers.values() if a.state in states.FINAL), None)
            if refused is not None:
                raise Refused(f"rank {refused.rank}: {refused.reason}")
            if not self._missing:
                self._go(control, now)
        elif not self._open:
            return self._outcome(None)
        if waited <= self.request.timeout:
            return None
        if not self._gone:
            raise Refused(self._silence())
        return self._outcome(f"it was not finished within {self.request.timeout:.0f} s")

    def _look_for_refusal(self, control: ControlDirectory) -> None:
        control.refresh(ANSWERS, self.request.id)
        with suppress(Absent, BadRecord, ValueError):
            record = control.read(directory.refusal(self.request.id), self._owner)
            raise Refused(Refusal.from_record(record).reason)
        with suppress(Absent, BadRecord), control.folder() as folder:
            run = read_run(folder)
            if run.run != self._run.run:
                raise Refused("the job was started again meanwhile")
            if run.ended is not None:
                raise Refused("the job has ended meanwhile")

    def _read_answers(self, control: ControlDirectory, now: float) -> None:
        places = {rank: directory.answer(self.request.id, rank, self._run.world) for rank in self._open}
        for folder in {place[:-1] for place in places.values()}:
            control.refresh(*folder)
        for rank, place in places.items():
            try:
                answer = Answer.from_record(control.read(place, self._owner))
            except (Absent, BadRecord, ValueError):
                continue
            if (answer.run, answer.rank) != (self._run.run, rank):
                continue
            if self._answers.get(rank) != answer:
                self._heard[rank] = now
            self._answers[rank] = answer
            self._missing.discard(rank)
            if answer.state in states.FINAL:
                self._open.discard(rank)
        if not self._missing and self._all_heard is None:
            self._all_heard = now

    def _go(self, control: ControlDirectory, now: float) -> None:
        known = [answer.seconds for answer in self._answers.values() if answer.seconds is not None]
        heard = now if self._all_heard is None else self._all_heard
        if len(known) < len(self._answers) and now - heard < min(_PATIENCE, self.request.timeout / 4):
            return  # the job is just beginning: its next calls will tell
        self._gone_at = first_call(
            max(answer.calls for answer in self._answers.values()),
            min(known, default=None),
            now - min(self._heard.values()),
            heard - self._began,
            self._run.interval,
        )
        start = Start(self._run.run, self.request.id, self._gone_at)
        try:
            control.write(directory.start(self.request.id), start.as_record())
        except OSError as fault:
            raise Refused(f"the job's orders cannot be written: {fault.strerror}") from None
        self._gone = True

    def _silence(self) -> str:
        silent = ", ".join(map(str, self.missing[:8])) + (" ..." if len(self._missing) > 8 else "")
        if not self._answers:
            return f"nobody answered within {self.request.timeout:.0f} s"
        if not self._missing:
            return f"no step began within {self.request.timeout:.0f} s"
        return f"no answer within {self.request.timeout:.0f} s from rank {silent}"

    def _outcome(self, reason: str | None) -> Outcome:
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        bad = [a for a in answers if a.state != states.DONE]
        done = [a for a in answers if a.state == states.DONE]
        if reason is None and bad:
            reason = f"rank {bad[0].rank} {bad[0].state}: {bad[0].reason}"
            reason += f" (and {len(bad) - 1} more ranks)" if len(bad) > 1 else ""
        if reason is None and len({a.steps for a in done}) > 1:
            reason = "the ranks number their steps differently: " + ", ".join(
                f"rank {a.rank} has {list(a.steps)}" for a in done[:4]
            )
        return Outcome(
            reason,
            done[0].steps if done else (),
            tuple(file for a in answers for file in a.files),
            len(done),
        )


def _submit(job: RunningJob, request: Request) -> Owner:
    """Write the request; returns whose answers are believed. Raises Refused."""
    path = directory.path_of(job.directory, job.part) / REQUESTS
    try:
        with job.control() as control:
            leader = control.owner_of(RUN)
            with control.folder(REQUESTS) as folder:
                folder.check(leader)
            written = control.write(directory.request(request.id), request.as_record(), mode=0o600)
            if written.uid != leader.uid:
                control.unlink(directory.request(request.id))
                raise Refused(f"you are user {written.uid} there, and the job belongs to user {leader.uid}")
    except FileNotFoundError:
        raise Refused("the job takes no requests: its control directory is gone") from None
    except PermissionError:
        raise Refused(f"{path} cannot be written by you: only the user whose job it is may ask") from None
    except OSError as fault:
        raise Refused(f"{path} cannot be written: {fault.strerror}") from None
    except Unsafe as fault:
        raise Refused(str(fault)) from None
    return leader


def selected_ranks(run: RunRecord, request: Request) -> list[int]:
    """The ranks that a request selects. Raises Refused where that cannot be known, or where there is none."""
    selector = request.selector
    if selector.rank_spans is not None:
        return [rank for first, last in selector.rank_spans for rank in range(first, last + 1)]
    layout = run.layout
    if layout is None:
        raise Refused(f"--select {request.select}: this job's rank order is not a plain one; name ranks instead")
    try:
        selector.check(run.sizes, layout)
    except ValueError as mistake:
        raise Refused(str(mistake)) from None
    return selector.ranks(layout)
