"""``annotate``, which puts a range around a function or a block of the host's, and names its role.

    @annotate                                        @annotate(role="rollout", color="red")
    def load_batch(): ...                            async def generate(prompts): ...

    with annotate(role="critic", message="values"): ...

The range is written while a window is open, and schedule calls inside count under the role. With ``--profile-discrete``
the outermost annotated work of a role opens a window of its own on captured steps. Without hooks, an annotated function
costs only one extra call, unless Nsight Systems records the process: then its range is always written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megaprof.capture import roles
from megaprof.capture.process import process
from megaprof.capture.roles import Work, enter_block, in_task, leave_block
from megaprof.config.per_role import checked_role
from megaprof.formats.ranges import DOMAIN
from megaprof.runtime.isolation import Contained

if TYPE_CHECKING:
    from megaprof.capture.session import Session

_COLORS = "an ARGB integer, one of NVTX's names (red, green, blue, ...), or matplotlib's where that is installed"


class annotate:
    """Names a range in traces. Use it as a decorator, with or without arguments, or as a context manager.

    ``role`` is the role that does the work (actor, ref, critic, rollout, ...). ``message`` is the name of the range;
    the default is the function's qualified name. ``color``, ``domain`` and ``category`` are passed to NVTX; the
    default domain is ``megaprof``.

    It can wrap functions, methods (also static and class methods) and coroutine functions, but no generators. The range
    of a coroutine lasts from its first step to its end, including waiting. Exceptions pass through unchanged. Invalid
    arguments raise ValueError when a function is decorated. In a ``with`` block, which may be in the training
    loop, they are logged once and ignored.
    """

    def __new__(cls, message: Any = None, **options: Any) -> Any:
        made = super().__new__(cls)
        if callable(message) or isinstance(message, staticmethod | classmethod):  # @annotate
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
            _check(
                message=(message, str), color=(color, str | int), domain=(domain, str), category=(category, str | int)
            )
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
        if inspect.iscoroutinefunction(function):
            wrapper = self._coroutine(function, message)
        else:
            wrapper = self._function(function, message)
        return functools.wraps(function)(wrapper)

    def __enter__(self) -> None:
        if self._mistake is not None:
            roles.say_once(f"{self._mistake}. It is left out")
        with ExitStack() as entered:
            entered.enter_context(_RoleWindow(self._role))
            entered.enter_context(Work(self._role, self._message or "block", self._look, overlapping=in_task()))
            enter_block(self, entered.pop_all())

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        entered = leave_block(self)
        if isinstance(entered, ExitStack):
            entered.__exit__(kind, fault, tb)

    def _function(self, function: Callable[..., Any], message: str) -> Callable[..., Any]:
        role, look = self._role, self._look

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _watched():
                return function(*args, **kwargs)
            with _RoleWindow(role), Work(role, message, look):
                return function(*args, **kwargs)

        return wrapper

    def _coroutine(self, function: Callable[..., Any], message: str) -> Callable[..., Any]:
        role, look = self._role, self._look

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _watched():
                return await function(*args, **kwargs)
            with _RoleWindow(role), Work(role, message, look, overlapping=True):
                return await function(*args, **kwargs)

        return wrapper


def _watched() -> bool:
    return bool(process.sessions) or process.traced


class _RoleWindow:
    """A context manager around annotated work of a role, which opens a window for it if one is wanted."""

    __slots__ = ("_role", "_session")

    def __init__(self, role: str | None) -> None:
        self._role = role
        self._session: Session | None = None

    def __enter__(self) -> None:
        role = self._role
        if role is None or roles.current().role == role:  # inside work of the same role
            return
        sessions = process.sessions
        session = next((s for s in sessions if s.role == role), None)
        session = session or next((s for s in sessions if s.role is None), None) or next(iter(sessions), None)
        with Contained("opening a window", process.abandon):
            if session is not None and session.begin_work(role):
                self._session = session

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        session, self._session = self._session, None
        if session is not None:
            with Contained("closing a window", process.abandon):
                session.end_work(failed=fault is not None and not isinstance(fault, GeneratorExit))


def _check(**given: tuple[Any, Any]) -> None:
    """Raises ValueError for the first of the ``given`` values that is neither None nor of its types."""
    for name, (value, kinds) in given.items():
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or value == ""):
            raise ValueError(f"annotate: {name}={value!r} is not valid; valid: {kinds} or None, not empty")


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
