"""A trial whose command fails, runs out of memory or hangs, or that is interrupted: what is told, and what stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megaprof.config.options import variable
from megaprof.tune import trial, tuning
from megaprof.tune.state import Trial, Tuning, load

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
NO_MEMORY = "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


def nothing(told: object) -> None:
    """Nobody is told."""


def running(directory: Path) -> list[int]:
    """Processes of the trial in it."""
    return trial._marked(f"{variable('dir')}={directory.absolute()}\0".encode())


@pytest.mark.parametrize(
    ("program", "outcome", "says"),
    [
        (BAD_FLAG, "failed", "unrecognized arguments: --no-such-flag"),
        (SECOND_HAND, "failed", "error: no space left for the cache"),
        (GOES_ON, "failed", "0 whole steps: ValueError: the model has 8 layers"),
        (NO_MEMORY, "out_of_memory", "Tried to allocate 2.00 GiB"),
        (HANGS, "time_limit", "after 0 whole steps"),
    ],
    ids=["bad flag", "ended by a rank", "went on after an error", "out of memory", "hangs"],
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
    assert not running(tmp_path / only.directory)


def test_what_the_end_of_a_trial_makes_a_command_print_is_no_reason(tmp_path: Path) -> None:
    def begun(made: int) -> None:
        while "begins" not in (tmp_path / trial.LOG).read_text():
            time.sleep(0.05)

    assert trial.run((sys.executable, "-c", TERMINATED), tmp_path, 5, 0.0, begun) == trial.Ended("time_limit")
    assert "SignalException" in (tmp_path / trial.LOG).read_text()


def test_an_interrupted_trial_is_ended_and_runs_again_beside_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(made: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "_GRACE", 0.5)
    given = Tuning((sys.executable, "-c", HANGS), 5, 4, saving_off=())
    with pytest.raises(KeyboardInterrupt):
        tuning.run(given, tmp_path, 300.0, nothing, interrupted, nothing)
    left = load(tmp_path)
    assert left is not None
    assert left.pending == Trial(1, given.command, "trial-1")
    assert not running(tmp_path / "trial-1")
    (again,) = tuning.run(left, tmp_path, 1.0, nothing, nothing, nothing).trials
    assert (again.number, again.directory, again.outcome) == (1, "trial-1.2", "time_limit")
    assert (tmp_path / "trial-1").is_dir()
