"""Which session a call belongs to, and what is recorded of it while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megaprof.capture.process import process
from megaprof.capture.session import Session
from megaprof.parallel.chunks import innermost
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.tape import Gate
from megaprof.runtime.device import GRACE_SECONDS, capturing
from megaprof.runtime.isolation import Contained, contained, fault_now, in_full
from megaprof.runtime.logs import logger
from megaprof.runtime.patching import Patches


class Dispatcher:
    """Routes a ``forward_backward_func`` call to the session of the model that it runs.

    The hooks of a process share one as long as they are in. ``call`` is the call that is being recorded, or None. It is
    all that the microbatch hooks look at, so an armed process without an open window pays one attribute read per
    microbatch.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = process.sessions
        """The sessions whose hooks are in. Empty for ever once the last of them is out: hooks of ours that somebody
        else wrapped stay, and do nothing then."""
        self.call: RecordedCall | None = None
        """The call that is being recorded, None outside of one. All that hooks in Python look at."""
        self.gate = Gate(self._clock_failed)
        self.inside: int | None = None
        """The thread that is inside a schedule call. A CUDA graph wrapper calls the schedule inside itself."""
        self.of_this_call = Patches()
        """What is replaced until the recorded call ends."""
        self.finalize: tuple[Any, Any] | None = None
        """The function that finalises the gradients, as the last call found it, and its hook."""
        self.close_modules: Callable[[], object] | None = None
        """Closes the ranges of modules that are open in this thread. Can be run twice."""
        self._recording: tuple[Session, RecordedCall] | None = None
        self._leaving: list[Callable[[], None]] = []
        self._dropped: list[Session] = []
        self._found: tuple[weakref.ref[Any], weakref.ref[Any], Session] | None = None
        """The last call's model, if it is one chunk; the model inside its wrappers; and whose it is. A module of torch
        takes its time to say that it has no attribute of some name."""

    def add(self, session: Session) -> None:
        """Route calls that run any model of ``session`` to it; one without models takes whatever no other takes."""
        self._found = None
        self.sessions.append(session)

    def remove(self, session: Session) -> None:
        """Route no calls to ``session`` any more."""
        self._found = None
        if session in self.sessions:
            self.sessions.remove(session)

    @property
    def level(self) -> str:
        """The finest ranges that the call being recorded is to have."""
        recording = self._recording
        return recording[0].config.ranges if recording is not None and recording[1].ranged else "step"

    def _now(self, call: RecordedCall | None) -> None:
        """``call`` is recorded from now on; None: no call is."""
        self.call = call
        self.gate.tape = call.tape if call is not None and call.timed else None
        # An open window wants ranges, or at least to be closed early when host memory runs out.
        self.gate.slow = (call is not None and call.ranged) or process.window is not None

    def _clock_failed(self, fault: BaseException) -> None:
        """What the clock of a tape raised; raises what belongs to the host."""
        if not contained("reading the clock of the timeline", self.drop, fault):
            raise fault

    def begin(self, facts: CallFacts) -> RecordedCall | None:
        """Returns the call if it is recorded, else None. ``end`` must follow in any case."""
        if process.urgent:
            self.settle()
        session = self._session_of(facts.chunks)
        call = None if session is None else session.begin(facts)
        if session is not None and call is not None:
            self._recording = session, call
            self._now(call if call.ranged or call.timed else None)
        return call

    def end(self, *, failed: bool) -> None:
        """The call is over, recorded or not; ``failed``: by an exception of the host's."""
        self._now(None)
        self.put_back()
        if self._dropped:
            self._abandon()
        if self._recording is not None:
            (session, call), self._recording = self._recording, None
            session.end(call, failed=failed)
        if process.urgent:
            self.settle()

    def ask(self, leave: Callable[[], None]) -> None:
        """Have ``leave`` called by the training thread, before its next call or at the end of this one. From any
        thread."""
        self._leaving.append(leave)
        process.urgent = True

    def settle(self) -> None:
        """Do what other threads asked the training thread for: it alone may close a window, though not while a CUDA
        graph is captured. In the middle of a call only what cannot wait: the device may be waiting for a peer that
        waits for what this rank has yet to send."""
        if not self.sessions or capturing():  # without sessions it is not in use any more
            return
        process.urgent = False
        try:
            if process.memory_full is not None:
                reason, process.memory_full = process.memory_full, None
                logger.warning("megaprof: the window closes early: %s", reason)
                self.cut(reason)
            while self._leaving and self._recording is None:
                in_full(self._leaving[0])
                del self._leaving[0]
            process.urgent = process.urgent or bool(self._leaving)
        except BaseException:
            process.urgent = True  # the host interrupted it
            raise

    def cut(self, reason: str) -> None:
        """Close the open window now, perhaps in the middle of a call: what it has is kept, and the timeline of the call
        goes on."""
        with Contained("closing a window early", self.drop):
            in_full(self.close_modules)
            call = None if self._recording is None else self._recording[1]
            if call is not None:
                call.ranged = False
                if call.outermost is not None:
                    call.outermost.close()
            for session in self.sessions:
                session.end_window(reason, None if call is None else GRACE_SECONDS)
            self._now(call if call is not None and call.timed else None)

    def put_back(self) -> None:
        """Undo what was done to the host for the call that is recorded. Can be run twice."""
        in_full(self.of_this_call.restore, self.close_modules)
        self.close_modules = None

    def forget(self) -> None:
        """In a forked child: the sessions are the parent's."""
        self._now(None)
        self._recording = self.inside = None
        self._leaving, self._dropped, self._found = [], [], None

    def drop(self) -> None:
        """After a fault in a hook: the sessions that it may have touched record nothing more. Can be run twice.

        Inside a schedule call their recorders stop when it ends: the fault may be in the middle of a backward, and
        stopping Kineto inside the autograd engine crashes the process.
        """
        self._now(None)
        self._dropped = self._touched()
        for session in self._dropped:
            session.off = session.off or fault_now()
        in_full(self.put_back, self._abandon if self.inside is None else None)

    def _touched(self) -> list[Session]:
        """The sessions that a fault in a hook now may have to do with."""
        return self.sessions.copy() if self._recording is None else [self._recording[0]]

    def _abandon(self) -> None:
        """Stop the recorders of the sessions that were dropped. Can be run twice."""
        outermost = None if self._recording is None else self._recording[1].outermost
        in_full(None if outermost is None else outermost.close, *(session.abandon for session in self._dropped))
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
        for session in self.sessions:
            if session.models is None:
                fallback = session
            elif any(reference() is model for reference in session.models for model in models):
                return session
        return fallback
