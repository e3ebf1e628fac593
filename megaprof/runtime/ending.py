"""How a process ends or splits: what is finished at exit and on SIGTERM."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

#: How long a SIGTERM is held up, in seconds, if ``--profile-flush-seconds`` is not less. torchrun, SLURM and
#: Kubernetes all send SIGKILL 30 s after SIGTERM by default.
TERM_SECONDS = 20.0


class Termination:
    """SIGTERM while something is unsaved: ``save()`` first, then the default action, with the exit status it has.

    The handler is in only while ``unsaved()`` (a window is open, or files are pending), only where the default action
    was, and only if the hooks run in the main thread: Python allows no other. A host with a handler of its own ends
    by its own means, and its exit finishes the files. A host that puts one in later, and calls the one that was there
    before it, gets control back once the files are finished. A rank that is stuck in C code never runs a Python
    handler, so there SIGTERM has no effect while the handler is in, and the launcher's SIGKILL ends it.
    """

    def __init__(self, save: Callable[[], None], unsaved: Callable[[], bool]) -> None:
        self._save = save
        self._unsaved = unsaved
        self.armed = False
        """True while the handler is in."""
        self._holding: FrameType | None = None
        self.due = False
        """True while a SIGTERM waits for the end of a held block."""
        self._ending = False

    def __enter__(self) -> None:
        """``with termination:`` around what must not be interrupted half-way: a SIGTERM acts when the block is left.
        Blocks inside one another are one."""
        block = sys._getframe(1)
        if self._holding is None or not self._held_by(block):
            self._holding = block

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        if self._holding is not sys._getframe(1):
            return  # a block inside another one
        self._holding = None
        if self.due:
            self.due = False
            self._end()
        self.settle()

    def _held_by(self, frame: FrameType | None) -> bool:
        """Whether ``frame`` runs inside a held block. One whose end the host interrupted holds nothing any more."""
        while frame is not None and frame is not self._holding:
            frame = frame.f_back
        return frame is not None

    def reset(self) -> None:
        """Take the handler out, in a forked child too: its parent's files are not the child's to save."""
        self._holding, self.due = None, False
        if self.armed:
            self._disarm()

    def settle(self) -> None:
        """Put the handler in where something is unsaved, and take it out where nothing is any more."""
        if self._ending or self.armed is self._unsaved() or threading.current_thread() is not threading.main_thread():
            return
        if self.armed:
            self._disarm()
        elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self.armed = True

    def _disarm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:  # else the host has put in its own meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        ours = signal.getsignal(signal.SIGTERM) == self._handle
        if self._holding is not None and self._held_by(frame):
            self.due = ours  # a handler of the host's that calls this one ends the process as it likes
        elif ours:
            self._end()
        else:
            self._finish()

    def _end(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Whatever holds up the files, in C code too, does not hold up the end.
        limit = threading.Timer(TERM_SECONDS + 1, os.kill, (os.getpid(), signal.SIGTERM))
        limit.daemon = True
        try:
            with suppress(RuntimeError):  # Python starts no thread while the process ends
                limit.start()
            self._finish()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _finish(self) -> None:
        if self._ending:  # a second SIGTERM ends the process at once
            return
        self._ending = True
        try:
            self._save()
        except Exception as fault:
            if from_host(fault):
                raise
            logger.exception("megaprof: finishing files on SIGTERM failed")


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
