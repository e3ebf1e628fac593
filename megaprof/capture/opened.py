"""The window that a session has open."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from megaprof.capture.agenda import PlannedWindow
from megaprof.recorders import Window
from megaprof.recorders.call import RecordedCall
from megaprof.recorders.emit import Range
from megaprof.runtime.device import DeviceWait


@dataclass
class OpenWindow:
    """What the session knows of it while it is open."""

    window: Window
    """What the recorders were asked for."""
    planned: PlannedWindow
    """Which steps are in it, and how it ends."""
    overall: Range | None = None
    """The range of the running step of a window that outlives the call that opened it, or had none."""
    call: RecordedCall | None = None
    """The window's first call: what the metadata describe."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that opened it, which alone can close it."""
    device: DeviceWait = field(default_factory=DeviceWait)
    """For when it closes: what the device has not finished then is not in it."""
