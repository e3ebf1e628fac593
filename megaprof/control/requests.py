"""The rules for a request: the command that asks and the ranks that are asked apply the same ones."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from msgspec.structs import replace

from megaprof.config.options import TORCH_ONLY, ProfileConfig, flag
from megaprof.config.tools import TIMELINE
from megaprof.config.windows import TARGETS
from megaprof.formats.job.records import LONGEST_TIMEOUT, MOST_STEPS, Refused, Request, RunRecord

#: The defaults of a request: how many steps, which ranks, and seconds until nobody waits for it any more.
STEPS, SELECT, TIMEOUT = 2, "per-stage", 300.0
#: Options that a request may set, besides the tool.
OPTIONS = (*TORCH_ONLY, "profile_memory", "with_stack")
#: The run of a request that is for no particular run.
_NO_RUN = "-"


def draft(
    target: str,
    *,
    role: str | None = None,
    steps: int = STEPS,
    select: str = SELECT,
    options: dict[str, Any] | None = None,
    timeout: float = TIMEOUT,
    by: str = "megaprof trigger",
) -> Request:
    """Returns a request that is not for any run yet (`address`). Raises Refused for what no job could carry out."""
    if not 1 <= steps <= MOST_STEPS:
        raise Refused(f"--steps {steps} is not a whole number from 1 to {MOST_STEPS}")
    if not 1 <= timeout <= LONGEST_TIMEOUT:
        raise Refused(f"--timeout {timeout:g} is not a number of seconds from 1 to {LONGEST_TIMEOUT:g}")
    fields = {
        "id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4),
        "run": _NO_RUN,
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
        _check(request)
    except ValueError as mistake:
        raise Refused(str(mistake)) from None
    return request


def address(request: Request, run: RunRecord) -> Request:
    """Returns the request to the ranks of `run`. Raises Refused as they would."""
    addressed = replace(request, run=run.run)
    check(addressed, run)
    return addressed


def new_request(run: RunRecord, target: str, **fields: Any) -> Request:
    """Returns a new request to the ranks of `run`, with the fields of `draft`. Raises Refused."""
    return address(draft(target, **fields), run)


def check(request: Request, run: RunRecord) -> None:
    """Raises Refused unless ranks of `run` could carry it out."""
    try:
        _check(request)
        request.selector.check(run.sizes, run.layout)
    except ValueError as mistake:
        raise Refused(str(mistake)) from None


def selected_ranks(run: RunRecord, request: Request) -> list[int]:
    """Returns the ranks of `run` that a request selects. Raises Refused if they cannot be known."""
    selector = request.selector
    if selector.rank_spans is not None:
        return [rank for first, last in selector.rank_spans for rank in range(first, last + 1)]
    if run.layout is None:
        raise Refused(f"--select {request.select}: this job's rank order is not a plain one; name ranks instead")
    return selector.ranks(run.layout)


def recorder_config(request: Request, directory: str) -> ProfileConfig:
    """Returns the configuration of the recorders of a request: its own options, and nothing of the job's. Raises
    ValueError."""
    unknown = sorted(set(request.options) - {"tool", *OPTIONS})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: tool, {', '.join(OPTIONS)}")
    options: dict[str, Any] = dict(request.options)
    config = ProfileConfig(target=(request.target,), dir=directory, **options)
    if TIMELINE in config.tool:
        raise ValueError(f"{flag('tool')} {TIMELINE} records all the time or not at all")
    return config


def _check(request: Request) -> None:
    """Raises ValueError for what no job could carry out."""
    if request.target not in TARGETS:
        raise ValueError(f"{flag('target')}: unknown target {request.target!r}; known: {', '.join(TARGETS)}")
    _ = request.selector
    recorder_config(request, ".")
