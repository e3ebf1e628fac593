"""Robust costs: what disturbs single passes or single steps is no cost, and is neither gained nor scaled."""

from __future__ import annotations

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.simulation.simulate import simulate
from megaprof.analysis.what_if.baseline import Baseline
from megaprof.analysis.what_if.replay import CapturedRun, CapturedStep
from tests.analysis.synthetic import TraceBuilder, chunk

RUN = CapturedRun("1f1b", 2, 1, None, False, True, 0.0)
COSTS = ([[30.0], [10.0]], [[60.0], [20.0]])
EVEN = ([[20.0], [20.0]], [[40.0], [40.0]])
MICROBATCHES = 8


def passes(costs, *, level=(1.0, 1.0), sizes=(1.0,) * MICROBATCHES):
    return [[[ms * own * size for size in sizes] for ms in stage] for stage, own in zip(costs, level, strict=True)]


def step(number=0, *, stalls=(), outside=5.0, **varied):
    """One captured step; ``stalls``: (kind, stage, microbatch, factor)."""
    kinds = [passes(kind, **varied) for kind in COSTS]
    for kind, stage, microbatch, factor in stalls:
        kinds[kind][stage][0][microbatch] *= factor
    taken = RUN.simulate(*kinds).step_ms
    return CapturedStep(number, *kinds, None, None, taken, outside, taken)


def baseline(*steps):
    return Baseline(RUN, steps, sum(each.pipeline_ms + each.outside_ms for each in steps) / len(steps))


def test_a_stall_is_neither_a_cost_nor_gained():
    quiet, disturbed = step(0), step(1, stalls=[(0, 0, 3, 7.0)])
    found = baseline(quiet, disturbed, step(2))
    assert found.typical == COSTS
    (stall,) = found.stalls
    assert (stall.kind, stall.stage, stall.step, stall.factor) == ("forward", 0, 1, pytest.approx(7.0))
    gain = baseline(quiet).measured_ms - baseline(quiet).lasting(EVEN, COSTS, RUN)
    assert gain == pytest.approx(RUN.simulate(*(passes(c) for c in COSTS)).step_ms - even_ms())
    assert found.measured_ms - found.lasting(EVEN, COSTS, RUN) == pytest.approx(gain)


def even_ms():
    return simulate(*EVEN, MICROBATCHES, rendezvous=True).step_ms


def test_a_stage_that_was_slow_in_one_step_only_is_not_gained():
    found = baseline(step(0), step(1, level=(3.0, 1.0)), step(2))
    assert found.typical == COSTS
    quiet = baseline(step(0))
    gains = [each.measured_ms - each.lasting(EVEN, COSTS, RUN) for each in (found, quiet)]
    # Scaled with its step it would be 1.67 times as much.
    assert gains[0] == pytest.approx(gains[1], rel=0.15)


def test_sequence_lengths_go_with_the_cost():
    """They differ by microbatch, on all stages alike: no stall, and a layout that takes half takes half of them."""
    sizes = (0.3, 1.0, 2.5, 1.0, 0.6, 1.4, 3.0, 1.0)
    found = baseline(step(0, sizes=sizes))
    assert found.stalls == []
    expected = RUN.simulate(*(passes(costs, sizes=sizes) for costs in EVEN)).step_ms
    assert found.lasting(EVEN, COSTS, RUN) == pytest.approx(5.0 + expected)


def test_more_scatter_is_more_uncertain_and_none_is_none():
    def uncertain(*steps):
        found = baseline(*steps)
        costs = [sample.typical for sample in found.samples]
        return found.uncertainty([EVEN] * len(costs), costs, found.samples, RUN, None)

    assert uncertain(step(0), step(1)) == 0.0
    little, much = (
        uncertain(*(step(n, sizes=[1 + by * ((3 * n + 5 * m) % 7 - 3) / 3 for m in range(8)]) for n in range(3)))
        for by in (0.02, 0.3)
    )
    assert 0 < little < 0.05 < much


def captured(directory, numbers, stalled=()):
    """Steps of 6 and 2 layers as traces; in ``stalled`` ones a forward of stage 0 takes seven times as long."""
    for number in numbers:
        kinds = [passes(kind) for kind in COSTS]
        if number in stalled:
            kinds[0][0][0][3] *= 7.0
        run = RUN.simulate(*kinds)
        for pp, layers in enumerate((6, 2)):
            held = chunk(layers, embedding=pp == 0, loss=pp == 1)
            trace = TraceBuilder(pp=pp, pp_size=2, step=number, microbatches=MICROBATCHES, chunks=[held])
            origin = 5000.0 * number
            for event in (event for event in run.events if event.stage == pp):
                getattr(trace, event.phase)(event.microbatch, origin + event.start_ms, event.end_ms - event.start_ms)
            trace.call(origin, run.step_ms)
            trace.write(directory)


def test_one_disturbed_step_is_too_noisy_to_advise_from_and_three_are_not(tmp_path):
    captured(tmp_path / "one", [1], stalled=[1])
    one = analyze(tmp_path / "one").targets[0].what_if
    assert one.best is None
    assert one.advice == ("too noisy to advise: one forward of stage 0 took 7 times the median; capture 5 steps")
    captured(tmp_path / "three", [1, 2, 3], stalled=[1])
    three = analyze(tmp_path / "three").targets[0]
    assert three.what_if.best is not None
    assert three.what_if.best.layout == "Et*4|t*4L"
    assert three.what_if.measured_ms == three.measured.step_time_ms.mean
