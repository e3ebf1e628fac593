"""A device that never becomes idle cuts a window short, and changes neither whether nor how the job ends."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.runtime.stuck_job import job

pytestmark = pytest.mark.slow

BUSY = "as where another rank is gone"


def run(what: str, directory: Path, send: signal.Signals | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(job, what, directory, send=send, limit=300)


def kept(directory: Path) -> list[str]:
    """Why each window that was kept was cut short, in order."""
    files = sorted(directory.glob("*.pt.trace.json*"))
    read = [gzip.decompress(each.read_bytes()) if each.suffix == ".gz" else each.read_bytes() for each in files]
    return [json.loads(each)["megaprof"]["truncated_reason"] for each in read]


def warned(job: subprocess.CompletedProcess[str]) -> bool:
    return sum("closes without what the device has yet to do" in line for line in job.stderr.splitlines()) == 1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.mark.parametrize("what", ["waits_in_a_window", "is_closing_a_window"])
def test_sigterm_ends_the_process_as_it_would_without_us(what: str, directory: Path) -> None:
    job = run(what, directory, signal.SIGTERM)
    assert job.returncode == -signal.SIGTERM, job.stderr
    assert warned(job), job.stderr
    (reason,) = kept(directory)
    assert reason.endswith(BUSY)
    assert ("SIGTERM" in reason) == (what == "waits_in_a_window")


def test_a_profiler_that_cannot_stop_does_not_hold_up_the_end(directory: Path) -> None:
    job = run("cannot_stop", directory, signal.SIGTERM)
    assert job.returncode == -signal.SIGTERM, job.stderr


def test_files_of_earlier_windows_are_finished_all_the_same(directory: Path) -> None:
    job = run("has_files_of_an_earlier_window", directory, signal.SIGTERM)
    assert job.returncode == -signal.SIGTERM, job.stderr
    assert warned(job), job.stderr
    first, second = kept(directory)
    assert first is None
    assert second.endswith(BUSY)


@pytest.mark.parametrize("what", ["raises_in_a_window", "raises_between_steps"])
def test_an_exception_of_the_host_ends_the_process(what: str, directory: Path) -> None:
    job = run(what, directory)
    assert job.returncode == 1, job.stderr
    assert any(line.endswith("RuntimeError: of the host") for line in job.stderr.splitlines())
    assert warned(job), job.stderr
    assert len(kept(directory)) == 1


@pytest.mark.parametrize("what", ["removes_and_trains_on", "runs_out_of_memory"])
def test_training_goes_on(what: str, directory: Path) -> None:
    job = run(what, directory)
    assert job.returncode == 3, job.stderr
    assert job.stdout == f"active {what == 'runs_out_of_memory'}, recording False\n"
    assert warned(job), job.stderr
    assert len(kept(directory)) == 1
