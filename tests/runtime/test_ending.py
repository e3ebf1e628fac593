"""How a process ends or splits, with real processes: files are whole, exit statuses are the host's."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaprof.formats.names import host, is_leftover
from megaprof.runtime.ending import Termination
from tests import programs
from tests.runtime.ending_job import job

pytestmark = pytest.mark.slow

SCRATCH = (Path("/dev/shm"), Path(tempfile.gettempdir()))


def run(what: str, directory: Path, send: signal.Signals | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(job, what, directory, send=send)


def traces(directory: Path) -> list[dict[str, Any]]:
    """Every trace with a final name, parsed; anything half-written would not be."""
    found = [path for path in sorted(directory.glob("*.pt.trace.json*")) if not path.name.startswith(".")]
    contents = [gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in found]
    return [json.loads(content) for content in contents]


def hidden(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.startswith(".")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.mark.parametrize("what", ["returns", "forked"])
def test_the_end_of_the_program_finishes_the_files(what: str, directory: Path) -> None:
    job = run(what, directory)
    assert job.returncode == 0, job.stderr
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated"] is False
    assert hidden(directory) == []
    # The job configures no logging, and is told all the same.
    # What a killed process of another test had left behind is no matter of this one.
    lines = [line for line in job.stderr.splitlines() if not line.startswith("megaprof: removed ")]
    said = [line.split(" train")[0] for line in lines if line.startswith("megaprof")]
    assert said[0] == "megaprof captures", job.stderr
    assert said[1] == "megaprof captured", job.stderr
    assert said[-1].startswith("megaprof ends: 1 window captured"), job.stderr


def test_an_exception_of_the_host_closes_the_window_and_stays_its_own(directory: Path) -> None:
    job = run("raises", directory)
    assert job.returncode == 1
    assert any(line.endswith("RuntimeError: of the host") for line in job.stderr.splitlines())
    (trace,) = traces(directory)
    assert trace["megaprof"]["target"] == "train_overall"
    assert trace["megaprof"]["truncated"] is True
    assert hidden(directory) == []


@pytest.mark.parametrize("what", ["waits_in_a_window", "has_a_handler_that_ends_it"])
def test_sigterm_in_a_window_keeps_what_there_is(what: str, directory: Path) -> None:
    job = run(what, directory, signal.SIGTERM)
    assert job.returncode == -signal.SIGTERM, job.stderr
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated_reason"] == "the process was terminated (SIGTERM)"
    assert hidden(directory) == []


def test_sigterm_in_a_write_finishes_the_file(directory: Path) -> None:
    job = run("waits_in_a_write", directory, signal.SIGTERM)
    assert job.returncode == -signal.SIGTERM, job.stderr
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated"] is False
    assert hidden(directory) == []


def test_sigterm_is_left_alone_when_all_is_done(directory: Path) -> None:
    job = run("waits_when_all_is_done", directory, signal.SIGTERM)
    assert job.returncode == -signal.SIGTERM, job.stderr
    assert len(traces(directory)) == 1


def test_a_hosts_own_handler_runs_and_profiling_goes_on(directory: Path) -> None:
    job = run("has_its_own_handler", directory, signal.SIGTERM)
    assert job.returncode == 5, job.stderr
    before, after = (trace["megaprof"] for trace in traces(directory))
    assert before["truncated_reason"] == "the process was terminated (SIGTERM)"
    assert after["truncated"] is False


def test_a_window_whose_host_goes_on_from_a_backward_is_whole_and_so_is_the_next(directory: Path) -> None:
    job = run("has_its_own_handler_in_a_backward", directory, signal.SIGTERM)
    assert job.returncode == 5, job.stderr
    assert [trace["megaprof"]["truncated"] for trace in traces(directory)] == [False, False], job.stderr


def of_the_dead(path: Path) -> bool:
    """Other jobs of this machine may be writing."""
    return not Path("/proc", path.parent.name.split(".")[-2]).exists()


@pytest.mark.parametrize("what", ["waits_in_a_window", "is_long_in_a_write"])
def test_sigkill_leaves_nothing_broken_and_the_next_run_cleans_up(what: str, directory: Path) -> None:
    assert run(what, directory, signal.SIGKILL).returncode == -signal.SIGKILL
    assert traces(directory) == []
    left = hidden(directory)
    raws = [path for base in SCRATCH for path in base.glob(f".megaprof.*.{host()}.*.scratch/*") if of_the_dead(path)]
    written = 0 if what == "waits_in_a_window" else 2  # the raw file, in scratch or beside, and the half-written one
    assert len(left) + len(raws) >= written
    assert all(is_leftover(path.name) for path in left)
    if written:
        assert run("returns", directory).returncode == 0
        assert len(traces(directory)) == 1
        assert hidden(directory) == []
        assert not any(path.exists() for path in raws)


def test_a_handler_of_the_hosts_that_calls_ours_gets_control_back(directory: Path) -> None:
    job = run("calls_the_handler_before_it", directory, signal.SIGTERM)
    assert job.returncode == 41, job.stderr
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated_reason"] == "the process was terminated (SIGTERM)"
    assert hidden(directory) == []


def test_an_exception_while_a_window_opens_leaves_no_profiler_running(directory: Path) -> None:
    job = run("interrupted_while_a_window_opens", directory)
    assert job.stdout.splitlines()[-2:] == ["the host's own", "recording False"]
    assert job.returncode == 0, job.stderr
    assert hidden(directory) == []


def test_removal_from_another_thread_is_left_to_the_training_thread(directory: Path) -> None:
    job = run("removes_from_another_thread", directory)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-2:] == ["asked True", "removed True False"]
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated"] is False, "the call was not over, and its window is whole"
    assert hidden(directory) == []


def test_a_removal_that_nobody_answered_happens_at_the_end_of_the_process(directory: Path) -> None:
    job = run("removes_from_another_thread_between_calls", directory)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1] == "asked True"
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated_reason"] == "the hooks were removed"
    assert hidden(directory) == []


def test_a_window_is_closed_by_the_thread_that_opened_it_at_the_latest_when_that_ends(directory: Path) -> None:
    job = run("changes_threads", directory)
    assert job.returncode == 0, job.stderr
    ended = "the thread that opened it has ended"
    found = [(trace["megaprof"]["steps"][0], trace["megaprof"]["truncated_reason"]) for trace in traces(directory)]
    assert found == [(0, None), (2, ended), (3, ended)]
    assert "step 1 was not captured: a window of train_overall was open in it" in job.stderr


def test_os_exit_leaves_nothing_broken(directory: Path) -> None:
    job = run("leaves_at_once", directory)
    assert job.returncode == 3, job.stderr
    assert [trace["megaprof"]["truncated"] for trace in traces(directory)] in ([], [False])


def test_a_forked_child_neither_hangs_nor_writes(directory: Path) -> None:
    job = run("forks", directory)
    assert job.returncode == 0, job.stderr
    (trace,) = traces(directory)
    assert trace["megaprof"]["truncated"] is False
    assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"} == {
        trace["megaprof"]["pid"]
    }
    assert hidden(directory) == []


@pytest.fixture
def _no_handler() -> Iterator[None]:
    """A command that ran in this process may have left its own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class _Unsaved:
    def __init__(self) -> None:
        self.value = False
        self.saved: list[bool] = []
        self.termination = Termination(self.saved.append, lambda: self.value)

    def settle(self, value: bool) -> object:
        self.value = value
        with self.termination:
            pass
        return signal.getsignal(signal.SIGTERM)


@pytest.mark.usefixtures("_no_handler")
def test_the_handler_is_in_only_while_something_is_unsaved() -> None:
    job = _Unsaved()
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    assert job.settle(False) is signal.SIG_DFL
    assert job.settle(True) is not signal.SIG_DFL
    assert job.settle(False) is signal.SIG_DFL


def test_a_handler_of_the_hosts_is_called_after_ours_and_put_back() -> None:
    called: list[tuple[int, object]] = []

    def hosts(number: int, frame: object) -> None:
        called.append((number, frame))

    def calls_the_one_before(number: int, frame: object) -> None:
        assert callable(before)
        before(number, frame)
        called.append((number, frame))

    job = _Unsaved()
    signal.signal(signal.SIGTERM, hosts)
    try:
        before = job.settle(True)
        assert before is not hosts
        assert job.settle(False) is hosts
        job.settle(True)
        with job.termination:  # in a held block it waits for the end
            signal.raise_signal(signal.SIGTERM)
            assert called == job.saved == []
        assert [number for number, _ in called] == [signal.SIGTERM]
        assert job.saved == [False]
        before = job.settle(True)
        signal.signal(signal.SIGTERM, calls_the_one_before)  # meanwhile: ours goes around that one
        job.settle(True)
        signal.raise_signal(signal.SIGTERM)
        assert [number for number, _ in called] == [signal.SIGTERM] * 3
        assert called[1] == called[2]
        assert job.settle(False) is calls_the_one_before
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert job.settle(True) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
