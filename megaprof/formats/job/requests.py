"""`capture.json`: the request to capture while a job runs. A command writes it, and every rank reads it.

There is at most one. The answer of a rank is in its status file (`formats.job.status.CaptureState`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megaprof.formats.job.records import Count, Name, Record
from megaprof.parallel.selectors import Selector, parse_selector

NAME = "capture.json"
#: The most steps of a request, so that a status that names a file for each step and tool stays short enough.
MOST_STEPS = 100
LONGEST_TIMEOUT = 24 * 3600.0


class Refused(Exception):
    """The request will not be carried out; the message says why."""


class Request(Record, frozen=True):
    """Some windows of a target, one after another, on some ranks, by some tools."""

    id: Name
    """A random name of the request."""
    run: Name
    """The run that it is for."""
    timeout: Annotated[float, Meta(ge=1, le=LONGEST_TIMEOUT)]
    """Seconds after which nobody waits for it any more."""
    target: Name
    """The target to capture, such as ``train_actor``."""
    role: Name | None
    """The role whose calls are captured; None if the job has only one role."""
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)]
    """The number of windows."""
    select: Annotated[str, Meta(min_length=1, max_length=4000)]
    """The ranks that capture, as in `--profile-select`."""
    options: dict[str, bool | str | list[str]]
    """``tool``, and options of the tools, as `ProfileConfig` names them."""
    by: str = "megaprof trigger"
    """The requester, for people."""
    first: Count | None = None
    """The number of the first call to capture, counted from 0 since the hooks were installed; None until every selected
    rank has reported its number of calls."""

    @property
    def selector(self) -> Selector:
        """The ranks that capture. Raises ValueError."""
        return parse_selector(self.select)
