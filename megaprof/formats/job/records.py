"""Small JSON files that other machines read while they are written: each carries its checksum.

A file is one object, ``{"crc32": "0a1b2c3d", "data": {...}}``: plain JSON for whoever looks, and never taken for whole
when it is not. Reading trusts nothing: whatever lies under the name, it returns or raises within a bounded time. What
the object may contain is the matter of `formats.job.run`, `formats.job.status` and `formats.job.requests`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from megaprof.formats.files import Directory, Owner, Unsafe

#: No record is longer; what is, is not read.
LONGEST = 64 << 10
_HEAD = b'{"crc32":"'
_MIDDLE = b'","data":'
_TRIES = 3
_PAUSE = 0.005
T = TypeVar("T")


class Absent(Exception):
    """There is no file under the name, or not any more."""


class BadRecord(Exception):
    """What lies under the name is no record; the message completes `it ...`."""


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
    except (ValueError, RecursionError):  # also for a number of thousands of digits
        raise BadRecord("is no JSON") from None
    if not isinstance(record, dict):
        raise BadRecord("is no JSON object")
    return record


def write(directory: Directory, name: str, record: dict[str, Any], *, mode: int = 0o644) -> os.stat_result:
    """`record` appears in `directory` whole, in the place of what was called `name`; returns what the file is.

    Raises OSError, and leaves nothing.
    """
    with directory.appearing(name, mode=mode, sync=False) as file:
        file.write(encode(record))
        return os.fstat(file.fileno())


def overwrite(directory: Directory, name: str, record: dict[str, Any], size: int) -> None:
    """The same in place, for what is written again and again: one write of `size` bytes, padded, so that nothing of an
    earlier record is left; a reader that comes in between sees a wrong checksum.

    Raises ValueError when it does not fit, and OSError.
    """
    content = encode(record)
    if len(content) > size:
        raise ValueError(f"a record of {len(content)} bytes does not fit into {size}")
    # Closed each time: that is when a network file system sends it.
    descriptor = directory.open_file(name, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, content.ljust(size), 0)
    finally:
        os.close(descriptor)


def read(directory: Directory, name: str, owner: Owner | None = None) -> dict[str, Any]:
    """The record called `name`; with `owner`, only one that nobody else can have written.

    Raises Absent, BadRecord.
    """
    return decoded(directory, name, owner, decode)


def decoded(directory: Directory, name: str, owner: Owner | None, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of the file; it may raise BadRecord. Else as `read`."""
    for attempt in range(_TRIES):
        try:
            return decode(_content(directory, name, owner))
        except BadRecord:
            if attempt == _TRIES - 1 or owner is not None:
                raise
            time.sleep(_PAUSE)  # it is being written
    raise Absent


def _content(directory: Directory, name: str, owner: Owner | None) -> bytes:
    try:
        descriptor = directory.open_file(name, os.O_RDONLY)
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
        if owner is not None:
            owner.check(status)
        if status.st_size > LONGEST:
            raise BadRecord(f"has {status.st_size} bytes, more than {LONGEST}")
        return os.read(descriptor, LONGEST + 1)
    except Unsafe as fault:
        raise BadRecord(str(fault)) from None
    except OSError as fault:
        if fault.errno == errno.ESTALE:
            raise Absent from None
        raise BadRecord(f"cannot be read: {fault.strerror}") from None
    finally:
        os.close(descriptor)
