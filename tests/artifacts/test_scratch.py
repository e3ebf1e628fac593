"""Local scratch: private, bounded, carried over whole, and tidied up behind dead processes only."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaprof.artifacts import places as scratch
from megaprof.artifacts import writer
from megaprof.artifacts.places import Scratch, remove_leftovers
from megaprof.artifacts.writer import Writer
from megaprof.formats.names import host
from megaprof.parallel.machine import find_bounds

MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(
    not MEMORY.is_dir() or os.stat(MEMORY).st_dev == os.stat("/tmp").st_dev, reason="needs a second file system"
)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SPARE_BYTES", 1 << 20)


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield Path(directory)


@pytest.mark.usefixtures("little")
def test_files_are_carried_over_compressed_or_not(tmp_path: Path, memory: Path) -> None:
    background = Writer(scratch=Scratch(tmp_path, (memory,)))
    (directory,) = memory.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    for name in ("a.bin.gz", "b.bin"):
        raw = background.raw_path(tmp_path / name)
        assert raw.parent == directory
        raw.write_bytes(b"data")
        background.submit(raw, tmp_path / name)
    assert background.close(30)
    assert gzip.decompress((tmp_path / "a.bin.gz").read_bytes()) == (tmp_path / "b.bin").read_bytes() == b"data"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin.gz", "b.bin"]
    assert list(memory.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_what_is_not_finished_in_time_is_copied_out(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(raw: Path, final: Path) -> Any:
        raise OSError("no compression today")

    monkeypatch.setattr(writer, "publish", broken)
    background = Writer(scratch=Scratch(tmp_path, (memory,)))
    raw = background.raw_path(tmp_path / "a.bin.gz")
    raw.write_bytes(b"data")
    background.submit(raw, tmp_path / "a.bin.gz")
    assert background.close(30)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert list(memory.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_too_much_goes_beside_the_final_file(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Scratch(tmp_path, (memory,))
    first = place.place(tmp_path / "a.bin")
    assert first is not None
    first.write_bytes(b"x" * 1000)
    monkeypatch.setattr(scratch, "MOST_BYTES", 1000)
    assert place.place(tmp_path / "b.bin") is None
    first.unlink()
    assert place.place(tmp_path / "b.bin") is not None
    place._spare = 1 << 60
    assert place.place(tmp_path / "b.bin") is None
    place.close()
    assert list(memory.iterdir()) == []


def test_no_scratch_without_room_or_on_the_same_disk(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SPARE_BYTES", 1 << 60)
    assert Scratch(tmp_path, (memory,)).place(tmp_path / "a") is None
    monkeypatch.setattr(scratch, "SPARE_BYTES", 0)
    assert Scratch(tmp_path, (tmp_path,)).place(tmp_path / "a") is None
    assert list(memory.iterdir()) == []
    monkeypatch.setattr("tempfile.gettempdir", lambda: os.listdir("/no temporary directory"))
    assert Scratch(tmp_path).place(tmp_path / "a") is None


@pytest.mark.usefixtures("little")
def test_no_scratch_where_the_kernel_does_not_say_how_much_memory_is_left(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 900 kB\n")
    monkeypatch.setattr(scratch, "find_bounds", lambda: find_bounds(tmp_path))
    assert Scratch(tmp_path, (memory,)).place(tmp_path / "a") is None
    assert list(memory.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_only_dead_processes_leftovers_go(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead, alive = int(gone.stdout), os.getpid()
    left, kept, link = (
        tmp_path / f".megaprof.abc{n}.{host()}.{pid}.scratch" for n, pid in enumerate((dead, alive, dead))
    )
    other = tmp_path / f".megaprof.abc.elsewhere-1.{dead}.scratch"
    for path in (left, kept, other):
        path.mkdir()
        (path / "a.raw").write_bytes(b"x")
    link.symlink_to(kept)
    remove_leftovers(tmp_path)
    assert not left.exists()
    assert (kept / "a.raw").exists()
    assert (other / "a.raw").exists()
    assert not link.is_symlink()
