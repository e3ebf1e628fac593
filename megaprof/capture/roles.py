"""Roles: whose work the process is doing now (actor, ref, critic, reward, rollout) where they share a model.

    with megaprof.role("ref"):
        forward_backward_func(...)      # counted, captured and named as the reference model's

A scope is a context variable: it holds for the code inside, for coroutines and tasks started inside, and for
``asyncio.to_thread``; not for other threads, and not for a task that was already running. So interleaved tasks of an
asynchronous rollout each keep their own role.
"""

from __future__ import annotations

import os
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING

from megaprof.capture.scope import Scope as Scope
from megaprof.capture.scope import current as current
from megaprof.capture.scope import enter_block, in_task, leave_block, scope
from megaprof.capture.scope import leave as leave
from megaprof.config.per_role import checked_role
from megaprof.formats.nsys import SESSION_VARIABLE
from megaprof.runtime.isolation import Contained, in_full
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.capture.session import Session
    from megaprof.recorders.emit import Range

#: The sessions whose hooks are in. Annotations look at nothing but this and `traced` while profiling is off.
sessions: list[Session] = []
#: Whether Nsight Systems records this process from start to end: a controller, which has no windows, has ranges then
#: without any hooks.
traced = SESSION_VARIABLE in os.environ


class role:
    """``with role("ref"): ...``: what runs inside is the work of that role.

    Steps are counted per target and role. Nested scopes: the innermost one counts. A name that is not a non-empty
    string is said once in the log and left out: training goes on.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = usable(name, "role")

    def __enter__(self) -> None:
        opened: Range | None = None
        window = _open_window() if sessions and self._name is not None else None
        if window is not None or (traced and not sessions and self._name is not None):
            with Contained("opening a role's range", abandon):
                from megaprof.formats.ranges import role_range
                from megaprof.recorders.emit import Range

                opened = Range(role_range(str(self._name)), overlapping=in_task())
                opened.__enter__()
        token = None if self._name is None else scope.set(Scope(self._name, window))
        enter_block(self, (token, opened))

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        entered = leave_block(self)
        if not isinstance(entered, tuple):
            return
        token, opened = entered
        if token is not None:
            leave(token)
        if opened is not None:
            with Contained("closing a role's range", abandon):
                opened.close()


_MOST_SAID = 64
_said: set[str] = set()


def usable(name: object, what: str) -> str | None:
    """``name`` as a role's name, None where it could not be one, which is said once: ``what`` is in the message."""
    try:
        return checked_role(name, what)
    except ValueError as mistake:
        say_once(f"{mistake}. It is left out")
        return None


def say_once(message: str) -> None:
    """Log a mistake in the host's own calls, which may be in its training loop."""
    if message not in _said and len(_said) < _MOST_SAID:
        _said.add(message)
        logger.warning("megaprof: %s", message)


def enter(name: str) -> Token[Scope]:
    """A scope without a range of its own; undone by `leave`."""
    return scope.set(Scope(name, _open_window()))


def attach(session: Session) -> None:
    """Annotations may open windows of ``session`` from now on."""
    sessions.append(session)


def detach(session: Session) -> None:
    """Annotations open no windows of ``session`` any more."""
    if session in sessions:
        sessions.remove(session)


def abandon() -> None:
    """After a fault: no session records anything more. Can be run twice."""
    in_full(*(session.abandon for session in sessions))


def recording() -> bool:
    """True while ranges have somebody to reach: a window is open in this process, or nsys records it and no hooks are
    in that would open windows."""
    return _open_window() is not None if sessions else traced


def _open_window() -> object:
    return sessions[0].open_window() if sessions else None
