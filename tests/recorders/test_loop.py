"""The parts of a host's loop: only the outermost one counts, and only on the thread that makes the schedule's calls."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from megaprof.recorders import loop
from megaprof.recorders.loop import Collections, Parts


def names(parts: Parts, since: int = 0) -> list[str]:
    return [part for part, _, _ in parts.since(since)]


def test_only_the_outermost_part_of_the_schedules_thread_counts() -> None:
    parts = Parts()
    with parts.inside("saving"):  # before the first call nobody knows which thread it is
        pass
    assert parts.enter("train_actor", schedule=True)
    with parts.inside("optimizer"):
        assert parts.now is not None
        assert parts.now[0] == "train_actor"
    parts.leave()
    with parts.inside("evaluation"):
        assert not parts.enter("evaluate", schedule=True)
        with parts.inside(None):
            pass

    def elsewhere() -> None:
        with parts.inside("saving"):
            pass

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with pytest.raises(KeyError), parts.inside("logging"):
        raise KeyError
    assert parts.now is None
    assert names(parts) == ["logging", "evaluation", "train_actor"]
    assert names(parts, parts.since(0)[0][1]) == ["logging"]


def test_a_process_waits_between_what_it_is_asked_for() -> None:
    parts = Parts()
    with parts.asked():
        assert parts.enter("train_actor", schedule=True)
        with parts.asked():  # on another thread, say
            pass
        parts.leave()
        assert parts.now is None
    assert parts.now is not None
    assert parts.now[0] == "waiting"
    with pytest.raises(KeyError), parts.asked():
        raise KeyError
    with parts.inside("saving"):  # it does something by itself
        pass
    assert parts.now is None
    assert names(parts) == ["saving", "waiting", "waiting", "train_actor"]


def test_the_step_of_a_torch_optimizer_is_a_part_once_and_only_alone() -> None:
    parts = Parts()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    ends = [parts.watch_optimizers() for _ in range(2)]  # two models
    optimizer.step()  # on a thread that made no call yet
    assert parts.enter("train_actor", schedule=True)
    optimizer.step()
    parts.leave()
    optimizer.step()

    def fail() -> float:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(fail)
    optimizer.step()
    for end in ends:
        end()
    optimizer.step()
    assert names(parts) == ["optimizer", "optimizer", "train_actor"]


def test_a_collection_of_another_thread_hides_no_part() -> None:
    """It began before the call, and is over only behind the parts that follow, because what it finalises waits."""
    parts, begun, go_on = Parts(), threading.Event(), threading.Event()
    collections = Collections(parts)

    class Waits:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            begun.set()
            go_on.wait(20)

    def collect() -> None:
        Waits()
        gc.collect()

    thread = threading.Thread(target=collect)
    collections.start()
    try:
        thread.start()
        assert begun.wait(20)
        assert parts.enter("train_actor", schedule=True)
        assert parts.now is not None
        began = parts.now[1]
        parts.leave()
        with parts.inside("saving"):
            pass
    finally:
        go_on.set()
        thread.join()
        collections.stop()
    assert names(parts, began) == ["garbage_collection", "saving", "train_actor"]
    moments = [moment for _, begin, end in reversed(parts.since(began)) for moment in (begin, end)]
    assert moments == sorted(moments), "no two at once"


def test_a_wait_for_a_core_is_none_that_somebody_makes_who_sets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "waited_ns", lambda thread: 0)
    read, now = loop.measure_waits(), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**10)
    assert read is not None
    assert (waited := read(0)) is not None
    assert waited.waited == 0
    assert waited.length >= 0
