"""Reads files of any origin so that none of them can make the reader wait forever or fill its memory."""

from __future__ import annotations

import os
import queue
import stat
import threading
import zlib
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from megaprof.formats.remote import RemotePath
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

_allowed: int | None = None


class UnusableInput(OSError):
    """A file is not read at all; the message says why."""


class BrokenOff(Exception):
    """Nothing more can be read from a file; the message says why. What was read before is good."""


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
        return min(size - used for used, size in (bound.read() for bound in find_bounds()))
    except (OSError, ValueError, KeyError):
        return 4 << 30  # not Linux: unknown


def open_input(path: Path) -> BinaryIO:
    """Opens a regular or a remote file to be read. Never waits for the other end of a FIFO, or for a terminal. Raises
    OSError."""
    if isinstance(path, RemotePath):
        return path.opened()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableInput("it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_input(path: Path) -> bytes:
    """Returns the bytes of a regular file, which may have at most `most_bytes`. Raises OSError."""
    with open_input(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        limit = SMALL if _allowed is None and size <= SMALL else most_bytes()
        if size > limit:
            raise UnusableInput(
                f"it has {size >> 20:,} MiB, more than the {limit >> 20:,} MiB that are read (see --max-input-mib)"
            )
        try:
            return file.read(size)  # if a job is still writing, what it adds meanwhile is left for the next reading
        except MemoryError:
            raise UnusableInput("it does not fit into memory") from None


def unpacked(path: Path) -> Generator[bytes, None, None]:
    """Yields the content of a regular file in pieces of at most `PIECE` bytes, unpacked if it is gzipped (according to
    its content, not its name). A thread reads and unpacks a few pieces ahead, if there are several. Raises OSError, and
    BrokenOff after the last good byte of a damaged file.
    """
    pieces = _pieces(path)
    yield from islice(pieces, 2)  # a thread costs more than reading a small file
    if (piece := next(pieces, None)) is not None:
        yield piece
        yield from _ahead(pieces)


def _pieces(path: Path) -> Generator[bytes, None, None]:
    with open_input(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(_PACKED)
        is_gzipped = head.startswith(_MAGIC)
        limit = _allowed or (max(SMALL, size * MOST_SHRUNK) if is_gzipped else size)
        total = 0
        for piece in _unzipped(head, file) if is_gzipped else _read(head, file):
            total += len(piece)
            if total > limit:
                subject = "its file has" if not is_gzipped else "it unpacks to"
                hint = "(see --max-input-mib)" if _allowed or not is_gzipped else "more than a trace of its size can"
                raise UnusableInput(f"{subject} more than {limit >> 20:,} MiB: {hint}")
            yield piece


def _read(piece: bytes, file: BinaryIO) -> Iterator[bytes]:
    while piece:
        yield piece
        piece = file.read(PIECE)


def _unzipped(data: bytes, file: BinaryIO) -> Iterator[bytes]:
    try:
        while data:  # a gzip file may have several members
            stream = isal_zlib.decompressobj(_GZIP)
            while not stream.eof:
                piece = stream.decompress(data, PIECE)
                data = stream.unconsumed_tail or (b"" if stream.eof else file.read(_PACKED))
                if piece:
                    yield piece
                elif not data and not stream.eof:
                    raise BrokenOff("it is truncated: the gzip stream ends too early")
            data = stream.unused_data.lstrip(b"\0")
            while not data and (next_piece := file.read(_PACKED)):
                data = next_piece.lstrip(b"\0")
    except (zlib.error, isal_zlib.error) as fault:  # type: ignore[misc]  # its stub types a class as an instance
        raise BrokenOff(f"its gzip stream is damaged: {fault}") from None


def _ahead(pieces: Generator[bytes, None, None]) -> Iterator[bytes]:
    """Yields the same pieces. A thread makes them while the caller works on earlier ones: isal and files release
    Python's lock."""
    piece_queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    stopped = threading.Event()

    def fetch() -> None:
        end_marker: BaseException | None = None
        try:
            for piece in pieces:
                if not _put(piece_queue, piece, stopped):
                    break
        except BaseException as fault:
            end_marker = fault
        finally:
            pieces.close()
        _put(piece_queue, end_marker, stopped)

    thread = threading.Thread(target=fetch, name="megaprof-unpack", daemon=True)
    thread.start()
    try:
        while (item := piece_queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()


def _put(piece_queue: queue.Queue[bytes | BaseException | None], item: object, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            piece_queue.put(item, timeout=0.05)  # type: ignore[arg-type]
            return True
        except queue.Full:
            continue
    return False
