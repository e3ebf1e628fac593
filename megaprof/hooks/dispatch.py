"""Which session a call belongs to, and the wrapper that puts a range around a function of somebody else's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from megaprof.capture.session import Session
from megaprof.formats import codes
from megaprof.parallel.chunks import innermost
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.emit import Range
from megaprof.recorders.tape import Gate, Hook
from megaprof.runtime.isolation import contain
from megaprof.runtime.logs import logger

Code = Callable[[RecordedCall, tuple[Any, ...], dict[str, Any]], int]


class Dispatcher:
    """Routes a ``forward_backward_func`` call to the session of the model that it runs. One per process.

    ``call`` is the call that is being recorded, or None. It is all that the microbatch hooks look at, so an armed
    process without an open window pays one attribute read per microbatch.
    """

    def __init__(self, held: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Windows open and close inside a ``held()`` block, which keeps a SIGTERM from ending one half-way."""
        self._held = held
        self.call: RecordedCall | None = None
        self.gate = Gate(partial(contain, "reading the clock of the timeline", self.drop))
        self.depth = 0  # of nested schedule calls: a CUDA graph wrapper calls the schedule inside itself
        self._recording: tuple[Session, RecordedCall] | None = None
        self._routes: list[tuple[Session, tuple[weakref.ref[Any], ...] | None]] = []

    def add(self, session: Session, models: tuple[Any, ...] | None) -> None:
        """Route calls that run any of ``models`` to ``session``; None takes whatever no other session takes."""
        self._routes.append((session, None if models is None else tuple(weakref.ref(innermost(m)) for m in models)))

    def remove(self, session: Session) -> None:
        self._routes = [route for route in self._routes if route[0] is not session]

    @property
    def empty(self) -> bool:
        return not self._routes

    @property
    def level(self) -> str:
        """The finest ranges that the call being recorded is to have."""
        recording = self._recording
        return recording[0].config.ranges if recording is not None and recording[1].ranged else "step"

    def begin(self, facts: CallFacts) -> bool:
        """True when the call is recorded; ``end`` must then follow."""
        if Session.memory_full is not None:
            self.stop_early()
        session = self._session_of(facts.chunks)
        if session is None:
            return False
        with self._held():
            call = session.begin(facts)
        if call is None:
            return False
        self._recording = session, call
        self._look_at(call if call.ranged or call.line is not None else None)
        return True

    def _look_at(self, call: RecordedCall | None) -> None:
        """From now on the hooks record in ``call``; None: they only call what they hook."""
        self.call = call
        self.gate.tape = call.tape if call is not None and call.line is not None else None
        # An open window wants ranges, or at least to be closed early when host memory runs out.
        self.gate.slow = call is not None and (call.ranged or Session.open_window() is not None)

    def spent(self, nanoseconds: int) -> None:
        """What it took to begin the call that is being recorded."""
        if self.call is not None and self.call.line is not None:
            self.call.line.own = nanoseconds

    def end(self, *, failed: bool) -> None:
        recording, self._recording = self._recording, None
        self._look_at(None)
        if recording is not None:
            session, call = recording
            with self._held():
                session.end(call, failed=failed)

    def stop_early(self) -> None:
        """Host memory runs out: close the open window, keep what it has, and record nothing more in this run."""
        reason, Session.memory_full = Session.memory_full, None
        if reason is None:
            return
        logger.warning("megaprof: the window closes early and is the last one of this run: %s", reason)
        recording, self._recording = self._recording, None
        self._look_at(None)
        with self._held():
            if recording is not None:
                recording[0].interrupt(recording[1], reason)
            for session, _ in self._routes:
                session.finish(reason)
                session.disabled = True

    def forget(self) -> None:
        """In a forked child: the sessions are the parent's."""
        self._recording = None
        self._look_at(None)
        self._routes = []

    def drop(self) -> None:
        """After a fault in a hook: the sessions that it may have touched record nothing more."""
        self._look_at(None)
        for session in [self._recording[0]] if self._recording is not None else [route[0] for route in self._routes]:
            session.abandon()

    def _session_of(self, chunks: tuple[Any, ...]) -> Session | None:
        models = [innermost(chunk) for chunk in chunks]
        fallback = None
        for session, owned in self._routes:
            if owned is None:
                fallback = session
            elif any(reference() is model for reference in owned for model in models):
                return session
        return fallback


def always(code: int) -> Code:
    """The code of a function that is the same event every time."""
    return lambda call, args, kwargs: code


def ranged(
    original: Callable[..., Any],
    dispatcher: Dispatcher,
    code_of: Code,
    after: Callable[[RecordedCall, dict[str, Any], Any], Any] | None = None,
    fast: tuple[Any, ...] | None = None,
) -> Callable[..., Any]:
    """``original`` inside a range, and in the timeline, while a call is recorded; nothing but ``original`` otherwise.

    ``code_of(call, args, kwargs)`` says which event this call of it is (`megaprof.formats.codes`), once;
    ``after(call, kwargs, result)`` returns what the caller gets. A fault of ours is contained; an exception of
    ``original`` passes unchanged. ``fast``: the same for `recorders.tape.Hook`, from the code on, for steps that are
    recorded while no window is open.
    """

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if Session.memory_full is not None:
            dispatcher.stop_early()
        call = dispatcher.call
        if call is None:
            return original(*args, **kwargs)
        line, tape, opened, began, code = call.line, call.tape, None, None, 0
        try:
            code = code_of(call, args, kwargs)
            if call.ranged:
                entering = Range(str(codes.name(code)))
                entering.__enter__()
                opened = entering
            if line is not None:
                tape.now = code
                began = tape.mark()
        except Exception as fault:
            contain("opening a range", dispatcher.drop, fault)
        try:
            result = original(*args, **kwargs)
        finally:
            try:
                if began is not None and line is not None:
                    tape.add(code, began, tape.mark())
                    tape.now = 0
                if opened is not None:
                    opened.__exit__(None, None, None)
            except Exception as fault:
                contain("closing a range", dispatcher.drop, fault)
        if after is not None:
            try:
                return after(call, kwargs, result)
            except Exception as fault:
                contain("matching a microbatch", dispatcher.drop, fault)
        return result

    return hooked if fast is None or Hook is None else Hook(dispatcher.gate, original, hooked, *fast)
