"""Owns what a process has only once: sessions, the open window, patches, the background thread, SIGTERM handling."""

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
from megaprof.runtime.background import Background
from megaprof.runtime.device import capturing
from megaprof.runtime.ending import TERM_SECONDS, AtExit, Termination, in_forked_child
from megaprof.runtime.isolation import in_full
from megaprof.runtime.patching import Patches

#: The longest time that the end of a host's step waits for unfinished files, in seconds; ``--profile-flush-seconds`` if
#: that is less.
STEP_END_SECONDS = 20.0


class Profiler:
    """Installs the process-wide parts with the first session, and removes them with the last session or at exit."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        """Routes calls to sessions. There is a new one each time that hooks are installed in a process without any."""
        self.patches = Patches()
        """The functions of Megatron and of hosts that are replaced while hooks are installed."""
        self.background = Background()
        """The thread for everything that runs beside the training."""
        self.termination = Termination(self._save, self._unsaved)
        """Holds up a SIGTERM while something is unsaved."""
        self._exit = AtExit(self._finish_all)
        self._put_in: list[Callable[[Patches, Dispatcher], None]] = []
        self._forks_watched = False

    @property
    def sessions(self) -> list[Session]:
        """The sessions whose hooks are installed now."""
        return process.sessions.copy()

    def enter(self, session: Session, patch: Callable[[Patches, Dispatcher], None]) -> None:
        """Installs the hooks of ``session`` with ``patch``, which runs only once even if several sessions need it. If
        it fails, the functions that it replaced are put back."""
        if not self._forks_watched:
            self._forks_watched = True
            os.register_at_fork(after_in_child=self._forget)
        if not process.sessions:
            process.sessions, process.disturbed = [], False
            self.dispatcher = Dispatcher()
            self._exit.arm()
        self.dispatcher.add(session)
        patched = bool(self.patches)
        try:
            if patch not in self._put_in:
                patch(self.patches, self.dispatcher)
                self._put_in.append(patch)
        except BaseException:
            in_full(None if patched else self._put_back, partial(self.remove, session))
            raise

    def remove(self, session: Session) -> None:
        """Removes ``session``. With the last session, the hooks themselves are removed."""
        with self.termination:
            self.dispatcher.remove(session)
            if not process.sessions:
                self._put_back()
                self._exit.disarm()

    def _put_back(self) -> None:
        self.patches.restore()
        self._put_in.clear()

    def leave(self, session: Session) -> None:
        """Closes the window of ``session``, finishes its files and removes its hooks: now, or as soon as the training
        thread can do it. Only that thread can close the window, and not while it captures a CUDA graph."""
        if session.removed.is_set():
            return
        training = {self.dispatcher.inside, session.thread} & set(sys._current_frames())
        if training - {threading.get_ident()} or capturing():
            self.dispatcher.ask(partial(self._leave, session))
        else:
            self._leave(session)

    def _leave(self, session: Session) -> None:
        if not session.removed.is_set():
            in_full(
                partial(session.close, "the hooks were removed", session.config.flush_seconds),
                partial(self.remove, session),
                session.removed.set,
            )

    def step_ended(self) -> None:
        """Ends a step of the host. Waits for its files, because the host may end this process before it calls anything
        again, as Ray does."""
        for session in self.sessions:
            session.step_ended()
        self._flush()

    def attempt_failed(self) -> None:
        """Notes that the call that has just ended was a failed attempt, and runs again."""
        for session in self.sessions:
            session.forget_attempt()

    def kernel_summary(self, timeout: float, role: str | None) -> dict[str, Any] | None:
        """Returns the kernel summary of the last window that closed; see `megaprof.kernel_summary`."""
        summaries = (session.kernel_summary(timeout, role) for session in reversed(process.capturers))
        return next((summary for summary in summaries if summary is not None), None)

    def _flush(self) -> None:
        deadline = time.monotonic() + STEP_END_SECONDS
        for session in self.sessions:
            left = max(0.0, deadline - time.monotonic())
            session.writer.flush(min(left, session.config.flush_seconds))

    def _unsaved(self) -> bool:
        return process.window is not None or any(session.writer.pending for session in process.sessions)

    def _save(self, last: bool) -> None:
        """Saves the open window and finishes every file on SIGTERM, within `TERM_SECONDS` and
        ``--profile-flush-seconds``. ``last``: False if a handler of the host's decides whether the process ends, so
        that profiling may go on."""
        deadline, reason = time.monotonic() + TERM_SECONDS, "the process was terminated (SIGTERM)"
        for session in self.sessions:
            seconds = min(max(0.0, deadline - time.monotonic()), session.config.flush_seconds)
            (session.close if last else session.save)(reason, seconds)

    def _finish_all(self) -> None:
        """Removes all sessions as the process ends. Gives a training thread that still runs time to close its
        window."""
        ending = self.sessions
        for session in ending:
            self.leave(session)
        for session in ending:
            session.removed.wait(session.config.flush_seconds)

    def _forget(self) -> None:
        """Resets a forked child, such as a DataLoader's worker, so that it has no hooks, no window and no files to
        finish."""
        self._exit.disarm()
        for session in (*process.capturers, *self.sessions):
            session.removed.set()
            session.recorders = ()
            session.writer.forget()
        self._put_back()
        self.dispatcher.forget()
        self.background.forget()
        in_forked_child(recording=process.window is not None)
        process.forget()
        self.termination.reset()


profiler = Profiler()
