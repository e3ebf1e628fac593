"""The computed load is what a real job does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import load

ROOT = Path(__file__).parents[2]


def test_no_directory_holds_100_000_files_at_any_number_of_ranks() -> None:
    cells = next(line for line in load.table().splitlines() if "in one directory" in line).split("|")[2:-1]
    assert len(cells) == len(load.RANKS)
    assert max(int(cell.replace(",", "")) for cell in cells) < 100_000


@pytest.mark.slow  # two real ranks, for the seconds that six looks at the control directory take
def test_a_real_rank_does_as_many_file_operations_as_the_table_counts() -> None:
    _, other = load.measure()
    assert (other["look"], other["end"]) == (load.LOOK, load.END)
    # A directory that the other rank has made already costs less; a run record that it has not written yet, more.
    assert 0 < other["start"] <= load.START


@pytest.mark.slow  # the report on 256 ranks twice
def test_the_benchmark_finds_what_was_put_there_and_its_last_line_is_json() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.scale", "--ranks", "1024", "--steps", "50"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert {"ranks", "seconds", "peak_rss_mb"} <= figures.keys()
    assert (figures["stragglers_found"], figures["others_named"], figures["named_in_a_healthy_job"]) == (2, 0, 0)
