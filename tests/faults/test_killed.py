"""SIGKILL at random moments: every timeline still reads, up to the last step that was over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaprof.formats.timeline import SUFFIX, read_timeline

JOBS = 100


@pytest.mark.slow
def test_a_hundred_killed_jobs_lose_at_most_the_step_that_was_being_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.killed", str(tmp_path), str(JOBS), "20261"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    said_last = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in said_last] == [-9] * JOBS
    missing = []
    for job, (_, last) in enumerate(said_last):
        (path,) = (tmp_path / str(job)).glob("*" + SUFFIX)
        timeline = read_timeline(path)
        steps = timeline.steps["step"].tolist()
        assert steps == list(range(len(steps)))
        assert all(timeline.events(position) is not None for position in range(len(steps)))
        missing.append(last + 1 - len(steps))
    # A step is over a moment before it is written, by another thread. The job says so in between.
    assert max(missing) <= 1, missing
    assert missing.count(1) <= JOBS / 10, missing
