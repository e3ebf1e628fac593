"""A trial whose command fails, runs out of memory or hangs, or that is interrupted: what is told, and what stays."""

from __future__ import annotations

import sys
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
        (NO_MEMORY, "out_of_memory", "Tried to allocate 2.00 GiB"),
        (HANGS, "time_limit", "after 0 whole steps"),
    ],
    ids=["bad flag", "out of memory", "hangs"],
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
