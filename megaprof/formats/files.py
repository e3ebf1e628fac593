"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megaprof.formats.names import temporary_path

#: Never follows a link, never waits for the other end of a FIFO, and never gets the terminal of this process.
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def appearing(final: Path, *, mode: int = 0o666, sync: bool = True, directory: int | None = None) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `final` when the block ends; after an exception, nothing has changed.

    It grows under a hidden name beside `final`. If a link is already there, it is not followed. `directory`: the
    descriptor of the directory that `final` lies in, if that is only a name. With `sync`, the file is on the disk in
    the end, and not just on its way there.
    """
    temporary = temporary_path(final)

    def create() -> int:
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, mode, dir_fd=directory)

    try:
        descriptor = create()
    except FileExistsError:
        # An earlier process with this id died here, or somebody has planted a link.
        os.unlink(temporary, dir_fd=directory)
        descriptor = create()
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
        # The file is closed by now: a network file system sends it when it is closed.
        os.replace(temporary, final, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
