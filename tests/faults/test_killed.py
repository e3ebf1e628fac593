"""SIGKILL at random moments: every timeline still reads, and only its last steps are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.recorders.timeline import recorder

JOBS = 60


@pytest.mark.slow
def test_killed_jobs_lose_only_their_last_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.killed", str(tmp_path), str(JOBS), "20261"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    said_last = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in said_last] == [-9] * JOBS
    missing, written = [], 0
    for job, (_, last) in enumerate(said_last):
        paths = list((tmp_path / str(job)).glob("*" + SUFFIX))
        if not paths:  # killed before its first second was over
            missing.append(last + 1)
            continue
        (path,) = paths
        written += 1
        timeline = read_timeline(path)
        steps = timeline.steps["step"].tolist()
        assert steps == list(range(len(steps)))
        assert all(timeline.events(position) is not None for position in range(len(steps)))
        missing.append(last + 1 - len(steps))
    # Steps are written once a second, or after 64 of them, and never more than these wait in memory.
    assert max(missing) <= recorder.WAITING_STEPS, missing
    assert written > JOBS / 4
