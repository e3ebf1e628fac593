"""What a process has once, whatever asks for it: its sessions, the one open window, and the names of those it had.

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
    """What its session knows of a window while it is open."""

    owner: object
    """The session that opened it. What others do meanwhile is recorded in it."""
    window: Window
    """What the recorders were asked for."""
    planned: PlannedWindow
    """Which steps are in it, and how it ends."""
    recorders: Sequence[Recorder]
    """What records it."""
    overall: Range | None = None
    """The range of the running step of a window that outlives the call that opened it, or had none."""
    call: RecordedCall | None = None
    """The window's first call: what the metadata describe."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that opened it, which alone can close it."""
    device: DeviceWait = field(default_factory=DeviceWait)
    """For when it closes: what the device has not finished then is not in it."""


class Process:
    """State that sessions, hooks and annotations share. `megaprof.capture.profiler.Profiler` looks after it."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []
        """The sessions (`megaprof.capture.session.Session`) whose hooks are in, in the order in which they went in."""
        self.window: OpenWindow | None = None
        """The open window, None: there is none. Kineto holds one session, so a process has one window at most."""
        self.prepared: Prepared | None = None
        """What was prepared behind the call before, for this one."""
        self.capturers: list[Any] = []
        """The sessions that captured a window, that of the last window last. Those that were removed, too."""
        self.repeats: dict[str, int] = {}
        """By the path that the names of a window's files begin with: how many windows have it."""
        self.said: set[str] = set()
        """Mistakes of the host's that stand in the log already."""
        self.answers: dict[Path, Any] = {}
        """By control directory: which session's `megaprof.control.listener.Listener` answers there."""
        self.memory_full: str | None = None
        """Why the open window must close before the next microbatch: set in the thread of the host memory guard."""
        self.urgent = False
        """True: another thread wants something of the training thread, which looks at this before each microbatch."""
        self.traced = SESSION_VARIABLE in os.environ
        """True: Nsight Systems records this process from start to end. A controller, which has no windows, has ranges
        then without any hooks."""

    @property
    def recording(self) -> bool:
        """True while ranges have somebody to reach: a window is open, or nsys records the process and no hooks are in
        that would open windows."""
        return self.window is not None if self.sessions else self.traced

    def captured(self, session: object) -> None:
        """A window of ``session`` has closed with its files."""
        self.capturers = [other for other in self.capturers if other is not session] + [session]

    def memory_ran_out(self, session: object, reason: str) -> None:
        """The window of ``session``, if it is open, is to close because of ``reason``. From any thread."""
        if self.window is not None and self.window.owner is session:
            self.memory_full = reason
            self.urgent = True

    def abandon(self) -> None:
        """After a fault: no session records anything more. Can be run twice."""
        in_full(*(session.abandon for session in self.sessions))

    def forget(self) -> None:
        """In a forked child: sessions and window are the parent's."""
        self.sessions.clear()
        self.capturers.clear()
        self.answers.clear()
        self.window, self.prepared, self.memory_full, self.urgent = None, None, None, False


process = Process()
