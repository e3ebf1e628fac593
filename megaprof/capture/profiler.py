"""What the sessions of a process share: the dispatcher, which finds the session that a call belongs to; and what is
installed with the first session and taken back with the last one, after a fork and at exit (patches, SIGTERM handling).
All its state is in `megaprof.capture.process`."""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError
from contextlib import suppress
from functools import partial
from typing import Any

from megaprof.capture.bounds import GRACE_SECONDS, capturing
from megaprof.capture.process import process
from megaprof.capture.roles import current
from megaprof.capture.session import Session
from megaprof.config.values import TRAIN_OVERALL
from megaprof.formats.facts import part_of_call
from megaprof.parallel.megatron import innermost
from megaprof.recorders.call import CallFacts, RecordedCall
from megaprof.recorders.tape import Gate
from megaprof.runtime.ending import TERM_SECONDS, Termination
from megaprof.runtime.isolation import Contained, Suppressed, contained, fault_now, in_full, logger
from megaprof.runtime.patching import Patches


class Dispatcher:
    """Routes a ``forward_backward_func`` call to the session of the model that it runs.

    The installed hooks of a process share one dispatcher. Hooks in C look only at ``gate``; those in Python first at
    what other threads asked (`process.asked`), then at ``call``. An idle process with hooks pays only that.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = process.sessions
        """The sessions whose hooks are installed. Once the last one is removed it stays empty. Hooks of ours that
        someone else has wrapped remain in place, and do nothing from then on."""
        self.call: RecordedCall | None = None
        """The call that is being recorded; None if none is."""
        self.gate = Gate(on_fault=self._clock_failed)
        self.inside: int | None = None
        """The thread that is inside a schedule call; None if none is. It keeps an inner call from being recorded again:
        a CUDA graph wrapper calls the schedule."""
        self.of_this_call = Patches()
        self.finalize: tuple[Any, Any] | None = None
        """The function that finalises the gradients, as the last call found it, and our hook on it."""
        self._recording: tuple[Session, RecordedCall] | None = None
        self._entered = False  # whether the call is a part of the host's loop, recorded or not
        self.last_model: tuple[weakref.ref[Any], weakref.ref[Any], Session] | None = None
        """The last call's model, if it was a single chunk; the model inside its wrappers; and its session. They are
        kept because unwrapping is slow: a torch module takes long to find that it lacks an attribute."""

    def _now(self, call: RecordedCall | None) -> None:
        """Makes ``call`` the one that is being recorded; None: no call is recorded from now on."""
        gate = self.gate
        self.call = call
        gate.tape = None if call is None or not call.timed else call.tape
        # An open window needs ranges, or at least a check whether host memory runs out, which closes it early.
        gate.slow = process.window is not None or (call is not None and call.level is not None)

    def _clock_failed(self, fault: BaseException) -> None:
        """Contains ``fault``, which the clock of a tape raised. Raises it again if it belongs to the host."""
        if not contained("reading the clock of the timeline", self.drop, fault):
            raise fault

    def begin(self, facts: CallFacts) -> RecordedCall | None:
        """Begins a call. Returns it if it is recorded, else None. ``end`` must follow in either case."""
        if process.asked:
            self.settle()
        session, models = self._route(facts.chunks)
        call = None if session is None else session.begin(facts)
        if session is not None and call is not None:
            self._recording = session, call
            call.models = models
            self._now(call if call.timed or call.level is not None else None)
        role = current().role or (None if session is None else session.role)
        self._entered = process.parts.enter(part_of_call(facts.target, role), schedule=True)
        return call

    def end(self, *, failed: bool) -> None:
        """Ends a call, recorded or not. ``failed``: it ended with an exception of the host's."""
        self._now(None)
        in_full(self.of_this_call.restore, process.parts.leave if self._entered else None)
        recording, self._recording, self._entered = self._recording, None, False
        if recording is not None:
            recording[0].end(recording[1], failed=failed)
        for session in self.sessions:
            if session.off is not None:  # a fault in this call, in which its recorders could not stop
                session.abandon()
        if process.asked:
            self.settle()

    def settle(self) -> None:
        """Does what other threads have asked of the training thread. Only the thread that opened a window may close it,
        and not while a CUDA graph is captured. In the middle of a call it does only what cannot wait: the device may be
        waiting for a peer, which may be waiting for something that this rank has yet to send."""
        if not self.sessions or capturing() or process.elsewhere:  # without sessions, it is no longer in use
            return
        for task in process.asked.copy():
            if self._recording is None or task[1]:
                in_full(task[0])
                process.asked.remove(task)  # only now: the host may interrupt us

    def cut(self, reason: str) -> None:
        """Closes the open window now, even in the middle of a call. Keeps what the window has recorded. The timeline of
        the call goes on."""
        logger.warning("megaprof: the window closes early: %s", reason)
        with Contained("closing a window early", self.drop):
            call = None if self._recording is None else self._recording[1]
            if call is not None:
                call.level = None
                call.outermost.close()
            for session in self.sessions:
                session.end_window(reason, None if call is None else GRACE_SECONDS)
            self._now(call if call is not None and call.timed else None)

    def drop(self) -> None:
        """Switches off the sessions that a fault in a hook may have touched. Can be run twice.

        Inside a schedule call, their recorders stop when the call ends: the fault may be in the middle of a backward,
        and stopping Kineto inside the autograd engine crashes the process.
        """
        self._now(None)
        recording = self._recording
        touched = self.sessions.copy() if recording is None else [recording[0]]
        for session in touched:
            session.off = session.off or fault_now()
        stops: list[Callable[[], object]] = []
        if self.inside is None:
            self._recording = None
            stops = [process.parts.leave, *(session.abandon for session in touched)]
            stops += [] if recording is None else [recording[1].outermost.close]
        in_full(self.of_this_call.restore, *stops)

    def _route(self, chunks: tuple[Any, ...]) -> tuple[Session | None, tuple[Any, ...]]:
        """Returns the session that takes a call of ``chunks``, or None, and the models inside their wrappers."""
        if self.last_model is not None and len(chunks) == 1:
            chunk, model, session = self.last_model
            if chunk() is chunks[0] and (unwrapped := model()) is not None:
                return session, (unwrapped,)
        models = tuple(map(innermost, chunks))
        taker = self.owner(models) or self.owner(None)
        if taker is not None and len(chunks) == 1 and chunks[0] is not None:
            with suppress(TypeError):  # a model without weak references is looked up every time
                self.last_model = weakref.ref(chunks[0]), weakref.ref(models[0]), taker
        return taker, models

    def owner(self, models: tuple[Any, ...] | None) -> Session | None:
        """Returns the session that was added for any of ``models``, which have no wrappers but that of torch.compile,
        which the host may add later; for None, the one that was added without models."""
        for session in self.sessions:
            if models is None or session.models is None:
                if models is session.models:
                    return session
            elif any(each() is getattr(model, "_orig_mod", model) for each in session.models for model in models):
                return session
        return None


def enter(session: Session, models: tuple[Any, ...] | None, *patches: Callable[[Patches], None]) -> None:
    """Installs the hooks of ``session``, which takes calls of ``models``, with ``patches``. Each of these runs only
    once even if several sessions need it. If one fails, `remove` puts back what was replaced."""
    if not process.forks_watched:
        process.forks_watched = True
        os.register_at_fork(after_in_child=_forget)
    if not process.sessions:
        process.sessions, process.disturbed = [], False
        logger.said.clear()  # what is wrong again is said again
        process.dispatcher = Dispatcher()
        atexit.register(_finish_all)
        if multiprocessing.parent_process() is not None:
            # A child that multiprocessing forked leaves by os._exit, past atexit, but runs these.
            multiprocessing.util.Finalize(None, _finish_all, exitpriority=0)
    process.dispatcher.last_model = None
    uncompiled = (getattr(model, "_orig_mod", model) for model in map(innermost, models or ()))
    session.models = None if models is None else tuple(map(weakref.ref, uncompiled))
    process.sessions.append(session)
    for patch in patches:
        if patch not in process.patched_by:
            patch(process.patches)
            process.patched_by.append(patch)


def remove(session: Session) -> None:
    """Removes ``session``. With the last session, the hooks themselves are removed."""
    with process.termination:
        process.dispatcher.last_model = None
        if session in process.sessions:
            process.sessions.remove(session)
        if not process.sessions:
            process.patches.restore()
            process.patched_by.clear()
            atexit.unregister(_finish_all)


def leave(session: Session) -> None:
    """Closes the window of ``session``, finishes its files and removes its hooks: now, or as soon as the training
    thread can do it. Only that thread can close the window, and not inside a call: Kineto must not stop inside the
    autograd engine, nor while a CUDA graph is captured."""
    if session.removed.is_set():
        return
    open_here = process.thread == threading.get_ident() or (process.window is None and not process.prepared)
    if {process.dispatcher.inside, None if open_here else process.thread} & set(sys._current_frames()) or capturing():
        process.asked.append((partial(_leave, session), False))
    else:
        _leave(session)


def _leave(session: Session) -> None:
    if not session.removed.is_set():
        in_full(
            partial(session.close, "the hooks were removed", session.config.flush_seconds),
            partial(remove, session),
            session.removed.set,
        )


def step_ended() -> None:
    """Ends a step of the host. Waits for its files as on SIGTERM, because the host may end this process before it calls
    anything again, as Ray does."""
    for session in process.sessions.copy():
        session.over(TRAIN_OVERALL)
    deadline = time.monotonic() + TERM_SECONDS
    for session in process.sessions.copy():
        left = max(0.0, deadline - time.monotonic())
        session.writer.flush(min(left, session.config.flush_seconds))


def kernel_summary(role: str | None = None, timeout: float = 0.0) -> dict[str, Any] | None:
    """Returns the kernel summary (``.kernels.json``) of the last window that closed in this process, or of the last one
    of ``role``.

    It is plain data that can be pickled, so a controller can call this in its workers. None if it is still being made
    after ``timeout`` seconds, without ``--profile-kernels``, in a process that captures nothing, and after a failure,
    which is logged. Works after the hooks are removed, too.
    """
    last = next(reversed(process.summaries.values()), None)
    summary, text = last if role is None else process.summaries.get(role), None
    with Suppressed(TimeoutError):
        text = None if summary is None else summary.result(timeout)
    return None if text is None else dict(json.loads(text))


def _unsaved() -> bool:
    return process.window is not None or any(session.writer.pending for session in process.sessions)


def _save(last: bool) -> None:
    """Saves the open window and finishes every file on SIGTERM, within `TERM_SECONDS` and
    ``--profile-flush-seconds``. ``last``: False if a handler of the host's decides whether the process ends, so
    that profiling may go on."""
    deadline, reason = time.monotonic() + TERM_SECONDS, "the process was terminated (SIGTERM)"
    for session in process.sessions.copy():
        seconds = min(max(0.0, deadline - time.monotonic()), session.config.flush_seconds)
        session.close(reason, seconds, last=last)


def _finish_all() -> None:
    """Removes all sessions as the process ends, also by an exception, but not by os._exit, SIGKILL or a crash. Gives a
    training thread that still runs time to close its window."""
    ending = process.sessions.copy()
    for session in ending:
        leave(session)
    for session in ending:
        session.removed.wait(session.config.flush_seconds)


def _forget() -> None:
    """Resets a forked child, such as a DataLoader's worker, so that it has no hooks, no window and no files to
    finish."""
    atexit.unregister(_finish_all)
    for session in process.sessions:
        session.removed.set()
        session.recorders = ()
        session.writer.forget()
    process.patches.restore()
    process.dispatcher._now(None)
    process.dispatcher._recording = None  # the call in progress is the parent's
    if process.window is not None:
        import torch

        # Nobody would ever read what the child records. The profiler cannot be stopped here: CUPTI and Kineto's threads
        # stayed in the parent.
        torch._C._autograd._enable_record_function(False)
    process.sessions.clear()  # hooks that somebody else has wrapped know this list
    process.reset()
    process.dispatcher = Dispatcher()
    process.termination.reset()


process.dispatcher, process.termination = Dispatcher(), Termination(_save, _unsaved)
