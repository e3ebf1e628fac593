"""The protocol of recorders, which run while a window is open, and the registry of ``--profile-tool``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from megaprof.config import values
from megaprof.config.options import flag
from megaprof.formats.names import artifact_name, shard
from megaprof.parallel.topology import RankCoords

if TYPE_CHECKING:
    from megaprof.artifacts.writer import Writer
    from megaprof.config.options import ProfileConfig


@dataclass(frozen=True)
class Window:
    """The window that a recorder records. It identifies the artifact that the recorder writes."""

    target: str
    role: str | None
    """The role that the work belongs to (actor, ref, critic, ...); None if the host names no role."""
    step: int
    coords: RankCoords
    call: int = 0
    """The number of calls with this step number right before it."""
    final: bool = False
    """True if the process plans no further window and has no request for one, known when it closes."""

    def path(self, directory: str | os.PathLike[str], suffix: str) -> Path:
        """Returns the path of this window's file with ``suffix``, in the rank's `shard` of ``directory``. Creates
        nothing. If there is such a file already, the writer gives this one the next number (`names.repeats`)."""
        name = artifact_name(self.target, self.role, self.step, self.coords, suffix)
        return Path(directory, shard(self.coords.rank, self.coords.sizes.world), name)


class Recorder(Protocol):
    """Records one window at a time, on the training thread. Its methods may raise: the session contains the fault.

    A recorder that is slow to start may also have a method ``prepare()``. It is called at the end of a call when the
    next call will probably be captured. ``start`` or ``discard`` follows it.
    """

    def start(self, window: Window) -> None:
        """Begins recording. Called right before the first step of the window."""

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        """Ends recording and hands the artifact to the writer. ``metadata`` is plain data that goes into the artifact.

        The session has already waited for the device, up to a limit. Do not wait for it again, even if it is still
        busy."""

    def discard(self) -> None:
        """Ends recording and keeps nothing. A no-op when nothing is being recorded or prepared."""


RecorderFactory = Callable[["ProfileConfig", "Writer"], Recorder]
"""Makes the recorder of one session, before the first step. Raises ValueError if the tool cannot run in this process.
Any other exception of a registered factory is turned into a ValueError. A recorder hands over finished files with
``writer.submit(raw, final)``."""


def register_recorder(name: str, factory: RecorderFactory) -> None:
    """Makes ``factory`` available in this process as ``--profile-tool NAME``. Call it before building a configuration.

    Raises ValueError if the name is not one lower-case word, or already stands for another factory.
    """
    if not isinstance(name, str) or name != name.lower() or [name] != name.replace(",", " ").split():
        raise ValueError(f"register_recorder: {name!r} is not valid; it must be one lower-case word without a comma")
    if name in (*values.BUILTIN, values.TIMELINE) or values.registered.get(name, factory) is not factory:
        known = ", ".join(values.known_tools())
        raise ValueError(f"register_recorder: {name!r} is taken; known tools: {known}")
    values.registered[name] = factory


def build_recorders(config: ProfileConfig, writer: Writer) -> tuple[Recorder, ...]:
    """Makes the recorders of windows in ``config.tool``. Raises ValueError if one cannot run in this process."""
    recorders: list[Recorder] = []
    for name in values.known_tools():
        if name not in config.tool or name == values.TIMELINE:
            continue
        if name in values.BUILTIN:
            module, _, attribute = values.BUILTIN[name].partition(":")
            recorders.append(getattr(import_module(module), attribute)(config, writer))
            continue
        try:
            recorders.append(cast("RecorderFactory", values.registered[name])(config, writer))
        except ValueError:
            raise
        except Exception as fault:
            raise ValueError(f"{flag('tool')} {name}: its recorder cannot be made: {fault!r}") from fault
    return tuple(recorders)
