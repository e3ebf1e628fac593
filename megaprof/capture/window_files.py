"""The files of windows in a rank's directory, by their names: no finished file is ever replaced."""

from __future__ import annotations

import os

from megaprof.formats.names import ArtifactName, parse_artifact_name, sanitise
from megaprof.recorders import Window
from megaprof.runtime.interruption import Suppressed

Names = tuple[str, int, str, str, int]
"""The directory of a rank's files, the rank, target, role (sanitised, empty for none) and step."""


def look(repeats: dict[Names, int], folder: str, rank: int) -> None:
    """Note in ``repeats`` what ``folder`` has of ``rank``. Now: a window that opens must not wait for the disk."""
    with Suppressed(OSError):
        for artifact in map(parse_artifact_name, os.listdir(folder)):
            if artifact is not None and artifact.place.rank == rank:
                names = _written(folder, artifact)
                repeats[names] = max(artifact.repeat, repeats.get(names, 0))


def next_repeat(repeats: dict[Names, int], folder: str, window: Window) -> int:
    """Returns the how-manieth one of its names ``window``, which opens, is, from 1 on."""
    names = _asked(folder, window)
    repeats[names] = repeats.get(names, 0) + 1
    return repeats[names]


def names_of(folder: str, window: Window) -> list[str]:
    """Returns what the finished files of ``window`` in its rank's directory are called."""
    names = list[str]()
    with Suppressed(OSError):
        names = sorted(name for name in os.listdir(folder) if name.startswith(window.stem))
    found = ((name, parse_artifact_name(name)) for name in names)
    return [name for name, artifact in found if artifact is not None and artifact.repeat == window.repeat]


def remove(folder: str, window: Window) -> None:
    """Remove the files of ``window``: of a step that failed and ran again. For the writer's thread, behind those
    files."""
    for name in names_of(folder, window):
        os.unlink(os.path.join(folder, name))


def _asked(folder: str, window: Window) -> Names:
    role = sanitise(window.role) if window.role else ""
    return folder, window.coords.rank, sanitise(window.target), role, window.step


def _written(folder: str, artifact: ArtifactName) -> Names:
    return folder, artifact.place.rank, artifact.target, artifact.role or "", artifact.step
