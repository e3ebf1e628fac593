"""The asking side: it carries one request through, from `capture.json` to the files, and never waits.

First every selected rank says in its status how far its calls have come. Then the command chooses one call number that
lies ahead of all of them, and writes it into the request. So every rank starts with the same step, and none waits for
another.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from megaprof.control.blame import is_stuck
from megaprof.control.directory import path_of
from megaprof.control.job import NoJob, RunningJob, find_job, read_statuses
from megaprof.control.requests import address, draft, selected_ranks
from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.job import records
from megaprof.formats.job.records import CAPTURE, Absent, BadRecord, Refused, Request, RunRecord
from megaprof.formats.job.status import FINAL, CaptureState
from megaprof.formats.phrases import ago, counted

#: The first step comes this many times later than the estimate says.
_SAFETY = 1.5
#: Seconds for which a job that is just beginning is given the time to show how long a step takes.
_PATIENCE = 30.0
#: Seconds from one look at the answers to the next, and statuses that are read a second at most.
_LOOK_SECONDS, _LOOK_RATE = 0.2, 5000


@dataclass(frozen=True)
class Outcome:
    """The result of a request."""

    version: int
    """The version of this object: 1."""
    request: str
    """Id of the request."""
    target: str
    """Requested target."""
    role: str | None
    """Requested role; None if none was named."""
    selected: tuple[int, ...]
    """Requested ranks."""
    captured: int
    """Number of ranks that captured."""
    steps: tuple[int, ...]
    """Numbers of the captured steps."""
    files: tuple[str, ...]
    """Written files, below the save directory as it was given."""
    reason: str | None
    """Why not every selected rank captured the steps; None if all did."""


def first_call(calls: int, seconds: float | None, latency: float, look: float) -> int:
    """Returns the number of the first call to capture: one that no rank can have begun when all have read it.

    At most `calls` calls had begun when the ranks answered; they begin `seconds` apart. To ask and be answered took
    `latency` seconds, and ranks look every `look` seconds. So an answer is at most `latency + look` old, and it takes
    as much again until every rank has read the choice. If `seconds` is None, it is the next call but one.

    Example: 10 calls have begun, one a second; the answer took a second, and ranks look every second:
    ``first_call(10, 1.0, 1.0, 1.0) == 17``.
    """
    if seconds is None:
        return calls + 1
    return calls + 1 + math.ceil(_SAFETY * 2 * (latency + look) / max(seconds, 1e-6))


class Requester:
    """Carries one request through."""

    def __init__(self, job: RunningJob, request: Request) -> None:
        """`submit` or the first `advance` writes the request. Raises Refused if its ranks cannot be known."""
        self.request = request
        self.ranks = tuple(selected_ranks(job.run, request))
        """The ranks that are asked, by number."""
        self.still = 0.0
        """Seconds since any rank that has not finished moved; 0 while one moves."""
        self._job = job
        self._answers: dict[int, CaptureState] = {}
        self._submitted_at: float | None = None
        self._latency: float | None = None

    def submit(self) -> None:
        """Asks, where that is not done yet. Raises Refused."""
        if self._submitted_at is None:
            _submit(self._job, self.request)
            self._submitted_at = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds from one look to the next."""
        return max(_LOOK_SECONDS, len(self.ranks) / _LOOK_RATE)

    @property
    def phase(self) -> Literal["waits", "starts", "records"]:
        """Whether it waits for answers, for the first call to come, or for the files."""
        if self.request.first is None:
            return "waits"
        return "records" if self._recording else "starts"

    @property
    def state(self) -> str:
        """What it waits for, for people."""
        if self.request.first is None:
            if self.missing:
                return f"waiting for {len(self.missing)} of {len(self.ranks)} to answer"
            return "waiting for the first steps"
        if self._recording:
            return f"recording on {self._recording} of {len(self.ranks)}"
        left = max(self.request.first - max(answer.calls for answer in self._answers.values()), 0)
        seconds = self._seconds
        soon = "" if seconds is None or self.still else f", {left * seconds:.0f} s"
        return f"starts in about {counted(left, 'call')}{soon}{self._standing()}"

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self._answers]

    @property
    def left_behind(self) -> str:
        """What becomes of the request when nobody waits for it any more, for people."""
        if self._recording:
            return (
                f"request {self.request.id}: withdrawn, but {self._recording} of {len(self.ranks)} ranks record "
                f"already; they finish, and their files come to {self._job.directory}"
            )
        if files := [file for answer in self._answers.values() for file in answer.files]:
            return f"request {self.request.id}: withdrawn; {len(files)} files were written already"
        return f"request {self.request.id}: withdrawn before any rank recorded; nothing is captured"

    def advance(self) -> Outcome | None:
        """Looks once at what the ranks answer; the first look asks. Returns the outcome when there is one."""
        try:
            self.submit()
            with self._job.control() as control:
                outcome = self._advance(control)
        except (OSError, Unsafe) as fault:
            outcome = self._outcome(f"the job's control directory does not answer: {fault}")
        except Refused as refusal:
            outcome = self._outcome(str(refusal))
        if outcome is not None:
            self.withdraw()
        return outcome

    def withdraw(self) -> None:
        """Removes the request. Windows that are open are finished, and no other one opens."""
        with suppress(OSError, Unsafe, Absent, BadRecord), self._job.control() as control:
            if records.read(control, CAPTURE, Request).id == self.request.id:
                control.unlink(CAPTURE)

    @property
    def _recording(self) -> int:
        """How many ranks record now."""
        return sum(answer.state == "recording" for answer in self._answers.values())

    @property
    def _unfinished(self) -> list[int]:
        """The ranks whose last answer is still to come."""
        final = {rank for rank, answer in self._answers.items() if answer.state in FINAL}
        return [rank for rank in self.ranks if rank not in final]

    @property
    def _seconds(self) -> float | None:
        """Seconds from one call to the next on the quickest rank; None where no rank knows."""
        return min((answer.seconds for answer in self._answers.values() if answer.seconds is not None), default=None)

    def _advance(self, control: Directory) -> Outcome | None:
        self._read_answers(control)
        if self._unfinished:
            self._check_that_it_stands(control)
        if self.request.first is None:
            failed = next(((rank, state) for rank, state in self._answers.items() if state.state in FINAL), None)
            if failed is not None:
                raise Refused(f"rank {failed[0]}: {failed[1].reason}")
            if not self.missing:
                self._choose_first(control)
        elif not self._unfinished:
            return self._outcome(None)
        if self._waited <= self.request.timeout:
            return None
        if self.request.first is None:
            raise Refused(self._silence())
        return self._outcome(f"it was not finished within {self.request.timeout:.0f} s{self._standing()}")

    @property
    def _waited(self) -> float:
        """Seconds since it asked."""
        return 0.0 if self._submitted_at is None else time.monotonic() - self._submitted_at

    def _check_that_it_stands(self, control: Directory) -> None:
        """Raises Refused where the ranks cannot see the request any more."""
        with suppress(Absent, BadRecord):
            run = records.read(control, records.RUN, RunRecord)
            if run.run != self._job.run.run:
                raise Refused("the job was started again meanwhile")
            if run.ended is not None:
                raise Refused("the job has ended meanwhile")
        try:
            other = records.read(control, CAPTURE, Request)
        except (Absent, BadRecord):
            raise Refused("somebody removed the request") from None
        if other.id != self.request.id:
            raise Refused(_busy(other))

    def _read_answers(self, control: Directory) -> None:
        statuses = read_statuses(control, self._job.run, self._unfinished)
        now = self._job.now(statuses, None)
        stuck = [status.stuck(now) for status in statuses.values() if is_stuck(status, now)]
        self.still = min(stuck) if stuck and len(stuck) == len(statuses) else 0.0
        for rank, status in statuses.items():
            if status.capture is not None and status.capture.request == self.request.id:
                self._answers[rank] = status.capture
        if self._latency is None and not self.missing:
            self._latency = self._waited

    def _choose_first(self, control: Directory) -> None:
        """Writes the first call to capture into the request."""
        latency = self._latency or 0.0
        unknown = any(answer.seconds is None for answer in self._answers.values())
        if unknown and self._waited - latency < min(_PATIENCE, self.request.timeout / 4):
            return  # the job is just beginning: its next calls will tell
        calls = max(answer.calls for answer in self._answers.values())
        first = first_call(calls, self._seconds, latency, self._job.run.interval)
        chosen = replace(self.request, first=first)
        try:
            records.write(control, CAPTURE, chosen)
        except OSError as fault:
            raise Refused(f"the request cannot be written: {fault.strerror}") from None
        self.request = chosen

    def _silence(self) -> str:
        if not self._answers:
            return f"nobody answered within {self.request.timeout:.0f} s"
        if not self.missing:
            return f"no step began within {self.request.timeout:.0f} s{self._standing()}"
        silent = ", ".join(map(str, self.missing[:8])) + (" ..." if len(self.missing) > 8 else "")
        return f"no answer within {self.request.timeout:.0f} s from rank {silent}"

    def _standing(self) -> str:
        return f"; none of these ranks has moved for {ago(self.still)}" if self.still else ""

    def _outcome(self, reason: str | None) -> Outcome:
        """Returns the outcome. `reason`: why it ends before all ranks have finished; None if they have."""
        answers = dict(sorted(self._answers.items()))
        done = {rank: answer for rank, answer in answers.items() if answer.state == "done"}
        failed = [(rank, answer) for rank, answer in answers.items() if answer.state == "failed"]
        steps = [answer.steps for answer in done.values()]
        if reason is None and failed:
            rank, first = failed[0]
            reason = f"rank {rank}: {first.reason}"
            reason += f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        elif reason is None and len(set(steps)) > 1:
            reason = "the ranks number their steps differently: " + ", ".join(
                f"rank {rank} has {list(answer.steps)}" for rank, answer in list(done.items())[:4]
            )
        return Outcome(
            version=1,
            request=self.request.id,
            target=self.request.target,
            role=self.request.role,
            selected=self.ranks,
            captured=len(done),
            steps=steps[0] if steps else (),
            files=tuple(str(self._job.directory / file) for answer in answers.values() for file in answer.files),
            reason=reason,
        )


def requester_for(directory: Path, target: str, *, role: str | None = None, **fields: Any) -> Requester:
    """Returns a requester to the job that writes to `directory`, with the fields of `draft`. Nothing is asked yet.
    Raises NoJob, and Refused for a request that makes no sense."""
    request = draft(target, role=role, **fields)  # before the job is looked for: what no job would take needs none
    job = find_job(directory, role)
    if (silence := job.silence()) is not None:
        raise NoJob(silence)
    if role is not None and job.run.role is not None:
        request = replace(request, role=job.run.role)  # a directory's name has it sanitised
    return Requester(job, address(request, job.run))


def _submit(job: RunningJob, request: Request) -> None:
    """Writes the request, in the place of one that no rank looks at any more. Raises Refused."""
    path = path_of(job.directory, job.part)
    try:
        with job.control() as control:
            with suppress(Absent, BadRecord):
                other = records.read(control, CAPTURE, Request)
                if other.run == request.run and other.id != request.id:
                    raise Refused(_busy(other))
            records.write(control, CAPTURE, request)
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
