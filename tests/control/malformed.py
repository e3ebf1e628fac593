"""Everything that can lie in the place of a request, and what is said of it."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaprof.formats.job.requests import Request
from megaprof.formats.job.run import RunRecord
from tests.control import places


def changed(of: RunRecord, path: Path, **fields: Any) -> None:
    record = Request.new(of, "train_actor", timeout=60).as_record()
    places.write(path, {**record, "id": path.name.removesuffix(".json"), **fields}, mode=0o600)


def raw(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def signed(data: bytes) -> bytes:
    return b'{"crc32":"%08x","data":%s}' % (zlib.crc32(data), data)


def linked(run: RunRecord, path: Path) -> None:
    aside = path.parents[2] / f"{path.name}.elsewhere"
    changed(run, aside, id=path.name.removesuffix(".json"))
    path.symlink_to(aside)


def directory(run: RunRecord, path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def writable(run: RunRecord, path: Path) -> None:
    changed(run, path)
    path.chmod(0o666)


def foreign(run: RunRecord, path: Path) -> None:
    changed(run, path)
    os.chown(path, 12345, 12345)


def half(run: RunRecord, path: Path) -> None:
    changed(run, path)
    content = path.read_bytes()
    raw(path, content[: len(content) // 2])


#: What writes it, and a part of the reason with which it is refused.
MALFORMED: dict[str, tuple[Callable[[RunRecord, Path], None], str]] = {
    "text": (lambda run, path: raw(path, b"please"), "no record"),
    "empty": (lambda run, path: raw(path, b""), "no record"),
    "half": (half, "no record"),
    "crc": (lambda run, path: raw(path, b'{"crc32":"00000000","data":{}}'), "damaged"),
    "not-json": (lambda run, path: raw(path, signed(b"{'id':}")), "no JSON"),
    "list": (lambda run, path: raw(path, signed(b"[1,2]")), "no JSON object"),
    "deep": (lambda run, path: raw(path, signed(b"[" * 30000 + b"]" * 30000)), "JSON"),
    "huge": (lambda run, path: raw(path, signed(json.dumps({"x": "y" * 100_000}).encode())), "bytes"),
    "link": (linked, "symbolic link"),
    "fifo": (lambda run, path: os.mkfifo(path, 0o600), "no regular file"),
    "directory": (directory, "no regular file"),
    "writable": (writable, "can be written by others"),
    "stale": (lambda run, path: changed(run, path, run="0" * 16), "another run"),
    "old": (lambda run, path: changed(run, path, created=time.time() - 3600), "old"),
    "not-a-number": (lambda run, path: changed(run, path, timeout=float("nan")), "timeout"),
    "steps": (lambda run, path: changed(run, path, steps="2"), "steps '2'"),
    "many-steps": (lambda run, path: changed(run, path, steps=10**9), "steps 1000000000"),
    "target": (lambda run, path: changed(run, path, target="train"), "unknown target 'train'"),
    "tool": (lambda run, path: changed(run, path, options={"tool": ["gdb"]}), "unknown value 'gdb'"),
    "options": (lambda run, path: changed(run, path, options={"dir": "/"}), "unknown option 'dir'"),
    "ranks": (lambda run, path: changed(run, path, select="0,99"), "outside the world"),
    "coordinates": (lambda run, path: changed(run, path, select="pp=7"), "pp=7"),
    "id": (lambda run, path: changed(run, path, id="another"), "not its file's name"),
    "path": (lambda run, path: changed(run, path, id="../../x"), "not its file's name"),
    "null": (lambda run, path: changed(run, path, target=None), "target None"),
}
if os.geteuid() == 0:
    MALFORMED["foreign"] = (foreign, "belongs to user 12345")
