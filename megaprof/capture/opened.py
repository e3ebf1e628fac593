"""The window that a session has open."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from megaprof.capture.agenda import Step
from megaprof.capture.demand import Demand
from megaprof.recorders import Window
from megaprof.recorders.call import RecordedCall
from megaprof.recorders.emit import Range
from megaprof.runtime.device import DeviceWait


@dataclass
class OpenWindow:
    """What the session knows of it while it is open."""

    window: Window
    """What the recorders were asked for."""
    last: Step
    """The last step in it so far; the first one at first."""
    merges: bool
    """True: wanted steps that follow go into it, too."""
    asked: int | None = None
    """The step that `last` is captured instead of; None: itself."""
    overall: Range | None = None
    """The range of the running step of a window that outlives the call that opened it, or had none."""
    call: RecordedCall | None = None
    """The window's first call: what the metadata describe."""
    demand: Demand | None = None
    """What asked for it while the job ran."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that opened it, which alone can close it."""
    device: DeviceWait = field(default_factory=DeviceWait)
    """For when it closes: what the device has not finished then is not in it."""

    def is_of(self, step: Step) -> bool:
        """Whether ``step`` is of the same target and role."""
        return (step.target, step.role) == (self.last.target, self.last.role)
