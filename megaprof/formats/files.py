"""A file appears whole or not at all: it grows under a hidden name and is renamed when it is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megaprof.formats.names import temporary_path


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears as ``final`` when the block ends; after an exception there is nothing."""
    temporary = temporary_path(final)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
