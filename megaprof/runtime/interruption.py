"""Tells a fault of ours from an exception that the host raised in the middle of our code.

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
import signal
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
    signal handler raises inside is an OSError, too, and passes through."""

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> bool:
        return bool(super().__exit__(kind, fault, tb)) and fault is not None and not from_host(fault)


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
