"""Recorders: what runs while a window is open. One small protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megaprof.topology import RankCoords


@dataclass(frozen=True)
class Window:
    """What a recorder is asked to record: the identity of the artifact that it will write."""

    target: str
    role: str | None
    step: int
    coords: RankCoords


class Recorder(Protocol):
    """Records one window at a time on the training thread. May raise: the session contains it."""

    def start(self, window: Window) -> None:
        """Begin recording. Called right before the first step of the window."""

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        """End recording and hand the artifact to the writer; ``metadata`` is plain data for inside the artifact."""

    def discard(self) -> None:
        """End recording and keep nothing (a warm-up, or a fault). A no-op when nothing records."""
