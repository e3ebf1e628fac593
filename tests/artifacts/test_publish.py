"""Files appear whole or not at all, on a disk that is really full as well."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaprof.artifacts import places as publishing
from megaprof.artifacts.places import publish, remove_leftovers
from megaprof.formats.names import appearing, host, raw_path

TRACE = b'{"traceEvents": [],"traceName": "/tmp/x.json" }\n'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB. Mounting one needs a privilege that not every machine gives its tests."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_whole_and_its_raw_file_goes(tmp_path: Path) -> None:
    final = tmp_path / "t.bin.gz"
    raw = raw_path(final)
    raw.write_bytes(b"x" * 3_000_000)
    publish(raw, final)
    assert gzip.decompress(final.read_bytes()) == b"x" * 3_000_000
    assert listing(tmp_path) == ["t.bin.gz"]


def test_what_is_not_called_gz_is_not_compressed(tmp_path: Path) -> None:
    final = tmp_path / "t.memory.pickle"
    raw = raw_path(final)
    raw.write_bytes(b"data")
    publish(raw, final)
    assert final.read_bytes() == b"data"
    assert listing(tmp_path) == [final.name]


def test_a_missing_directory_is_made_again(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(b"data")
    publish(raw, tmp_path / "a" / "b" / "t.gz")
    assert gzip.decompress((tmp_path / "a" / "b" / "t.gz").read_bytes()) == b"data"


def test_a_rename_that_fails_leaves_the_old_file_and_the_raw_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.gz").write_bytes(b"old")
    final = tmp_path / "u.gz"
    raw = raw_path(final)
    raw.write_bytes(b"new")

    def no_rename(source: object, target: object, **directories: int) -> None:  # a tmpfs never refuses one, a quota may
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publishing.os, "link", no_rename)
    monkeypatch.setattr(publishing.os, "replace", no_rename)
    with pytest.raises(OSError, match="No space"):
        publish(raw, final)
    assert raw.read_bytes() == b"new"
    assert listing(tmp_path) == sorted(["t.gz", raw.name])


@pytest.mark.parametrize("links", [True, False])
def test_a_finished_file_is_never_replaced(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another process took the name in the meantime, and where the file system has no hard links."""

    def no_link(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(publishing.os, "link", no_link)
    stem = "train_actor.step000007.pp0-tp0-cp0-ep0-dp0.rank00000"
    for name in (f"{stem}.memory.pickle", "other.gz"):
        for content in (b"1", b"2", b"3"):
            raw = raw_path(tmp_path / name)
            raw.write_bytes(content)
            publish(raw, tmp_path / name)
    assert listing(tmp_path) == sorted(
        [*(f"{stem}{repeat}.memory.pickle" for repeat in ("", ".2", ".3")), "other.gz", "other.2.gz", "other.3.gz"]
    )
    assert (tmp_path / f"{stem}.2.memory.pickle").read_bytes() == b"2"
    assert gzip.decompress((tmp_path / "other.gz").read_bytes()) == b"1"


def test_a_full_disk_while_compressing_leaves_the_raw_file_only(small_disk: Path) -> None:
    final = small_disk / "t.bin.gz"
    raw = raw_path(final)
    noise = os.urandom(200 << 10)
    raw.write_bytes(noise)
    with pytest.raises(OSError, match="No space left on device"):
        publish(raw, final)
    assert listing(small_disk) == [raw.name]
    assert raw.read_bytes() == noise


@pytest.mark.parametrize("content", [b"", TRACE[:20], TRACE[:-2], b'{"traceEvents": [{"ph": "X"}'])
def test_half_a_trace_never_gets_a_final_name(content: bytes, tmp_path: Path) -> None:
    final = tmp_path / "a.pt.trace.json.gz"
    raw = raw_path(final)
    raw.write_bytes(content)
    assert publish(raw, final) is None
    assert listing(tmp_path) == []


def test_what_kineto_writes_is_complete(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recording:
        torch.ones(2).sum()
    raw, final = tmp_path / "raw.json", tmp_path / "t.pt.trace.json"
    recording.export_chrome_trace(str(raw))
    whole = raw.read_bytes()
    assert publish(raw, final).read_bytes() == whole
    raw.write_bytes(whole[:-40])
    assert publish(raw, final) is None


def test_nothing_appears_after_an_exception(tmp_path: Path) -> None:
    def interrupted() -> None:
        with appearing(tmp_path / "t") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert listing(tmp_path) == []


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    others = ["a.gz", ".a.gz.other.1.raw", f".b.gz.{host()}.{os.getpid()}.raw", ".gitignore"]
    dead = [f".c.gz.{host()}.{killed.pid}.{kind}" for kind in ("raw", "tmp")]
    for name in others + dead:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert listing(tmp_path) == sorted(others + dead), "a living process's files were taken"
    killed.kill()
    killed.communicate()
    remove_leftovers(tmp_path)
    assert listing(tmp_path) == sorted(others)
    remove_leftovers(tmp_path / "missing")
