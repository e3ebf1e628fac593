"""Fault isolation, in one place: a fault of megaprof never reaches the training that hosts it, and what the host raises
while our code runs always does.

Python runs a signal handler between two instructions of the main thread, whatever code those belong to. So an exception
that the host's handler raises (a time-out by SIGALRM, an exit by SIGTERM, Ctrl-C) may surface in our code like any
other. It is the host's, and must reach the host.

The traceback tells them apart, because it has every frame that the exception passed. If one of them is a signal
handler, the exception is the host's: a handler is called by the frame that it interrupted, with that very frame as an
argument. This costs nothing before there is an exception. Blocking signals would not help: a mask belongs to one
thread, another thread of the process takes the signal, and Python then runs the handler in the main thread anyway.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from types import CodeType, FrameType, TracebackType
from typing import Any


def from_host(fault: BaseException) -> bool:
    """Returns whether ``fault`` is the host's: a signal handler raised it, or it is not an error at all
    (KeyboardInterrupt, SystemExit and the like)."""
    if not isinstance(fault, Exception):
        return True
    outer: FrameType | None = None
    tb = fault.__traceback__
    handlers: set[CodeType] | None = None
    while tb is not None:
        inner = tb.tb_frame
        if outer is not None:
            handlers = _handlers() if handlers is None else handlers
            if inner.f_code in handlers or _was_handed(inner, outer):
                return True
        outer, tb = inner, tb.tb_next
    return False


class Suppressed(contextlib.suppress):
    """``with Suppressed(OSError): ...``: `contextlib.suppress` for our own errors. A time-out that the host's
    signal handler raises inside is an OSError, too, and passes through. ``says``: what the log says then, before the
    error."""

    def __init__(self, *kinds: type[BaseException], says: str = "") -> None:
        super().__init__(*kinds)
        self._says = says

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> bool:
        if fault is None or not super().__exit__(kind, fault, tb) or from_host(fault):
            return False
        if self._says:
            logger.error("megaprof: %s: %s", self._says, fault)
        return True


def _was_handed(frame: FrameType, interrupted: FrameType) -> bool:
    """Returns whether ``frame`` got ``interrupted``, which called it, as an argument. Only Python does that, for signal
    handlers and for trace functions."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        if value is interrupted or (isinstance(value, tuple) and any(element is interrupted for element in value)):
            return True
    return False


def _handlers() -> set[CodeType]:
    """Returns the code of the signal handlers that are installed: a handler may have rebound its arguments."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if not hasattr(handler, "__code__"):
            handler = getattr(handler, "__func__", None) or vars(type(handler)).get("__call__")
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            codes.add(code)
    return codes


#: How many lines from one message are logged once: what a host does wrong in its training loop may differ each time.
_MOST_SAID = 64


class _Guarded(logging.LoggerAdapter):  # type: ignore[type-arg]
    """The logger ``megaprof``, without the exceptions of its handlers."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("megaprof"), {})
        self.said: defaultdict[str, set[str]] = defaultdict(set)
        """What `once` has logged, by message."""

    def once(self, message: str, *args: object, about: str | None = None, level: int = logging.WARNING) -> None:
        """Logs a line only the first time in this process, or only the first one that is ``about`` something."""
        subject, said = message % args if about is None else about, self.said[message]
        if subject not in said and len(said) < _MOST_SAID:
            said.add(subject)
            self.log(level, message, *args, stacklevel=2)

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception as fault:  # there is nowhere left to say it
            if from_host(fault):
                raise

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # shows the line that logs, not this adapter
        return msg, kwargs


logger = _Guarded()


def show_lines() -> None:
    """Makes lines of level INFO visible on stderr, unless the host has configured its logging, or as long as it has
    not."""
    package_logger = logging.getLogger("megaprof")
    if package_logger.hasHandlers() or package_logger.level != logging.NOTSET:
        return
    handler = logging.StreamHandler()
    handlers = package_logger.handlers, logging.getLogger().handlers
    handler.addFilter(lambda record: all(other is handler for some in handlers for other in some))
    handler.setFormatter(logging.Formatter("%(message)s"))
    package_logger.addHandler(handler)
    package_logger.setLevel(logging.INFO)


#: How often `in_full` runs a step that the host interrupts.
_ATTEMPTS = 3


class Contained:
    """``with Contained("closing a window", on_fault): ...``: a fault of ours ends here, as one log line.

    ``on_fault`` is called for every exception, before anything else; it cleans up and can be called twice. What the
    host raised passes through unchanged, once that is done.
    """

    __slots__ = ("_doing", "_on_fault")

    def __init__(self, doing: str, on_fault: Callable[[], None]) -> None:
        self._doing = doing
        self._on_fault = on_fault

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> bool:
        return fault is not None and contained(self._doing, self._on_fault, fault)


def contained(doing: str, on_fault: Callable[[], None], fault: BaseException) -> bool:
    """Does what `Contained` does, inside ``except BaseException as fault:``, which costs nothing as long as nothing
    fails. Returns False if ``fault`` is the host's, and the caller must raise it again."""
    in_full(on_fault)
    if from_host(fault):
        logger.warning(
            "megaprof: the host raised %s while megaprof was %s; profiling is off for the rest of this run",
            type(fault).__name__,
            doing,
        )
        return False
    tb = fault.__traceback__
    frame = traceback.extract_tb(tb)[-1] if tb is not None else None
    location = f"{frame.filename}:{frame.lineno}" if frame is not None else "unknown place"
    logger.error(
        "megaprof: %s failed, profiling is off for the rest of this run and training goes on: %s: %s (%s)",
        doing,
        type(fault).__name__,
        fault,
        location,
    )
    return True


def fault_now() -> str:
    """Describes the exception that is being handled, or cleaned up after, in a few words."""
    fault = sys.exc_info()[1]
    return "a fault" if fault is None else f"{type(fault).__name__}: {fault}"


def in_full(*steps: Callable[[], object] | None) -> None:
    """Runs every step of a clean-up, even if one of them raises. None is no step. It must be safe to run a step twice.

    If the host raises an exception in the middle of a step, the step runs again, and the exception reaches the caller
    when all steps are done. A fault of ours ends its step with a log line: cleaning up after a fault must not cause the
    next one.
    """
    host_fault: BaseException | None = None
    for step in filter(None, steps):
        for _ in range(_ATTEMPTS):
            try:
                step()
                break
            except BaseException as fault:
                if not from_host(fault):
                    logger.warning("megaprof: cleaning up failed: %r", fault)
                    break
                host_fault = fault
    if host_fault is not None:
        raise host_fault
