"""The end of a process by SIGTERM."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from megaprof.runtime.isolation import Suppressed

#: How long a SIGTERM is held up, in seconds, if ``--profile-flush-seconds`` is not less. torchrun, SLURM and
#: Kubernetes all send SIGKILL 30 s after SIGTERM by default.
TERM_SECONDS = 20.0


class Termination:
    """Handles SIGTERM while something is unsaved: ``save`` runs first, then what would have happened without us.

    The handler is installed only while ``unsaved()`` is true (a window is open, or files are pending), and only if the
    hooks run in the main thread, because Python allows no other. If the default action was in place, it follows, with
    its exit status. If the host has a handler, it is called after ours, with the signal's arguments. It may end the
    process or not: Megatron-LM has both kinds (``--otel-enabled`` ends it by the default action,
    ``--exit-signal-handler`` finishes the step), and nothing tells them apart before they run. A host that installs a
    handler later, and calls the one that was there before it, gets control back once the files are finished. An ignored
    SIGTERM stays ignored. A rank that is stuck in C code never runs a Python handler. So SIGTERM has no effect there
    while the handler is installed, and the launcher's SIGKILL ends the rank.
    """

    def __init__(self, save: Callable[[bool], None], unsaved: Callable[[], bool]) -> None:
        """``save(last)`` finishes what is unsaved; with ``last``, the process ends when that is done."""
        self._save = save
        self._unsaved = unsaved
        self.handler: Callable[[int, FrameType | None], None] | None = None
        """The handler while something is unsaved, even if the host has installed one of its own since; else None."""
        self._previous: Any = signal.SIG_DFL
        self._holding: FrameType | None = None
        self.due = False
        """True while a SIGTERM waits for the end of a held block."""
        self._ending = False

    def __enter__(self) -> None:
        """Enters a block that must not be interrupted half-way (``with termination:``): a SIGTERM acts when the block
        is left. Nested blocks count as one."""
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
            self._act(self._previous, signal.SIGTERM, block)
        self.settle()

    def _held_by(self, frame: FrameType | None) -> bool:
        """Returns whether ``frame`` runs inside a held block. A block whose end the host interrupted no longer holds
        anything."""
        while frame is not None and frame is not self._holding:
            frame = frame.f_back
        return frame is not None

    def reset(self) -> None:
        """Removes the handler. A forked child calls this, too, because it must not save its parent's files."""
        self._holding, self.due = None, False
        self._disarm()

    def settle(self) -> None:
        """Installs the handler if something is unsaved, and removes it if nothing is."""
        if self._ending or threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if not self._unsaved():
            self._disarm()
        elif self.handler is not None and previous is self.handler:
            return
        elif previous is signal.SIG_DFL or callable(previous):  # else ignored, or a handler in C
            # A new handler each time: the host's handler may have kept an older one, and call it.
            self._previous, self.handler = previous, functools.partial(self._handle, previous)
            signal.signal(signal.SIGTERM, self.handler)

    def _disarm(self) -> None:
        handler = self.handler
        if handler is not None and signal.getsignal(signal.SIGTERM) is handler:  # else the host has installed its own
            signal.signal(signal.SIGTERM, self._previous)
        self.handler = None  # last: if the host interrupts this call, the next one begins again

    def _handle(self, previous: Any, number: int, frame: FrameType | None) -> None:
        is_held = self._holding is not None and self._held_by(frame)
        if previous is not self._previous or signal.getsignal(signal.SIGTERM) is not self.handler:
            # The host's handler has called this one, and ends the process as it likes.
            if not is_held:
                self._keep(previous, number, frame)
            elif callable(previous):
                previous(number, frame)
        elif is_held:
            self.due = True
        else:
            self._act(previous, number, frame)

    def _keep(self, previous: Any, number: int, frame: FrameType | None) -> None:
        was_ending, self._ending = self._ending, True
        try:
            if not was_ending:
                self._finish(last=False)
            if callable(previous):
                previous(number, frame)
        finally:
            self._ending = was_ending

    def _act(self, previous: Any, number: int, frame: FrameType | None) -> None:
        if callable(previous):
            self._disarm()
            self._keep(previous, number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Whatever delays the files, even in C code, does not delay the end.
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
        with Suppressed(Exception, says="finishing files on SIGTERM failed"):
            self._save(last)
