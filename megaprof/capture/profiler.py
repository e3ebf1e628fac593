"""The one owner of what a process has once: sessions, the open window, patches, the background thread, SIGTERM."""

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

#: How long the end of a host's step waits for unfinished files, in seconds, if ``--profile-flush-seconds`` is not less.
STEP_END_SECONDS = 20.0


class Profiler:
    """Installs what belongs to the process with the first session, and removes it with the last one or at exit."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        """Routes calls to sessions. A new one each time that hooks go in."""
        self.patches = Patches()
        """The functions of Megatron and of hosts that are replaced while hooks are in."""
        self.background = Background()
        """The thread for everything that is done beside the training."""
        self.termination = Termination(self._save, self._unsaved)
        """Holds up a SIGTERM while something is unsaved."""
        self._exit = AtExit(self._finish_all)
        self._put_in: list[Callable[[Patches, Dispatcher], None]] = []
        self._forks_watched = False

    @property
    def sessions(self) -> list[Session]:
        """The sessions whose hooks are in, now."""
        return process.sessions.copy()

    def enter(self, session: Session, patch: Callable[[Patches, Dispatcher], None]) -> None:
        """Install the hooks of ``session`` with ``patch``, which runs once however many sessions need it. If it fails,
        what it replaced is put back."""
        if not self._forks_watched:
            self._forks_watched = True
            os.register_at_fork(after_in_child=self._forget)
        if not process.sessions:
            process.sessions = []
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
        """Remove ``session``; the hooks themselves go with the last session."""
        with self.termination:
            self.dispatcher.remove(session)
            if not process.sessions:
                self._put_back()
                self._exit.disarm()

    def _put_back(self) -> None:
        self.patches.restore()
        self._put_in.clear()

    def leave(self, session: Session) -> None:
        """Close the window of ``session``, finish its files and remove its hooks: now, or as soon as the training
        thread can do it. Only that thread can close its window, and not while it captures a CUDA graph."""
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
        """A step of the host is over. The host may end this process before it calls anything again, as Ray does."""
        for session in self.sessions:
            session.step_ended()
        self._flush()

    def capture_ended(self) -> None:
        """The host captures nothing more, so the user's command for the end runs now."""
        for session in self.sessions:
            session.writer.end_capture()
        self._flush()

    def attempt_failed(self) -> None:
        """The call that has just ended was a failed attempt, and runs again."""
        for session in self.sessions:
            session.forget_attempt()

    def kernel_summary(self, timeout: float, role: str | None) -> dict[str, Any] | None:
        """Returns the kernel summary of the last window that closed, see `megaprof.kernel_summary`."""
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
        """Save the open window and finish every file on SIGTERM, within `TERM_SECONDS` and ``--profile-flush-seconds``.
        ``last``: False if a handler of the host's decides whether the process ends, so that profiling may go on."""
        deadline, reason = time.monotonic() + TERM_SECONDS, "the process was terminated (SIGTERM)"
        for session in self.sessions:
            seconds = min(max(0.0, deadline - time.monotonic()), session.config.flush_seconds)
            (session.close if last else session.save)(reason, seconds)

    def _finish_all(self) -> None:
        """Remove all sessions as the process ends. A training thread that still runs has time to close its window."""
        ending = self.sessions
        for session in ending:
            self.leave(session)
        for session in ending:
            session.removed.wait(session.config.flush_seconds)

    def _forget(self) -> None:
        """Reset a forked child, such as a DataLoader's worker: it has no hooks, no window and no files to finish."""
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
