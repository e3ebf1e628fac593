"""The window that is open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from megaprof.capture.agenda import PlannedWindow
from megaprof.recorders import Recorder, Window
from megaprof.recorders.call import RecordedCall
from megaprof.recorders.emit import Range
from megaprof.runtime.device import DeviceWait


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
