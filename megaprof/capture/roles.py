"""Marks code as the work of one role (actor, ref, critic, reward, rollout) when models share a process, or as
evaluation; and ``annotate``, which puts a range around a function or a block of the host's, and names its role.

    with megaprof.role("ref"):
        forward_backward_func(...)      # counted, captured and named as the reference model's

    @annotate                                        @annotate(role="rollout", color="red")
    def load_batch(): ...                            async def generate(prompts): ...

    with annotate(role="critic", message="values"): ...

An annotation's range is written while a window is open. With ``--profile-discrete`` the outermost annotated work of a
role opens a window of its own on captured steps. Without hooks, an annotated function costs only one extra call, unless
Nsight Systems records the process: then its range is always written.

A scope is a context variable. It holds for the code inside, for coroutines and tasks that are started inside, and for
``asyncio.to_thread``. It does not hold for other threads, or for a task that was already running. So interleaved tasks
of an asynchronous rollout each keep their own role.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from megaprof.capture.bounds import compiling
from megaprof.capture.process import process
from megaprof.config.values import ANNOTATED, checked_role
from megaprof.formats.ranges import DOMAIN, annotation_range, role_range
from megaprof.runtime.isolation import Contained, in_full, logger

if TYPE_CHECKING:
    from megaprof.recorders.emit import Range


class Scope(NamedTuple):
    """A stretch of code that is the work of one role."""

    role: str | None
    window: object
    """The window that was open when the scope began, and has a range for it; None if none was open."""


_NOBODY = Scope(None, None)
_scope: ContextVar[Scope] = ContextVar("megaprof_role", default=_NOBODY)
_blocks: ContextVar[tuple[tuple[object, Callable[[bool], None]], ...]] = ContextVar("megaprof_blocks", default=())
_evaluates: ContextVar[bool] = ContextVar("megaprof_evaluation", default=False)


#: Returns the innermost scope around the caller.
current: Callable[[], Scope] = _scope.get


def begin_work(
    role: str | None, message: str | None = None, look: dict[str, Any] | None = None, *, overlapping: bool = False
) -> Callable[[bool], None]:
    """Begins one run of the host's code, which is the work of ``role``. It has a range of its own while ranges are
    recorded. Annotated work of a role may also open a window. Returns a function that ends it, which is told whether it
    failed.

    ``role``: None leaves the role as it was. ``message``: the name of an annotation's range; None if the range is named
    after the role. ``look`` and ``overlapping``: see `megaprof.recorders.emit.Range`.
    """
    session: Any = None
    opened: Range | None = None
    if message is not None and role is not None and current().role != role:
        with Contained("opening a window", process.drop):
            # The session of this role, or else of any role, or else the first one.
            by_role = {each.role: each for each in reversed(process.sessions)}
            owner = by_role.get(role) or by_role.get(None) or next(iter(process.sessions), None)
            session = owner if owner is not None and owner.begin_work(role) else None
    window = process.window
    if process.recording:
        with Contained("opening a range", process.drop):
            from megaprof.recorders.emit import Range

            whose = role or current().role
            name = role_range(str(whose)) if message is None else annotation_range(message, whose)
            opened = Range(name, look, overlapping=overlapping)
            opened.__enter__()
    token = None if role is None else _scope.set(Scope(role, window))

    def leave() -> None:
        # An unfinished coroutine is closed in another context; the host may interrupt the first attempt.
        with suppress(ValueError, RuntimeError):
            if token is not None:
                _scope.reset(token)

    def end(failed: bool) -> None:
        in_full(
            leave,
            None if opened is None else opened.close,
            None if session is None else partial(session.over, ANNOTATED, failed=failed),
        )

    return end


class Block:
    """A context manager of the host's, the work of ``role``, which several tasks may be inside at once: what it began
    is remembered in each task's own context."""

    def __init__(self, role: str | None) -> None:
        self._role = role

    def __enter__(self) -> None:
        if self._role is not None:
            self._begin(None, None)

    def _begin(self, message: str | None, look: dict[str, Any] | None) -> None:
        events = sys.modules.get("asyncio.events")
        # An event loop runs the caller: other tasks may run before the block ends.
        in_task = events is not None and events._get_running_loop() is not None
        end = begin_work(self._role, message, look, overlapping=in_task)
        _blocks.set((*_blocks.get(), (self, end)))

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        blocks = _blocks.get()
        for place in reversed(range(len(blocks))):
            if blocks[place][0] is self:
                _blocks.set(blocks[:place] + blocks[place + 1 :])
                blocks[place][1](fault is not None and not isinstance(fault, GeneratorExit))
                return


def role(name: str) -> Block:
    """Marks the code inside ``with role("ref"): ...`` as the work of that role.

    Steps are counted per target and role. If scopes are nested, the innermost one counts. A name that is empty or not a
    string is logged once and ignored, and training continues.
    """
    try:
        return Block(checked_role(name, "role"))
    except ValueError as mistake:
        logger.once("megaprof: %s. It is left out", mistake)
        return Block(None)


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


_COLORS = "an ARGB integer, one of NVTX's names (red, green, blue, ...), or matplotlib's where that is installed"


class annotate(Block):
    """Names a range in traces. Use it as a decorator, with or without arguments, or as a context manager.

    ``role`` is the role that does the work (actor, ref, critic, rollout, ...). ``message`` is the name of the range;
    the default is the function's qualified name. ``color``, ``domain`` and ``category`` are passed to NVTX; the
    default domain is ``megaprof``.

    It can wrap functions, methods (also static and class methods) and coroutine functions, but no generators. The range
    of a coroutine lasts from its first step to its end, including waiting. What torch.compile compiles has no range
    inside. Exceptions pass through unchanged. Invalid
    arguments raise ValueError when a function is decorated. In a ``with`` block, which may be in the training
    loop, they are logged once and ignored.
    """

    def __new__(cls, message: Any = None, **options: Any) -> Any:
        made = super().__new__(cls)
        if callable(message) or hasattr(message, "__get__"):  # @annotate, also above @property, which it refuses
            made.__init__(**options)  # type: ignore[misc]
            return made(message)
        return made

    def __init__(
        self,
        message: str | None = None,
        *,
        role: str | None = None,
        color: str | int | None = None,
        domain: str | None = None,
        category: str | int | None = None,
    ) -> None:
        self._message: str | None = None
        self._role: str | None = None
        self._look: dict[str, Any] = {"color": None, "domain": DOMAIN, "category": None}
        self._mistake: ValueError | None = None
        try:
            given = {"message": message, "color": color, "domain": domain, "category": category}
            for name, value in given.items():
                kinds, words = (str | int, "text or a number") if name in ("color", "category") else (str, "text")
                if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or value == ""):
                    raise ValueError(f"annotate: {name}={value!r} is not valid; valid: {words}, not empty, or None")
            self._role = None if role is None else checked_role(role, "annotate: role")
            self._look = {"color": _checked_color(color), "domain": domain or DOMAIN, "category": category}
            self._message = message
        except ValueError as mistake:
            self._mistake = mistake

    def __call__(self, function: Any) -> Any:
        if self._mistake is not None:
            raise self._mistake
        if isinstance(function, staticmethod | classmethod):
            return type(function)(self(function.__func__))
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"annotate: {function!r} is not a function or method")
        message = self._message or str(getattr(function, "__qualname__", type(function).__qualname__))
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ValueError(
                f"annotate: {message} is a generator, between whose steps others work; valid: a block around each part "
                "of its work, `with megaprof.annotate(...):`, or the function that consumes it"
            )
        role, look = self._role, self._look

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (process.sessions or process.traced) or compiling():
                return function(*args, **kwargs)
            end, failed = begin_work(role, message, look), True
            try:
                result = function(*args, **kwargs)
                failed = False
                return result
            finally:
                end(failed)

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            if not (process.sessions or process.traced):
                return await function(*args, **kwargs)
            end, failed = begin_work(role, message, look, overlapping=True), True
            try:
                result = await function(*args, **kwargs)
                failed = False
                return result
            except GeneratorExit:  # closes a coroutine that is not finished
                failed = False
                raise
            finally:
                end(failed)

        return run if inspect.iscoroutinefunction(function) else call

    def __enter__(self) -> None:
        if self._mistake is not None:
            logger.once("megaprof: %s. It is left out", self._mistake)
        self._begin(self._message or "block", self._look)


def _checked_color(color: str | int | None) -> str | int | None:
    if isinstance(color, str):
        try:
            from nvtx.colors import color_to_hex
        except ModuleNotFoundError:  # there is no NVTX here (macOS), so nothing shows a color
            return color
        try:
            color_to_hex(color)
        except (TypeError, ValueError):
            raise ValueError(f"annotate: color={color!r} is not a color; valid: {_COLORS}") from None
    elif color is not None and not 0 <= color <= 0xFFFFFFFF:
        raise ValueError(f"annotate: color={color!r} is not a color; valid: {_COLORS}")
    return color
