"""The control directory of a save directory: the way in, its files, and the job that is found there.

Only the user of the job can enter it. A rank opens it without following links, and uses it only if it belongs to that
user and is closed to others. So nobody else can have written what lies in it, and that is the whole defence.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from megaprof.formats.job import (
    COLLECTIVES,
    CONTROL,
    LATE_INTERVALS,
    LATE_SECONDS,
    ROLE,
    RUN,
    STATUS,
    InFlight,
    R,
    RankStatus,
    RunRecord,
    decode,
)
from megaprof.formats.names import SAFE, appearing, dead, sanitise, shard
from megaprof.formats.phrases import Unanswerable, ago

#: Bytes of the longest record; a longer file is not read.
LONGEST = 256 << 10
#: How often an old status is read again before the job counts as silent: clocks of hosts differ.
_LOOKS = 3
#: Threads that read statuses: a network file system takes milliseconds for each, and serves many at once.
_READERS = 16
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o700
#: A record that each rank writes, with its `run` and `rank`.
OfRank = TypeVar("OfRank", RankStatus, InFlight)


class Unsafe(Exception):
    """Another user could plant or change files there, or it is closed to this one; the message says where and why."""


class ControlDirectory:
    """``control/`` in a save directory, or the directory of one role in it."""

    def __init__(self, directory: Path, role: str | None, *, own: bool = False) -> None:
        """``own``: for a rank of the job, which makes the directory, and refuses one that others could write to. A
        command opens it whoever it belongs to."""
        self._top = directory / CONTROL
        self._names: tuple[str, ...] = () if role is None else (ROLE + sanitise(role),)
        self._own = own
        self._checked: tuple[int, int] | None = None
        self.path = self._top.joinpath(*self._names)

    @contextmanager
    def open(self, *below: str, create: bool = False, control: int | None = None) -> Iterator[int]:
        """Yields a descriptor of it, or of the directory that the names ``below`` lead to from there, which ``create``
        makes. ``control``: its own descriptor, if it is open.

        It stays that directory, whatever its path leads to meanwhile. Raises OSError, and `Unsafe` for a symbolic link
        and anything else that is no directory, for one that is closed to the user of a command, and for one of a
        rank's that others could write to.
        """
        with ExitStack() as stack:
            if control is not None:
                path, descriptor, names = self.path, control, below
            else:
                path, descriptor, names = self._top, self._enter(self._top, None, create=self._own), self._names + below
                stack.callback(os.close, descriptor)
                if self._own:
                    self._check(descriptor)
            for name in names:
                path = path / name
                descriptor = self._enter(path, descriptor, create=create or (self._own and name in self._names))
                stack.callback(os.close, descriptor)
            if not create:  # a network file system asks its server for what is new in a directory that is listed
                with suppress(OSError), os.scandir(descriptor) as entries:
                    next(entries, None)
            yield descriptor

    def _enter(self, path: Path, parent: int | None, *, create: bool) -> int:
        name = path if parent is None else path.name
        try:
            return os.open(name, _DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
        except PermissionError:
            if self._own:
                raise
            raise Unsafe(f"{path} is closed to you: only the user whose job it is may look and ask") from None
        except OSError as fault:
            if fault.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            link = stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
            raise Unsafe(f"{path} is {'a symbolic link' if link else 'no directory'}") from None
        if parent is None:
            os.makedirs(path.parent, exist_ok=True)  # somebody has cleaned up
        with suppress(FileExistsError):
            os.mkdir(name, _MODE, dir_fd=parent)
        return os.open(name, _DIRECTORY, dir_fd=parent)

    def _check(self, descriptor: int) -> None:
        """Raises Unsafe if others could write to it: once, and again if another directory has taken its place.

        It is compared with a file that we make there: on some file systems, neither the owner nor the mode of our files
        is what we ask for.
        """
        here = os.fstat(descriptor)
        if self._checked == (here.st_dev, here.st_ino):
            return
        name = f".{secrets.token_hex(8)}"
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o644, dir_fd=descriptor)
        except PermissionError:
            if here.st_uid == os.geteuid():
                raise
            uid, mode = os.geteuid(), 0
        else:
            try:
                uid, mode = os.fstat(file).st_uid, os.fstat(file).st_mode
            finally:
                os.close(file)
                os.unlink(name, dir_fd=descriptor)
        if here.st_uid != uid:
            raise Unsafe(f"{self._top} belongs to user {here.st_uid}, and the job to user {uid}")
        if here.st_mode & 0o022 & ~mode:
            raise Unsafe(f"{self._top} can be written by others than its owner")
        if stat.S_IMODE(here.st_mode) != _MODE:  # made by hand
            with suppress(OSError):
                os.fchmod(descriptor, _MODE)
        self._checked = here.st_dev, here.st_ino


def names_of(what: str, rank: int, world: int) -> tuple[str, ...]:
    """Returns the names from the control directory down to a rank's file of the kind `what`."""
    return tuple(filter(None, (what, shard(rank, world), f"rank{rank:05d}.json")))


def write(directory: int, name: str, record: msgspec.Struct) -> None:
    """Replaces the file `name` by `record`, as a whole. Raises OSError; then nothing has changed."""
    with appearing(Path(name), mode=0o600, sync=False, directory=directory) as file:
        file.write(msgspec.json.encode(record))


def read(directory: int, name: str, kind: type[R]) -> R | None:
    """Returns the record in the file `name`; None if there is none, or none of this kind."""
    with suppress(FileNotFoundError, ValueError):
        return load(directory, name, kind)
    return None


def load(directory: int, name: str, kind: type[R]) -> R:
    """Returns the record in the file `name`, whatever lies there, within a bounded time. Raises FileNotFoundError, and
    ValueError."""
    try:
        descriptor = os.open(name, os.O_RDONLY | SAFE, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("is no regular file")
            if status.st_size > LONGEST:
                raise ValueError(f"has {status.st_size} bytes, more than {LONGEST}")
            return decode(os.read(descriptor, LONGEST + 1), kind)
        finally:
            os.close(descriptor)
    except OSError as fault:
        if fault.errno in (errno.ENOENT, errno.ESTALE):
            raise FileNotFoundError from None
        reason = "is a symbolic link" if fault.errno == errno.ELOOP else f"cannot be read: {fault.strerror}"
        raise ValueError(reason) from None


@dataclass(frozen=True)
class RunningJob:
    """One run in a save directory."""

    directory: Path
    run: RunRecord

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory(self.directory, self.run.role)

    def leader(self) -> RankStatus | None:
        """Returns the status of rank 0; None if it cannot be read."""
        return self.statuses([0]).get(0)

    def statuses(self, ranks: Iterable[int] | None = None) -> dict[int, RankStatus]:
        """Returns the statuses of `ranks`, or of all ranks, by rank: those that exist and belong to this run."""
        sizes = self.run.sizes
        return {
            rank: status
            for rank, status in self._read(STATUS, range(self.run.world) if ranks is None else ranks, RankStatus)
            if all(place < getattr(sizes, axis) for axis, place in status.coords.items())
        }

    def in_flight(self) -> dict[int, InFlight]:
        """Returns what the ranks that stand still have in flight, by rank, as far as they wrote it."""
        return dict(self._read(COLLECTIVES, range(self.run.world), InFlight))

    def _read(self, what: str, ranks: Iterable[int], kind: type[OfRank]) -> Iterator[tuple[int, OfRank]]:
        """Yields the records of `ranks` below the directory `what`, as far as they are written and of this run."""
        by_folder: dict[tuple[str, ...], dict[int, str]] = {}
        for rank in ranks:
            *names, file = names_of(what, rank, self.run.world)
            by_folder.setdefault(tuple(names), {})[rank] = file
        for folders, files in by_folder.items():
            with suppress(OSError, Unsafe), self.control.open(*folders) as folder:
                if len(files) <= _READERS:
                    records = [read(folder, file, kind) for file in files.values()]
                else:
                    with ThreadPoolExecutor(_READERS) as readers:
                        records = list(readers.map(lambda file: read(folder, file, kind), files.values()))
                for rank, record in zip(files, records, strict=True):
                    if record is not None and (record.run, record.rank) == (self.run.run, rank):
                        yield rank, record

    def now(self, statuses: dict[int, RankStatus], silence: str | None) -> float:
        """Returns the time in seconds by the clocks of the job's hosts, which may differ from the clock here. While the
        job lives (`silence` is None), some rank wrote its status less than an interval ago."""
        here = time.time()
        if silence is not None or not statuses:
            return here
        latest = max(status.time for status in statuses.values())
        return min(max(here, latest), latest + self.run.interval)

    def silence(self) -> str | None:
        """Returns why the job will not answer any more; None while it lives. May take a few of its intervals."""
        run = self.run
        if run.ended is not None:
            return f"the job has ended, {ago(time.time() - run.ended)} ago"
        if dead(run.host, run.pid):
            return f"the job is gone: process {run.pid} of rank 0 does not exist any more"
        first = self.leader()
        if first is not None and not first.late(time.time()):
            return None
        for _ in range(_LOOKS):
            time.sleep(run.interval)
            last = self.leader()
            if last is not None and (first is None or last.time != first.time):
                return None
        heard = "never" if first is None else f"{ago(time.time() - first.time)} ago"
        name = run.host if first is None else first.name
        return f"the job does not answer: rank 0 ({name}, process {run.pid}) was last heard of {heard}"

    def starting(self, statuses: dict[int, RankStatus]) -> bool:
        """Returns whether ranks without a status may just not have started yet."""
        since = time.time() - self.run.started
        return len(statuses) < self.run.world and since < max(LATE_SECONDS, LATE_INTERVALS * self.run.interval)


def roles_with_a_run(directory: Path) -> list[str | None]:
    """Returns the roles of a save directory whose control directory holds a run; None stands for a run without a role.
    Raises Unsafe."""
    try:
        with ControlDirectory(directory, None).open() as control:
            names = os.listdir(control)
            roles = [name.removeprefix(ROLE) for name in sorted(names) if name.startswith(ROLE)]
            found: list[str | None] = [None] if RUN in names else []
    except OSError:
        return []
    for role in roles:
        with suppress(OSError, Unsafe), ControlDirectory(directory, role).open() as control:
            found += [role] if RUN in os.listdir(control) else []
    return found


def find_job(directory: Path, role: str | None = None) -> RunningJob:
    """Returns the job that writes to `directory`, or a role's part of it. Raises Unanswerable."""
    if not directory.is_dir():
        raise Unanswerable(f"{directory} is not a directory")
    try:
        roles = roles_with_a_run(directory)
    except Unsafe as fault:
        raise Unanswerable(f"no job in {directory}: {fault}") from None
    if not roles:
        raise Unanswerable(
            f"no job in {directory}: {CONTROL}/run.json does not exist there; a job writes it with its first step, "
            "if it has --profile-on-demand or --profile-tool timeline"
        )
    wanted = None if role is None else sanitise(role)
    chosen = wanted if wanted in roles else None if None in roles else roles[0]
    if chosen not in (wanted, None) and (role is not None or len(roles) > 1):
        raise Unanswerable(f"the job in {directory} has the roles {', '.join(map(str, roles))}: name one with --role")
    control = ControlDirectory(directory, chosen)
    try:
        with control.open() as opened:
            return RunningJob(directory, load(opened, RUN, RunRecord))
    except ValueError as fault:
        raise Unanswerable(f"{control.path / RUN} {fault}") from None
    except (OSError, Unsafe) as fault:
        raise Unanswerable(f"no job in {directory}: {fault}") from None
