"""The end of a process, at exit or by SIGTERM, and its forks."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

#: How long a SIGTERM is held up, in seconds, if ``--profile-flush-seconds`` is not less. torchrun, SLURM and
#: Kubernetes all send SIGKILL 30 s after SIGTERM by default.
TERM_SECONDS = 20.0


class Termination:
    """SIGTERM while something is unsaved: ``save`` first, then what would have happened without us.

    The handler is in only while ``unsaved()`` (a window is open, or files are pending), and only if the hooks run
    in the main thread: Python allows no other. Where the default action was, it follows, with the exit status that
    it has. A handler of the host's is called after ours, with the signal's arguments, and ends the process or does
    not: Megatron-LM has both kinds (``--otel-enabled`` ends it by the default action, ``--exit-signal-handler``
    finishes the step), and nothing tells them apart before they run. A host that puts a handler in later, and calls
    the one that was there before it, gets control back once the files are finished. An ignored SIGTERM stays
    ignored. A rank that is stuck in C code never runs a Python handler, so there SIGTERM has no effect while the
    handler is in, and the launcher's SIGKILL ends it.
    """

    def __init__(self, save: Callable[[bool], None], unsaved: Callable[[], bool]) -> None:
        """``save(last)``: finish what is unsaved; ``last``: the process ends when that is done."""
        self._save = save
        self._unsaved = unsaved
        self._handler: Callable[[int, FrameType | None], None] | None = None
        self._before: Any = signal.SIG_DFL
        self._holding: FrameType | None = None
        self.due = False
        """True while a SIGTERM waits for the end of a held block."""
        self._ending = False

    @property
    def armed(self) -> bool:
        """True while the handler is in, or something of the host's has taken its place."""
        return self._handler is not None

    def __enter__(self) -> None:
        """``with termination:`` around what must not be interrupted half-way: a SIGTERM acts when the block is left.
        Blocks inside one another are one."""
        block = sys._getframe(1)
        if self._holding is None or not self._held_by(block):
            self._holding = block

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        block = sys._getframe(1)
        if self._holding is not block:
            return  # a block inside another one
        self._holding = None
        if self.due:
            self.due = False
            self._act(self._before, signal.SIGTERM, block)
        self.settle()

    def _held_by(self, frame: FrameType | None) -> bool:
        """Returns whether ``frame`` runs inside a held block. One whose end the host interrupted holds nothing any
        more."""
        while frame is not None and frame is not self._holding:
            frame = frame.f_back
        return frame is not None

    def reset(self) -> None:
        """Take the handler out, in a forked child too: its parent's files are not the child's to save."""
        self._holding, self.due = None, False
        self._disarm()

    def settle(self) -> None:
        """Put the handler in where something is unsaved, and take it out where nothing is any more."""
        if self._ending or threading.current_thread() is not threading.main_thread():
            return
        if not self._unsaved():
            self._disarm()
        elif self._handler is None or signal.getsignal(signal.SIGTERM) is not self._handler:
            self._arm()

    def _arm(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_DFL or callable(before):  # else ignored, or a handler in C
            # One of its own for each time: a handler of the host's may hold on to an older one, and call it.
            self._before, self._handler = before, functools.partial(self._handle, before)
            signal.signal(signal.SIGTERM, self._handler)

    def _disarm(self) -> None:
        handler = self._handler
        if handler is not None and signal.getsignal(signal.SIGTERM) is handler:  # else the host has put in its own
            signal.signal(signal.SIGTERM, self._before)
        self._handler = None  # last: if the host interrupts before it, the next call begins again

    def _handle(self, before: Any, number: int, frame: FrameType | None) -> None:
        held = self._holding is not None and self._held_by(frame)
        if before is not self._before or signal.getsignal(signal.SIGTERM) is not self._handler:
            # A handler of the host's calls this one, and ends the process as it likes.
            if not held:
                self._keep(before, number, frame)
            elif callable(before):
                before(number, frame)
        elif held:
            self.due = True
        else:
            self._act(before, number, frame)

    def _keep(self, before: Any, number: int, frame: FrameType | None) -> None:
        outer, self._ending = self._ending, True
        try:
            if not outer:
                self._finish(last=False)
            if callable(before):
                before(number, frame)
        finally:
            self._ending = outer

    def _act(self, before: Any, number: int, frame: FrameType | None) -> None:
        if callable(before):
            self._disarm()
            self._keep(before, number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Whatever holds up the files, in C code too, does not hold up the end.
        limit = threading.Timer(TERM_SECONDS + 1, os.kill, (os.getpid(), signal.SIGTERM))
        limit.daemon = True
        try:
            with suppress(RuntimeError):  # Python starts no thread while the process ends
                limit.start()
            if not self._ending:  # a second SIGTERM ends the process at once
                self._ending = True
                self._finish(last=True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _finish(self, *, last: bool) -> None:
        try:
            self._save(last)
        except Exception as fault:
            if from_host(fault):
                raise
            logger.exception("megaprof: finishing files on SIGTERM failed")


class AtExit:
    """Calls ``finish`` when the process ends, by an exception too. Not by os._exit, SIGKILL or a crash."""

    def __init__(self, finish: Callable[[], None]) -> None:
        """Does nothing before `arm`."""
        self._finish = finish
        self._finalizer: multiprocessing.util.Finalize | None = None

    def arm(self) -> None:
        """Call ``finish`` at the end from now on."""
        atexit.register(self._finish)
        if multiprocessing.parent_process() is not None:
            # A child that multiprocessing forked leaves by os._exit, past atexit, but runs these.
            self._finalizer = multiprocessing.util.Finalize(None, self._finish, exitpriority=0)

    def disarm(self) -> None:
        """Do not call it any more. Can be run twice."""
        atexit.unregister(self._finish)
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.cancel()


def in_forked_child(*, recording: bool) -> None:
    """Stop recording in a child that was forked inside a window, whose records nobody would ever read."""
    if recording:
        import torch

        # Not by stopping the profiler: CUPTI and Kineto's threads stayed in the parent.
        torch._C._autograd._enable_record_function(False)
