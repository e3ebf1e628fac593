"""Faults made on purpose: who waits, for how long, and that numbers stay."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaprof.testing import build, faults


def test_modules_that_linger_wait_in_both_passes_and_compute_the_same(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, waited, took = one_rank.log_probs_pass(), [], []
    monkeypatch.setattr(faults.time, "sleep", waited.append)

    def more(ms: float) -> tuple[float, float]:
        took.append(ms)
        return 10.0, 30.0

    faults.linger(faults.layers(one_rank.chunks), more)
    after = one_rank.log_probs_pass()
    layers, microbatches = 2, 3
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))
    assert waited == [0.01] * layers * microbatches
    assert all(ms > 0 for ms in took)
    waited.clear()
    one_rank.train_step()
    assert sorted(waited) == [0.01] * layers * microbatches + [0.03] * layers * microbatches


class Twice(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(given) + given, None


def test_what_paced_modules_compute_is_part_of_the_time_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = itertools.count(), []  # a second passes whenever it is asked
    monkeypatch.setattr(faults, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=waited.append))
    chain, given = [Twice(4, 4), Twice(4, 4)], torch.ones(1, 4, requires_grad=True)

    def passes() -> torch.Tensor:
        given.grad, passed = None, given
        for module in chain:
            passed, _ = module(passed)
        passed.sum().backward()
        return torch.cat([passed, given.grad])

    before = passes()
    faults.pace(chain, lambda: (10e3, 30e3))
    assert torch.equal(passes(), before)
    assert waited == [9.0, 18.0, 29.0, 58.0]  # each pass of the second one begins when that of the first should end


def test_layers_with_a_time_of_their_own_wait_in_both_passes(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(faults, "_until", ends.append)
    monkeypatch.setattr(faults.time, "perf_counter", lambda: 0.0)
    paced = build(dataclasses.replace(one_rank.workload, layer_ms=(10.0, 30.0)))
    paced.train_step()
    microbatches = 3
    assert sorted(ends) == sorted([layer * s for s in (0.01, 0.03) for layer in (1, 2)] * microbatches)


def test_something_comes_before_each_forward(one_rank: Any) -> None:
    seen: list[bool] = []
    faults.before_forward(one_rank.chunks[0], lambda: seen.append(torch.is_grad_enabled()) or "no input")
    one_rank.train_step()
    assert seen == [True] * 3
