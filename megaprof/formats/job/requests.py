"""`capture.json`: a capture that is asked for while a job runs. A command writes it, and every rank reads it.

There is at most one: whoever finds one there waits, or is told who is busy. What the ranks say to it stands in their
status files (`formats.job.status.CaptureState`).
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megaprof.formats.job.records import Count, Name, Record
from megaprof.formats.job.run import RunRecord
from megaprof.parallel.selectors import Selector, parse_selector

NAME = "capture.json"
#: Steps of a request at most, so that a status that names a file for each step and tool stays short enough.
MOST_STEPS = 100
LONGEST_TIMEOUT = 24 * 3600.0


class Refused(Exception):
    """The request will not be carried out; the message says why, and begins with the ``field`` that is to blame."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason if field is None else f"{field} {reason}")
        self.field = field


class Request(Record, frozen=True):
    """Some windows of a target, one after another, on some ranks, by some tools."""

    id: Name
    """A random name of the request."""
    run: Name
    """The run that it is for."""
    timeout: Annotated[float, Meta(ge=1, le=LONGEST_TIMEOUT)]
    """Seconds after which nobody waits for it any more."""
    target: Name
    """What to capture, such as ``train_actor``."""
    role: Name | None
    """Whose calls; None where the job has only one role."""
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)]
    """How many windows."""
    select: Annotated[str, Meta(min_length=1, max_length=4000)]
    """Which ranks, as in `--profile-select`."""
    options: dict[str, bool | str | list[str]]
    """``tool``, and options of the tools, as `ProfileConfig` names them."""
    by: str = "megaprof trigger"
    """Who asks, for people."""
    first: Count | None = None
    """The number of the first call to capture, counted from 0 since the hooks went in; None until every selected rank
    has said how far it is."""

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
        """Returns a new request to the run called ``run``. Raises Refused for what no job would take."""
        if not 1 <= steps <= MOST_STEPS:
            raise Refused(f"{steps} is not a whole number from 1 to {MOST_STEPS}", "steps")
        if not 1 <= timeout <= LONGEST_TIMEOUT:
            raise Refused(f"{timeout:g} is not a number of seconds from 1 to {LONGEST_TIMEOUT:g}", "timeout")
        fields = {
            "id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4),
            "run": run,
            "timeout": timeout,
            "target": target,
            "role": role,
            "steps": steps,
            "select": select,
            "options": options or {"tool": ["torch"]},
            "by": by,
        }
        try:
            request = msgspec.json.decode(msgspec.json.encode(fields), type=cls)
            parse_selector(select)
        except ValueError as mistake:
            raise Refused(str(mistake)) from None
        return request

    @property
    def selector(self) -> Selector:
        """Which ranks. Raises ValueError."""
        return parse_selector(self.select)

    def check(self, run: RunRecord) -> None:
        """Raises Refused unless the request is for ``run``, and selects ranks of it."""
        if self.run != run.run:
            raise Refused("it was made for another run of this job, not for the one that is running")
        try:
            self.selector.check(run.sizes, run.layout)
        except ValueError as mistake:
            raise Refused(str(mistake)) from None
