"""How a process ends or splits: what is finished at exit and on SIGTERM."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from megaprof.runtime.logs import logger

#: How long a SIGTERM is held up, in seconds, if ``--profile-flush-seconds`` is not less. torchrun, SLURM and
#: Kubernetes all send SIGKILL 30 s after SIGTERM by default.
TERM_SECONDS = 20.0


class Termination:
    """SIGTERM while something is unsaved: ``save()`` first, then the default action, with the exit status it has.

    The handler is in only while ``unsaved()`` (a window is open, or files are pending), only where the default action
    was, and only if the hooks run in the main thread: Python allows no other. A host with a handler of its own ends
    by its own means, and its exit finishes the files. A rank that is stuck in C code never runs a Python handler, so
    there SIGTERM has no effect while the handler is in, and the launcher's SIGKILL ends it.
    """

    def __init__(self, save: Callable[[], None], unsaved: Callable[[], bool]) -> None:
        self._save = save
        self._unsaved = unsaved
        self._armed = False
        self._holding = False
        self._due = False
        self._ending = False

    def held(self) -> Termination:
        """``with termination.held():`` around what must not be interrupted half-way: a SIGTERM acts when the block is
        left. A class rather than a generator: every step of an armed process goes through two of these."""
        return self

    def __enter__(self) -> None:
        self._holding = True

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self._holding = False
        if self._due:
            self._end()
        self._settle()

    def reset(self) -> None:
        """Take the handler out, in a forked child too: its parent's files are not the child's to save."""
        self._holding = self._due = False
        if self._armed:
            self._disarm()

    def _settle(self) -> None:
        if self._armed is self._unsaved() or threading.current_thread() is not threading.main_thread():
            return
        if self._armed:
            self._disarm()
        elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._armed = True

    def _disarm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:  # else the host has put in its own meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._due = True
        else:
            self._end()

    def _end(self) -> None:
        try:
            if not self._ending:  # a second SIGTERM ends the process at once
                self._ending = True
                self._save()
        except Exception:
            logger.exception("megaprof: finishing files on SIGTERM failed")
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def at_exit(finish: Callable[[], None]) -> None:
    """Call ``finish`` when the process ends, by an exception too. Not by os._exit, SIGKILL or a crash."""
    atexit.register(finish)
    if multiprocessing.parent_process() is not None:
        # A child that multiprocessing forked leaves by os._exit, past atexit, but runs these.
        _finalizers[finish] = multiprocessing.util.Finalize(None, finish, exitpriority=0)


def not_at_exit(finish: Callable[[], None]) -> None:
    atexit.unregister(finish)
    finalizer = _finalizers.pop(finish, None)
    if finalizer is not None:
        finalizer.cancel()


def in_forked_child(*, recording: bool) -> None:
    """A child forked inside a window: its thread would go on recording into memory that nobody ever reads."""
    if recording:
        import torch

        # Not by stopping the profiler: CUPTI and Kineto's threads stayed in the parent.
        torch._C._autograd._enable_record_function(False)


_finalizers: dict[Callable[[], None], multiprocessing.util.Finalize] = {}
