"""Files of any origin: finds them below a directory or below an address such as ``s3://bucket/traces``, and reads them
so that none of them can make the reader wait forever or fill its memory."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import stat
import tempfile
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import chain, islice
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

from isal import isal_zlib

from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.machine import find_bounds

#: A file of up to this many bytes is read on every machine ...
SMALL = 64 << 20
#: ... and a larger one only up to this share of the memory that is left, since decoding takes several times as much.
_SHARE = 0.25

#: Traces shrink to a tenth or a twentieth; what shrinks more than this is no trace, unless it is `SMALL`.
MOST_SHRUNK = 250
_MAGIC = b"\x1f\x8b"
_GZIP = 31  # zlib's wbits for a gzip header
_PACKED, PIECE = 256 << 10, 256 << 10  # pieces that fit into a processor's cache are decoded soonest
_AHEAD = 8  # pieces
#: A search for our files ends after this many files of others, because home directories have more.
MOST_OTHERS = 100_000

_allowed: int | None = None


class BrokenOff(Exception):
    """Nothing more can be read from a file; the message says why. What was read before is good."""


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
        info = self.ask("info")
        kind = stat.S_IFDIR if info.get("type") == "directory" else stat.S_IFREG
        changed_at = info.get("LastModified") or info.get("mtime") or info.get("created") or 0
        seconds = changed_at if isinstance(changed_at, (int, float)) else changed_at.timestamp()
        return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, int(info.get("size") or 0), *[int(seconds)] * 3))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self.ask("exists"))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self.ask("isfile"))

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self.ask("isdir"))

    def iterdir(self) -> Generator[RemotePath, None, None]:
        for entry in self.ask("ls"):
            yield self / entry["name"].rstrip("/").rpartition("/")[2]

    def files(self) -> list[RemotePath]:
        """Returns every file below the directory."""
        with _unreachable():
            filesystem, root = self._on_file_system()
            return [self / str(name).removeprefix(root.rstrip("/")).lstrip("/") for name in filesystem.find(root)]

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Yields the file, opened for reading. What its block raises becomes Unreachable, too."""
        with _unreachable():
            filesystem, name = self._on_file_system()
            with filesystem.open(name, "rb") as file:
                yield file

    def ask(self, method: str) -> Any:
        """Returns what a method of the file system, such as ``info``, answers about the path."""
        with _unreachable():
            filesystem, name = self._on_file_system()
            return getattr(filesystem, method)(name)

    def _on_file_system(self) -> tuple[Any, str]:
        """Returns the file system, and what the path is called there."""
        filesystem, name = importlib.import_module("fsspec.core").url_to_fs(str(self))
        return filesystem, str(name)


@contextmanager
def _unreachable() -> Iterator[None]:
    """Turns every exception into Unreachable: each library below fsspec raises its own."""
    try:
        yield
    except Exception as fault:
        raise Unreachable(" ".join(f"{type(fault).__name__}: {fault}".split())[:300]) from None


def path_of(text: str | os.PathLike[str]) -> Path:
    """Returns the path that a user names: a remote one if it has ``://`` in it."""
    if isinstance(text, Path):
        return text
    protocol, separator, path = os.fspath(text).partition("://")
    if protocol in ("file", "local"):
        return Path(path)
    return RemotePath(text) if separator else Path(text)


def files_below(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns every file below ``directory`` that ends with one of ``suffixes`` and is not hidden, in no order.

    Raises Unreachable, PermissionError if ``directory`` is closed to this user, and Unanswerable for the root of the
    file system and after `MOST_OTHERS` files of which none is ours.
    """
    hint = "name the directory that the job got as --profile-dir"
    if os.path.realpath(directory) == os.path.abspath(os.sep):
        raise Unanswerable(f"{directory} is the whole file system; {hint}")

    def refused(fault: OSError) -> None:
        # Directories below it that are closed to this user are left out.
        if isinstance(fault, PermissionError) and fault.filename == os.fspath(directory):
            raise fault

    folders: Iterable[tuple[Path, list[str]]]
    if isinstance(directory, RemotePath):
        folders = ((path.parent, [path.name]) for path in directory.files())
    else:
        folders = ((Path(folder), names) for folder, _, names in os.walk(directory, onerror=refused))
    paths: list[Path] = []
    other_count = 0
    for folder, names in folders:
        paths += [folder / name for name in names if name.endswith(suffixes) and not name.startswith(".")]
        if not paths:
            other_count += sum(".rank" not in name for name in names)  # each file of ours names its rank
        if other_count > MOST_OTHERS:
            raise Unanswerable(
                f"{directory} holds more than {MOST_OTHERS:,} files, none of them by megaprof so far; {hint}"
            )
    return paths


def allow(limit: int | None) -> None:
    """Lets this process read files of up to ``limit`` bytes, however little memory is left. With None, the free memory
    decides."""
    global _allowed
    _allowed = limit


def allowed() -> int | None:
    """Returns the limit that `allow` set."""
    return _allowed


def most_bytes() -> int:
    """Returns how many bytes of one input may be in memory now."""
    return _allowed if _allowed is not None else max(SMALL, int(_SHARE * memory_left()))


def fits(size: int) -> bool:
    """Returns whether so many bytes of one input may be in memory now."""
    return (_allowed is None and size <= SMALL) or size <= most_bytes()  # most_bytes reads many files


def memory_left() -> int:
    """Returns the bytes that this process may still take, as far as the system says."""
    try:
        return min(size - used for used, size in (read() for read in find_bounds().values()))
    except (OSError, ValueError, KeyError):
        return 4 << 30  # not Linux: unknown


def open_input(path: Path) -> BinaryIO:
    """Opens a regular file of this machine to be read. Never waits for the other end of a FIFO, or for a terminal.
    Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_input(path: Path) -> bytes:
    """Returns the bytes of a regular or a remote file, which may have at most `most_bytes`. Raises OSError."""
    if not fits(size := path.stat().st_size):
        most = most_bytes() >> 20
        raise OSError(f"it has {size >> 20:,} MiB, more than the {most:,} MiB that are read (see --max-input-mib)")
    try:
        if isinstance(path, RemotePath):
            return bytes(path.ask("cat_file"))
        with open_input(path) as file:
            return file.read(size)  # if a job is still writing, what it adds meanwhile is left for the next reading
    except MemoryError:
        raise OSError("it does not fit into memory") from None


@functools.cache
def local_copy(path: Path) -> Path:
    """Returns a path that other libraries can open: ``path`` itself, or a copy of a remote file, which is removed when
    the process ends. Raises Unreachable."""
    if not isinstance(path, RemotePath):
        return path
    folder = Path(tempfile.mkdtemp(prefix="megaprof-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with open(folder / path.name, "wb") as copy:
        copy.writelines(_stored(path))
    return folder / path.name


def unpacked(path: Path) -> Generator[bytes, None, None]:
    """Yields the content of a regular or a remote file in pieces of at most `PIECE` bytes, unpacked if it is gzipped
    (according to its content, not its name). A thread reads and unpacks a few pieces ahead, if there are several.
    Raises OSError, and BrokenOff after the last good byte of a damaged file.
    """
    pieces = _pieces(path)
    yield from islice(pieces, 2)  # a thread costs more than reading a small file
    if (piece := next(pieces, None)) is not None:
        yield piece
        yield from _ahead(pieces)


def _pieces(path: Path) -> Generator[bytes, None, None]:
    size = path.stat().st_size
    with closing(_stored(path)) as stored:
        head = next(stored, b"")
        is_gzipped = head.startswith(_MAGIC)
        limit = _allowed or (max(SMALL, size * MOST_SHRUNK) if is_gzipped else size)
        total = 0
        whole = chain((head,), stored)
        for piece in _unzipped(whole) if is_gzipped else whole:
            total += len(piece)
            if total > limit:
                subject = "its file has" if not is_gzipped else "it unpacks to"
                hint = " (see --max-input-mib)" if _allowed or not is_gzipped else ", more than a trace of its size can"
                raise OSError(f"{subject} more than {limit >> 20:,} MiB{hint}")
            yield piece


def _stored(path: Path) -> Generator[bytes, None, None]:
    """Yields the content of a file as it is stored, in pieces of `_PACKED` bytes."""
    with path.opened() if isinstance(path, RemotePath) else open_input(path) as file:
        while piece := file.read(_PACKED):
            yield piece


def _unzipped(stored: Iterator[bytes]) -> Iterator[bytes]:
    data = next(stored, b"")
    try:
        while data:  # a gzip file may have several members
            stream = isal_zlib.decompressobj(_GZIP)
            while not stream.eof:
                piece = stream.decompress(data, PIECE)
                data = stream.unconsumed_tail or (b"" if stream.eof else next(stored, b""))
                if piece:
                    yield piece
                elif not data and not stream.eof:
                    raise BrokenOff("it is truncated: the gzip stream ends too early")
            data = stream.unused_data.lstrip(b"\0")
            while not data and (next_piece := next(stored, b"")):
                data = next_piece.lstrip(b"\0")
    except (zlib.error, isal_zlib.error) as fault:  # type: ignore[misc]  # its stub types a class as an instance
        raise BrokenOff(f"its gzip stream is damaged: {fault}") from None


def _ahead(pieces: Generator[bytes, None, None]) -> Iterator[bytes]:
    """Yields the same pieces. A thread makes them while the caller works on earlier ones: isal and files release
    Python's lock."""
    with closing(pieces), ThreadPoolExecutor(1, "megaprof-unpack") as thread:
        waiting = deque(thread.submit(next, pieces, None) for _ in range(_AHEAD))
        while (piece := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, pieces, None))
            yield piece
