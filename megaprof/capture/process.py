"""The state that a process has once, whoever uses it: its sessions, its one open window, the names of its files.

Plain data, light to import.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaprof.formats.nsys import SESSION_VARIABLE
from megaprof.runtime.device import DeviceWait
from megaprof.runtime.isolation import in_full

if TYPE_CHECKING:
    from megaprof.capture.agenda import PlannedWindow
    from megaprof.capture.ahead import Prepared
    from megaprof.recorders import Recorder, Window
    from megaprof.recorders.call import RecordedCall
    from megaprof.recorders.ranges.emit import Range


@dataclass(eq=False)
class OpenWindow:
    """A window while it is open."""

    owner: object
    """The session that opened it. Calls of other sessions are recorded in it, too."""
    window: Window
    """Its target, role and step, as the recorders know it."""
    planned: PlannedWindow
    """The steps that are in it, and how it ends."""
    recorders: Sequence[Recorder]
    """The recorders that run."""
    overall: Range | None = None
    """The range of the running step, in a window that does not end with a call; else None."""
    call: RecordedCall | None = None
    """Its first call, which the metadata describe; None: no call has begun in it yet."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that opened it, which alone can close it."""
    device: DeviceWait = field(default_factory=DeviceWait)
    """Waits for the device when the window closes. What the device has not finished by then is not in it."""


class Process:
    """State that sessions, hooks and annotations share. `megaprof.capture.profiler.Profiler` looks after it."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []
        """The sessions (`megaprof.capture.session.Session`) whose hooks are in, in the order in which they went in."""
        self.window: OpenWindow | None = None
        """The open window, None: there is none. Kineto holds one session, so a process has one window at most."""
        self.prepared: Prepared | None = None
        """The recorders that were prepared after the last call, for the next one; None: none were."""
        self.capturers: list[Any] = []
        """The sessions that captured a window, also those that were removed, in the order of their last windows."""
        self.repeats: dict[str, int] = {}
        """The number of windows, by the path that the names of their files begin with."""
        self.said: set[str] = set()
        """Mistakes in the host's calls that were logged already."""
        self.answers: dict[Path, Any] = {}
        """The `megaprof.control.listener.Listener` of the session that answers in a control directory, by its path."""
        self.memory_full: str | None = None
        """Why the open window has to close before the next microbatch. Set by the thread of the host memory guard."""
        self.urgent = False
        """True: another thread has work for the training thread, which looks at this before each microbatch."""
        self.traced = SESSION_VARIABLE in os.environ
        """True: Nsight Systems records this process from start to end. A controller has no hooks and no windows, and
        writes ranges then."""

    @property
    def recording(self) -> bool:
        """True while somebody records ranges: a window is open, or nsys records a process without hooks, which would
        open windows."""
        return self.window is not None if self.sessions else self.traced

    def captured(self, session: object) -> None:
        """A window of ``session`` has closed with its files."""
        self.capturers = [other for other in self.capturers if other is not session] + [session]

    def memory_ran_out(self, session: object, reason: str) -> None:
        """Have the window of ``session`` closed because of ``reason``, if it is open. Any thread may call it."""
        if self.window is not None and self.window.owner is session:
            self.memory_full = reason
            self.urgent = True

    def abandon(self) -> None:
        """Stop all recording after a fault. Can be run twice."""
        in_full(*(session.abandon for session in self.sessions))

    def forget(self) -> None:
        """Forget the sessions and the window in a forked child: they are the parent's."""
        self.sessions.clear()
        self.capturers.clear()
        self.answers.clear()
        self.window, self.prepared, self.memory_full, self.urgent = None, None, None, False


process = Process()
