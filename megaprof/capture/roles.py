"""Whose work the process is doing now (actor, ref, critic, reward, rollout) where models share it, and if it evaluates.

    with megaprof.role("ref"):
        forward_backward_func(...)      # counted, captured and named as the reference model's

A scope is a context variable: it holds for the code inside, for coroutines and tasks started inside, and for
``asyncio.to_thread``; not for other threads, and not for a task that was already running. So interleaved tasks of an
asynchronous rollout each keep their own role.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from megaprof.capture.process import process
from megaprof.config.per_role import checked_role
from megaprof.runtime.isolation import Contained
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.recorders.ranges.emit import Range

_MOST_SAID = 64


class Scope(NamedTuple):
    """A role's scope."""

    role: str | None
    """Whose work it is; None: nobody said."""
    window: object
    """The open window that has a range for this scope, if any."""


_NOBODY = Scope(None, None)
_scope: ContextVar[Scope] = ContextVar("megaprof_role", default=_NOBODY)
_blocks: ContextVar[tuple[tuple[object, object], ...]] = ContextVar("megaprof_blocks", default=())
_evaluates: ContextVar[bool] = ContextVar("megaprof_evaluation", default=False)


#: Returns the innermost scope around the caller.
current: Callable[[], Scope] = _scope.get


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
                from megaprof.recorders.ranges.emit import Range

                opened = Range(role_range(str(self._name)), overlapping=in_task())
                opened.__enter__()
        token = None if self._name is None else _scope.set(Scope(self._name, window))
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


@contextmanager
def evaluation() -> Iterator[None]:
    """Forward-only passes inside are evaluation, not log-probs. Not needed inside a function named ``evaluate``."""
    token = _evaluates.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # closed in another context, as in `leave`
            _evaluates.reset(token)


#: Returns whether the caller is inside an `evaluation` block.
evaluating: Callable[[], bool] = _evaluates.get


def enter(name: str) -> Token[Scope]:
    """A scope without a range of its own; undone by `leave`."""
    return _scope.set(Scope(name, process.window))


def leave(token: Token[Scope]) -> None:
    """Undo ``enter``. A coroutine that was never finished may be closed in another context: that one has nothing
    to undo."""
    with suppress(ValueError):
        _scope.reset(token)


def enter_block(owner: object, state: object) -> None:
    """Remember ``state`` until ``owner`` is left here. Several tasks may be inside the same ``owner`` at once."""
    _blocks.set((*_blocks.get(), (owner, state)))


def leave_block(owner: object) -> object:
    """The ``state`` with which ``owner`` was entered last in this context; None where it was not."""
    blocks = _blocks.get()
    for place in reversed(range(len(blocks))):
        if blocks[place][0] is owner:
            _blocks.set(blocks[:place] + blocks[place + 1 :])
            return blocks[place][1]
    return None


def in_task() -> bool:
    """Returns whether an event loop runs the caller: other tasks may then run before a block ends."""
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None


def usable(name: object, what: str) -> str | None:
    """``name`` as a role's name, None where it could not be one, which is said once: ``what`` is in the message."""
    try:
        return checked_role(name, what)
    except ValueError as mistake:
        say_once(f"{mistake}. It is left out")
        return None


def say_once(message: str) -> None:
    """Log a mistake in the host's own calls, which may be in its training loop."""
    if message not in process.said and len(process.said) < _MOST_SAID:
        process.said.add(message)
        logger.warning("megaprof: %s", message)
