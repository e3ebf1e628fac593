"""The asking side: it carries one request through, from `capture.json` to the files, and never waits.

First every selected rank says in its status how far its calls have come. Then the command chooses one call number that
lies ahead of all of them, and writes it into the request. So every rank starts with the same step, and none waits for
another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from megaprof.control.blame import is_stuck
from megaprof.control.directory import path_of
from megaprof.control.job import NoJob, RunningJob, find_job, read_statuses
from megaprof.control.requests import check_draft, new_request
from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.job import records
from megaprof.formats.job import run as run_json
from megaprof.formats.job.records import Absent, BadRecord
from megaprof.formats.job.requests import NAME, Refused, Request
from megaprof.formats.job.run import RunRecord
from megaprof.formats.job.status import FINAL, CaptureState
from megaprof.formats.phrases import ago, counted

#: The first step comes so much later than the estimate says; a step time that is not known is waited for so many
#: seconds.
_SAFETY = 1.5
_PATIENCE = 30.0
#: Seconds from one look at the answers to the next, and statuses that are read a second at most.
_LOOK_SECONDS, _LOOK_RATE = 0.2, 5000


@dataclass(frozen=True)
class Outcome:
    """The result of a request."""

    version: int
    """The version of this object: 1."""
    request: str
    """The id of the request."""
    target: str
    """The target that was asked for."""
    role: str | None
    """The role that was asked for; None if none was named."""
    selected: tuple[int, ...]
    """The ranks that were asked, by number."""
    captured: int
    """How many of them captured."""
    steps: tuple[int, ...]
    """The numbers of the captured steps."""
    files: tuple[str, ...]
    """What was written, below the save directory as it was given."""
    reason: str | None
    """Why not every selected rank captured the steps; None if all did."""


def first_call(calls: int, seconds: float | None, answers_age: float, latency: float, look: float) -> int:
    """Returns the number of the first call to capture: one that no rank can have begun when all have read it.

    Calls begin `seconds` apart. At most `calls` of them had begun when the ranks answered; that was `answers_age`
    seconds ago, or up to `latency` seconds earlier. The ranks need another `latency`, which is how long asking and
    answering took, and a `look` of theirs (seconds) to read the choice. If `seconds` is None, it is the next call but
    one.

    Example: 10 calls have begun, one a second; answers are 1 s old, took 1 s, and ranks look every second:
    ``first_call(10, 1.0, 1.0, 1.0, 1.0) == 17``.
    """
    if seconds is None:
        return calls + 1
    ahead = _SAFETY * (answers_age + 2 * latency + look)
    return calls + 1 + math.ceil(ahead / max(seconds, 1e-6))


class Requester:
    """Carries one request through. Methods raise Refused when nothing will be captured."""

    def __init__(self, job: RunningJob, request: Request, ranks: Iterable[int]) -> None:
        """`ranks` are the ones that `request.select` selects. `submit` or the first `advance` writes the request."""
        self.request = request
        self.ranks = tuple(ranks)
        """The ranks that are asked, by number."""
        self.still = 0.0
        """Seconds since any rank that has not finished moved; 0 while one moves."""
        self._job = job
        self._run = job.run
        self._missing = set(self.ranks)
        self._open = set(self.ranks)
        self._answers: dict[int, CaptureState] = {}
        self._heard: dict[int, float] = {}
        self._began = 0.0
        self._all_heard: float | None = None
        self._asked = False

    def submit(self) -> None:
        """Asks, where that is not done yet. Raises Refused."""
        if not self._asked:
            self._began = time.monotonic()
            _submit(self._job, self.request)
            self._asked = True

    @property
    def pause(self) -> float:
        """Seconds from one look to the next."""
        return max(_LOOK_SECONDS, len(self.ranks) / _LOOK_RATE)

    @property
    def phase(self) -> Literal["waits", "starts", "records"]:
        """Whether it waits for answers, for the first call to come, or for the files."""
        if self.request.first is None:
            return "waits"
        return "records" if any(a.state == "recording" for a in self._answers.values()) else "starts"

    @property
    def state(self) -> str:
        """What it waits for, for people."""
        if self.request.first is not None:
            begun = [a.calls for a in self._answers.values()]
            if self.phase == "records":
                recording = sum(a.state == "recording" for a in self._answers.values())
                return f"recording on {recording} of {len(self._answers)}"
            left = max(self.request.first - max(begun, default=0), 0)
            seconds = min((a.seconds for a in self._answers.values() if a.seconds is not None), default=None)
            soon = "" if seconds is None or self.still else f", {left * seconds:.0f} s"
            return f"starts in about {counted(left, 'call')}{soon}{self._standing()}"
        if self._missing:
            return f"waiting for {len(self._missing)} of {len(self._open)} to answer"
        return "waiting for the first steps"

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return sorted(self._missing)

    @property
    def left_behind(self) -> str:
        """What becomes of the request when nobody waits for it any more, for people."""
        answers = self._answers.values()
        if recording := sum(each.state == "recording" for each in answers):
            return (
                f"request {self.request.id}: withdrawn, but {recording} of {len(answers)} ranks record already; they "
                f"finish, and their files come to {self._job.directory}"
            )
        if done := [file for each in answers for file in each.files]:
            return f"request {self.request.id}: withdrawn; {len(done)} files were written already"
        return f"request {self.request.id}: withdrawn before any rank recorded; nothing is captured"

    def advance(self) -> Outcome | None:
        """Looks once at what the ranks say; the first look asks. Returns the outcome when there is one."""
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

    def refused(self, refusal: Refused) -> Outcome:
        """Returns the outcome of a request that was refused."""
        return self._result(str(refusal) if self._missing else f"refused: {refusal}")

    def withdraw(self) -> None:
        """Removes the request. Windows that are open are finished, and no other one opens."""
        with suppress(OSError, Unsafe), self._job.control() as control:
            if _id_in(control) == self.request.id:
                control.unlink(NAME)

    def _advance(self, control: Directory) -> Outcome | None:
        now = time.monotonic()
        self._read_answers(control, now)
        if self._open:
            self._check_that_it_stands(control)
        waited = now - self._began
        if self.request.first is None:
            refused = next(((rank, a) for rank, a in self._answers.items() if a.state in FINAL), None)
            if refused is not None:
                raise Refused(f"rank {refused[0]}: {refused[1].reason}")
            if not self._missing:
                self._choose_first(control, now)
        elif not self._open:
            return self._outcome(None)
        if waited <= self.request.timeout:
            return None
        if self.request.first is None:
            raise Refused(self._silence())
        return self._outcome(f"it was not finished within {self.request.timeout:.0f} s{self._standing()}")

    def _check_that_it_stands(self, control: Directory) -> None:
        """Raises Refused where the ranks cannot see the request any more."""
        with suppress(Absent, BadRecord):
            run = records.read(control, run_json.NAME, RunRecord)
            if run.run != self._run.run:
                raise Refused("the job was started again meanwhile")
            if run.ended is not None:
                raise Refused("the job has ended meanwhile")
        try:
            other = records.read(control, NAME, Request)
        except (Absent, BadRecord):
            raise Refused("somebody removed the request") from None
        if other.id != self.request.id:
            raise Refused(_busy(other))

    def _read_answers(self, control: Directory, now: float) -> None:
        leader = self._run.leader
        statuses = read_statuses(control, self._run, self._open | {leader})
        there = self._job.now(statuses, None)
        stuck = [status.stuck(there) for status in statuses.values() if is_stuck(status, there)]
        self.still = min(stuck) if stuck and len(stuck) == len(statuses) else 0.0
        for rank, status in statuses.items():
            answer = status.capture
            if answer is None or answer.request != self.request.id:
                continue
            if rank not in self._open:
                if answer.state == "refused" and rank == leader:
                    raise Refused(str(answer.reason))
                continue
            if self._answers.get(rank) != answer:
                self._heard[rank] = now
            self._answers[rank] = answer
            self._missing.discard(rank)
            if answer.state in FINAL:
                self._open.discard(rank)
        if not self._missing and self._all_heard is None:
            self._all_heard = now

    def _choose_first(self, control: Directory, now: float) -> None:
        known = [answer.seconds for answer in self._answers.values() if answer.seconds is not None]
        heard = now if self._all_heard is None else self._all_heard
        if len(known) < len(self._answers) and now - heard < min(_PATIENCE, self.request.timeout / 4):
            return  # the job is just beginning: its next calls will tell
        first = first_call(
            max(answer.calls for answer in self._answers.values()),
            min(known, default=None),
            now - min(self._heard.values()),
            heard - self._began,
            self._run.interval,
        )
        chosen = replace(self.request, first=first)
        try:
            records.write(control, NAME, chosen)
        except OSError as fault:
            raise Refused(f"the request cannot be written: {fault.strerror}") from None
        self.request = chosen

    def _silence(self) -> str:
        silent = ", ".join(map(str, self.missing[:8])) + (" ..." if len(self._missing) > 8 else "")
        if not self._answers:
            return f"nobody answered within {self.request.timeout:.0f} s"
        if not self._missing:
            return f"no step began within {self.request.timeout:.0f} s{self._standing()}"
        return f"no answer within {self.request.timeout:.0f} s from rank {silent}"

    def _standing(self) -> str:
        return f"; none of these ranks has moved for {ago(self.still)}" if self.still else ""

    def _outcome(self, reason: str | None) -> Outcome:
        answers = dict(sorted(self._answers.items()))
        bad = [(rank, answer) for rank, answer in answers.items() if answer.state != "done"]
        done = {rank: answer for rank, answer in answers.items() if answer.state == "done"}
        if reason is None and bad:
            rank, first = bad[0]
            reason = f"rank {rank} {first.state}: {first.reason}"
            reason += f" (and {len(bad) - 1} more ranks)" if len(bad) > 1 else ""
        steps = [answer.steps for answer in done.values()]
        if reason is None and len(set(steps)) > 1:
            reason = "the ranks number their steps differently: " + ", ".join(
                f"rank {rank} has {list(answer.steps)}" for rank, answer in list(done.items())[:4]
            )
        files = [file for answer in answers.values() for file in answer.files]
        return self._result(reason, len(done), steps[0] if steps else (), files)

    def _result(
        self, reason: str | None, captured: int = 0, steps: tuple[int, ...] = (), files: Iterable[str] = ()
    ) -> Outcome:
        written = tuple(str(self._job.directory / file) for file in files)
        asked = self.request
        return Outcome(1, asked.id, asked.target, asked.role, self.ranks, captured, steps, written, reason)


def requester_for(directory: Path, target: str, *, role: str | None = None, **fields: Any) -> Requester:
    """Returns a requester to the job that writes to `directory`, with the fields of `Request.draft`. Nothing is asked
    yet. Raises NoJob, and Refused for a request that makes no sense."""
    check_draft(target, role=role, **fields)  # what no job would take is said without one
    job = find_job(directory, role)
    if (silence := job.silence()) is not None:
        raise NoJob(silence)
    if role is not None:
        role = job.run.role or role  # a directory's name has it sanitised
    request = new_request(job.run, target, role=role, **fields)
    return Requester(job, request, selected_ranks(job.run, request))


def _submit(job: RunningJob, request: Request) -> None:
    """Writes the request, in the place of one that no rank looks at any more. Raises Refused."""
    path = path_of(job.directory, job.part)
    try:
        with job.control() as control:
            with suppress(Absent, BadRecord):
                other = records.read(control, NAME, Request)
                if other.run == request.run and other.id != request.id:
                    raise Refused(_busy(other))
            records.write(control, NAME, request)
    except FileNotFoundError:
        raise Refused("the job takes no requests: its control directory is gone") from None
    except PermissionError:
        raise Refused(f"{path} cannot be written by you: only the user whose job it is may ask") from None
    except OSError as fault:
        raise Refused(f"{path} cannot be written: {fault.strerror}") from None
    except Unsafe as fault:
        raise Refused(str(fault)) from None


def _busy(other: Request) -> str:
    return f"busy with {other.id} ({other.by}), which asks for {other.target}"


def _id_in(control: Directory) -> str | None:
    """Returns the id of the request that stands in the directory; None where none does."""
    with suppress(Absent, BadRecord):
        return records.read(control, NAME, Request).id
    return None


def selected_ranks(run: RunRecord, request: Request) -> list[int]:
    """Returns the ranks that a request selects. Raises Refused if they cannot be known, or if there are none."""
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
