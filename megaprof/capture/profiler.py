"""Installs what a process has only once with its first session, and takes it back with the last one, after a fork and
at exit: patches, SIGTERM handling, the background thread. All its state is in `megaprof.capture.process`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.capture.process import process
from megaprof.capture.session import Session
from megaprof.runtime.device import capturing
from megaprof.runtime.ending import TERM_SECONDS, AtExit, Termination, in_forked_child
from megaprof.runtime.isolation import in_full
from megaprof.runtime.patching import Patches

#: The longest time that the end of a host's step waits for unfinished files, in seconds; ``--profile-flush-seconds`` if
#: that is less.
STEP_END_SECONDS = 20.0


def enter(session: Session, patch: Callable[[Patches, Dispatcher], None]) -> None:
    """Installs the hooks of ``session`` with ``patch``, which runs only once even if several sessions need it. If
    it fails, the functions that it replaced are put back."""
    if not process.forks_watched:
        process.forks_watched = True
        os.register_at_fork(after_in_child=_forget)
    if not process.sessions:
        process.sessions, process.disturbed = [], False
        process.dispatcher = Dispatcher()
        process.at_exit.arm()
    process.dispatcher.add(session)
    patched = bool(process.patches)
    try:
        if patch not in process.put_in:
            patch(process.patches, process.dispatcher)
            process.put_in.append(patch)
    except BaseException:
        in_full(None if patched else _put_back, partial(remove, session))
        raise


def remove(session: Session) -> None:
    """Removes ``session``. With the last session, the hooks themselves are removed."""
    with process.termination:
        process.dispatcher.remove(session)
        if not process.sessions:
            _put_back()
            process.at_exit.disarm()


def _put_back() -> None:
    process.patches.restore()
    process.put_in.clear()


def leave(session: Session) -> None:
    """Closes the window of ``session``, finishes its files and removes its hooks: now, or as soon as the training
    thread can do it. Only that thread can close the window, and not while it captures a CUDA graph."""
    if session.removed.is_set():
        return
    training = {process.dispatcher.inside, session.thread} & set(sys._current_frames())
    if training - {threading.get_ident()} or capturing():
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
    """Ends a step of the host. Waits for its files, because the host may end this process before it calls anything
    again, as Ray does."""
    for session in process.sessions.copy():
        session.step_ended()
    deadline = time.monotonic() + STEP_END_SECONDS
    for session in process.sessions.copy():
        left = max(0.0, deadline - time.monotonic())
        session.writer.flush(min(left, session.config.flush_seconds))


def attempt_failed() -> None:
    """Notes that the call that has just ended was a failed attempt, and runs again."""
    for session in process.sessions.copy():
        session.forget_attempt()


def kernel_summary(role: str | None = None, timeout: float = 0.0) -> dict[str, Any] | None:
    """Returns the kernel summary of the last window that closed in this process, or of the last one of ``role``.

    It needs no Handle, so a controller can call it in its workers. See `Handle.kernel_summary`. None if there is none,
    or if it is still being made after ``timeout`` seconds.
    """
    summaries = (session.kernel_summary(timeout, role) for session in reversed(process.capturers))
    return next((summary for summary in summaries if summary is not None), None)


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
    """Removes all sessions as the process ends. Gives a training thread that still runs time to close its
    window."""
    ending = process.sessions.copy()
    for session in ending:
        leave(session)
    for session in ending:
        session.removed.wait(session.config.flush_seconds)


def _forget() -> None:
    """Resets a forked child, such as a DataLoader's worker, so that it has no hooks, no window and no files to
    finish."""
    process.at_exit.disarm()
    for session in (*process.capturers, *process.sessions):
        session.removed.set()
        session.recorders = ()
        session.writer.forget()
    _put_back()
    process.dispatcher.forget()
    process.background.forget()
    in_forked_child(recording=process.window is not None)
    for of_parent in (process.sessions, process.capturers, process.answers, process.asked):
        of_parent.clear()
    process.window = process.prepared = None
    process.disturbed = False
    process.termination.reset()


process.dispatcher, process.termination, process.at_exit = (
    Dispatcher(),
    Termination(_save, _unsaved),
    AtExit(_finish_all),
)
