"""Remote save paths: refused up front or uploaded whole; a failed upload keeps the local file."""

from __future__ import annotations

import gzip
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megaprof.artifacts.places import Remote, check_remote
from megaprof.artifacts.writer import Writer
from megaprof.config.options import ProfileConfig
from megaprof.formats.names import raw_path


class HalfWay(MemoryFileSystem):  # type: ignore[misc]
    """A connection that breaks in the middle of a file."""

    protocol = "halfway"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way to share a store between instances

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        super().put_file(lpath, rpath, **kwargs)
        file = self.store[self._strip_protocol(rpath)]
        file.truncate(3)
        raise ConnectionError("connection reset")


class Watched(MemoryFileSystem):  # type: ignore[misc]
    """Notes which names were ever visible."""

    protocol = "watched"
    store: dict[str, Any] = {}  # noqa: RUF012
    operations: list[tuple[str, str]] = []  # noqa: RUF012

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.operations.append(("put", rpath.rpartition("/")[2]))
        super().put_file(lpath, rpath, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.operations.append(("mv", path2.rpartition("/")[2]))
        super().mv(path1, path2, **kwargs)


class ObjectStore(Watched):
    """What s3fs and its kind promise: an object exists when its upload is complete."""

    protocol = ("s3", "s3a")


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fsspec.register_implementation("halfway", HalfWay, clobber=True)
    fsspec.register_implementation("watched", Watched, clobber=True)
    Watched.operations.clear()
    yield
    for cls in (HalfWay, Watched):
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]


def submit(remote: Remote, name: str = "t.bin.gz") -> tuple[Writer, Path]:
    background = Writer(remote=remote)
    final = remote.staging / name
    raw_path(final).write_bytes(b"data")
    background.submit(raw_path(final), final)
    assert background.flush(60)
    return background, final


def test_an_upload_arrives_and_leaves_nothing_here() -> None:
    remote = Remote("memory://bucket/traces/")
    background, final = submit(remote)
    assert not final.exists()
    assert background.close(60)
    assert not remote.staging.exists()
    with fsspec.open("memory://bucket/traces/t.bin.gz") as file:
        assert gzip.decompress(file.read()) == b"data"
    assert [Path(p).name for p in fsspec.filesystem("memory").find("/bucket")] == ["t.bin.gz"]


def test_the_shard_of_a_rank_is_part_of_the_address() -> None:
    remote = Remote("memory://bucket/traces/")
    background, _ = submit(remote, "ranks001024-002047/t.bin")
    assert background.close(60)
    assert fsspec.filesystem("memory").find("/bucket") == ["/bucket/traces/ranks001024-002047/t.bin"]
    assert not remote.staging.exists()


def test_an_upload_that_breaks_half_way_keeps_the_local_file(caplog: pytest.LogCaptureFixture) -> None:
    remote = Remote("halfway://bucket/traces")
    background, final = submit(remote)
    assert background.close(60)
    assert gzip.decompress(final.read_bytes()) == b"data"
    assert f"uploading to halfway://bucket/traces failed: ConnectionError: connection reset; the file is {final}" in (
        caplog.text
    )
    assert fsspec.filesystem("halfway").find("/") == []


def test_an_upload_gets_its_final_name_when_it_is_complete() -> None:
    submit(Remote("watched://bucket"))
    (put, hidden), (moved, name) = Watched.operations
    assert (put, moved, name) == ("put", "mv", "t.bin.gz")
    assert hidden.startswith(".t.bin.gz.")


def test_an_object_store_is_not_asked_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote("s3://bucket/traces")
    monkeypatch.setattr(remote, "_filesystem", ObjectStore())
    monkeypatch.setattr(remote, "_root", "bucket/traces")
    submit(remote)
    assert Watched.operations == [("put", "t.bin.gz")]


def test_nothing_is_asked_of_the_network_on_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(Watched, "__init__", lambda self, *a, **k: threads.append(threading.current_thread()))
    submit(Remote("watched://bucket/x"))
    assert [thread.name for thread in threads] == ["megaprof-writer"]


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("nonsense://x/y", "unknown protocol 'nonsense'"),
        ("file:///data/traces", "give its path alone: /data/traces"),
        ("memory://", "names no place"),
    ],
)
def test_what_cannot_be_honoured_is_refused_up_front(directory: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"--profile-dir: ") as error:
        ProfileConfig(target=("train_actor",), dir=directory)
    assert directory in str(error.value)
    assert said in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("fsspec.registry")  # fsspec.registry, the attribute, is another thing
    monkeypatch.setitem(registry.known_implementations, "far", {"class": "farfs_absent.FarFS", "err": "Install farfs"})
    with pytest.raises(ValueError, match=r"--profile-dir: 'far://b/t' needs a package .*: Install farfs"):
        check_remote("--profile-dir", "far://b/t")


def test_a_remote_directory_is_a_valid_one() -> None:
    assert ProfileConfig(target=("train_actor",), dir="memory://bucket/traces").dir == "memory://bucket/traces"
