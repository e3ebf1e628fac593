"""A capture that is asked for while a job runs: what a command writes, and what the ranks answer.

| file | record |
|---|---|
| `requests/ID.json`, `orders/ID.json` | `Request` |
| `orders/ID.go.json` | `Start` |
| `answers/ID/rank00000.json` | `Answer` |
| `answers/ID/refused.json` | `Refusal` |
"""

from __future__ import annotations

import posixpath
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from megaprof.formats.checks import Record, listing, number, one_of, optional, sentence, short, text, whole
from megaprof.formats.job.run import LATEST, MOST_RANKS, RunRecord
from megaprof.parallel.selectors import Selector, parse_selector

REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
#: So that an answer, with a file for each step and tool, stays a record.
MOST_STEPS = 100
_MOST_FILES = 1000
LONGEST_TIMEOUT = 24 * 3600.0
#: How far the clocks of two hosts may differ before a request counts as too old, in seconds.
CLOCK_SKEW = 60.0
_LONGEST_REASON = 1000

ACCEPTED, REFUSED, ARMED, RECORDING, DONE, MISSED, FAILED = STATES = (
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


def _options(value: object) -> dict[str, Any]:
    """Whether there are such options, and such values of them, is for `control.requests` to say."""
    if not isinstance(value, dict) or len(value) > 40:
        raise ValueError(f"{short(value)} are no options")
    return {text(40)(name): _option(chosen) for name, chosen in value.items()}


def _option(value: object) -> Any:
    if isinstance(value, bool):
        return value
    return listing(text(), 20)(value) if isinstance(value, list | tuple) else text()(value)


def _file(value: object) -> str:
    """A name below the save directory. People hand what `megaprof trigger` prints on to other commands."""
    name: str = text(1000)(value)
    if posixpath.isabs(name) or ".." in name.split("/"):
        raise ValueError(f"{short(name)} does not lie below the save directory")
    return name


@dataclass(frozen=True)
class Request(Record):
    """Some windows of a target, one after another, on some ranks, by some tools."""

    id: Annotated[str, text(64, REQUEST_ID)]
    """Its name, and that of its files."""
    run: Annotated[str, text(64)]
    """The run that it is for."""
    created: Annotated[float, number(0, LATEST)]
    """Wall-clock seconds of whoever asks."""
    timeout: Annotated[float, number(1, LONGEST_TIMEOUT)]
    """Seconds after which nobody waits for it any more."""
    target: Annotated[str, text()]
    """What to capture, such as ``train_actor``."""
    role: Annotated[str | None, optional(text())]
    """Whose calls, None where it is clear."""
    steps: Annotated[int, whole(1, MOST_STEPS)]
    """How many windows."""
    select: Annotated[str, text(4000)]
    """Which ranks, as in `--profile-select`."""
    options: Annotated[dict[str, Any], _options]
    """``tool``, and options of the tools, as `ProfileConfig` names them."""
    by: Annotated[str, sentence(200)] = "megaprof trigger"
    """Who asks, for people."""

    @classmethod
    def draft(
        cls,
        target: str,
        *,
        run: str = "-",
        role: str | None = None,
        steps: int = 2,
        select: str = "per-stage",
        options: dict[str, Any] | None = None,
        timeout: float = 300.0,
        by: str = "megaprof trigger",
    ) -> Request:
        """A request made now; ``run`` is the run that it is for. Raises Refused for what no job would take."""
        record = {
            "id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4),
            "run": run,
            "created": time.time(),
            "timeout": timeout,
            "target": target,
            "role": role,
            "steps": steps,
            "select": select,
            "options": options or {"tool": ["torch"]},
            "by": by,
        }
        try:
            request = cls.from_record(record)
            parse_selector(request.select)
        except ValueError as mistake:
            raise Refused(str(mistake)) from None
        return request

    @classmethod
    def new(cls, run: RunRecord, target: str, **fields: Any) -> Request:
        """A `draft` to `run`. Raises Refused as the job would."""
        return cls.checked(cls.draft(target, run=run.run, **fields).as_record(), run)

    @property
    def selector(self) -> Selector:
        """Which ranks. Raises ValueError."""
        return parse_selector(self.select)

    @classmethod
    def checked(cls, record: dict[str, Any], run: RunRecord) -> Request:
        """The request in `record`, if it is for `run` and its ranks are ranks of it. Raises Refused."""
        try:
            request = cls.from_record(record)
            if request.run != run.run:
                raise Refused("it was made for another run of this job, not for the one that is running")
            age = time.time() - request.created
            if age > request.timeout + CLOCK_SKEW:
                raise Refused(f"it is {age:.0f} s old by the job's clock and was good for {request.timeout:.0f} s")
            request.selector.check(run.sizes, run.layout)
        except ValueError as mistake:
            raise Refused(str(mistake)) from None
        return request


@dataclass(frozen=True)
class Start(Record):
    """From which call on a request is carried out."""

    run: Annotated[str, text(64)]
    """The run that the request is for."""
    id: Annotated[str, text(64, REQUEST_ID)]
    """The request."""
    first: Annotated[int, whole(0, 1 << 62)]
    """The number of the first call to capture, counted from 0 since the hooks went in."""


@dataclass(frozen=True)
class Refusal(Record):
    """Why the lowest rank did not even pass a request on."""

    run: Annotated[str, text(64)]
    """The run that refused it."""
    reason: Annotated[str, sentence(_LONGEST_REASON)]
    """For people."""


@dataclass(frozen=True)
class Answer(Record):
    """What one rank says to a request."""

    rank: Annotated[int, whole(0, MOST_RANKS)]
    """Who says it."""
    state: Annotated[str, one_of(*STATES)]
    """How far it has come; see `FINAL`."""
    calls: Annotated[int, whole(0, 1 << 62)] = 0
    """How many calls of the target have begun there."""
    seconds: Annotated[float | None, optional(number(0, 1e9))] = None
    """From the beginning of one to that of the next, lately; None before there were two."""
    reason: Annotated[str | None, optional(sentence(_LONGEST_REASON))] = None
    """Why not, None where nothing is wrong."""
    steps: Annotated[tuple[int, ...], listing(whole(0, 1 << 62), MOST_STEPS)] = ()
    """The numbers of the captured steps."""
    files: Annotated[tuple[str, ...], listing(_file, _MOST_FILES)] = ()
    """What was written, relative to the save directory."""
    run: Annotated[str, text(64)] = field(default="-", compare=False)
    """The run that it belongs to."""

    def as_record(self, run: str = "-") -> dict[str, Any]:
        """For JSON, as a rank of `run` says it."""
        return {**super().as_record(), "reason": self.reason and self.reason[:_LONGEST_REASON], "run": run}
