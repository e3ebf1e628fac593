"""Recorders: what runs while a window is open. One small protocol, and the registry of ``--profile-tool``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from megaprof.config import tools
from megaprof.config.options import flag
from megaprof.formats.names import artifact_path
from megaprof.parallel.topology import RankCoords

if TYPE_CHECKING:
    from megaprof.artifacts.writer import Writer
    from megaprof.config.options import ProfileConfig


@dataclass(frozen=True)
class Window:
    """What a recorder is asked to record: the identity of the artifact that it will write."""

    target: str
    """What is captured: ``train_actor``, ``train_log_probs``, ``evaluate``, ``train_overall`` or ``annotated``."""
    role: str | None
    """Whose work it is (actor, ref, critic, ...), where that was said."""
    step: int
    """The number of its first step."""
    coords: RankCoords
    """Of this rank."""
    last: int | None = None
    """The number of its last step, once it closes; None: that of its first."""
    asked: int | None = None
    """The step that was asked for, where another window was open in it and this one is captured instead; else None."""
    repeat: int = 1
    """The how-manieth window it is with these names, from 1 on: a finished file is never replaced."""

    @property
    def stem(self) -> str:
        """What the names of its files begin with, up to the dot before the suffix."""
        return self.path("", ".").name

    def path(self, directory: str | os.PathLike[str], suffix: str) -> Path:
        """Returns where the file of this window with ``suffix`` goes. Nothing is created."""
        return artifact_path(directory, self.target, self.role, self.step, self.coords, suffix, repeat=self.repeat)


class Recorder(Protocol):
    """Records one window at a time on the training thread. May raise: the session contains it.

    One that takes its time to start may have a method ``prepare()``, too: the call that ends is probably followed at
    once by one that is captured. ``start`` or ``discard`` comes next.
    """

    def start(self, window: Window) -> None:
        """Begin recording. Called right before the first step of the window."""

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        """End recording and hand the artifact to the writer; ``metadata`` is plain data for inside the artifact. The
        device is idle, unless it did not become so in time; do not wait for it."""

    def discard(self) -> None:
        """End recording and keep nothing. A no-op when nothing records and nothing is prepared."""


RecorderFactory = Callable[["ProfileConfig", "Writer"], Recorder]
"""Makes the recorder of one session. Raises ValueError for a tool that cannot run in this process, before the first
step; whatever else somebody's own raises becomes one. A recorder hands finished files over with
``writer.submit(Artifact(raw, final))``."""


def register_recorder(name: str, factory: RecorderFactory) -> None:
    """Make ``factory`` available in this process as ``--profile-tool NAME``. Call it before the configuration is built.

    Raises ValueError for a name that is not one lower-case word, or that stands for another factory already.
    """
    tools.register(name, factory)


def build_recorders(config: ProfileConfig, writer: Writer) -> tuple[Recorder, ...]:
    """The recorders of windows in ``config.tool``. Raises ValueError when one of them cannot run in this process."""
    windowed = (name for name in tools.known_tools() if name in config.tool and name != tools.TIMELINE)
    return tuple(_recorder(name, config, writer) for name in windowed)


def _recorder(name: str, config: ProfileConfig, writer: Writer) -> Recorder:
    if name in tools.BUILTIN:
        module, _, attribute = tools.BUILTIN[name].partition(":")
        recorder: Recorder = getattr(import_module(module), attribute)(config, writer)
        return recorder
    try:
        return cast("RecorderFactory", tools.registered[name])(config, writer)
    except ValueError:
        raise
    except Exception as fault:
        raise ValueError(f"{flag('tool')} {name}: its recorder cannot be made: {fault!r}") from fault
