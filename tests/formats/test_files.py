"""Files that appear whole or not at all, also where somebody else has been before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaprof.formats.files import Directory, Unsafe, appearing
from megaprof.formats.names import temporary_path


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    final, precious = tmp_path / "report.json", tmp_path / "precious"
    precious.write_text("ten years")
    temporary_path(final).symlink_to(precious)
    final.symlink_to(precious)
    with appearing(final) as file:
        file.write(b"new")
    assert precious.read_text() == "ten years"
    assert not final.is_symlink()
    assert final.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["precious", "report.json"]


def test_after_an_exception_there_is_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "report.json"
    final.write_text("old")

    def fails() -> None:
        with appearing(final) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert final.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("planted", ["link", "file", "fifo"])
def test_what_is_no_directory_is_not_entered(tmp_path: Path, planted: str) -> None:
    place, elsewhere = tmp_path / "control", tmp_path / "elsewhere"
    elsewhere.mkdir()
    {"link": lambda: place.symlink_to(elsewhere), "file": place.touch, "fifo": lambda: os.mkfifo(place)}[planted]()
    reason = "is a symbolic link" if planted == "link" else "is no directory"
    with Directory.open(tmp_path) as directory, pytest.raises(Unsafe, match=f"{place} {reason}"):
        directory.child("control", create=0o755)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_directory_that_others_may_write_to_is_not_ours(tmp_path: Path, mode: int) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control").chmod(mode)
    with Directory.open(tmp_path) as top, top.child("control") as control:
        ours = control.probe()
        assert ours.st_uid == os.geteuid()
        with pytest.raises(Unsafe, match="can be written by others"):
            control.check(ours.st_uid, ours.st_mode)
        control.check(ours.st_uid, 0o777)  # a file system that ignores permissions
        assert control.names(10) == []


def test_the_path_may_lead_elsewhere_meanwhile(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for place in (ours, theirs):
        place.mkdir()
        (place / "x").write_text(place.name)
    with Directory.open(ours) as directory:
        ours.rename(tmp_path / "moved")
        ours.symlink_to(theirs)
        assert directory.unlink("x")
        with directory.appearing("y") as file:
            file.write(b"y")
    assert os.listdir(theirs) == ["x"]
    assert os.listdir(tmp_path / "moved") == ["y"]
