"""The background thread: tasks by time and by wake-up, faults contained, gone when there is nothing to do."""

from __future__ import annotations

import threading
import time

import pytest

from megaprof.runtime import background as module
from megaprof.runtime.background import Background


def wait_for(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "megaprof-background"]


def test_a_task_runs_again_and_again_until_it_is_removed() -> None:
    background, ran = Background(), []
    task = lambda: ran.append(1)  # noqa: E731
    background.add(task, 0.01)
    assert wait_for(lambda: len(ran) > 3)
    background.remove(task)
    assert wait_for(lambda: not threads())
    count = len(ran)
    time.sleep(0.05)
    assert len(ran) == count


def test_only_tasks_that_want_it_are_woken() -> None:
    background, woken, slow = Background(), [], []
    on_wake, by_time = lambda: woken.append(1), lambda: slow.append(1)
    background.add(on_wake, 60, woken=True)
    background.add(by_time, 60)
    background.wake()
    assert wait_for(lambda: woken == [1])
    assert slow == []
    background.remove(on_wake)
    background.remove(by_time)
    assert wait_for(lambda: not threads())


def test_tasks_of_one_period_share_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    background, happened = Background(), []
    drain = module._drain
    monkeypatch.setattr(module, "_drain", lambda *given: (happened.append("|"), drain(*given))[1])
    first, second = lambda: happened.append("a"), lambda: happened.append("b")
    background.add(first, 0.1)
    time.sleep(0.05)  # half a period later
    background.add(second, 0.1)
    assert wait_for(lambda: happened.count("b") > 3)
    background.remove(first)
    background.remove(second)
    assert wait_for(lambda: not threads())
    together = "".join(happened)
    rounds = [tasks for tasks in together[together.index("b") + 2 :].split("|") if tasks]
    assert set(rounds[:2]) == {"ab"}


def test_a_fault_drops_its_task_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    background, ran = Background(), []

    def broken() -> None:
        raise OSError("the file server is gone")

    task = lambda: ran.append(1)  # noqa: E731
    background.add(broken, 0.01)
    background.add(task, 0.01)
    assert wait_for(lambda: len(ran) > 5)
    assert caplog.text.count("a background task failed") == 1
    background.remove(task)
    assert wait_for(lambda: not threads())


def test_the_thread_starts_again_after_it_has_ended() -> None:
    background, ran = Background(), []
    for round in range(1, 4):
        task = lambda: ran.append(1)  # noqa: E731
        background.add(task, 0.01)
        assert wait_for(lambda: len(ran) >= round)  # noqa: B023
        background.remove(task)
        assert wait_for(lambda: not threads())
