"""Ranks that begin at once are like fresh ones, in what a test can see."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megaprof.testing import RanksFailed, run_ranks
from tests.warm_ranks import Forked


def facts() -> dict[str, object]:
    import torch

    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OF_THE_TEST")
    return {
        "environment": {name: os.environ.get(name) for name in names},
        "threads": threading.active_count(),
        "descriptors": sorted(each.name for each in Path("/proc/self/fd").iterdir()),
        "session": os.getsid(0) == os.getpid(),
        "main": (sys.modules["__main__"].__name__, hasattr(sys.modules["__main__"], "__file__")),
        "path": sys.path,
        "directory": os.getcwd(),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "group": torch.distributed.is_initialized(),
    }


def first_filter() -> tuple[str, int]:
    return warnings.filters[0][0], os.getppid()


def fail_by_rank() -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_fork_is_like_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("OF_THE_TEST", "1")
    warm = run_ranks(facts, 2, timeout=120)
    request.getfixturevalue("fresh_ranks")
    assert warm == run_ranks(facts, 2, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forks on Linux only")
def test_they_are_forks_unless_a_variable_is_read_when_an_interpreter_begins() -> None:
    def parents(**env: str) -> set[int]:
        return set(run_ranks(os.getppid, 2, timeout=120, env=env))

    assert os.getpid() not in parents()
    assert len(parents()) == 1
    assert parents(PYTHONUTF8="1") == {os.getpid()}
    (action, parent), _ = run_ranks(first_filter, 2, timeout=120, env={"PYTHONWARNINGS": "ignore"})
    assert action == "ignore"
    assert parent != os.getpid()


def test_how_they_end_is_told() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(fail_by_rank, 2, timeout=60)
    zero, one = failed.value.reports
    assert (zero.outcome, zero.exit_status, one.outcome, one.signal) == ("exited", 7, "signalled", "SIGKILL")


def test_threads_that_ask_at_once_hear_the_same_and_close_its_descriptor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed twice, its number may be that of a pipe of another process, whose output would then go astray."""
    (status, told), out, err = os.pipe(), os.pipe(), os.pipe()
    os.set_blocking(status, False)
    job = Forked(0, status, out[0], err[0])
    os.write(told, b"7")
    for each in (told, out[1], err[1]):
        os.close(each)
    read, close, closed = os.read, os.close, list[int]()

    def slowly(descriptor: int, most: int) -> bytes:
        data = read(descriptor, most)
        time.sleep(0.05)
        return data

    def noted(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "read", slowly)
    monkeypatch.setattr(os, "close", noted)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: job.poll(), range(4))) == [7] * 4
    assert closed == [status]
    job.stdout.close()
    job.stderr.close()
