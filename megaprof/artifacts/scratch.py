"""Local scratch space for recorders to write to, so that a slow disk delays the writer's thread and not the training.

Each process has a private directory. It is in RAM (``/dev/shm``) if that has plenty of room, and else in the system's
temporary directory. There is none if the final files are on the same disk anyway. The writer's thread moves each file
to its destination. Files that a killed process left are removed by a later process on the same host.

A file goes to scratch only while this process has less than `MOST_BYTES` waiting there, and while `SPARE_BYTES` stay
free for each rank of the host. So a rank's scratch holds at most `MOST_BYTES` and one more file, on disk or in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megaprof.formats.names import host, is_gone
from megaprof.parallel.machine import find_bounds, local_ranks
from megaprof.runtime.interruption import Suppressed, from_host
from megaprof.runtime.logs import logger

#: The most bytes that may wait in a process's scratch when another file is placed there.
MOST_BYTES = 1 << 30
#: Bytes that stay free for each rank of the host when a file is placed: the host itself uses /dev/shm, too.
SPARE_BYTES = 2 << 30
_MEMORY = Path("/dev/shm")
_PREFIX = "megaprof-scratch."


class Scratch:
    """The private scratch directory of this process, for files whose final place is in ``destination``, which exists.

    The directory is made at once. Without room, or without another disk, there is none, and `place` returns None.
    Raises nothing.
    """

    def __init__(self, destination: Path, bases: tuple[Path, ...] | None = None) -> None:
        self._bases = (_MEMORY, Path(tempfile.gettempdir())) if bases is None else bases
        self._spare = SPARE_BYTES * (local_ranks() or 1)
        self._directory: Path | None = None
        try:
            device = os.stat(destination).st_dev
            for base in self._bases:
                if (
                    base.is_dir()
                    and os.access(base, os.W_OK)
                    and os.stat(base).st_dev != device
                    and self._has_room(base)
                ):
                    self._directory = Path(tempfile.mkdtemp(dir=base, prefix=f"{_PREFIX}{host()}.{os.getpid()}."))
                    return
        except OSError as fault:
            if from_host(fault):
                raise

    def place(self, final: Path) -> Path | None:
        """Returns where to write the raw file of ``final``; None if there is no room here, so it goes beside
        ``final``."""
        directory = self._directory
        if directory is None:
            return None
        try:
            waiting_bytes = sum(entry.stat().st_size for entry in os.scandir(directory))
            return directory / f"{final.name}.raw" if waiting_bytes < MOST_BYTES and self._has_room(directory) else None
        except FileNotFoundError:  # somebody removed the directory
            return None

    def close(self) -> None:
        """Removes the directory, unless it still holds a file that could not be moved to its destination."""
        if self._directory is not None:
            try:
                self._directory.rmdir()
            except OSError as fault:
                if from_host(fault):
                    raise

    def remove_leftovers(self) -> None:
        """Removes the scratch of dead processes of this host and this user. Called in the writer's thread."""
        for base in self._bases:
            for path in _leftovers(base):
                shutil.rmtree(path, ignore_errors=True)
                logger.info("megaprof: removed %s, which a killed process had left", path)

    def _has_room(self, base: Path) -> bool:
        disk = os.statvfs(base)
        if disk.f_bavail * disk.f_frsize < self._spare:
            return False
        if not base.is_relative_to(_MEMORY):
            return True
        try:
            return all(limit - used >= 2 * self._spare for used, limit in (bound.read() for bound in find_bounds()))
        except (OSError, KeyError, ValueError) as fault:  # some kernels and all sandboxes report it otherwise
            if from_host(fault):
                raise
            return False


def _leftovers(base: Path) -> Iterator[Path]:
    with Suppressed(OSError):
        for entry in os.scandir(base):
            name = entry.name.removeprefix(f"{_PREFIX}{host()}.")
            pid = name.partition(".")[0]
            if name == entry.name or not pid.isdecimal() or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and is_gone(int(pid)):
                yield Path(entry.path)
