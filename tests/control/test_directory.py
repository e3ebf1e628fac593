"""The way into a control directory: who could write to it, and whatever lies in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaprof.control.directory import ControlDirectory, Unsafe, load, read, roles_with_a_run, write
from megaprof.formats.job import RUN, RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout

RECORD = RunRecord.new(WorldLayout(ParallelSizes()).coords(0), None, None, 1.0)


@pytest.mark.parametrize("planted", ["link", "file", "fifo"])
@pytest.mark.parametrize("below", ["", "status"])
@pytest.mark.parametrize("own", [True, False])
def test_what_is_no_directory_is_not_entered(tmp_path: Path, planted: str, below: str, own: bool) -> None:
    place, elsewhere = tmp_path / "control" / below, tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.parent.mkdir(mode=0o700, exist_ok=True)
    {"link": lambda: place.symlink_to(elsewhere), "file": place.touch, "fifo": lambda: os.mkfifo(place)}[planted]()
    reason = "is a symbolic link" if planted == "link" else "is no directory"
    control = ControlDirectory(tmp_path, None, own=own)
    with pytest.raises(Unsafe, match=f"{place} {reason}"), control.open(*filter(None, [below]), create=own):
        pass
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_directory_that_others_may_write_to_is_not_ours(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control").chmod(mode)
    with pytest.raises(Unsafe, match="can be written by others"), ControlDirectory(tmp_path, None, own=True).open():
        pass
    assert os.listdir(tmp_path / "control") == []
    before = os.umask(0)
    opened = os.open

    def without_permissions(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return opened(name, flags, 0o777, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", without_permissions)  # as on a file system that ignores them
    try:
        with ControlDirectory(tmp_path, None, own=True).open():
            pass
    finally:
        os.umask(before)


@pytest.mark.parametrize("names", [(), ("status", "ranks000000-001023")])
def test_it_is_made_for_its_owner_alone(tmp_path: Path, names: tuple[str, ...]) -> None:
    with ControlDirectory(tmp_path / "new", "actor", own=True).open(*names, create=True) as directory:
        write(directory, RUN, RECORD)
    made = tmp_path.joinpath("new", "control", "role-actor", *names)
    assert (made / RUN).stat().st_mode & 0o777 == 0o600
    while made != tmp_path / "new":
        assert made.stat().st_mode & 0o777 == 0o700
        made = made.parent
    assert roles_with_a_run(tmp_path / "new") == ([] if names else ["actor"])


def test_the_path_may_lead_elsewhere_meanwhile(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for place in (ours, theirs):
        (place / "control").mkdir(parents=True, mode=0o700)
    with ControlDirectory(ours, None, own=True).open() as control:
        ours.rename(tmp_path / "moved")
        ours.symlink_to(theirs)
        write(control, RUN, RECORD)
        assert read(control, RUN, RunRecord) == RECORD
    assert os.listdir(theirs / "control") == []
    assert os.listdir(tmp_path / "moved" / "control") == [RUN]


def test_another_directory_in_its_place_is_checked_again(tmp_path: Path) -> None:
    control, place = ControlDirectory(tmp_path, None, own=True), tmp_path / "control"
    for _ in range(2):
        with control.open() as opened:
            write(opened, RUN, RECORD)
    place.rename(tmp_path / "aside")
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(Unsafe, match="can be written by others"), control.open():
        pass
    place.rmdir()
    place.symlink_to(tmp_path / "aside")
    with pytest.raises(Unsafe, match="is a symbolic link"), control.open():
        pass


def test_what_is_no_record_is_read_as_none(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir(mode=0o700)
    with ControlDirectory(tmp_path, None).open() as control:
        with pytest.raises(FileNotFoundError):
            load(control, RUN, RunRecord)
        assert read(control, RUN, RunRecord) is None
        (tmp_path / "control" / RUN).mkdir()
        with pytest.raises(ValueError, match="is no regular file"):
            load(control, RUN, RunRecord)
        with pytest.raises(OSError, match=RUN):
            write(control, RUN, RECORD)
    assert os.listdir(tmp_path / "control") == [RUN]
