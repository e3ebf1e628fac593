"""SIGKILL at random moments: every timeline still reads, and only its last steps are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.recorders import timeline as recorder
from tests import programs
from tests.faults import killed
from tests.formats.step_records import events_of

JOBS = 12


@pytest.mark.slow
def test_killed_jobs_lose_only_their_last_steps(tmp_path: Path) -> None:
    done = programs.run(killed.main, tmp_path, str(JOBS), "20261", limit=900)
    assert done.returncode == 0, done.stderr
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
        assert all(events_of(timeline, position) is not None for position in range(len(steps)))
        missing.append(last + 1 - len(steps))
    # Steps are written once a second, or after 64 of them, and never more than these wait in memory.
    assert max(missing) <= recorder.WAITING_STEPS, missing
    assert written > 1
