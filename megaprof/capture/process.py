"""The state that a process has only once: its sessions and hooks, and its one open window.

It is plain data, and imports neither torch nor numpy. The functions that change it are in `megaprof.capture.profiler`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaprof.capture.bounds import Guard
from megaprof.formats.metadata import SESSION_VARIABLE
from megaprof.recorders.loop import Parts
from megaprof.runtime.background import Background
from megaprof.runtime.patching import Patches

if TYPE_CHECKING:
    from megaprof.capture.agenda import CountedStep, Demand
    from megaprof.recorders import Recorder, Window
    from megaprof.recorders.call import RecordedCall
    from megaprof.recorders.emit import Range
    from megaprof.runtime.ending import Termination


@dataclass(eq=False)
class OpenWindow:
    """A window while it is open."""

    owner: object
    """The session that opened it. Calls of other sessions are recorded in it, too."""
    window: Window
    """Its target, role and step, in the form that the recorders get."""
    step: CountedStep
    demand: Demand | None
    """The request that it was opened for; None if the configuration wants it."""
    recorders: Sequence[Recorder]
    overall: Range | None = None
    """The range of the running step, in a window that does not end with a call; else None."""
    call: RecordedCall | None = None
    """Its first call, which the metadata describe; None if no call has begun in it yet."""
    guard: Guard = field(default_factory=Guard)
    """Watches the host's memory, and waits for the device when the window closes. Work that the device has not finished
    by then is not in the window."""


class Process:
    """State that sessions, hooks and annotations share."""

    dispatcher: Any
    """The `Dispatcher`, which routes calls to sessions: a new one if hooks are installed in a process without any."""
    termination: Termination
    """Holds up a SIGTERM while something is unsaved."""

    def __init__(self) -> None:
        self.forks_watched = False
        """True once a forked child resets its state."""
        self.reset()

    def reset(self) -> None:
        """Begins afresh, as a process without hooks."""
        self.patches = Patches()
        """The functions of Megatron and of hosts that are replaced while hooks are installed."""
        self.patched_by: list[Callable[[Patches], None]] = []
        """The functions that have replaced these, each once."""
        self.background = Background()
        """The thread for everything that runs beside the training."""
        self.sessions: list[Any] = []
        """The sessions (`megaprof.capture.session.Session`) whose hooks are installed, in the order of installation."""
        self.window: OpenWindow | None = None
        """The open window; None if there is none. Kineto holds one session, so a process has at most one window."""
        self.started: Any = None
        """The `megaprof.Handle` of the hooks that a controller started in this process; None if none did."""
        self.step = 0
        """That controller's number of the running step."""
        self.prepared: Sequence[Recorder] = ()
        """The recorders that were prepared after the last call, for the next one. The next call of the process uses or
        discards them."""
        self.thread: int | None = None
        """The thread that opened the window or prepared the recorders. Only that thread can end them."""
        self.disturbed = False
        """True if a window closed, or prepared recorders were discarded, since the last call that was recorded."""
        self.summaries: dict[str | None, Future[bytes | None] | None] = {}
        """The kernel summaries of the roles' last windows, with ``--profile-kernels``, in the order of these windows;
        None if one is not made."""
        self.listeners: dict[Path, Any] = {}
        """The `megaprof.control.listener.Listener` of the session that answers in a control directory, by its path."""
        self.asked: list[tuple[Callable[[], None], bool]] = []
        """What other threads have asked of the training thread, which looks at this before each microbatch: functions,
        and whether they may run in the middle of a call."""
        self.parts = Parts()
        """What the host does between the schedule's calls."""
        self.traced = SESSION_VARIABLE in os.environ
        """True if Nsight Systems records this process from start to end. Then a controller, which has no hooks and no
        windows, writes ranges as well."""

    @property
    def recording(self) -> bool:
        """True while something records ranges: either a window is open, or nsys records a process that has no hooks to
        open windows."""
        return self.window is not None if self.sessions else self.traced

    @property
    def elsewhere(self) -> bool:
        """True while a window is open that another thread opened, and that only that thread can close."""
        return self.window is not None and self.thread != threading.get_ident()

    def memory_ran_out(self, session: object, reason: str) -> None:
        """Has the window of ``session`` closed because of ``reason``, if it is open. Any thread may call it."""
        if self.window is not None and self.window.owner is session:
            self.asked.append((partial(self.dispatcher.cut, reason), True))

    def drop(self) -> None:
        """Switches off the sessions that a fault may have touched (`Dispatcher.drop`). Can be run twice."""
        if self.sessions:
            self.dispatcher.drop()


process = Process()
