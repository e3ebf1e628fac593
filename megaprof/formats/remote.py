"""Reads from addresses such as ``s3://bucket/traces``, by fsspec: for readers they are paths like any other."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from types import TracebackType
from typing import Any, BinaryIO, cast

from megaprof.formats.phrases import Unanswerable

#: A search for our files ends after this many files of others, because home directories have more.
MOST_OTHERS = 100_000


def place(text: str | os.PathLike[str]) -> Path:
    """Returns the path that a user names: a remote one if it has ``://`` in it."""
    if isinstance(text, Path):
        return text
    protocol, separator, path = os.fspath(text).partition("://")
    if protocol in ("file", "local"):
        return Path(path)
    return RemotePath(text) if separator else Path(text)


def walk(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yields every directory at or below one, with the names of its files. Raises Unreachable, and PermissionError if
    ``directory`` is closed to this user."""
    if isinstance(directory, RemotePath):
        yield from directory.walk_files()
        return

    def refused(fault: OSError) -> None:
        # Directories below it that are closed to this user are left out.
        if isinstance(fault, PermissionError) and fault.filename == os.fspath(directory):
            raise fault

    for folder, _, names in os.walk(directory, onerror=refused):
        yield Path(folder), names


def files_below(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns every file below ``directory`` that ends with one of ``suffixes`` and is not hidden, in no order. Raises
    Unreachable, and TooMuch for the root of the file system and after `MOST_OTHERS` files of which none is ours."""
    hint = "name the directory that the job got as --profile-dir"
    if os.path.realpath(directory) == os.path.abspath(os.sep):
        raise TooMuch(f"{directory} is the whole file system; {hint}")
    paths: list[Path] = []
    other_count = 0
    for folder, names in walk(directory):
        paths += [folder / name for name in names if name.endswith(suffixes) and not name.startswith(".")]
        if not paths:
            other_count += sum(".rank" not in name for name in names)  # each file of ours names its rank
        if other_count > MOST_OTHERS:
            raise TooMuch(f"{directory} holds more than {MOST_OTHERS:,} files, none of them by megaprof so far; {hint}")
    return paths


def local_copy(path: Path) -> Path:
    """Returns a path that other libraries can open: ``path`` itself, or a local copy that is removed when the process
    ends. Raises Unreachable."""
    if not isinstance(path, RemotePath):
        return path
    return _copied(str(path))


@functools.cache
def _copied(address: str) -> Path:
    path = RemotePath(address)
    folder = Path(tempfile.mkdtemp(prefix="megaprof-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with path.opened() as source, open(folder / path.name, "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    return folder / path.name


class TooMuch(Unanswerable):
    """A directory holds too many files to search it for ours; the message says so."""


class Unreachable(OSError):
    """fsspec, or a library below it, failed; the message says why, in one line."""


class RemotePath(PosixPath):
    """A path to be read by fsspec; nothing here writes. Its methods raise Unreachable, whatever the file system
    raises."""

    def __str__(self) -> str:
        head, colon, tail = super().__str__().partition(":/")
        return f"{head}://{tail}" if colon else head

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> RemotePath:
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Returns the size, the kind and, if it is known, the time of the last change."""
        with _unreachable():
            filesystem, name = self._file_system()
            info = filesystem.info(name)
        kind = stat.S_IFDIR if info.get("type") == "directory" else stat.S_IFREG
        changed_at = info.get("LastModified") or info.get("mtime") or info.get("created") or 0
        seconds = changed_at if isinstance(changed_at, (int, float)) else changed_at.timestamp()
        return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, int(info.get("size") or 0), *[int(seconds)] * 3))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._is("exists")

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is("isfile")

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is("isdir")

    def iterdir(self) -> Generator[RemotePath, None, None]:
        with _unreachable():
            filesystem, name = self._file_system()
            names = sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in filesystem.ls(name, detail=False))
        yield from (self / child for child in names if child)

    def walk_files(self) -> Iterator[tuple[Path, list[str]]]:
        """Yields every directory at or below this one, with the names of its files."""
        with _unreachable():
            filesystem, name = self._file_system()
            folders = [(folder, sorted(names)) for folder, _, names in filesystem.walk(name)]
            root = str(filesystem._strip_protocol(name)).rstrip("/")
        for folder, names in folders:
            yield (
                self / str(folder).rstrip("/").removeprefix(root).lstrip("/"),
                [file_name for file_name in names if file_name],
            )

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath, None, None]:
        with _unreachable():
            filesystem, name = self._file_system()
            root = str(filesystem._strip_protocol(name)).rstrip("/")
            matches = sorted(map(str, filesystem.glob(f"{root}/{pattern}")))
        yield from (self / match.removeprefix(root).lstrip("/") for match in matches)

    def opened(self) -> BinaryIO:
        """Returns the file, opened for reading."""
        with _unreachable():
            filesystem, name = self._file_system()
            return cast(BinaryIO, _File(filesystem.open(name, "rb")))

    def _is(self, question: str) -> bool:
        with _unreachable():
            filesystem, name = self._file_system()
            return bool(getattr(filesystem, question)(name))

    def _file_system(self) -> tuple[Any, str]:
        filesystem, name = importlib.import_module("fsspec.core").url_to_fs(str(self))
        return filesystem, str(name)


class _File:
    """A file of fsspec that raises only Unreachable."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        with _unreachable():
            return bytes(self._file.read(size))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with _unreachable():
            return self._file.seek(offset, whence)

    def close(self) -> None:
        with _unreachable():
            self._file.close()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@contextmanager
def _unreachable() -> Iterator[None]:
    """Turns every exception into Unreachable: each library below fsspec raises its own."""
    try:
        yield
    except ImportError as fault:
        raise Unreachable(f"a package is missing: {fault}") from None
    except Exception as fault:
        raise Unreachable(" ".join(f"{type(fault).__name__}: {fault}".split())[:300]) from None
