"""Local scratch: where recorders write, so that a slow disk holds up the writer's thread and no training.

A process has a directory of its own, private, in RAM (``/dev/shm``) where there is plenty of room, else in the system's
temporary directory; none where the files are to lie on the same disk anyway. The writer's thread carries each file over
and removes it. What a killed process left is removed by a later one on the same host.

Room: a file goes there only while less than `MOST_BYTES` of this process's wait there and `SPARE_BYTES` stay free for
each rank of the host. So scratch holds at most `MOST_BYTES` and one file more per rank, on disk or in memory.
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

#: Bytes that may wait in a process's scratch when another file is placed there.
MOST_BYTES = 1 << 30
#: Bytes, per rank of the host, that stay free when a file is placed: what else lies in /dev/shm is the host's.
SPARE_BYTES = 2 << 30
_MEMORY = Path("/dev/shm")
_PREFIX = "megaprof-scratch."


class Scratch:
    """The scratch directory of this process for files that are to lie in ``destination``, which exists.

    It is made at once, and is private. Without room, or without another disk, it places nothing. Raises nothing.
    """

    def __init__(self, destination: Path, bases: tuple[Path, ...] | None = None) -> None:
        self._bases = (_MEMORY, Path(tempfile.gettempdir())) if bases is None else bases
        self._spare = SPARE_BYTES * (local_ranks() or 1)
        self._directory: Path | None = None
        try:
            device = os.stat(destination).st_dev
            for base in self._bases:
                if base.is_dir() and os.access(base, os.W_OK) and os.stat(base).st_dev != device and self._room(base):
                    self._directory = Path(tempfile.mkdtemp(dir=base, prefix=f"{_PREFIX}{host()}.{os.getpid()}."))
                    return
        except OSError as fault:
            if from_host(fault):
                raise

    def place(self, final: Path) -> Path | None:
        """Returns where the raw file of ``final`` is to be written; None: beside it, because there is no room here."""
        directory = self._directory
        if directory is None:
            return None
        try:
            waiting = sum(entry.stat().st_size for entry in os.scandir(directory))
            return directory / f"{final.name}.raw" if waiting < MOST_BYTES and self._room(directory) else None
        except FileNotFoundError:  # somebody has tidied up
            return None

    def close(self) -> None:
        """Remove the directory, unless a file is left in it that could not be carried over."""
        if self._directory is not None:
            try:
                self._directory.rmdir()
            except OSError as fault:
                if from_host(fault):
                    raise

    def remove_leftovers(self) -> None:
        """Remove what dead processes of this host and this user left. For the writer's thread."""
        for base in self._bases:
            for path in _left(base):
                shutil.rmtree(path, ignore_errors=True)
                logger.info("megaprof: removed %s, which a killed process had left", path)

    def _room(self, base: Path) -> bool:
        disk = os.statvfs(base)
        if disk.f_bavail * disk.f_frsize < self._spare:
            return False
        if not base.is_relative_to(_MEMORY):
            return True
        try:
            return all(there_is - used >= 2 * self._spare for used, there_is in (each.read() for each in find_bounds()))
        except (OSError, KeyError, ValueError) as fault:  # not every kernel, and no sandbox, says it as Linux does
            if from_host(fault):
                raise
            return False


def _left(base: Path) -> Iterator[Path]:
    with Suppressed(OSError):
        for entry in os.scandir(base):
            name = entry.name.removeprefix(f"{_PREFIX}{host()}.")
            pid = name.partition(".")[0]
            if name == entry.name or not pid.isdecimal() or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and is_gone(int(pid)):
                yield Path(entry.path)
