"""Files that appear whole or not at all: under a temporary name first, then renamed."""

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
    """A raw file ends in the middle: it was written to a disk that filled up, or by a process that died."""


def publish(raw: Path, final: Path) -> Path:
    """Give ``raw`` its final name, compressed if that ends in ``.gz``; ``raw`` is gone afterwards.

    Returns the name: ``final``, or its first repeat that is free. It is never half-written. Raises OSError, with
    ``raw`` untouched and nothing left behind, and Incomplete if ``raw`` is a Kineto trace without its end.
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
    """Rename a complete file to ``final``, or to its first repeat that is free: nothing is ever replaced.

    Returns the name that it got. Raises OSError.
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
    """gzip ``raw`` into ``final``, or its first repeat that is free, and remove ``raw``. Returns the name."""
    from isal import igzip  # 4 times the speed of zlib's fastest level, at the same size

    def fill(source: BinaryIO, file: BinaryIO) -> None:
        with igzip.IGzipFile(filename="", mode="wb", fileobj=file) as sink:
            shutil.copyfileobj(source, sink, _CHUNK)

    return _grown(raw, final, fill)


def carry(raw: Path, final: Path, seconds: float | None = None) -> Path:
    """Copy ``raw`` from another disk to ``final``, or its first repeat that is free, and remove ``raw``.

    Returns the name. Raises OSError, after ``seconds`` as well, with nothing left behind but ``raw``.
    """
    deadline = None if seconds is None else time.monotonic() + seconds

    def fill(source: BinaryIO, file: BinaryIO) -> None:
        while chunk := source.read(_CHUNK):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"copying takes longer than {seconds} s")
            file.write(chunk)

    return _grown(raw, final, fill)


def _grown(raw: Path, final: Path, fill: Callable[[BinaryIO, BinaryIO], None]) -> Path:
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
    raw.unlink(missing_ok=True)  # given up meanwhile, and kept under another name
    return name


def check_trace(raw: Path) -> None:
    """Raises Incomplete unless ``raw`` ends as Kineto ends a trace (torch 2.6 to 2.13).

    Kineto reports a full disk on stderr only. If it does not write to a temporary name of its own, it leaves half a
    trace under the name that it was given.
    """
    with open(raw, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        tail = file.read().rstrip()
    if not tail.endswith(b"}") or b'"traceName"' not in tail:
        raise Incomplete(f"{raw} has {size} bytes and no end")


def remove_leftovers(directory: Path) -> None:
    """Remove unfinished files in ``directory`` that dead processes of this host left behind."""
    with Suppressed(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(".") and is_leftover(entry.name):
                with Suppressed(OSError):
                    os.unlink(entry.path)
                    logger.info("megaprof: removed %s, which a killed process had left unfinished", entry.path)
