"""Inside which role's scope the running code is."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class Scope(NamedTuple):
    role: str | None
    window: object
    """The open window that has a range for this scope, if any."""


_NOBODY = Scope(None, None)
#: A context variable holds for the code inside, for coroutines and tasks started inside, and for no other thread.
scope: ContextVar[Scope] = ContextVar("megaprof_role", default=_NOBODY)


def current() -> Scope:
    """The innermost scope around the caller."""
    return scope.get()
