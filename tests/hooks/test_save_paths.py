"""Where files go, through install_hooks and real steps: remote paths, full disks, directories that vanish."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megaprof import ProfileConfig, install_hooks


def on(directory: Path | str, **fields: Any) -> ProfileConfig:
    return ProfileConfig(**{"target": ("train_actor",), "dir": str(directory), "schedule": "0", **fields})


def test_a_remote_directory_receives_the_trace(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = tmp_path / "told"
    config = on("memory://bucket/run", on_finish=f'echo "$PROFILED_FILES" > {told}')
    with install_hooks(one_rank.chunks, config):
        one_rank.train_step()
    (name,) = fsspec.filesystem("memory").find("/bucket/run")
    trace = json.loads(gzip.decompress(fsspec.filesystem("memory").cat_file(name)))
    assert trace["megaprof"]["target"] == "train_actor"
    assert told.read_text() == f"memory:/{name}\n"
    assert list(tmp_path.iterdir()) == [told], "the staging directory is still there"


def test_a_directory_removed_in_the_middle_of_the_run_is_made_again(one_rank: Any, tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    with install_hooks(one_rank.chunks, on(directory, schedule="0:0:0:2")) as handle:
        one_rank.train_step()
        assert handle.flush()
        shutil.rmtree(directory)
        one_rank.train_step()
        assert handle.active
    (path,) = directory.iterdir()
    assert path.name.startswith("train_actor.step000001.")


@pytest.mark.parametrize("option", ["size=64k", "ro"])
def test_a_disk_that_takes_no_file(
    option: str, one_rank: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        with install_hooks(one_rank.chunks, on(disk, kernels=option == "ro")):
            one_rank.train_step()
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
    assert "train_actor.step000000" in caplog.text
    assert any(why in caplog.text for why in ("No space left on device", "is the disk full", "Read-only file system"))
    assert "Traceback" not in caplog.text
    last = caplog.messages[-1]
    assert last.startswith(f"megaprof ends: no windows captured into {disk}; train_actor: step 0 was not captured: ")


def test_a_directory_that_cannot_be_made_turns_profiling_off_on_this_rank(one_rank: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    handle = install_hooks(one_rank.chunks, on(tmp_path / "file" / "traces"))
    assert not handle.active
    one_rank.train_step()
