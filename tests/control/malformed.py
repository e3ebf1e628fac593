"""Everything that can lie in the place of a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from megaprof.control.request import new_request
from megaprof.formats.job import RunRecord
from tests.control import places


def changed(of: RunRecord, path: Path, **fields: Any) -> None:
    record = msgspec.to_builtins(new_request(of, "train_actor", timeout=60))
    places.write(path, {**record, "id": "x", **fields})


def linked(run: RunRecord, path: Path) -> None:
    aside = path.parents[1] / "elsewhere"
    changed(run, aside)
    path.symlink_to(aside)


def half(run: RunRecord, path: Path) -> None:
    changed(run, path)
    path.write_bytes(path.read_bytes()[:50])


Writes = Callable[[RunRecord, Path], None]
#: What is no request at all, or not of this version. Nobody can be told of it, and whoever asks next replaces it.
UNREADABLE: dict[str, Writes] = {
    "text": lambda run, path: path.write_bytes(b"please") and None,
    "empty": lambda run, path: path.touch(),
    "half": half,
    "checksummed": lambda run, path: path.write_bytes(b'{"crc32":"00000000","data":{}}') and None,
    "list": lambda run, path: path.write_bytes(b"[1,2]") and None,
    "deep": lambda run, path: path.write_bytes(b"[" * 30000 + b"]" * 30000) and None,
    "huge": lambda run, path: changed(run, path, by="y" * 300_000),
    "link": linked,
    "fifo": lambda run, path: os.mkfifo(path, 0o600),
    "not-a-number": lambda run, path: changed(run, path, timeout=float("nan")),
    "steps": lambda run, path: changed(run, path, steps="2"),
    "many-steps": lambda run, path: changed(run, path, steps=10**9),
    "null": lambda run, path: changed(run, path, target=None),
    "later": lambda run, path: changed(run, path, version=3),
}
#: What a rank cannot carry out, and a part of the reason.
REFUSED: dict[str, tuple[Writes, str]] = {
    "target": (lambda run, path: changed(run, path, target="train"), "unknown target 'train'"),
    "tool": (lambda run, path: changed(run, path, options={"tool": ["gdb"]}), "unknown value 'gdb'"),
    "options": (lambda run, path: changed(run, path, options={"dir": "/"}), "unknown option 'dir'"),
    "ranks": (lambda run, path: changed(run, path, select="0,99"), "outside the world"),
    "selection": (lambda run, path: changed(run, path, select="first"), "first"),
}
