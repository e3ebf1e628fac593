"""A capture that is asked for: what a command writes, and what each rank answers."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from megaprof.config.options import TORCH_ONLY, ProfileConfig, flag
from megaprof.config.tools import TIMELINE
from megaprof.config.windows import TARGETS
from megaprof.control import records
from megaprof.control.paths import REQUEST_ID
from megaprof.control.run import Run
from megaprof.parallel.selectors import Selector, parse_selector

#: Fields of ProfileConfig that a request may set, besides the tool.
OPTIONS = (*TORCH_ONLY, "profile_memory", "with_stack")
#: So that an answer, with a file for each step and tool, stays a record.
MOST_STEPS = 100
LONGEST_TIMEOUT = 24 * 3600.0
#: How far the clocks of two hosts may differ before a request counts as too old.
CLOCK_SKEW = 60.0

ACCEPTED, REFUSED, ARMED, RECORDING, DONE, MISSED, FAILED = (
    "accepted",
    "refused",
    "armed",
    "recording",
    "done",
    "missed",
    "failed",
)
FINAL = frozenset((REFUSED, DONE, MISSED, FAILED))


class Refused(Exception):
    """The request will not be carried out; the message says why."""


@dataclass(frozen=True)
class Request:
    """``steps`` windows of ``target``, one after another, on the ranks of ``select``, by the tools in ``options``."""

    id: str
    run: str
    created: float
    timeout: float
    """Seconds after which nobody waits for it any more."""
    target: str
    role: str | None
    steps: int
    select: str
    options: dict[str, Any]
    by: str = "megaprof trigger"

    @classmethod
    def new(
        cls,
        run: Run,
        target: str,
        *,
        role: str | None = None,
        steps: int = 2,
        select: str = "per-stage",
        options: dict[str, Any] | None = None,
        timeout: float = 300.0,
        by: str = "megaprof trigger",
    ) -> Request:
        """Raises Refused as the job would."""
        made = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4)
        return cls.from_record(
            {
                "id": made,
                "run": run.run,
                "created": time.time(),
                "timeout": timeout,
                "target": target,
                "role": role,
                "steps": steps,
                "select": select,
                "options": options or {"tool": ["torch"]},
                "by": by,
            },
            run,
        )

    def as_record(self) -> dict[str, Any]:
        return {"version": 1, **asdict(self)}

    @property
    def selector(self) -> Selector:
        return parse_selector(self.select)

    @classmethod
    def from_record(cls, record: dict[str, Any], run: Run) -> Request:
        """The request in ``record``, if ``run`` can carry it out as far as any rank of it can tell. Raises Refused."""
        try:
            request = cls._read(record)
            if request.run != run.run:
                raise Refused("it was made for another run of this job, not for the one that is running")
            age = time.time() - request.created
            if age > request.timeout + CLOCK_SKEW:
                raise Refused(f"it is {age:.0f} s old by the job's clock and was good for {request.timeout:.0f} s")
            if request.target not in TARGETS:
                raise Refused(f"{flag('target')}: unknown target {request.target!r}; known: {', '.join(TARGETS)}")
            request.selector.check(run.sizes, run.layout)
            request.config(".")
        except ValueError as mistake:
            raise Refused(str(mistake)) from None
        return request

    @classmethod
    def _read(cls, record: dict[str, Any]) -> Request:
        identity = records.text(record, "id", longest=64)
        if REQUEST_ID.fullmatch(identity) is None:
            raise ValueError(f"id {identity!r} has other characters than letters, digits, '-' and '_'")
        options = record.get("options")
        if not isinstance(options, dict):
            raise ValueError("options are not an object")
        return cls(
            id=identity,
            run=records.text(record, "run"),
            created=records.number(record, "created", 0, 1e12),
            timeout=records.number(record, "timeout", 1, LONGEST_TIMEOUT),
            target=records.text(record, "target"),
            role=None if record.get("role") is None else records.text(record, "role"),
            steps=records.whole(record, "steps", 1, MOST_STEPS),
            select=records.text(record, "select", longest=4000),
            options=options,
            by=records.text(record, "by"),
        )

    def config(self, directory: str) -> ProfileConfig:
        """What the recorders of its windows are made from: nothing but the request's own options. Raises ValueError."""
        unknown = sorted(set(self.options) - {"tool", *OPTIONS})
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; known: tool, {', '.join(OPTIONS)}")
        config = ProfileConfig(target=(self.target,), dir=directory, **self.options)
        if TIMELINE in config.tool:
            raise ValueError(f"{flag('tool')} {TIMELINE} records all the time or not at all")
        return config


@dataclass(frozen=True)
class Answer:
    """What one rank says to a request. ``calls`` of the target have begun there so far, ``seconds`` apart lately."""

    rank: int
    state: str
    calls: int = 0
    seconds: float | None = None
    reason: str | None = None
    steps: tuple[int, ...] = ()
    """The numbers of the captured steps."""
    files: tuple[str, ...] = ()
    """What was written, relative to the save directory."""

    def as_record(self, run: str) -> dict[str, Any]:
        return {"version": 1, "run": run, **asdict(self)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Answer:
        """Raises ValueError."""
        steps, files, seconds = record.get("steps"), record.get("files"), record.get("seconds")
        if not isinstance(steps, list) or not all(type(step) is int for step in steps):
            raise ValueError("steps are not whole numbers")
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise ValueError("files are not names")
        return cls(
            rank=records.whole(record, "rank", 0, 1 << 32),
            state=records.text(record, "state"),
            calls=records.whole(record, "calls", 0, 1 << 62),
            seconds=None if seconds is None else records.number(record, "seconds", 0, 1e9),
            reason=None if record.get("reason") is None else str(record["reason"])[:1000],
            steps=tuple(steps),
            files=tuple(files),
        )
