"""Files of any origin, opened so that none of them can make a reader wait for ever or fill its memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from megaprof.parallel.machine import find_bounds

#: A file of up to this many bytes is read on every machine ...
SMALL = 64 << 20
#: ... and a larger one only up to this share of the memory that is left, since decoding takes several times as much.
_SHARE = 0.25

#: So many other files are looked at before the first of ours: home directories have more.
MOST_OTHERS = 100_000

_allowed: int | None = None


class UnusableInput(OSError):
    """A file that is not read, whatever it holds; the message says why."""


class TooMuch(Exception):
    """A directory in which a search for our files would take for ever; the message says so."""


def allow(most: int | None) -> None:
    """Read files of up to ``most`` bytes in this process, however little memory is left; None: by the memory again."""
    global _allowed
    _allowed = most


def allowed() -> int | None:
    """What `allow` was told."""
    return _allowed


def most_bytes() -> int:
    """How many bytes of one input may be in memory now."""
    return _allowed if _allowed is not None else max(SMALL, int(_SHARE * memory_left()))


def memory_left() -> int:
    """Bytes that this process may still take, as far as the system says."""
    try:
        return min(there_is - used for used, there_is in (bound.read() for bound in find_bounds()))
    except (OSError, ValueError, KeyError):
        return 4 << 30  # not Linux: unknown


def open_input(path: Path) -> BinaryIO:
    """Open a regular file to be read. Never waits: for the other end of a FIFO, or for a terminal. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableInput("it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_input(path: Path) -> bytes:
    """The bytes of a regular file, of `most_bytes` at most. Raises OSError."""
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        most = SMALL if _allowed is None and size <= SMALL else most_bytes()
        if size > most:
            raise UnusableInput(
                f"it has {size >> 20:,} MiB, more than the {most >> 20:,} MiB that are read (see --max-input-mib)"
            )
        try:
            data = file.read(most + 1)
        except MemoryError:
            raise UnusableInput("it does not fit into memory") from None
    if len(data) > most:
        raise UnusableInput(f"it grows beyond {most:,} bytes while it is read")
    return data


def files_below(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Every file under ``directory`` whose name ends so and is not hidden, in no order. Raises TooMuch for the root of
    the file system, and after `MOST_OTHERS` files none of which is ours."""
    hint = "name the directory that the job got as --profile-dir"
    if os.path.realpath(directory) == os.path.abspath(os.sep):
        raise TooMuch(f"{directory} is the whole file system; {hint}")
    found: list[Path] = []
    others = 0
    for folder, _, names in os.walk(directory):
        found += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
        if not found:
            others += sum(".rank" not in name for name in names)  # each file of ours names its rank
        if others > MOST_OTHERS:
            raise TooMuch(f"{directory} holds more than {MOST_OTHERS:,} files, none of them by megaprof so far; {hint}")
    return found
