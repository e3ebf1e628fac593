"""A trial whose command fails, runs out of memory or hangs, or that is interrupted: what is told, what stays, and what
the same command line does then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaprof import cli
from megaprof.analysis.samples import Interval
from megaprof.autoload.arming import environment
from megaprof.control.directory import names_of
from megaprof.formats.job import CONTROL, STATUS
from megaprof.formats.names import SHARD_RANKS
from megaprof.tune import trial, tuning
from megaprof.tune.tuning import Trial, Tuning, load, store
from tests import programs
from tests.cli.running import megaprof

BAD_FLAG = """
import argparse
try:
    argparse.ArgumentParser().parse_args(["--no-such-flag"])
finally:
    print("=" * 60, flush=True)  # as torchrun does
"""
#: One rank ends, and the other one, which waits for it, tells of that later, as gloo does.
SECOND_HAND = """
import sys
print("error: no space left for the cache", file=sys.stderr)
print("[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:17234", file=sys.stderr)
sys.exit(1)
"""
#: A module that goes on without another one, as Megatron-Bridge's do, and an error later.
GOES_ON = """
import traceback
try:
    import no_such_module
except ImportError:
    print(f"Import of no_such_module failed with: {traceback.format_exc()}")
raise ValueError("the model has 8 layers")
"""
#: Ends as torchrun does on SIGTERM.
TERMINATED = """
import signal, time
def end(number, frame):
    print("torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15", flush=True)
    raise SystemExit(1)
signal.signal(signal.SIGTERM, end)
print("begins", flush=True)
time.sleep(1000)
"""
TRACKS = """
import os
raise RuntimeError(f"W&B is {os.environ['WANDB_MODE']}, TensorBoard in {os.environ['TENSORBOARD_DIR']}")
"""
#: An assertion without a message, as Megatron-Core has many.
ASSERTION = """
import sys
print("[rank3]: AssertionError", file=sys.stderr)
print("=" * 60, file=sys.stderr)
sys.exit(1)
"""
#: Has no more data, which megaprof says behind it.
TOO_SHORT = """
print("the data end here")
print("megaprof keeps a timeline of every step on every rank; writes to /tmp")
print("megaprof ends: no windows captured into /tmp")
"""
NO_MEMORY = "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
HANGS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begins", flush=True)
time.sleep(1000)
"""


def nothing(told: object) -> None:
    """Nobody is told."""


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("program", "outcome", "says"),
    [
        (BAD_FLAG, "failed", "unrecognized arguments: --no-such-flag"),
        (SECOND_HAND, "failed", "error: no space left for the cache"),
        (TRACKS, "failed", "W&B is disabled, TensorBoard in /"),
        (ASSERTION, "failed", "[rank3]: AssertionError"),
        (GOES_ON, "failed", "0 whole steps: ValueError: the model has 8 layers"),
        (TOO_SHORT, "failed", "exit code 0 after 0 whole steps: the data end here"),
        (NO_MEMORY, "out_of_memory", "Tried to allocate 2.00 GiB"),
        (HANGS, "time_limit", "after 0 whole steps"),
    ],
    ids=[
        "bad flag",
        "by a rank",
        "tracks",
        "an assertion",
        "went on after an error",
        "too short",
        "no memory",
        "hangs",
    ],
)
def test_a_command_that_does_not_make_its_steps(
    program: str, outcome: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_GRACE", 0.5)
    limit = 1.0 if outcome == "time_limit" else 300.0
    given = Tuning((sys.executable, "-c", program), 5, 4, saving_off=())
    found = tuning.run(given, tmp_path, limit, nothing, nothing, nothing)
    (only,) = found.trials
    assert (only.outcome, found.stopped) == (outcome, "not_measured")
    assert says in (only.why or "")
    assert load(tmp_path) == found
    assert not trial.running(tmp_path / only.directory)


def test_what_the_end_of_a_trial_makes_a_command_print_is_no_reason(tmp_path: Path) -> None:
    def begun(made: int) -> None:
        while "begins" not in (tmp_path / trial.LOG).read_text():
            time.sleep(0.05)

    assert trial.run((sys.executable, "-c", TERMINATED), tmp_path, 5, 0.0, begun) == trial.Ended("time_limit")
    assert "SignalException" in (tmp_path / trial.LOG).read_text()


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_trial_is_ended_and_runs_again_beside_what_it_left(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        while "begins" not in (tmp_path / "trial-1" / trial.LOG).read_text():
            time.sleep(0.05)
        raise KeyboardInterrupt

    if times == 1:
        monkeypatch.setattr(trial, "_GRACE", 0.5)
    else:  # again, while the trial is given time to end
        monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupted))
    given = Tuning((sys.executable, "-c", HANGS), 5, 4, saving_off=())
    with pytest.raises(KeyboardInterrupt):
        tuning.run(given, tmp_path, 300.0, nothing, interrupted, nothing)
    left = load(tmp_path)
    assert left is not None
    assert left.pending == Trial(1, given.command, "trial-1")
    assert not trial.running(tmp_path / "trial-1")
    monkeypatch.setattr(trial, "time", time)
    monkeypatch.setattr(trial, "_GRACE", 0.5)
    (again,) = tuning.run(left, tmp_path, 1.0, nothing, nothing, nothing).trials
    assert (again.number, again.directory, again.outcome) == (1, "trial-1.2", "time_limit")
    assert (tmp_path / "trial-1").is_dir()


def tune(out: Path, *words: str) -> list[str]:
    return ["tune", "--out", str(out), "--saving-off", "", *words]


def ended(out: str) -> None:
    """A tuning that a signal ends in its first trial."""

    def begun() -> None:
        log = Path(out, "trial-1", trial.LOG)
        while not (log.exists() and "begins" in log.read_text()):
            time.sleep(0.05)
        os.write(1, b"ready\n")

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    threading.Thread(target=begun, daemon=True).start()
    sys.exit(megaprof(*tune(Path(out), "--", sys.executable, "-c", TERMINATED)).returncode)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, cli.TERMINATED), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_trial_ends_with_its_tuning(number: signal.Signals, code: int, tmp_path: Path) -> None:
    told = programs.run(ended, tmp_path / "tuned", send=number)
    assert told.returncode == code, told.stderr
    until = time.monotonic() + 60
    while trial.running(tmp_path / "tuned" / "trial-1"):
        assert time.monotonic() < until
        time.sleep(0.05)
    left = load(tmp_path / "tuned")
    assert left is not None
    assert left.pending is not None


@pytest.mark.parametrize("command", [("python",), ("mended",)])
def test_a_trial_that_still_runs_is_left_alone(command: tuple[str, ...], tmp_path: Path) -> None:
    """That of a tuning that was killed, or that goes on elsewhere."""
    store(tmp_path, Tuning(("python",), 5, 4, trials=(Trial(1, ("python",), "trial-1"),), saving_off=()))
    env = environment(trial.config_of((tmp_path / "trial-1").absolute()), {})
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], env=env, stdin=subprocess.PIPE) as left:
        try:
            found = megaprof(*tune(tmp_path), "--", *command)
            assert found.returncode == 1
            assert str(left.pid) in found.stderr
            assert left.poll() is None
        finally:
            left.kill()
    assert not (tmp_path / "trial-1.2").exists()


def test_another_command_begins_anew_where_the_first_trial_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "trial-1").mkdir()
    store(tmp_path, Tuning(("python",), 5, 4, trials=(Trial(1, ("python",), "trial-1"),), saving_off=()))
    assert megaprof(*tune(tmp_path), "--next", "--", sys.executable, "-V").returncode == 0
    found = load(tmp_path)
    assert found is not None
    assert found.pending == Trial(1, (sys.executable, "-V"), "trial-1.2")


def test_a_tuning_that_measured_nothing_begins_anew_with_any_command(tmp_path: Path) -> None:
    assert megaprof(*tune(tmp_path, "--steps", "5", "--", sys.executable, "-c", BAD_FLAG)).returncode == 1
    assert megaprof(*tune(tmp_path, "--steps", "6", "--", sys.executable, "-c", NO_MEMORY)).returncode == 1
    found = load(tmp_path)
    assert found is not None
    (only,) = found.trials
    assert (only.outcome, only.directory, found.steps) == ("out_of_memory", "trial-1.2", 6)
    assert (tmp_path / "trial-1").is_dir()


@pytest.mark.parametrize("words", [("--steps", "6"), ("--memory-limit", "60GiB"), ("--saving-off", "save=no")])
def test_trials_of_other_options_are_no_beginning(words: tuple[str, str], tmp_path: Path) -> None:
    before = Tuning(("python",), 5, 4, saving_off=(), trials=(measured(1),))
    store(tmp_path, before)
    assert megaprof("tune", "--out", tmp_path, *words, "--", "python").returncode == 2
    assert load(tmp_path) == before


def measured(number: int) -> Trial:
    return Trial(number, ("python",), f"trial-{number}", outcome="measured", step_ms=Interval(10, 9, 11))


def test_a_trial_that_failed_runs_again_once_its_directory_is_deleted(tmp_path: Path) -> None:
    failed = Trial(2, ("python",), "trial-2", outcome="failed", why="no space left")
    before = Tuning(("python",), 5, 4, trials=(measured(1), failed, measured(3)))
    (tmp_path / "trial-2").mkdir()
    assert tuning.resumed(before, tmp_path) == before
    (tmp_path / "trial-2").rmdir()
    found = tuning.resumed(before, tmp_path)
    assert found.pending == Trial(2, ("python",), "trial-2")
    assert (found.trials[0], found.trials[2]) == (before.trials[0], before.trials[2])


def test_steps_of_a_rank_alone_are_found_in_a_job_of_any_size(tmp_path: Path) -> None:
    calls = [{"target": trial.TARGET, "role": None, "count": 7}]
    coords = {"pp": 0, "tp": 0, "cp": 0, "ep": 0, "dp": 0}
    status = {"run": None, "rank": 8, "coords": coords, "host": "host", "name": "host", "pid": 1, "time": 1.0}
    for at, world in enumerate((8, 2 * SHARD_RANKS)):
        file = tmp_path.joinpath(str(at), CONTROL, *names_of(STATUS, 8, world))
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(status | {"interval": 1.0, "since": 1.0, "calls": calls}))
        assert trial._steps_alone(tmp_path / str(at)) == 7
