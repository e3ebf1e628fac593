"""What only the noise of a machine, or a profiler's start, does to microbatches must not read as a cause."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.stages.causes import pipeline_causes
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, plain_stage

TINY = Scenario("tiny", layers=(2, 2), layer=1.0, microbatches=8, steps=3, gpu=False, opening=4.0)
BUSY = Scenario("busy", layers=(4, 4), microbatches=16, steps=3, gpu=False, noise=0.05, load=0.2)
SEEDS = range(4)


def causes(scenario: Scenario, directory: Path) -> list[str]:
    """Of all seeds, those that blame the microbatches: their work, or their data."""
    found = []
    for seed in SEEDS:
        own = directory / str(seed)
        write(replace(scenario, seed=seed), own)
        (target,) = analyze(own).targets
        found += [
            f"{seed}: {cause.kind}, {cause.evidence}"
            for cause in target.verdict.causes
            if cause.kind == "data_wait" or (cause.kind == "uneven_microbatches" and cause.stage is None)
        ]
    return found


@pytest.mark.parametrize(
    ("layers", "target"), [((4, 4), "train_log_probs"), ((6, 2), "train_actor"), ((4, 4, 4, 4), "train_actor")], ids=str
)
def test_bursts_of_other_load_are_no_uneven_microbatches(layers: tuple[int, ...], target: str, tmp_path: Path) -> None:
    assert causes(replace(BUSY, layers=layers, target=target), tmp_path) == []


@pytest.mark.parametrize(
    ("layers", "target"), [((2,), "train_actor"), ((2, 2), "train_log_probs"), ((3, 1), "train_actor")], ids=str
)
def test_a_profiler_that_starts_is_neither_data_nor_work(layers: tuple[int, ...], target: str, tmp_path: Path) -> None:
    assert causes(replace(TINY, layers=layers, target=target), tmp_path) == []


@pytest.mark.parametrize("target", ["train_actor", "train_log_probs"])
def test_uneven_microbatches_are_found_in_noise(target: str, tmp_path: Path) -> None:
    uneven = replace(BUSY, load=0.0, noise=0.08, uneven=0.6, target=target)
    found = causes(uneven, tmp_path)
    assert [each.split(",")[0] for each in found] == [f"{seed}: uneven_microbatches" for seed in SEEDS]


def test_one_long_microbatch_is_a_stall(tmp_path: Path) -> None:
    # Both stages stall at one microbatch, in forward and backward: nobody knows whether that was its work.
    stalled = replace(BUSY, load=0.0, steps=1, hiccups={0: (0, "forward", 5), 1: (0, "forward", 5)})
    assert causes(stalled, tmp_path) == []


def test_a_first_microbatch_that_is_the_largest_does_not_wait_for_data(tmp_path: Path) -> None:
    for step in (5, 6, 7):
        plain_stage(0, 1, 100.0, 200.0, jitter=-30.0, step=step).write(tmp_path)
    (target,) = analyze(tmp_path).targets
    assert target.verdict.causes == ()


def test_data_that_is_late_in_every_step_is_found_in_noise(tmp_path: Path) -> None:
    for layers in ((4,), (4, 4)):
        found = causes(replace(BUSY, layers=layers, load=0.0, data=120.0, opening=4.0), tmp_path / str(len(layers)))
        assert [each.split(",")[0] for each in found] == [f"{seed}: data_wait" for seed in SEEDS]


def test_data_that_is_late_in_one_step_of_three_is_a_stall(tmp_path: Path) -> None:
    assert causes(replace(BUSY, load=0.0, hiccups={0: (1, "forward", 0)}, opening=4.0), tmp_path) == []


def test_forwards_and_backwards_tell_uneven_work_of_one_stage_from_a_disturbed_rank(tmp_path: Path) -> None:
    uneven = Scenario("uneven", layers=(4, 4), gpu=False, spread={1: 0.6})
    write(uneven, tmp_path / "work")
    assert "agree which ones are long (correlation 1.00): they differ in work there" in of_stage(tmp_path / "work", 1)
    for pp in range(2):
        rng = random.Random(pp)
        stage, now = TraceBuilder(pp=pp, pp_size=2, microbatches=16), 0.0
        for add, usual in ((stage.forward, 10.0), (stage.backward, 20.0)):
            for mb in range(16):
                length = usual * (rng.choice((0.4, 1.0, 1.6, 2.2)) if pp else 1.0)
                add(mb, now, length)
                now += length
        stage.call(0.0, now)
        stage.write(tmp_path / "rank")
    found = of_stage(tmp_path / "rank", 1)
    assert "do not agree which ones are long" in found
    assert "something disturbs this rank, and their work is not why" in found
    write(replace(uneven, target="train_log_probs"), tmp_path / "forwards")
    found = of_stage(tmp_path / "forwards", 1)
    assert found.endswith("; whether their work differs or something disturbs this rank is not known")


def of_stage(directory: Path, stage: int) -> str:
    """Why the microbatches of one stage are called uneven."""
    (measured,) = [target.measured for target in analyze(directory).targets]
    (cause,) = [each for each in pipeline_causes(measured) if each.kind == "uneven_microbatches"]
    assert cause.stage == stage
    return cause.evidence
