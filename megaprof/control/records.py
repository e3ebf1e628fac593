"""Small JSON files that other machines read while they are written: each carries its checksum.

A file is one object, ``{"crc32": "0a1b2c3d", "data": {...}}``: plain JSON for whoever looks, and never taken for whole
when it is not. Reading trusts nothing: whatever lies under the name, it returns or raises within a bounded time.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: No record is longer; what is, is not read.
LONGEST = 64 << 10
_HEAD = b'{"crc32":"'
_MIDDLE = b'","data":'
_TRIES = 3
_PAUSE = 0.005


class Absent(Exception):
    """There is no file under the name, or not any more."""


class BadRecord(Exception):
    """What lies under the name is no record; the message completes "it ..."."""


@dataclass(frozen=True)
class Owner:
    """Who may write what we act upon: the user that our own files get here (on a network file system that need not be
    the user that we are), and the write permissions for others that they get although we ask for none."""

    uid: int
    loose: int = 0

    @classmethod
    def of(cls, own: os.stat_result) -> Owner:
        return cls(own.st_uid, own.st_mode & 0o022)


def encode(record: dict[str, Any]) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode()
    return b"%s%08x%s%s}\n" % (_HEAD, zlib.crc32(data), _MIDDLE, data)


def decode(content: bytes) -> dict[str, Any]:
    """Raises BadRecord."""
    data = content.rstrip()
    start = len(_HEAD) + 8 + len(_MIDDLE)
    if not data.startswith(_HEAD) or data[len(_HEAD) + 8 : start] != _MIDDLE or not data.endswith(b"}"):
        raise BadRecord("is no record of megaprof's")
    data = data[start:-1]
    if content[len(_HEAD) : len(_HEAD) + 8] != b"%08x" % zlib.crc32(data):
        raise BadRecord("is damaged, or only half written")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise BadRecord("is no JSON") from None
    if not isinstance(record, dict):
        raise BadRecord("is no JSON object")
    return record


def write(path: Path, record: dict[str, Any], *, mode: int = 0o644) -> os.stat_result:
    """``record`` appears under ``path`` whole, in the place of what was there. Raises OSError, and leaves nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb", closefd=True) as file:
            file.write(encode(record))
            file.flush()
            status = os.fstat(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return status


def overwrite(path: Path, record: dict[str, Any], size: int) -> os.stat_result:
    """The same in place, for what is written again and again: one write of ``size`` bytes, padded, so that nothing of
    an earlier record is left; a reader that comes in between sees a wrong checksum. Raises ValueError when it does not
    fit."""
    content = encode(record)
    if len(content) > size:
        raise ValueError(f"a record of {len(content)} bytes does not fit into {size}")
    # Closed each time: that is when a network file system sends it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, content.ljust(size), 0)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, owner: Owner | None = None) -> dict[str, Any]:
    """The record under ``path``; with ``owner``, only one that nobody else can have written.

    Raises Absent, BadRecord.
    """
    for attempt in range(_TRIES):
        try:
            return decode(_content(path, owner))
        except BadRecord:
            if attempt == _TRIES - 1 or owner is not None:
                raise
            time.sleep(_PAUSE)  # it is being written
    raise Absent


def _content(path: Path, owner: Owner | None) -> bytes:
    try:
        # Neither through a link nor waiting: for the other end of a FIFO, or for a terminal.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as fault:
        if fault.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            raise Absent from None
        if fault.errno == errno.ELOOP:
            raise BadRecord("is a symbolic link") from None
        raise BadRecord(f"cannot be read: {fault.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadRecord("is no regular file")
        if owner is not None and status.st_uid != owner.uid:
            raise BadRecord(f"belongs to user {status.st_uid}, and the job to user {owner.uid}")
        if owner is not None and status.st_mode & 0o022 & ~owner.loose:
            raise BadRecord("can be written by others than its owner")
        if status.st_size > LONGEST:
            raise BadRecord(f"has {status.st_size} bytes, more than {LONGEST}")
        return os.read(descriptor, LONGEST + 1)
    except OSError as fault:
        if fault.errno == errno.ESTALE:
            raise Absent from None
        raise BadRecord(f"cannot be read: {fault.strerror}") from None
    finally:
        os.close(descriptor)


def text(record: dict[str, Any], key: str, *, longest: int = 200) -> str:
    """Raises ValueError, as the following do, naming the key."""
    value = record.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise ValueError(f"{key} {_short(value)} is not a text of 1 to {longest} printable characters")
    return value


def whole(record: dict[str, Any], key: str, least: int, most: int) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key} {_short(value)} is not a whole number from {least} to {most}")
    return value


def number(record: dict[str, Any], key: str, least: float, most: float) -> float:
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key} {_short(value)} is not a number from {least:g} to {most:g}")
    return float(value)


def _short(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 40 else shown[:40] + "..."
