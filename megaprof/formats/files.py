"""Files that appear whole or not at all, in directories that are held open.

What is done through a `Directory` is done in the directory that was opened, whatever its path leads to meanwhile, and
nothing in it is reached through a symbolic link. Who else may write there is asked of the opened directory itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megaprof.formats.names import temporary_path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Neither through a link, nor waiting for the other end of a FIFO, nor becoming the terminal of this process.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = 0o022


class Unsafe(Exception):
    """Another user could lead us astray there; the message says where and why."""


@dataclass(frozen=True)
class Owner:
    """Who may write what we act upon."""

    uid: int
    """The user that our own files get there: on a network file system that need not be the user that we are."""
    loose: int = 0
    """The write permissions for others that our own files get there although we ask for none."""

    @classmethod
    def of(cls, own: os.stat_result) -> Owner:
        """The owner of a file that we have written ourselves."""
        return cls(own.st_uid, own.st_mode & _WRITABLE_BY_OTHERS)

    def check(self, found: os.stat_result) -> None:
        """Raises `Unsafe` where somebody else owns what was found, or may write to it; the message completes `it`."""
        if found.st_uid != self.uid:
            raise Unsafe(f"belongs to user {found.st_uid}, and the job to user {self.uid}")
        if found.st_mode & _WRITABLE_BY_OTHERS & ~self.loose:
            raise Unsafe("can be written by others than its owner")


class Directory:
    """A directory that is held open until `close`, or as a context manager. Every method raises OSError."""

    def __init__(self, descriptor: int, top: Path, *names: str) -> None:
        """`top`, and the `names` that lead from there to it, are for messages only."""
        self._descriptor = descriptor
        self._top, self._names = top, names

    @property
    def path(self) -> Path:
        """Where it lies, for messages."""
        return self._top.joinpath(*self._names)

    @classmethod
    def open(cls, path: Path) -> Directory:
        """The directory that the user named, also through links."""
        return cls(os.open(path, _DIRECTORY), path)

    @classmethod
    def inside(cls, parent: Path, name: str) -> Directory:
        """The directory `name` in the directory that the user named. Raises `Unsafe` as `child` does."""
        path = parent / name
        return cls(_enter(path, None), path)

    def child(self, name: str, *, create: int | None = None) -> Directory:
        """The directory `name` in this one, made with the permissions `create` where it does not exist. Raises
        `Unsafe` for a symbolic link, and for whatever else is no directory."""
        try:
            return Directory(_enter(name, self), self._top, *self._names, name)
        except FileNotFoundError:
            if create is None:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, create, dir_fd=self._descriptor)
        return Directory(_enter(name, self), self._top, *self._names, name)

    def stat(self, name: str | None = None) -> os.stat_result:
        """Returns who owns it and who may write to it; or the same of the file `name` in it, or of the link of that
        name."""
        if name is None:
            return os.fstat(self._descriptor)
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def check(self, owner: Owner) -> None:
        """Raises `Unsafe` where somebody else owns it, or may write to it."""
        try:
            owner.check(self.stat())
        except Unsafe as fault:
            raise Unsafe(f"{self.path} {fault}") from None

    def chmod(self, mode: int) -> None:
        os.fchmod(self._descriptor, mode)

    def owner(self) -> Owner:
        """Returns who owns what we create here, from a file that is created and removed. Raises `Unsafe` where the
        directory is another user's, and closed to us."""
        name = f".{secrets.token_hex(8)}"
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o644, dir_fd=self._descriptor)
        except PermissionError:
            self.check(Owner(os.geteuid()))
            raise
        try:
            return Owner.of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
            os.unlink(name, dir_fd=self._descriptor)

    def open_file(self, name: str, flags: int, mode: int = 0o666) -> int:
        """A descriptor of the file `name`, which may turn out to be a device or a FIFO."""
        return os.open(name, flags | _FILE, mode, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def appearing(self, name: str, *, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
        """A file to write, which appears as `name` when the block ends, in the place of what was there; after an
        exception there is nothing. `sync`: it is on the disk then, and not only on its way."""
        temporary = temporary_path(Path(name)).name
        descriptor = self._create(temporary, mode)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(descriptor)
            # Closed before: that is when a network file system sends it.
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.unlink(temporary)
            raise

    def _create(self, name: str, mode: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return self.open_file(name, flags, mode)
        except FileExistsError:
            # An earlier process of this number died here, or somebody has planted a link.
            self.unlink(name)
            return self.open_file(name, flags, mode)

    def names(self, most: int) -> list[str]:
        """Returns what is in it, in no order, at most so many. A network file system asks its server for it again."""
        with os.scandir(self._descriptor) as entries:
            return [entry.name for entry in islice(entries, most)]

    def unlink(self, name: str) -> bool:
        """Returns whether there was such a file, and it could be removed. Never raises."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except OSError:
            return False
        return True

    def exists(self, name: str) -> bool:
        """Returns whether anything of that name is there, a link for instance."""
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


def _enter(name: str | Path, above: Directory | None) -> int:
    """A descriptor of the directory `name`, in the directory `above` if there is one."""
    descriptor = None if above is None else above._descriptor
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError as fault:
        if fault.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                what = "is a symbolic link" if stat.S_ISLNK(mode) else "is no directory"
                raise Unsafe(f"{name if above is None else above.path / name} {what}") from None
        raise


@contextlib.contextmanager
def appearing(final: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which appears as `final` when the block ends; after an exception there is nothing.

    It grows under a hidden name beside it. A link that lies there already is not followed.
    """
    with Directory.open(final.parent) as directory, directory.appearing(final.name, sync=sync) as file:
        yield file
