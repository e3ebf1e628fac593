"""How many windows of the same names a directory has already: no finished file is ever replaced."""

from __future__ import annotations

import os
from pathlib import Path

from megaprof.formats.names import parse_artifact_name, sanitise, shard
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import Window
from megaprof.runtime.interruption import Suppressed

_Names = tuple[int, str, str, int]
"""Rank, target, role (sanitised, empty for none) and step."""

#: By directory: the highest repeat of each window so far. All sessions of a process share it.
_taken: dict[Path, dict[_Names, int]] = {}


class Repeats:
    """Called with a window that opens, it says the how-manieth one of these names it is, from 1 on."""

    def __init__(self, directory: str, coords: RankCoords) -> None:
        """Looks into ``directory`` once, now: a window that opens must not wait for the file system."""
        self._rank = coords.rank
        folder = Path(directory, shard(coords))
        self._taken = _taken.setdefault(folder, {})
        with Suppressed(OSError):
            for name in os.listdir(folder):
                found = parse_artifact_name(name)
                if found is not None and found.place.rank == self._rank:
                    names = (self._rank, found.target, found.role or "", found.step)
                    self._taken[names] = max(found.repeat, self._taken.get(names, 0))

    def __call__(self, window: Window) -> int:
        role = sanitise(window.role) if window.role else ""
        names = (self._rank, sanitise(window.target), role, window.step)
        repeat = self._taken[names] = self._taken.get(names, 0) + 1
        return repeat


def remove(folder: str, window: Window) -> None:
    """Remove the files of ``window`` from its rank's directory: of a step that failed and ran again. For the writer's
    thread, behind those files."""
    role = sanitise(window.role) if window.role else ""
    wanted = window.coords.rank, sanitise(window.target), role, window.step, window.repeat
    for name in os.listdir(folder):
        found = parse_artifact_name(name)
        if found is not None and wanted == (
            found.place.rank,
            found.target,
            found.role or "",
            found.step,
            found.repeat,
        ):
            os.unlink(os.path.join(folder, name))
