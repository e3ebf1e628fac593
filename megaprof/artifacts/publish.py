"""Makes files appear whole or not at all: they are written under a temporary name, and then renamed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from megaprof.formats.names import is_leftover, repeats, temporary_path
from megaprof.runtime.interruption import Suppressed
from megaprof.runtime.logs import logger

_CHUNK = 1 << 20


class Incomplete(Exception):
    """A raw file ends in the middle, because its disk was full or its process died."""


def publish(raw: Path, final: Path) -> Path:
    """Moves ``raw`` to its final name, compressed if that ends in ``.gz``. Afterwards ``raw`` is gone.

    Returns the name, which is ``final`` or its first repeat that is free. The file is never half-written. Raises
    OSError, with ``raw`` untouched and nothing left behind. Raises Incomplete if ``raw`` is a Kineto trace without its
    end.
    """
    if final.name.endswith((".trace.json", ".trace.json.gz")):
        check_trace(raw)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.suffix == ".gz":
        return compress(raw, final)
    if raw.parent != final.parent:
        return carry(raw, final)
    with open(raw, "rb") as file:
        os.fsync(file.fileno())
    return rename(raw, final)


def rename(complete: Path, final: Path) -> Path:
    """Renames a complete file to ``final``, or to its first repeat that is free. Never replaces a file.

    Returns the new name. Raises OSError.
    """
    for name in repeats(final):
        try:
            os.link(complete, name)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if name.exists():
                continue
            os.replace(complete, name)
            return name
        os.unlink(complete)
        return name
    raise FileExistsError(final)


def compress(raw: Path, final: Path) -> Path:
    """Compresses ``raw`` into ``final``, or its first repeat that is free, and removes ``raw``. Returns the name."""
    from isal import igzip  # 4 times as fast as zlib's fastest level, at the same size

    def fill(source: BinaryIO, file: BinaryIO) -> None:
        with igzip.IGzipFile(filename="", mode="wb", fileobj=file) as sink:
            shutil.copyfileobj(source, sink, _CHUNK)

    return _write_then_rename(raw, final, fill)


def carry(raw: Path, final: Path, seconds: float | None = None) -> Path:
    """Copies ``raw`` from another disk to ``final``, or its first repeat that is free, and removes ``raw``.

    Returns the name. Raises OSError, also if copying takes longer than ``seconds``; then only ``raw`` is left.
    """
    deadline = None if seconds is None else time.monotonic() + seconds

    def fill(source: BinaryIO, file: BinaryIO) -> None:
        while chunk := source.read(_CHUNK):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"copying takes longer than {seconds} s")
            file.write(chunk)

    return _write_then_rename(raw, final, fill)


def _write_then_rename(raw: Path, final: Path, fill: Callable[[BinaryIO, BinaryIO], None]) -> Path:
    temporary = temporary_path(final)
    try:
        with open(raw, "rb") as source, open(temporary, "wb") as file:
            fill(source, file)
            file.flush()
            os.fsync(file.fileno())
        name = rename(temporary, final)
    except BaseException:
        with Suppressed(OSError):
            temporary.unlink()
        raise
    raw.unlink(missing_ok=True)  # missing if the writer gave up meanwhile, and kept it under another name
    return name


def check_trace(raw: Path) -> None:
    """Raises Incomplete unless ``raw`` ends as Kineto ends a trace (torch 2.6 to 2.13).

    Kineto reports a full disk only on stderr. Unless it writes to a temporary name of its own, it leaves half a trace
    under the requested name.
    """
    with open(raw, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        tail = file.read().rstrip()
    if not tail.endswith(b"}") or b'"traceName"' not in tail:
        raise Incomplete(f"{raw} has {size} bytes and no end")


def remove_leftovers(directory: Path) -> None:
    """Removes unfinished files in ``directory`` that dead processes of this host left behind."""
    with Suppressed(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(".") and is_leftover(entry.name):
                with Suppressed(OSError):
                    os.unlink(entry.path)
                    logger.info("megaprof: removed %s, which a killed process had left unfinished", entry.path)
