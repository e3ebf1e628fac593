"""Which session a call belongs to, and the wrapper that puts a range around a function of somebody else's."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from megaprof.capture.session import Session
from megaprof.formats import codes
from megaprof.hooks.patching import Patches
from megaprof.parallel.chunks import innermost
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.emit import Range
from megaprof.recorders.tape import Gate, Hook
from megaprof.recorders.timeline.recorder import TimelineRecorder
from megaprof.runtime.device import capturing
from megaprof.runtime.isolation import contained, fault_now, in_full
from megaprof.runtime.logs import logger

Code = Callable[[RecordedCall, tuple[Any, ...], dict[str, Any]], int]


class ModuleRanges(Protocol):
    """The ranges of modules in one recorded call."""

    def close(self) -> None:
        """Close what is open in this thread. Can be run twice."""


class Dispatcher:
    """Routes a ``forward_backward_func`` call to the session of the model that it runs. One per process.

    ``call`` is the call that is being recorded, or None. It is all that the microbatch hooks look at, so an armed
    process without an open window pays one attribute read per microbatch.
    """

    def __init__(self) -> None:
        self.call: RecordedCall | None = None
        """The call that is being recorded, None outside of one. All that hooks in Python look at."""
        self.gate = Gate(self._clock_failed)
        self._resting: TimelineRecorder | None = None  # the one that does not record the call, to measure its cost
        self.inside: int | None = None
        """The thread that is inside a schedule call. A CUDA graph wrapper calls the schedule inside itself."""
        self.of_this_call = Patches()
        """What is replaced until the recorded call ends."""
        self.finalize: tuple[Any, Any] | None = None
        """The function that finalises the gradients, as the last call found it, and its hook."""
        self.modules: ModuleRanges | None = None
        self._recording: tuple[Session, RecordedCall] | None = None
        self._leaving: list[Callable[[], None]] = []
        self._dropped: list[Session] = []
        self._routes: list[tuple[Session, tuple[weakref.ref[Any], ...] | None]] = []
        self._found: tuple[weakref.ref[Any], weakref.ref[Any], Session] | None = None
        """The last call's model, if it is one chunk; the model inside its wrappers; and whose it is. A module of torch
        takes its time to say that it has no attribute of some name."""

    def add(self, session: Session, models: tuple[Any, ...] | None) -> None:
        """Route calls that run any of ``models`` to ``session``; None takes whatever no other session takes."""
        self._found = None
        self._routes.append((session, None if models is None else tuple(weakref.ref(innermost(m)) for m in models)))

    def remove(self, session: Session) -> None:
        self._found = None
        self._routes = [route for route in self._routes if route[0] is not session]

    @property
    def empty(self) -> bool:
        return not self._routes

    @property
    def level(self) -> str:
        """The finest ranges that the call being recorded is to have."""
        recording = self._recording
        return recording[0].config.ranges if recording is not None and recording[1].ranged else "step"

    def _now(self, call: RecordedCall | None) -> None:
        """``call`` is recorded from now on; None: no call is."""
        self.call = call
        self.gate.tape = call.tape if call is not None and call.line is not None else None
        # An open window wants ranges, or at least to be closed early when host memory runs out.
        self.gate.slow = (call is not None and call.ranged) or Session.open_window() is not None

    def _clock_failed(self, fault: BaseException) -> None:
        """What the clock of a tape raised; raises what belongs to the host."""
        if not contained("reading the clock of the timeline", self.drop, fault):
            raise fault

    def begin(self, facts: CallFacts) -> bool:
        """True when the call is recorded. ``end`` must follow in any case."""
        if Session.urgent:
            self.settle()
        session = self._session_of(facts.chunks)
        if session is None:
            return False
        call = session.begin(facts)
        self._resting = None
        if call is None:
            timeline = session.timeline
            if timeline is not None and timeline.resting:
                self._resting = timeline
            return False
        self._recording = session, call
        self._now(call if call.ranged or call.line is not None else None)
        return True

    def spent(self, nanoseconds: int) -> None:
        """What it took to begin the call."""
        call = self.call
        if call is not None and call.line is not None:
            call.line.own = nanoseconds
        elif self._resting is not None:
            self._resting.hooks_took(nanoseconds)

    def end(self, *, failed: bool) -> None:
        """The call is over, recorded or not; ``failed``: by an exception of the host's."""
        self._now(None)
        if self.of_this_call or self.modules is not None:
            self._put_back()
        if self._dropped:
            self._abandon()
        if self._recording is not None:
            (session, call), self._recording = self._recording, None
            session.end(call, failed=failed)
        if Session.urgent:
            self.settle()

    def ask(self, leave: Callable[[], None]) -> None:
        """Have ``leave`` called by the training thread, before its next call or at the end of this one. From any
        thread."""
        self._leaving.append(leave)
        Session.urgent = True

    def settle(self) -> None:
        """Do what other threads asked the training thread for: it alone may close a window, though not while a CUDA
        graph is captured. In the middle of a call only what cannot wait: the device may be waiting for a peer that
        waits for what this rank has yet to send."""
        if not self._routes or capturing():  # without routes it is not the process's own: what is asked is not for it
            return
        Session.urgent = False
        try:
            if Session.memory_full is not None:
                reason, Session.memory_full = Session.memory_full, None
                logger.warning("megaprof: the window closes early: %s", reason)
                self._cut(reason)
            while self._leaving and self._recording is None:
                self.interrupt("the hooks were removed")
                in_full(self._leaving[0])
                del self._leaving[0]
            Session.urgent = Session.urgent or bool(self._leaving)
        except BaseException:
            Session.urgent = True  # the host interrupted it
            raise

    def interrupt(self, reason: str) -> None:
        """Close every open window now, in the middle of a call perhaps. What it has is kept."""
        self._put_back()
        recording, self._recording = self._recording, None
        self._now(None)
        if recording is not None:
            recording[0].interrupt(recording[1], reason)
        for session, _ in self._routes:
            session.finish(reason)

    def _cut(self, reason: str) -> None:
        """The same, and the timeline goes on with the call."""
        in_full(*([] if self.modules is None else [self.modules.close]))
        call = None
        if self._recording is not None:
            session, call = self._recording
            session.cut(call, reason)
        for session, _ in self._routes:
            session.finish(reason)
        self._now(None if call is None or call.line is None else call)

    def _put_back(self) -> None:
        """Undo what was done to the host for the call that is recorded. Can be run twice."""
        modules = self.modules
        in_full(self.of_this_call.restore, *([] if modules is None else [modules.close]))
        self.modules = None

    def forget(self) -> None:
        """In a forked child: the sessions are the parent's."""
        self._now(None)
        self._recording = self.inside = None
        self._routes, self._leaving, self._dropped, self._found = [], [], [], None

    def drop(self) -> None:
        """After a fault in a hook: the sessions that it may have touched record nothing more. Can be run twice.

        Inside a schedule call their recorders stop when it ends: the fault may be in the middle of a backward, and
        stopping Kineto inside the autograd engine crashes the process.
        """
        self._now(None)
        self._dropped = self._touched()
        for session in self._dropped:
            session.off = session.off or fault_now()
        in_full(self._put_back, *([self._abandon] if self.inside is None else []))

    def _touched(self) -> list[Session]:
        """The sessions that a fault in a hook now may have to do with."""
        return [route[0] for route in self._routes] if self._recording is None else [self._recording[0]]

    def _abandon(self) -> None:
        """Stop the recorders of the sessions that were dropped. Can be run twice."""
        recording = self._recording
        ranges = [] if recording is None else [partial(recording[1].outermost.__exit__, None, None, None)]
        in_full(*ranges, *(session.abandon for session in self._dropped))
        self._recording, self._dropped = None, []

    def unwrapped(self, chunk: Any) -> Any:
        """The model inside the wrappers of ``chunk``."""
        found = self._found
        known = found[1]() if found is not None and found[0]() is chunk else None
        return innermost(chunk) if known is None else known

    def _session_of(self, chunks: tuple[Any, ...]) -> Session | None:
        found = self._found
        if found is not None and len(chunks) == 1 and found[0]() is chunks[0]:
            return found[2]
        session = self._look_up(chunks)
        if session is not None and len(chunks) == 1 and chunks[0] is not None:
            with suppress(TypeError):  # a model that cannot be referred to weakly is looked up every time
                self._found = weakref.ref(chunks[0]), weakref.ref(innermost(chunks[0])), session
        return session

    def _look_up(self, chunks: tuple[Any, ...]) -> Session | None:
        models = [innermost(chunk) for chunk in chunks]
        fallback = None
        for session, owned in self._routes:
            if owned is None:
                fallback = session
            elif any(reference() is model for reference in owned for model in models):
                return session
        return fallback


def stepped(
    original: Callable[..., Any],
    dispatcher: Dispatcher,
    facts_of: Callable[[tuple[Any, ...], dict[str, Any]], CallFacts],
    prepare: Callable[[CallFacts], None],
) -> Callable[..., Any]:
    """``original``, which runs all microbatches of a step, as a call that may be recorded.

    ``facts_of(args, kwargs)`` says what the call is; ``prepare`` is called before one that is recorded, and puts in
    what is replaced until it ends. A fault of ours is contained; an exception of ``original`` passes unchanged.
    """

    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        if dispatcher.inside is not None or dispatcher.empty:
            return original(*args, **kwargs)
        failed = True
        try:
            try:
                dispatcher.inside = threading.get_ident()
                entered = time.perf_counter_ns()
                facts = facts_of(args, kwargs)
                if dispatcher.begin(facts):
                    prepare(facts)
                dispatcher.spent(time.perf_counter_ns() - entered)
            except BaseException as fault:  # not `Contained`, which every step would pay for
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


def always(code: int) -> Code:
    """The code of a function that is the same event every time."""
    return lambda call, args, kwargs: code


def ranged(
    original: Callable[..., Any],
    dispatcher: Dispatcher,
    code_of: Code,
    after: Callable[[RecordedCall, dict[str, Any], Any], Any] | None = None,
    fast: tuple[Any, ...] | None = None,
    name_of: Callable[[RecordedCall], str] | None = None,
) -> Callable[..., Any]:
    """``original`` inside a range, and in the timeline, while a call is recorded; nothing but ``original`` otherwise.

    ``code_of(call, args, kwargs)`` says which event this call of it is (`megaprof.formats.codes`), once;
    ``after(call, kwargs, result)`` returns what the caller gets. A fault of ours is contained; an exception of
    ``original``, or of a signal handler of the host's, passes unchanged. ``fast``: the same for
    `recorders.tape.Hook`, from the code on, for steps that are recorded while no window is open. ``name_of``: the
    range's name, where it says more than the code.
    """

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if Session.urgent:
            dispatcher.settle()
        call = dispatcher.call
        if call is None:
            return original(*args, **kwargs)
        line, tape, opened, began, code = call.line, call.tape, None, None, 0
        try:
            try:
                code = code_of(call, args, kwargs)
                if call.ranged:
                    opened = Range(str(codes.name(code)) if name_of is None else name_of(call))
                    opened.__enter__()
                if line is not None:
                    tape.now = code
                    began = tape.mark()
            except BaseException as fault:
                if not contained("opening a range", dispatcher.drop, fault):
                    raise
            result = original(*args, **kwargs)
        finally:
            try:
                if began is not None and line is not None:
                    tape.add(code, began, tape.mark())
                    tape.now = 0
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
