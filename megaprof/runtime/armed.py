"""The state of a process that waits for megatron-core to bring the hooks. Plain data and the standard library, because
every Python process of an armed job imports it, whether it trains or not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megaprof.runtime.isolation import Suppressed

#: The mark of a process that asked for hooks. What becomes of them is logged elsewhere.
INSTALLED = "installed"


class Armed:
    """The state that the import hooks, the hosts' hooks and the line at the end of a job without hooks share."""

    def __init__(self) -> None:
        self.config: Any = None
        """Its `ProfileConfig`, or the ValueError of a host's own settings; None if the environment has it."""
        self.since = 0.0
        """When it was armed, in seconds since the epoch."""
        self.place: Any = None
        """The rank's `RankCoords` in Megatron's groups when the hooks were installed; None without such groups."""
        self.install: Callable[..., bool] = lambda **options: True
        """Installs the hooks (`megaprof.autoload.arming.install`). Returns False if it is too early, and has to be
        called again. Does nothing in a process that is not armed."""
        self.finish_job: Callable[[], object] = lambda: None
        """Waits for the files of the job's other processes."""
        self.schedules = SimpleNamespace()
        """By the name of a schedule: what runs when a host calls it, wherever it has it from. Empty if not armed."""
        self.awaits_schedule = False
        """True until the hooks are installed or cannot be: the next schedule that is called or asked for does it."""
        self.awaits_batch = False
        """True until the hooks are installed or cannot be. While it is, the first batch of a trainer without Megatron's
        schedule installs them."""
        self.marks: Path | None = None
        """The directory where the processes of a job mark how far they came (`autoload.arming`), if any."""
        self.first: int | None = None
        """The id of this process if it is the first one of the job."""
        self.asked_too_early = False
        """True if the host asked for a schedule, or called one, before Megatron-Core's process groups existed."""

    def mark(self, name: str) -> None:
        """Leaves a mark for the first process of the job: how far this one came, or that hooks were asked for. Once the
        first process itself has asked, nobody reads marks any more; it may be killed, so it removes them then."""
        if self.marks is not None and name == INSTALLED and self.first == os.getpid():
            from shutil import rmtree  # not in every process

            rmtree(self.marks, ignore_errors=True)
            self.marks = None
        elif self.marks is not None:
            with Suppressed(OSError):  # on another machine, or the first process is gone, or has asked for hooks
                (self.marks / name).touch()


armed = Armed()
