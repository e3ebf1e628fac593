"""Roles: whose work the process is doing now (actor, ref, critic, reward, rollout) where they share a model.

    with megaprof.role("ref"):
        forward_backward_func(...)      # counted, captured and named as the reference model's

A scope is a context variable: it holds for the code inside, for coroutines and tasks started inside, and for
``asyncio.to_thread``; not for other threads, and not for a task that was already running. So interleaved tasks of an
asynchronous rollout each keep their own role.
"""

from __future__ import annotations

from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING

from megaprof.capture.process import process
from megaprof.capture.scope import Scope as Scope
from megaprof.capture.scope import current as current
from megaprof.capture.scope import enter_block, in_task, leave_block, scope
from megaprof.capture.scope import leave as leave
from megaprof.config.per_role import checked_role
from megaprof.runtime.isolation import Contained
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.recorders.emit import Range


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
        window = None if self._name is None else process.window
        if self._name is not None and process.recording:
            with Contained("opening a role's range", process.abandon):
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
            with Contained("closing a role's range", process.abandon):
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
    return scope.set(Scope(name, process.window))
