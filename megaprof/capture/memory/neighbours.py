"""Finds out how much host memory the other processes of this host still need to close their windows.

Ranks capture the same step, so they close together, and there may be room for each alone but not for all. Each process
writes the bytes that it needs into a file of its own. The files are in a private directory in memory, which all
processes of one user on this host see, so no launcher has to list the processes. A file that cannot be written or read
counts as nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.names import host, is_gone
from megaprof.runtime.interruption import Suppressed

_MEMORY = Path("/dev/shm")
#: The most processes of one host that are looked at.
_MOST = 1024
_LONGEST = 20
#: A file is rewritten ten times a second, unless its process hangs. An older file was left by a killed process whose
#: number another process has now.
_STALE_SECONDS = 600


class Neighbours:
    """The processes of this host that have a window open. As a context manager, it makes this process one of them."""

    def __init__(self, base: Path | None = None) -> None:
        """``base``: the directory in which the private directory is."""
        self._base = base or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        self._directory: Directory | None = None
        self._own = str(os.getpid())

    def __enter__(self) -> Neighbours:
        with Suppressed(OSError, Unsafe), ExitStack() as undo:
            with Directory.open(self._base) as base:
                directory = base.child(f"megaprof-memory.{os.geteuid()}.{host()}", create=0o700)
            undo.callback(directory.close)
            directory.check(os.geteuid())
            undo.pop_all()
            self._directory = directory
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.unlink(self._own)
            directory.close()

    def say(self, needed: int) -> None:
        """Tells the other processes that this one needs ``needed`` more bytes."""
        if self._directory is not None:
            with Suppressed(OSError):
                self._write(self._directory, b"%*d" % (_LONGEST, needed))

    def others(self) -> int:
        """Returns how many bytes the other processes need together."""
        directory = self._directory
        if directory is None:
            return 0
        with Suppressed(OSError):
            return sum(self._read(directory, name) for name in directory.names(_MOST) if name != self._own)
        return 0

    def _write(self, directory: Directory, text: bytes) -> None:
        descriptor = directory.open_file(self._own, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)

    def _read(self, directory: Directory, name: str) -> int:
        if not name.isdecimal() or is_gone(int(name)):
            directory.unlink(name)
            return 0
        with Suppressed(OSError, ValueError):
            descriptor = directory.open_file(name, os.O_RDONLY)
            try:
                fresh = os.fstat(descriptor).st_mtime > time.time() - _STALE_SECONDS
                return int(os.read(descriptor, _LONGEST)) if fresh else 0
            finally:
                os.close(descriptor)
        return 0
