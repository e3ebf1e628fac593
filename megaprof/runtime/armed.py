"""What a process has once that waits for megatron-core to bring the hooks. Plain data and the standard library: every
Python process of an armed job imports it, whether it trains or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def _not_armed(**how: Any) -> bool:
    return True


class Armed:
    """State that the import hooks, the hosts' hooks and the line at the end of a job without any hooks share."""

    def __init__(self) -> None:
        self.config: Any = None
        """The `ProfileConfig` that it was armed with; None: the environment has it, or a host's own settings."""
        self.since = 0.0
        """When it was armed, in seconds since the epoch."""
        self.place: Any = None
        """Where the rank stood among Megatron's groups (`RankCoords`) when its hooks went in; None: nowhere."""
        self.install: Callable[..., bool] = _not_armed
        """Installs the hooks (`megaprof.autoload.arming.install`); false: it is too early, and it is to be asked
        again. Does nothing in a process that is not armed."""
        self.finish_job: Callable[[], object] = _not_armed
        """Waits for the files of the job's other processes."""
        self.awaits_batch = False
        """True until hooks went in, or cannot: the first batch of a trainer without Megatron's schedule brings them."""
        self.marks: Path | None = None
        """Where the processes of a job leave marks of how far they came; None: nobody looks (`runtime.unmet`)."""
        self.asked_too_early = False
        """True: a schedule was asked for before Megatron-Core's process groups existed."""


armed = Armed()
