"""Inputs that would make a reader wait for ever or fill its memory."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.traces import read_trace
from megaprof.formats import inputs
from megaprof.formats.inputs import open_input, read_input, unpacked
from megaprof.formats.timeline import UnreadableTimeline, read_timeline


@pytest.fixture(autouse=True)
def _by_the_memory() -> Iterator[None]:
    yield
    inputs.allow(None)


def sparse(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc" * 1000)
    assert read_input(path) == b"abc" * 1000
    (tmp_path / "link").symlink_to(path)
    assert read_input(tmp_path / "link") == b"abc" * 1000


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (fifo(tmp_path / "fifo"), Path("/dev/zero"), tmp_path, tmp_path / "socket"):
            with pytest.raises(OSError):  # noqa: PT011  # a socket cannot be opened at all
                open_input(path)
    with pytest.raises(OSError, match="no regular file"):
        read_input(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(OSError, match="no regular file"):
            open_input(tmp_path / "fifo")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_larger_than_the_memory_is_refused_unread(tmp_path: Path) -> None:
    path = sparse(tmp_path / "x", 1 << 41)
    with pytest.raises(OSError, match=r"more than the .* MiB that are read"):
        read_input(path)


def test_the_bound_can_be_set(tmp_path: Path) -> None:
    path = sparse(tmp_path / "x", inputs.SMALL + 1)
    inputs.allow(1 << 20)
    with pytest.raises(OSError, match="64 MiB, more than the 1 MiB that are read"):
        read_input(path)
    inputs.allow(1 << 30)
    assert len(read_input(path)) == inputs.SMALL + 1


@pytest.mark.parametrize("size", [10, inputs.PIECE + 1, 20 * inputs.PIECE])
def test_only_a_file_of_several_pieces_takes_a_thread(size: int, tmp_path: Path) -> None:
    (path := tmp_path / "x").write_bytes(b"x" * size)
    pieces = unpacked(path)
    for _ in range(4):
        next(pieces, None)
    assert any(thread.name.startswith("megaprof-unpack") for thread in threading.enumerate()) is (
        size > 2 * inputs.PIECE
    )
    pieces.close()


@pytest.mark.parametrize("make", [fifo, lambda path: sparse(path, 1 << 41)])
def test_traces_and_timelines_say_why_they_are_not_read(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Undecodable, match=r"it is no regular file|it begins with neither"):
        read_trace(make(tmp_path / "x.pt.trace.json.gz"))
    with pytest.raises(UnreadableTimeline, match="it cannot be read: it "):
        read_timeline(make(tmp_path / "x.timeline.bin"))
