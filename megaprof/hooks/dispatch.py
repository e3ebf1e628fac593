"""The wrappers around functions of the host and of Megatron: a call that may be recorded, and a range inside one."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from megaprof.capture.process import process
from megaprof.capture.profiler import Dispatcher
from megaprof.formats import codes
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.emit import Range
from megaprof.recorders.tape import Hook
from megaprof.runtime.isolation import contained, in_full

Code = Callable[[RecordedCall, tuple[Any, ...], dict[str, Any]], int]
Argument = tuple[int, str]
"""Position, not counting ``self``, and name of an argument. The position is impossible if there is no such argument."""


@functools.lru_cache(maxsize=64)
def argument(function: Callable[..., Any], name: str) -> Argument:
    """Returns where ``function`` takes its argument ``name``."""
    names = [each for each in inspect.signature(function).parameters if each != "self"]
    return (names.index(name) if name in names else sys.maxsize), name


def given(argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the ``argument`` of a call, however it is passed; None if it is not."""
    index, name = argument
    return args[index] if index < len(args) else kwargs.get(name)


def stepped(
    original: Callable[..., Any],
    dispatcher: Dispatcher,
    facts_of: Callable[[tuple[Any, ...], dict[str, Any]], CallFacts],
    prepare: Callable[[RecordedCall, dict[str, Any]], None],
) -> Callable[..., Any]:
    """Wraps ``original``, which runs all microbatches of a step, so that its calls may be recorded.

    ``facts_of(args, kwargs)`` returns the facts of a call. ``prepare`` gets every recorded call before it starts, with
    its keyword arguments, which it may replace, and patches what stays replaced until the call ends. Our own faults are
    contained. An exception of ``original`` passes unchanged.
    """

    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        if dispatcher.inside is not None or not dispatcher.sessions:
            return original(*args, **kwargs)
        failed = True
        try:
            try:
                dispatcher.inside = threading.get_ident()
                entered = time.perf_counter_ns()
                call = dispatcher.begin(facts_of(args, kwargs))
                if call is not None:
                    prepare(call, kwargs)
                    if call.timed:
                        call.tape.own = time.perf_counter_ns() - entered
            except BaseException as fault:  # `with Contained(...)` lets the host interrupt us before it is entered
                if not contained("looking at a step", dispatcher.drop, fault):
                    raise
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            dispatcher.inside = None
            try:
                dispatcher.end(failed=failed)
            except BaseException as fault:
                if not contained("closing a window", dispatcher.drop, fault):
                    raise

    return forward_backward


def ranged(
    original: Callable[..., Any],
    dispatcher: Dispatcher,
    code_of: Code | int,
    after: Callable[[RecordedCall, dict[str, Any], Any], Any] | None = None,
    fast: tuple[Any, ...] | None = None,
    name_of: Callable[[RecordedCall], str] | None = None,
) -> Callable[..., Any]:
    """Wraps ``original``. While a call is recorded, it runs inside a range and in the timeline; else it just runs.

    ``code_of(call, args, kwargs)`` returns the code of the event (`megaprof.formats.codes`), and is called once; or it
    is the code, if all calls are the same event. ``after(call, kwargs, result)`` returns what the caller gets. Our own
    faults are contained. An exception of ``original``, or of one of the host's signal handlers, passes unchanged.
    ``fast``: the arguments of `recorders.tape.Hook` from ``code`` on; that hook serves steps that are recorded while no
    window is open. ``name_of`` returns the range's name, if it says more than the code.
    """

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if process.asked:
            dispatcher.settle()
        call = dispatcher.call
        if call is None:
            return original(*args, **kwargs)
        timed, tape, opened, begun, began, code = call.timed, call.tape, None, False, None, 0
        try:
            try:
                code = code_of if isinstance(code_of, int) else code_of(call, args, kwargs)
                if call.level is not None:
                    opened = Range(str(codes.name(code)) if name_of is None else name_of(call))
                    opened.__enter__()
                if timed:
                    begun, began = True, tape.begin(code, fast is not None)
            except BaseException as fault:
                if not contained("opening a range", dispatcher.drop, fault):
                    raise
            result = original(*args, **kwargs)
        finally:
            try:
                if begun:
                    tape.end(code, began)
                if opened is not None:
                    opened.close()
            except BaseException as fault:
                end = dispatcher.drop if opened is None else partial(in_full, opened.close, dispatcher.drop)
                if not contained("closing a range", end, fault):
                    raise
        if after is not None:
            try:
                return after(call, kwargs, result)
            except BaseException as fault:
                if not contained("matching a microbatch", dispatcher.drop, fault):
                    raise
        return result

    return hooked if fast is None or Hook is None else Hook(dispatcher.gate, original, hooked, *fast)
