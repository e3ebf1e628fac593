"""A real job of two stages of which one says that it is slow: it captures that by itself, once."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from megaprof.control.directory import find_job
from tests.control.control_jobs import running

pytestmark = pytest.mark.slow

#: Milliseconds of a step by stage, in words: a busy machine would have a say in what it really computes.
COMPUTES = (200.0, 800.0)


def captured(directory: Path) -> set[tuple[int, int]]:
    """Stage and step of every trace."""
    found = set()
    for path in directory.glob("*.pt.trace.json.gz"):
        with gzip.open(path) as file:
            meta = json.load(file)["megaprof"]
        found.add((meta["coords"]["pp"], meta["steps"][0]))
    return found


def test_an_uneven_stage_is_captured_once(tmp_path: Path) -> None:
    # Steps that become slow: test_own_captures.py, with times that are written and not measured.
    figures = tmp_path / "megaprof.prom"
    flags = [
        *("--profile-tool", "timeline", "--profile-trigger-imbalance", "1.5"),
        *("--profile-prometheus", str(figures)),
    ]
    with running(tmp_path / "traces", flags, computes=COMPUTES, quick=True) as job:
        found = find_job(job.directory)

        def step() -> int:
            status = found.leader()
            return -1 if status is None else status.last_step() or -1

        deadline = time.monotonic() + 150
        while len(captured(job.directory)) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        first = step()
        while step() < first + 8 and time.monotonic() < deadline:  # as uneven as before
            time.sleep(0.2)
        written = figures.read_text()
    steps = sorted({step for _, step in captured(job.directory)})
    assert len(steps) == 2
    assert captured(job.directory) == {(pp, step) for pp in (0, 1) for step in steps}
    (line,) = [line for line in written.splitlines() if line.startswith("megaprof_imbalance_ratio{")]
    assert float(line.split()[-1]) == pytest.approx(1.6)
