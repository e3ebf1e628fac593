"""Finds and numbers the files of windows in a rank's directory by their names. No finished file is ever replaced."""

from __future__ import annotations

import os

from megaprof.formats.names import artifact_name, parse_artifact_name
from megaprof.recorders import Window
from megaprof.runtime.interruption import Suppressed


def look(repeats: dict[str, int], folder: str, rank: int) -> None:
    """Notes in ``repeats`` how many windows of ``rank`` are in ``folder``, by the path with which their files' names
    begin. Called when the hooks are installed, because a window that opens must not wait for the disk."""
    with Suppressed(OSError):
        for artifact in map(parse_artifact_name, os.listdir(folder)):
            if artifact is not None and artifact.place.rank == rank:
                name = artifact_name(artifact.target, artifact.role, artifact.step, artifact.place, "")
                names = os.path.join(folder, name)
                repeats[names] = max(artifact.repeat, repeats.get(names, 0))


def next_repeat(repeats: dict[str, int], folder: str, window: Window) -> int:
    """Returns the number, from 1, of ``window``, which opens, among the windows whose files' names begin alike."""
    names = os.path.join(folder, artifact_name(window.target, window.role, window.step, window.coords, ""))
    repeats[names] = repeats.get(names, 0) + 1
    return repeats[names]


def names_of(folder: str, window: Window) -> list[str]:
    """Returns the names of the finished files of ``window`` in ``folder``, the directory of its rank."""
    names = list[str]()
    with Suppressed(OSError):
        names = sorted(name for name in os.listdir(folder) if name.startswith(window.stem))
    artifacts = ((name, parse_artifact_name(name)) for name in names)
    return [name for name, artifact in artifacts if artifact is not None and artifact.repeat == window.repeat]


def remove(folder: str, window: Window) -> None:
    """Removes the files of ``window``, whose step failed and ran again. Called in the writer's thread, once the files
    are complete."""
    for name in names_of(folder, window):
        os.unlink(os.path.join(folder, name))
