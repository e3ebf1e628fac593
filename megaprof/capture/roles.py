"""Marks code as the work of one role (actor, ref, critic, reward, rollout) when models share a process, or as
evaluation.

    with megaprof.role("ref"):
        forward_backward_func(...)      # counted, captured and named as the reference model's

A scope is a context variable. It holds for the code inside, for coroutines and tasks that are started inside, and for
``asyncio.to_thread``. It does not hold for other threads, or for a task that was already running. So interleaved tasks
of an asynchronous rollout each keep their own role.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from megaprof.capture.process import process
from megaprof.config.per_role import checked_role
from megaprof.runtime.isolation import Contained, in_full
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.recorders.ranges.emit import Range

_MOST_SAID = 64


class Scope(NamedTuple):
    """A stretch of code that is the work of one role."""

    role: str | None
    """The role; None if unknown."""
    window: object
    """The window that was open when the scope began, and has a range for it; None if none was open."""


_NOBODY = Scope(None, None)
_scope: ContextVar[Scope] = ContextVar("megaprof_role", default=_NOBODY)
_blocks: ContextVar[tuple[tuple[object, object], ...]] = ContextVar("megaprof_blocks", default=())
_evaluates: ContextVar[bool] = ContextVar("megaprof_evaluation", default=False)


#: Returns the innermost scope around the caller.
current: Callable[[], Scope] = _scope.get


class Work:
    """A context manager around one run of the host's code, which is the work of ``role``. It has a range of its own
    while ranges are recorded.

    ``role``: None leaves the role as it was. ``message``: the name of an annotation's range; None if the range is named
    after the role. ``look`` and ``overlapping``: see `megaprof.recorders.ranges.emit.Range`.
    """

    __slots__ = ("_look", "_message", "_opened", "_overlapping", "_role", "_scope")

    def __init__(
        self,
        role: str | None,
        message: str | None = None,
        look: dict[str, Any] | None = None,
        *,
        overlapping: bool = False,
    ) -> None:
        self._role = role
        self._message = message
        self._look = look
        self._overlapping = overlapping
        self._scope: Token[Scope] | None = None
        self._opened: Range | None = None

    def __enter__(self) -> None:
        window = process.window
        if process.recording:
            with Contained("opening a range", process.abandon):
                from megaprof.formats.ranges import annotation_range, role_range
                from megaprof.recorders.ranges.emit import Range

                role = self._role or current().role
                name = role_range(str(role)) if self._message is None else annotation_range(self._message, role)
                self._opened = Range(name, self._look, overlapping=self._overlapping)
                self._opened.__enter__()
        if self._role is not None:
            self._scope = _scope.set(Scope(self._role, window))

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        in_full(self._leave, self._close)

    def _leave(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            with suppress(ValueError):  # an unfinished coroutine is closed in another context
                _scope.reset(scope)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


class role:
    """Marks the code inside ``with role("ref"): ...`` as the work of that role.

    Steps are counted per target and role. If scopes are nested, the innermost one counts. A name that is empty or not a
    string is logged once and ignored, and training continues.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name: str | None = None
        try:
            self._name = checked_role(name, "role")
        except ValueError as mistake:
            say_once(f"{mistake}. It is left out")

    def __enter__(self) -> None:
        if self._name is not None:
            work = Work(self._name, overlapping=in_task())
            work.__enter__()
            enter_block(self, work)

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        work = leave_block(self)
        if isinstance(work, Work):
            work.__exit__(kind, fault, tb)


@contextmanager
def evaluation() -> Iterator[None]:
    """Marks forward-only passes inside as evaluation. Not needed inside a function named ``evaluate``."""
    token = _evaluates.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # it may be closed in another context, like a scope
            _evaluates.reset(token)


#: Returns whether the caller is inside an `evaluation` block.
evaluating: Callable[[], bool] = _evaluates.get


def enter_block(owner: object, state: object) -> None:
    """Remembers ``state`` in this context until ``owner`` is left. Several tasks may be inside the same ``owner`` at
    once."""
    _blocks.set((*_blocks.get(), (owner, state)))


def leave_block(owner: object) -> object:
    """Returns the ``state`` with which ``owner`` was last entered in this context; None if it was not entered."""
    blocks = _blocks.get()
    for place in reversed(range(len(blocks))):
        if blocks[place][0] is owner:
            _blocks.set(blocks[:place] + blocks[place + 1 :])
            return blocks[place][1]
    return None


def in_task() -> bool:
    """Returns whether an event loop runs the caller, so that other tasks may run before a block ends."""
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None


def say_once(message: str) -> None:
    """Logs a mistake in the host's own calls only the first time, because they may be in its training loop."""
    if message not in process.said and len(process.said) < _MOST_SAID:
        process.said.add(message)
        logger.warning("megaprof: %s", message)
