"""A save directory that another user of the machine may write to: he gets nothing removed, changed or believed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.control import places

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")

ROOT = Path(__file__).parents[2]
VICTIM, ATTACKER = 23456, 12345


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that everybody may write to, as ``/scratch`` often is; pytest's own are closed to other users."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def precious(shared: Path) -> Path:
    """What the victim would not like to lose."""
    place = shared / "precious"
    place.mkdir()
    for name in ("thesis.tex", "capture.json", "run.json", "rank00000.json"):
        (place / name).write_text("ten years")
        os.chown(place / name, VICTIM, VICTIM)
    (place / "deeper").mkdir()
    (place / "deeper" / "rank00000.json").write_text("ten years")
    for each in (place, place / "deeper", place / "deeper" / "rank00000.json"):
        os.chown(each, VICTIM, VICTIM)
    return place


def state(place: Path) -> list[tuple[str, int, str]]:
    return [
        (str(path.relative_to(place)), path.stat().st_mode, path.read_text() if path.is_file() else "")
        for path in [place, *sorted(place.rglob("*"))]
    ]


def as_user(uid: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "control" / "two_users.py"), str(uid)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=environment, cwd="/"
    )


def plant_control(shared: Path, precious: Path) -> None:
    (shared / "control").symlink_to(precious)


def plant(name: str) -> Callable[[Path, Path], None]:
    def planting(shared: Path, precious: Path) -> None:
        (shared / "control").mkdir()
        (shared / "control").chmod(0o777)
        (shared / "control" / name).symlink_to(precious)
        os.chown(shared / "control", ATTACKER, ATTACKER)

    return planting


def plant_below_ours(name: str) -> Callable[[Path, Path], None]:
    """The control directory was the victim's, and open to all for a while."""

    def planting(shared: Path, precious: Path) -> None:
        plant(name)(shared, precious)
        os.chown(shared / "control", VICTIM, VICTIM)
        (shared / "control").chmod(0o755)

    return planting


def plant_theirs(shared: Path, precious: Path) -> None:
    (shared / "control").mkdir(mode=0o755)
    os.chown(shared / "control", ATTACKER, ATTACKER)


def plant_open(shared: Path, precious: Path) -> None:
    (shared / "control").mkdir()
    os.chown(shared / "control", VICTIM, VICTIM)
    (shared / "control").chmod(0o775)


TRAPS = {
    "control": plant_control,
    "status, control is theirs": plant("status"),
    "status, control is ours": plant_below_ours("status"),
    "a control directory of theirs": plant_theirs,
    "a control directory for a group": plant_open,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_job_neither_follows_nor_uses_what_another_user_has_prepared(trap: str, shared: Path, precious: Path) -> None:
    TRAPS[trap](shared, precious)
    before = state(precious)
    job = as_user(VICTIM, "look", shared)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith(f"megaprof: {shared}/control")
    assert job.stdout.endswith("profiling on demand and status are off, training goes on\n")
    assert state(precious) == before


@pytest.mark.parametrize("name", ["run.json", "capture.json"])
def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(name: str, shared: Path, precious: Path) -> None:
    """The control directory was the victim's, and open to all for a while."""
    plant_below_ours("elsewhere")(shared, precious)
    (shared / "control" / name).symlink_to(precious / name)
    before = state(precious)
    assert as_user(VICTIM, "look", shared).stdout == ""
    assert not (shared / "control" / "run.json").is_symlink()
    asked = as_user(VICTIM, "trigger", shared, "--target", "train_actor", "--timeout", 1)
    assert "the job is gone" in asked.stderr
    assert state(precious) == before


def test_what_lies_beside_stays(shared: Path) -> None:
    assert as_user(VICTIM, "look", shared).stdout == ""
    control = shared / "control"
    kept = {"notes.txt", "capture.json.bak", "requests"}
    for name in kept:
        (control / name).touch()
    assert as_user(VICTIM, "look", shared).stdout == ""
    assert set(os.listdir(control)) == {*kept, "run.json", "status"}


def test_another_user_may_neither_look_nor_ask(shared: Path) -> None:
    (shared / "control").mkdir(mode=0o755)  # as earlier versions made it
    os.chown(shared / "control", VICTIM, VICTIM)
    assert as_user(VICTIM, "look", shared).stdout == ""
    assert {path.stat().st_mode & 0o777 for path in (shared / "control", shared / "control" / "status")} == {0o700}
    before = state(shared / "control")
    for command in (["trigger", shared, "--target", "train_actor", "--timeout", 5], ["status", shared, "--wait", 0]):
        asked = as_user(ATTACKER, *command)
        assert asked.returncode == 1
        assert "is closed to you: only the user whose job it is may look and ask" in asked.stderr
        assert len(asked.stderr.splitlines()) == 1
    assert state(shared / "control") == before
    seen = as_user(VICTIM, "status", shared)
    assert "2 ranks (pp=2" in seen.stdout
    assert (seen.returncode, seen.stderr) == (3, ""), "its process has ended without a word"


def test_a_command_does_not_follow_a_link_either(shared: Path, precious: Path) -> None:
    plant_control(shared, precious)
    before = state(precious)
    for command in (["status", shared, "--wait", 0], ["trigger", shared, "--target", "train_actor"]):
        ran = as_user(VICTIM, *command)
        assert ran.returncode == 1
        assert f"{shared}/control is a symbolic link" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1
    assert state(precious) == before


def test_one_line_and_training_goes_on(shared: Path, precious: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant_control(shared, precious)
    before = state(precious)
    caplog.set_level(logging.INFO, "megaprof")
    listener = places.listening(shared, WorldLayout(ParallelSizes(pp=2)), 0, every=0.01)
    listener.start()
    deadline = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline:  # the line is the last thing that a refusal does
        time.sleep(0.01)
    listener.look()
    listener.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"megaprof: {shared}/control is a symbolic link; profiling on demand and status are off, training goes on"
    ]
    assert listener.closed
    assert state(precious) == before
