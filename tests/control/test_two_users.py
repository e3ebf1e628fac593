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
from types import SimpleNamespace

import pytest

from megaprof import ProfileConfig
from megaprof.artifacts.writer import Writer
from megaprof.control.directory import ControlDirectory
from megaprof.control.listener import Listener
from megaprof.formats.job.run import RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.runtime.background import Background
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
    for name in ("thesis.tex", "x.json", "x.go.json", "run.json", "rank00000.json"):
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
    **{f"{name}, control is theirs": plant(name) for name in ("requests", "orders", "answers", "status")},
    **{f"{name}, control is ours": plant_below_ours(name) for name in ("requests", "orders", "answers", "status")},
    "a control directory of theirs": plant_theirs,
    "a control directory for a group": plant_open,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_job_neither_follows_nor_uses_what_another_user_has_prepared(trap: str, shared: Path, precious: Path) -> None:
    TRAPS[trap](shared, precious)
    before = state(precious)
    job = as_user(VICTIM, "look", shared)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith(f"unsafe: {shared}/control")
    assert state(precious) == before


def test_what_lies_beside_requests_stays(shared: Path) -> None:
    assert as_user(VICTIM, "look", shared).stdout == ""
    requests = shared / "control" / "requests"
    kept = ["notes.txt", "x.json.bak", "two words.json", ".hidden.json", "x" * 65 + ".json"]
    for name in [*kept, "asked.json"]:
        (requests / name).touch()
    assert as_user(VICTIM, "look", shared).stdout == ""
    assert sorted(os.listdir(requests)) == sorted(kept)


def test_another_user_may_look_and_not_ask(shared: Path) -> None:
    assert as_user(VICTIM, "look", shared).stdout == ""
    before = state(shared / "control")
    asked = as_user(ATTACKER, "trigger", shared, "--target", "train_actor", "--timeout", 5)
    assert asked.returncode == 1
    assert "only the user whose job it is may ask" in asked.stderr or "the job is gone" in asked.stderr
    seen = as_user(ATTACKER, "status", shared)
    assert "2 ranks (tp1 pp2" in seen.stdout
    assert (seen.returncode, seen.stderr) == (3, ""), "its process has ended without a word"
    assert state(shared / "control") == before


def test_another_user_may_not_ask_a_job_that_runs(shared: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    run = RunRecord.new(layout.coords(0), layout, ("train_actor",), None, 1.0)
    gate = places.Gated(shared, run)  # root's
    places.write(gate.paths.run, run.as_record())
    status = {"run": run.run, "rank": 0, "host": run.host, "name": "here", "pid": run.pid, "interval": 1.0, "calls": []}
    status |= {"coords": dict.fromkeys(("pp", "tp", "cp", "ep", "dp"), 0), "time": 8e9, "since": 8e9}
    gate.paths.status(0).parent.mkdir()
    places.write(gate.paths.status(0), status)
    asked = as_user(ATTACKER, "trigger", shared, "--target", "train_actor", "--timeout", 5)
    assert asked.returncode == 1
    assert "requests cannot be written by you: only the user whose job it is may ask" in asked.stderr
    assert list(gate.paths.requests.iterdir()) == []


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
    layout = WorldLayout(ParallelSizes(pp=2))
    config = ProfileConfig(target=("train_actor",), dir=str(shared), on_demand=True)
    session = SimpleNamespace(
        config=config,
        coords=layout.coords(0),
        role=None,
        calls={},
        timeline=None,
        disabled=False,
        off=None,
        demand=None,
    )
    ended: list[None] = []
    caplog.set_level(logging.INFO, "megaprof")
    listener = Listener(session, layout, Writer(), shared, every=0.01)  # type: ignore[arg-type]
    listener.follow(lambda listener: None, lambda: ended.append(None))
    background = Background()
    listener.start(background)
    deadline = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline:  # the line is the last thing that a refusal does
        time.sleep(0.01)
    listener.look()
    listener.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"megaprof: {shared}/control is a symbolic link; profiling on demand and status are off, training goes on"
    ]
    assert ended == [None]
    assert not session.disabled
    assert state(precious) == before


def test_a_run_record_of_another_user_is_not_believed_by_the_leader(shared: Path) -> None:
    """The control directory is the job's, and somebody (root, an earlier attack) has left a run record there."""
    layout = WorldLayout(ParallelSizes(pp=2))
    config = ProfileConfig(target=("train_actor",), dir=str(shared), on_demand=True)
    session = SimpleNamespace(
        config=config,
        coords=layout.coords(0),
        role=None,
        calls={},
        timeline=None,
        disabled=False,
        off=None,
        demand=None,
    )
    listener = Listener(session, layout, Writer(), shared, every=0.01)  # type: ignore[arg-type]
    listener.look()
    assert listener.job is not None
    ours = listener.job.run
    path = places.Paths(listener.path).run
    places.write(path, RunRecord.new(layout.coords(0), None, ("train_actor",), None, 1.0).as_record())
    os.chown(path, ATTACKER, ATTACKER)
    listener.look()
    assert listener.job is not None
    assert listener.job.run == ours, "it is not ousted by what another user says"
    with ControlDirectory.own(shared, None, None) as control:
        assert control.owner_of(("run.json",)).uid == os.geteuid(), "and says so again"
