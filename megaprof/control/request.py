"""A request to capture: its rules, which the command that asks and the ranks that are asked share, and the side that
asks. That carries a request through, from `capture.json` to the files, and never waits.

First every selected rank says in its status how far its calls have come. Then the command chooses one call number that
lies ahead of all of them, and writes it into the request. So every rank starts with the same step, and none waits for
another.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from megaprof.config.options import OF_OTHERS_TOO, TORCH_ONLY, ProfileConfig, flag
from megaprof.config.values import TARGETS, TIMELINE
from megaprof.control.blame import is_stuck
from megaprof.control.directory import RunningJob, Unsafe, find_job, read, write
from megaprof.formats.job import CAPTURE, LONGEST_TIMEOUT, MOST_WINDOWS, RUN, Answer, Refused, Request, RunRecord
from megaprof.formats.phrases import Unanswerable, ago, counted, listed

#: The defaults of a request: how many steps, which ranks, and seconds until nobody waits for it any more.
STEPS, SELECT, TIMEOUT = 2, "per-stage", 300.0
#: Options that a request may set, besides the tool.
OPTIONS = TORCH_ONLY + OF_OTHERS_TOO
#: The first step comes this many times later than the estimate says.
_SAFETY = 1.5
#: Seconds for which a job that is just beginning is given the time to show how long a step takes.
_PATIENCE = 30.0


def new_request(
    run: RunRecord | None,
    target: str,
    *,
    role: str | None = None,
    steps: int = STEPS,
    select: str = SELECT,
    options: dict[str, Any] | None = None,
    timeout: float = TIMEOUT,
    by: str = "megaprof trigger",
) -> Request:
    """Returns a request to the ranks of `run`. Raises Refused as they would; without a run, for what no job could carry
    out."""
    if not 1 <= steps <= MOST_WINDOWS:
        raise Refused(f"--steps {steps} is not a whole number from 1 to {MOST_WINDOWS}")
    if not 1 <= timeout <= LONGEST_TIMEOUT:
        raise Refused(f"--timeout {timeout:g} is not a number of seconds from 1 to {LONGEST_TIMEOUT:g}")
    fields = {
        "id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4),
        "run": "-" if run is None else run.run,
        "timeout": timeout,
        "target": target,
        "role": role,
        "steps": steps,
        "select": select,
        "options": options or {"tool": ["torch"]},
        "by": by,
    }
    try:
        request = msgspec.json.decode(msgspec.json.encode(fields), type=Request)
    except ValueError as mistake:
        raise Refused(str(mistake)) from None
    check(request, run)
    return request


def check(request: Request, run: RunRecord | None, directory: str = ".") -> ProfileConfig:
    """Returns the configuration of a request's recorders, with files in `directory`: the request's own options, and
    nothing of the job's. Raises Refused unless ranks of `run` could carry it out; without a run, unless any job
    could."""
    try:
        if request.target not in TARGETS:
            raise ValueError(f"{flag('target')}: unknown target {request.target!r}; known: {', '.join(TARGETS)}")
        selector = request.selector
        if unknown := sorted(set(request.options) - {"tool", *OPTIONS}):
            raise ValueError(f"unknown option {unknown[0]!r}; known: tool, {', '.join(OPTIONS)}")
        options: dict[str, Any] = dict(request.options)
        config = ProfileConfig(target=(request.target,), dir=directory, **options)
        if TIMELINE in config.tool:
            raise ValueError(f"{flag('tool')} {TIMELINE} records all the time or not at all")
        if run is not None:
            selector.check(run.sizes, run.layout)
    except ValueError as mistake:
        raise Refused(str(mistake)) from None
    return config


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
        ranks = request.selector.ranks(job.run.sizes, job.run.layout)
        if ranks is None:
            raise Refused(f"--select {request.select}: this job's rank order is not a plain one; name ranks instead")
        self.request = request
        self.ranks = tuple(ranks)
        """The ranks that are asked, by number."""
        self.still = 0.0
        """Seconds since any rank that has not finished moved; 0 while one moves."""
        self.pause = job.run.interval / 5
        """Seconds from one look to the next: a rank answers once in an interval."""
        self._job = job
        self._answers: dict[int, Answer] = {}
        self._submitted_at = 0.0  # by the monotonic clock; 0: not yet
        self._latency: float | None = None

    def submit(self) -> None:
        """Asks, where that is not done yet, in the place of a request that no rank looks at any more. Raises
        Refused."""
        if self._submitted_at:
            return
        path = self._job.control.path
        try:
            with self._job.control.open() as control:
                other = read(control, CAPTURE, Request)
                if other is not None and other.run == self.request.run and other.id != self.request.id:
                    raise Refused(_busy(other))
                write(control, CAPTURE, self.request)
        except OSError as fault:
            raise Refused(f"{path} cannot be written: {fault.strerror}") from None
        except Unsafe as fault:
            raise Refused(str(fault)) from None
        self._submitted_at = monotonic()

    @property
    def state(self) -> str:
        """What it waits for, for people. The first word stays as long as that is the same: answers, the first call, or
        files."""
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
            with self._job.control.open() as control:
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
        with suppress(OSError, Unsafe), self._job.control.open() as control:
            written = read(control, CAPTURE, Request)
            if written is not None and written.id == self.request.id:
                os.unlink(CAPTURE, dir_fd=control)

    @property
    def _recording(self) -> int:
        """How many ranks record now."""
        return sum(answer.state == "recording" for answer in self._answers.values())

    @property
    def _unfinished(self) -> list[int]:
        """The ranks whose last answer is still to come."""
        return [rank for rank in self.ranks if rank not in self._answers or not self._answers[rank].final]

    @property
    def _seconds(self) -> float | None:
        """Seconds from one call to the next on the quickest rank; None where no rank knows."""
        return min((answer.seconds for answer in self._answers.values() if answer.seconds is not None), default=None)

    def _advance(self, control: int) -> Outcome | None:
        statuses = self._job.statuses(self._unfinished)
        now = self._job.now(statuses, None)
        stuck = [status.stuck(now) for status in statuses.values() if is_stuck(status, now)]
        self.still = min(stuck) if stuck and len(stuck) == len(statuses) else 0.0
        for rank, status in statuses.items():
            if status.capture is not None and status.capture.request == self.request.id:
                self._answers[rank] = status.capture
        waited, missing = monotonic() - self._submitted_at, self.missing
        if self._unfinished:  # is the request still there for the ranks to see?
            run, request = read(control, RUN, RunRecord), read(control, CAPTURE, Request)
            if run is not None and run.run != self._job.run.run:
                raise Refused("the job was started again meanwhile")
            if run is not None and run.ended is not None:
                raise Refused("the job has ended meanwhile")
            if request is None:
                raise Refused("somebody removed the request")
            if request.id != self.request.id:
                raise Refused(_busy(request))
        if self.request.first is None:
            for rank, answer in self._answers.items():
                if answer.final:
                    raise Refused(f"rank {rank}: {answer.reason}")
            if not missing:
                self._choose_first(control, waited)
        elif not self._unfinished:
            return self._outcome(None)
        if waited <= self.request.timeout:
            return None
        within = f"within {self.request.timeout:.0f} s"
        if self.request.first is not None:
            return self._outcome(f"it was not finished {within}{self._standing()}")
        if not self._answers:
            raise Refused(f"nobody answered {within}")
        if missing:
            raise Refused(f"no answer {within} from rank {listed(missing)}")
        raise Refused(f"no step began {within}{self._standing()}")

    def _choose_first(self, control: int, waited: float) -> None:
        """Writes the first call to capture into the request. All ranks have answered, `waited` seconds after it."""
        self._latency = latency = waited if self._latency is None else self._latency
        unknown = any(answer.seconds is None for answer in self._answers.values())
        if unknown and waited - latency < min(_PATIENCE, self.request.timeout / 4):
            return  # the job is just beginning: its next calls will tell
        calls = max(answer.calls for answer in self._answers.values())
        first = first_call(calls, self._seconds, latency, self._job.run.interval)
        chosen = replace(self.request, first=first)
        write(control, CAPTURE, chosen)
        self.request = chosen

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
    """Returns a requester to the job that writes to `directory`, with the fields of `new_request`. Nothing is asked
    yet. Raises Unanswerable, and Refused for a request that makes no sense."""
    new_request(None, target, role=role, **fields)  # what no job would take needs none
    job = find_job(directory, role)
    if (silence := job.silence()) is not None:
        raise Unanswerable(silence)
    if role is not None and job.run.role is not None:
        role = job.run.role  # a directory's name has it sanitised
    return Requester(job, new_request(job.run, target, role=role, **fields))


def _busy(other: Request) -> str:
    return f"busy with {other.id} ({other.by}), which asks for {other.target}"
