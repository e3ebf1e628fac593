"""What a request may ask for: one set of rules for the command that asks and the ranks that are asked."""

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
    _check_options(Request.draft(target, **fields))


def new_request(run: RunRecord, target: str, **fields: Any) -> Request:
    """Returns a new request to ``run``, with the fields of `Request.draft`. Raises Refused as its ranks would."""
    request = Request.draft(target, run=run.run, **fields)
    check(request, run)
    return request


def check(request: Request, run: RunRecord) -> None:
    """Raises Refused unless ranks of ``run`` could carry it out."""
    request.check(run)
    _check_options(request)


def _check_options(request: Request) -> None:
    if request.target not in TARGETS:
        raise Refused(f"{flag('target')}: unknown target {request.target!r}; known: {', '.join(TARGETS)}")
    try:
        recorder_config(request, ".")
    except ValueError as mistake:
        raise Refused(str(mistake)) from None


def recorder_config(request: Request, directory: str) -> ProfileConfig:
    """Returns the configuration of its recorders, from the request's own options alone. Raises ValueError."""
    unknown = sorted(set(request.options) - {"tool", *OPTIONS})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: tool, {', '.join(OPTIONS)}")
    options: dict[str, Any] = dict(request.options)
    config = ProfileConfig(target=(request.target,), dir=directory, **options)
    if TIMELINE in config.tool:
        raise ValueError(f"{flag('tool')} {TIMELINE} records all the time or not at all")
    return config
