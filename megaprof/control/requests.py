"""What a request may ask for: the same rules for the command that asks and for the ranks that are asked."""

from __future__ import annotations

from typing import Any

from megaprof.config.options import TORCH_ONLY, ProfileConfig, flag
from megaprof.config.tools import TIMELINE
from megaprof.config.windows import TARGETS
from megaprof.formats.job.requests import Refused, Request
from megaprof.formats.job.run import RunRecord

#: Options that a request may set, besides the tool.
OPTIONS = (*TORCH_ONLY, "profile_memory", "with_stack")


def check_draft(target: str, **fields: Any) -> None:
    """Raises Refused where no job at all could carry out `Request.draft` of this."""
    check(Request.draft(target, **fields))


def new_request(run: RunRecord, target: str, **fields: Any) -> Request:
    """`Request.new`, and `check` of it. Raises Refused."""
    return check(Request.new(run, target, **fields))


def read_request(record: dict[str, Any], run: RunRecord) -> Request:
    """`Request.checked`, and `check` of it. Raises Refused."""
    return check(Request.checked(record, run))


def check(request: Request) -> Request:
    """`request`, if any rank could carry it out. Raises Refused."""
    if request.target not in TARGETS:
        raise Refused(f"{flag('target')}: unknown target {request.target!r}; known: {', '.join(TARGETS)}")
    try:
        recorder_config(request, ".")
    except ValueError as mistake:
        raise Refused(str(mistake)) from None
    return request


def recorder_config(request: Request, directory: str) -> ProfileConfig:
    """What the recorders of its windows are made from: nothing but the request's own options. Raises ValueError."""
    unknown = sorted(set(request.options) - {"tool", *OPTIONS})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: tool, {', '.join(OPTIONS)}")
    config = ProfileConfig(target=(request.target,), dir=directory, **request.options)
    if TIMELINE in config.tool:
        raise ValueError(f"{flag('tool')} {TIMELINE} records all the time or not at all")
    return config
