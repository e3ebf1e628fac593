"""The launcher for ranks: results in order, every failure told, nothing left running."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaprof.parallel.machine import processes_with
from megaprof.testing import RanksFailed, init_distributed, launcher, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_ranks")]


def join_and_add(offset: int, *, scale: int) -> tuple[int, int, float, str | None]:
    rank, world = init_distributed()
    total = torch.tensor(float(rank))
    torch.distributed.all_reduce(total)
    print(f"rank {rank} says  ü", flush=True)
    return rank * scale + offset, world, total.item(), os.environ.get("OURS")


def test_results_in_rank_order_and_output_forwarded() -> None:
    lines: list[tuple[int, str]] = []
    results = run_ranks(
        join_and_add, 2, 5, scale=10, env={"OURS": "yes"}, on_line=lambda rank, line: lines.append((rank, line))
    )
    assert results == [(5, 2, 1.0, "yes"), (15, 2, 1.0, "yes")]
    assert sorted(lines) == [(0, "rank 0 says  ü\n"), (1, "rank 1 says  ü\n")]


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from megaprof.testing import run_ranks\ndef one_rank():\n    return 1\nprint(run_ranks(one_rank, 2))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "RanksFailed: ranks 0, 1 of 2 failed" in run.stderr
    assert "if __name__ == '__main__':" in run.stderr


def fail_by_rank() -> str:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} goes", file=sys.stderr, flush=True)
    if rank == 0:
        raise KeyError("the reason")
    if rank == 1:
        os._exit(3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "well"


def test_every_way_to_fail_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE", 100)  # they all end by themselves, on a busy machine late
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fail_by_rank, 4)
    raised, exited, signalled, _ = failure.value.reports
    assert [report.outcome for report in failure.value.reports] == ["raised", "exited", "signalled", "returned"]
    assert "in fail_by_rank" in raised.traceback
    assert "KeyError: 'the reason'" in raised.traceback
    assert (exited.exit_status, signalled.signal) == (3, "SIGKILL")
    assert "rank 2 goes" in signalled.stderr
    message = str(failure.value)
    for expected in (
        "ranks 0, 1, 2 of 4 failed",
        "KeyError: 'the reason'",
        "rank 1 did not return: exited with status 3",
        "rank 2 was killed by SIGKILL",
        "rank 3 returned",
    ):
        assert expected in message
    assert str(pickle.loads(pickle.dumps(failure.value))) == message


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def write(path: Path, pid: int) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(str(pid))
    partial.rename(path)


def stay_here_for_good(directory: Path) -> None:
    # A session of its own, as torchrun gives its workers: killing the rank's process group would miss it.
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    write(directory / "grandchild", child.pid)
    wait_for(directory / "never")


def one_hangs(directory: Path) -> int:
    rank = int(os.environ["RANK"])
    if rank == 1:
        stay_here_for_good(directory)
    write(directory / "returned", os.getpid())
    return rank


def one_fails_one_stays(directory: Path) -> None:
    if os.environ["RANK"] == "1":
        stay_here_for_good(directory)
    wait_for(directory / "grandchild")
    raise ValueError("cannot go on")


def assert_grandchild_is_gone(directory: Path) -> None:
    pid = int((directory / "grandchild").read_text())
    status = Path(f"/proc/{pid}/status")
    # Killed but not yet reaped by init still has an entry.
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_hanging_rank_is_reported_with_its_stack_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up as soon as one has returned and the other one hangs, however long these took to begin."""
    returned, grandchild = tmp_path / "returned", tmp_path / "grandchild"

    def now() -> float:
        over = grandchild.exists() and returned.exists() and not Path("/proc", returned.read_text()).exists()
        return time.monotonic() + 600 * over

    clock = SimpleNamespace(sleep=time.sleep, monotonic=now)
    monkeypatch.setattr(launcher, "time", clock)
    with pytest.raises(RanksFailed, match="rank 1 hung, killed at the time limit") as failure:
        run_ranks(one_hangs, 2, tmp_path, timeout=300)
    well, hung = failure.value.reports
    assert (well.outcome, hung.outcome) == ("returned", "hung")
    assert "in stay_here_for_good" in hung.stack
    assert "in wait_for" in str(failure.value)
    assert_grandchild_is_gone(tmp_path)


def test_others_are_killed_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    with pytest.raises(RanksFailed, match="rank 1 killed after rank 0 failed") as failure:
        run_ranks(one_fails_one_stays, 2, tmp_path)
    raised, killed = failure.value.reports
    assert "ValueError: cannot go on" in raised.traceback
    assert (killed.outcome, killed.failed_rank) == ("killed", 0)
    assert "in stay_here_for_good" in killed.stack
    assert_grandchild_is_gone(tmp_path)


KILLED_AT_ONCE = """
import os, sys, time
from pathlib import Path
from megaprof.testing import launcher
def begin(directory):
    (Path(directory) / "began").touch()
    time.sleep(100)
launcher._wait = lambda *_: os.kill(os.getpid(), 9)
if __name__ == "__main__":
    launcher.run_ranks(begin, 2, sys.argv[1], env={"OURS": sys.argv[1]})
"""


def test_ranks_whose_parent_is_killed_while_they_start_end_before_they_begin(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED_AT_ONCE)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, script, tmp_path], env=env, timeout=120).returncode == -signal.SIGKILL
    began = tmp_path / "began"
    while processes_with(f"OURS={tmp_path}") and not began.exists():
        time.sleep(0.05)
    assert not began.exists()


@pytest.mark.parametrize(("world", "timeout"), [(0, 1.0), (1, 0.0)])
def test_impossible_requests_are_refused(world: int, timeout: float) -> None:
    with pytest.raises(ValueError, match=r"world|timeout"):
        run_ranks(fail_by_rank, world, timeout=timeout)


def test_a_job_without_a_time_limit_names_none() -> None:
    assert str(RanksFailed((), math.inf)) == "ranks  of 0 failed"
    assert str(RanksFailed((), 9.0)) == "ranks  of 0 failed (time limit 9 s)"
