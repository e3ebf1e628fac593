"""Files that appear whole or not at all, in directories that are held open.

A `Directory` stays the directory that was opened, whatever its path leads to meanwhile, and nothing in it is reached
through a symbolic link. Who else may write there is read from the opened directory itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megaprof.formats.names import temporary_name

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Never follows a link, never waits for the other end of a FIFO, and never gets the terminal of this process.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = 0o022


class Unsafe(Exception):
    """Another user could plant or change files there; the message says where and why."""


class Directory:
    """A directory that is held open until `close`, or as a context manager. Every method raises OSError."""

    def __init__(self, descriptor: int, top: Path, *names: str) -> None:
        """`top` and the `names` that lead from there to it are for messages only."""
        self._descriptor = descriptor
        self._top, self._names = top, names

    @property
    def path(self) -> Path:
        """Its path, for messages."""
        return self._top.joinpath(*self._names)

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Opens the directory that the user named, also through links."""
        return cls(os.open(path, _DIRECTORY), path)

    @classmethod
    def inside(cls, parent: Path, name: str) -> Directory:
        """Opens the directory `name` in the directory that the user named. Raises `Unsafe` as `child` does."""
        return cls(_enter(f"{parent}/{name}", None), parent, name)

    def child(self, name: str, *, create: int | None = None) -> Directory:
        """Opens the directory `name` in this one; makes it with the permissions `create` if it does not exist. Raises
        `Unsafe` for a symbolic link, and for anything else that is no directory."""
        try:
            return Directory(_enter(name, self), self._top, *self._names, name)
        except FileNotFoundError:
            if create is None:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, create, dir_fd=self._descriptor)
        return Directory(_enter(name, self), self._top, *self._names, name)

    def stat(self, name: str | None = None) -> os.stat_result:
        """Returns who owns the directory and who may write to it; with a `name`, the same for that file or link."""
        if name is None:
            return os.fstat(self._descriptor)
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def check(self, uid: int, unavoidable: int = 0) -> None:
        """Raises `Unsafe` if the directory does not belong to user `uid`, or if others can write to it. Write
        permissions in the mode `unavoidable` do not count."""
        status = self.stat()
        if status.st_uid != uid:
            raise Unsafe(f"{self.path} belongs to user {status.st_uid}, and the job to user {uid}")
        if status.st_mode & _WRITABLE_BY_OTHERS & ~unavoidable:
            raise Unsafe(f"{self.path} can be written by others than its owner")

    def chmod(self, mode: int) -> None:
        os.fchmod(self._descriptor, mode)

    def probe(self) -> os.stat_result:
        """Returns the owner and the mode that our files get here, from a file that it creates and removes: on some file
        systems they are not what we ask for. Raises `Unsafe` if the directory belongs to another user and is closed to
        us."""
        name = f".{secrets.token_hex(8)}"
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o644, dir_fd=self._descriptor)
        except PermissionError:
            self.check(os.geteuid())
            raise
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(name, dir_fd=self._descriptor)

    def open_file(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Returns a descriptor of the file `name`, which may turn out to be a device or a FIFO."""
        return os.open(name, flags | _FILE, mode, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def appearing(self, name: str, *, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
        """Yields a file to write, which replaces `name` when the block ends; after an exception, nothing has changed.
        With `sync`, the file is on the disk by then, and not just on its way there."""
        temporary, flags = temporary_name(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = self.open_file(temporary, flags, mode)
        except FileExistsError:
            # An earlier process with this id died here, or somebody has planted a link.
            self.unlink(temporary)
            descriptor = self.open_file(temporary, flags, mode)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(descriptor)
            # The file is closed by now: a network file system sends it when it is closed.
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.unlink(temporary)
            raise

    def names(self, limit: int) -> list[str]:
        """Returns at most `limit` names in it, in no order. A network file system asks its server for them again."""
        with os.scandir(self._descriptor) as entries:
            return [entry.name for entry in islice(entries, limit)]

    def unlink(self, name: str) -> bool:
        """Removes a file. Returns whether it was there and could be removed; never raises."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except OSError:
            return False
        return True

    def exists(self, name: str) -> bool:
        """Returns whether anything with that name is there, even a link."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _enter(name: str, parent: Directory | None) -> int:
    """Returns a descriptor of the directory `name`, in the directory `parent` if there is one."""
    descriptor = None if parent is None else parent._descriptor
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError as fault:
        if fault.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                kind = "is a symbolic link" if stat.S_ISLNK(mode) else "is no directory"
                raise Unsafe(f"{name if parent is None else parent.path / name} {kind}") from None
        raise


@contextlib.contextmanager
def appearing(final: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `final` when the block ends; after an exception, nothing has changed.

    It grows under a hidden name beside `final`. If a link is already there, it is not followed.
    """
    with Directory.open(final.parent) as directory, directory.appearing(final.name, sync=sync) as file:
        yield file
