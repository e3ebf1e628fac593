"""Files that appear whole or not at all: under a temporary name first, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from megaprof.formats.files import appearing
from megaprof.formats.names import is_leftover
from megaprof.runtime.logs import logger

_CHUNK = 1 << 20


class Incomplete(Exception):
    """A raw file ends in the middle: it was written to a disk that filled up, or by a process that died."""


def publish(raw: Path, final: Path) -> None:
    """``raw`` under its final name, compressed where that ends in ``.gz``; ``raw`` is gone afterwards.

    ``final`` is replaced atomically and never half-written. Raises OSError, with ``raw`` untouched and nothing left
    behind; Incomplete when ``raw`` is a Kineto trace without its end.
    """
    if final.name.endswith((".trace.json", ".trace.json.gz")):
        check_trace(raw)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.suffix == ".gz":
        compress(raw, final)
        return
    with open(raw, "rb") as file:
        os.fsync(file.fileno())
    os.replace(raw, final)


def compress(raw: Path, final: Path) -> None:
    """gzip ``raw`` into ``final`` and remove ``raw``."""
    from isal import igzip  # 4 times the speed of zlib's fastest level, at the same size

    with (
        open(raw, "rb") as source,
        appearing(final) as file,
        igzip.IGzipFile(filename="", mode="wb", fileobj=file) as sink,
    ):
        shutil.copyfileobj(source, sink, _CHUNK)
    raw.unlink(missing_ok=True)  # given up meanwhile, and kept under another name


def check_trace(raw: Path) -> None:
    """Raises Incomplete unless ``raw`` ends as Kineto ends a trace (torch 2.6 to 2.13).

    Kineto reports a full disk on stderr only. Where it does not write to a temporary name of its own, what it leaves
    under the name that we gave it is half a trace.
    """
    with open(raw, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        tail = file.read().rstrip()
    if not tail.endswith(b"}") or b'"traceName"' not in tail:
        raise Incomplete(f"{raw} has {size} bytes and no end")


def remove_leftovers(directory: Path) -> None:
    """Remove unfinished files in ``directory`` that dead processes of this host left behind."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(".") and is_leftover(entry.name):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    logger.info("megaprof: removed %s, which a killed process had left unfinished", entry.path)
