"""The records that lie in a control directory: small JSON files that other processes read while a job runs, written
whole by a rename and decoded into msgspec structs. ``run.json`` is the running job, by its lowest rank.
``capture.json`` is the one request to capture, by a command. The status of a rank is in `formats.job.status`.

Reading returns a record or raises within a bounded time, whatever lies under the name.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from megaprof.formats.files import Directory
from megaprof.formats.names import host, is_gone
from megaprof.parallel.selectors import Selector, parse_selector
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout

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


RUN = "run.json"
#: Status files that the whole job writes each second, at most.
STATUS_RATE = 1000
#: No job has more ranks, and nobody reads more status files.
MOST_RANKS = 1 << 18
LARGEST_PID = 1 << 31


def interval(world: int) -> float:
    """Returns the seconds between two looks of a rank, so that the whole job looks at most `STATUS_RATE` times a
    second."""
    return max(1.0, world / STATUS_RATE)


#: The interval in the largest job.
LONGEST_INTERVAL = interval(MOST_RANKS)


class RunRecord(Record, frozen=True):
    """A running job, or one role's part of it, as its lowest rank describes it."""

    run: Name
    """A random name of this run: another run in the same directory has another name."""
    host: Name
    """The host of the lowest rank, as `formats.names.host` names it."""
    pid: Annotated[int, Meta(ge=0, le=LARGEST_PID)]
    """The lowest rank's process id there."""
    started: Time
    """When it started, in wall-clock seconds."""
    sizes: ParallelSizes
    """Its parallel sizes."""
    order: Name | None
    """Megatron's rank order, such as ``tp-cp-ep-dp-pp``; None if no order explains the ranks."""
    targets: Annotated[tuple[Name, ...], Meta(max_length=8)]
    """The targets that it captures by itself."""
    role: str | None
    """The role of the model; None without roles."""
    interval: Annotated[float, Meta(ge=0.01, le=LONGEST_INTERVAL)]
    """Seconds between two looks of a rank, and between two of its status records."""
    leader: Count = 0
    """Its lowest rank, which removes old requests."""
    ended: Time | None = None
    """When it ended, in wall-clock seconds; None while it runs."""

    def __post_init__(self) -> None:
        """Raises ValueError if the sizes make more ranks than any job has."""
        largest = max(self.world, self.sizes.vpp, self.sizes.ep, self.sizes.etp)
        if largest > MOST_RANKS:
            raise ValueError(f"its sizes make {largest} ranks, more than {MOST_RANKS}")

    @classmethod
    def new(
        cls, coords: RankCoords, layout: WorldLayout | None, targets: tuple[str, ...], role: str | None, seconds: float
    ) -> RunRecord:
        """Returns the record of the job of the rank at `coords`. It begins now, and a rank looks every `seconds`."""
        return cls(
            run=secrets.token_hex(8),
            host=host(),
            pid=os.getpid(),
            started=time.time(),
            sizes=coords.sizes,
            order=None if layout is None else layout.order,
            targets=targets,
            role=role,
            interval=seconds,
            leader=coords.rank,
        )

    @property
    def world(self) -> int:
        """The number of its ranks."""
        return self.sizes.world

    @property
    def layout(self) -> WorldLayout | None:
        """Every rank's coordinates; None if no rank order explains them."""
        if self.order is None:
            return None
        try:
            return WorldLayout(self.sizes, self.order)
        except ValueError:
            return None


def dead(host_of: str, pid: int) -> bool:
    """Returns whether a process is known to be gone. False for a process of another host, about which nothing is
    known."""
    if host_of != host():
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # Z: it has ended, but its parent has not noticed
            return file.read().rpartition(b")")[2].split()[0] == b"Z" or is_gone(pid)
    except (OSError, IndexError):  # without /proc
        return is_gone(pid)


CAPTURE = "capture.json"
#: The most steps of a request, so that a status that names a file for each step and tool stays short enough.
MOST_STEPS = 100
LONGEST_TIMEOUT = 24 * 3600.0


class Refused(Exception):
    """The request will not be carried out; the message says why."""


class Request(Record, frozen=True):
    """Some windows of a target, one after another, on some ranks, by some tools."""

    id: Name
    """A random name of the request."""
    run: Name
    """The run that it is for."""
    timeout: Annotated[float, Meta(ge=1, le=LONGEST_TIMEOUT)]
    """Seconds after which nobody waits for it any more."""
    target: Name
    """The target to capture, such as ``train_actor``."""
    role: Name | None
    """The role whose calls are captured; None if the job has only one role."""
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)]
    """The number of windows."""
    select: Annotated[str, Meta(min_length=1, max_length=4000)]
    """The ranks that capture, as in `--profile-select`."""
    options: dict[str, bool | str | list[str]]
    """``tool``, and options of the tools, as `ProfileConfig` names them."""
    by: str = "megaprof trigger"
    """The requester, for people."""
    first: Count | None = None
    """The number of the first call to capture, counted from 0 since the hooks were installed; None until every selected
    rank has reported its number of calls."""

    @property
    def selector(self) -> Selector:
        """The ranks that capture. Raises ValueError."""
        return parse_selector(self.select)
