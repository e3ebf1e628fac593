"""Small JSON files that other processes read while a job runs: written whole by a rename, decoded into msgspec structs.

The fields' types and bounds stand in the structs (`formats.job.run`, `formats.job.status`, `formats.job.requests`).
Reading returns a record or raises within a bounded time, whatever lies under the name.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Annotated, Literal, TypeVar

import msgspec

from megaprof.formats.files import Directory

#: Bytes of the longest record; a longer file is not read.
LONGEST = 256 << 10

#: Types that several records use. A time is in wall-clock seconds, up to the year 2242: as nanoseconds, that fits into
#: 63 bits.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Time = Annotated[float, msgspec.Meta(ge=0, le=float(1 << 33))]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record that is a file of its own. Unknown fields of a newer writer are ignored."""

    version: Literal[2] = 2
    """The version of the files in a control directory. A record of another version is refused."""


R = TypeVar("R", bound=Record)


class Absent(Exception):
    """There is no such file."""


class BadRecord(Exception):
    """The file is not a record of the wanted kind; the message completes "it ..."."""


def write(directory: Directory, name: str, record: Record) -> None:
    """Replaces the file `name` in `directory` by `record`, as a whole. Raises OSError; then nothing has changed."""
    with directory.appearing(name, mode=0o600, sync=False) as file:
        file.write(msgspec.json.encode(record))


def read(directory: Directory, name: str, kind: type[R]) -> R:
    """Returns the record in the file `name` of `directory`. Raises Absent and BadRecord."""
    return decode(_content(directory, name), kind)


def decode(content: bytes, kind: type[R]) -> R:
    """Returns the record in a file's `content`. Raises BadRecord."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise BadRecord(f"is damaged, or was written by another version of megaprof: {fault}") from None


def _content(directory: Directory, name: str) -> bytes:
    try:
        descriptor = directory.open_file(name, os.O_RDONLY)
    except OSError as fault:
        if fault.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            raise Absent from None
        reason = "is a symbolic link" if fault.errno == errno.ELOOP else f"cannot be read: {fault.strerror}"
        raise BadRecord(reason) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadRecord("is no regular file")
        if status.st_size > LONGEST:
            raise BadRecord(f"has {status.st_size} bytes, more than {LONGEST}")
        return os.read(descriptor, LONGEST + 1)
    except OSError as fault:
        if fault.errno == errno.ESTALE:
            raise Absent from None
        raise BadRecord(f"cannot be read: {fault.strerror}") from None
    finally:
        os.close(descriptor)
