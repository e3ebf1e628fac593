"""Captures that a job makes by itself."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megaprof import ProfileConfig
from megaprof.control.request import COOLDOWN_SECONDS, Watchdog


def config(tmp_path: Path, **options: Any) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), dir=str(tmp_path), tool=("timeline",), **options)


class Job:
    """A listener as far as the watchdog looks at it, and the requests that it would make."""

    def __init__(self, options: ProfileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy = False
        self.captures = True
        self.asked: list[str] = []
        self.time = 0.0
        self.watchdog = Watchdog(options)
        monkeypatch.setattr("megaprof.control.request.monotonic", lambda: self.time)
        self._now = (0, 0.0)
        monkeypatch.setattr(self.watchdog, "_ask", self._ask)

    def step_time(self, target: str) -> tuple[int, float | None]:
        """As a session counts: by the schedule's calls, so that nothing is ever called train_overall."""
        return (0, None) if target == "train_overall" else self._now

    def _ask(self, job: None, reason: str) -> None:
        self.asked.append(reason)
        self.watchdog._not_before = self.time + COOLDOWN_SECONDS
        if self.captures:
            captured: Any = SimpleNamespace(request="x", captured=2, steps=(1, 2), reason=None)
            self.watchdog._go_on(Mock(advance=lambda: captured))

    def steps(self, milliseconds: float, count: int) -> None:
        for _ in range(count):
            self._now = (self._now[0] + 1, milliseconds)
            self.watchdog.look(None, *self.step_time(self.watchdog.timed), busy=self.busy)


def test_slow_steps_ask_until_they_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(config(tmp_path, trigger_step_time=1.5), monkeypatch)
    job.captures = False
    job.steps(300, 5)  # a cold start is not what is usual
    job.steps(100, 60)
    job.steps(149, 20)
    job.steps(160, 2)
    job.steps(100, 10)
    assert job.asked == []
    job.steps(160, 10)
    assert job.asked == ["steps take 160 ms, 1.60 times the usual 100 ms"]
    job.time = 3601.0
    job.busy = True
    job.steps(170, 10)
    job.busy = False
    assert len(job.asked) == 1
    job.captures = True
    job.steps(170, 3)
    assert len(job.asked) == 2
    job.time = 7300.0
    job.steps(170, 5000)
    assert len(job.asked) == 2, "that is captured, and is the usual now"
    job.steps(300, 3)
    assert job.asked[2:] == ["steps take 300 ms, 1.76 times the usual 170 ms"]


def test_a_trigger_on_train_overall_goes_by_the_training_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ProfileConfig(target=("train_overall",), dir=str(tmp_path), on_demand=True, trigger_step_time=1.5)
    job = Job(options, monkeypatch)
    job.steps(100, 60)
    job.steps(160, 5)
    assert job.asked == ["steps take 160 ms, 1.60 times the usual 100 ms"]
    assert job.watchdog._target == "train_overall", "what is captured then"


def test_uneven_stages_ask_once_until_they_have_been_even(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(config(tmp_path, trigger_imbalance=1.3), monkeypatch)

    def see(*imbalances: float | None) -> None:
        for imbalance in imbalances:
            job.watchdog.see(imbalance)
            job.steps(100, 1)
            job.time += 60

    see(1.4, 1.4, 1.2, 1.4, 1.4, None, 1.4, 1.4)
    assert job.asked == []
    see(1.4)
    assert job.asked == ["the slowest stage computes 1.40 times as long as the average one"]
    see(*[1.4] * 100)
    assert len(job.asked) == 1, "a job that stays uneven must not fill its disk"
    see(1.2, 1.2, 1.2, 1.4, 1.4, 1.4)
    assert len(job.asked) == 2


def test_a_real_job_captures_its_own_slow_steps(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import install_hooks

    milliseconds = 100.0  # rather than what steps take on a machine that others use, too
    looks: list[None] = []  # of the watchdog
    look = Watchdog.look

    def told(self: Watchdog, job: Any, calls: int, took: float | None, *, busy: bool) -> None:
        looks.append(None)
        look(self, job, len(looks), milliseconds, busy=busy)

    monkeypatch.setattr("megaprof.control.listener.interval", lambda world: 0.05)
    monkeypatch.setattr(Watchdog, "look", told)
    caplog.set_level(logging.WARNING, "megaprof")
    with install_hooks(one_rank.chunks, config(tmp_path, trigger_step_time=1.5)):
        forward_backward = get_forward_backward_func()
        while len(looks) < 50:
            one_rank.train_step(forward_backward)
        assert not list(tmp_path.glob("*.gz"))
        milliseconds = 160.0
        deadline = time.monotonic() + 60
        while "captured step" not in caplog.text and time.monotonic() < deadline:
            one_rank.train_step(forward_backward)
    assert "steps take 160 ms, 1.60 times the usual 100 ms: capturing 2 steps" in caplog.text
    assert "captured step" in caplog.text
    assert len(list(tmp_path.glob("train_actor.*.pt.trace.json.gz"))) == 2
