"""Where whole iterations go, of real jobs: a host's own loop around Megatron's schedule and optimizer."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.report.report import analyze
from megaprof.analysis.table.iterations import UNKNOWN, Iterations, parts_of
from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

#: Milliseconds of the optimizer, of a checkpoint and of an evaluation, which rank 1 needs twice as long; and what a
#: forward of the first step takes longer, as if something were compiled in it.
OPTIMIZER, SAVING, EVALUATION, COMPILING = 40.0, 150.0, 100.0, 500.0
#: On a busy machine, several steps after the first one may be slow enough to count as warming up.
STEPS, SAVED, EVALUATED, WARM = 20, (8, 12, 16), 10, 8
PIPELINE = GPTWorkload(pp=2, layers=2, hidden=32, seq_length=16, microbatches=4)


def loop(directory: str) -> None:
    rank, _ = init_distributed()
    training = ModuleType("megatron.training.training")

    def evaluate(evaluates: Any) -> None:
        evaluates()
        time.sleep(EVALUATION / 1e3 * (1 + rank))

    training.evaluate_and_print_results = evaluate  # type: ignore[attr-defined]
    training.save_checkpoint_and_time = lambda: time.sleep(SAVING / 1e3)  # type: ignore[attr-defined]
    sys.modules[training.__name__] = training
    with cpu_megatron():
        from megatron.core.optimizer import OptimizerConfig, optimizer

        class Slow(optimizer.FP32Optimizer):  # type: ignore[misc]
            """Megatron's own step, after a while."""

            def __init__(self, inner: Any) -> None:
                self.inner, self.zero_grad = inner, inner.zero_grad
                self.config = OptimizerConfig()

            def prepare_grads(self) -> bool:
                time.sleep(OPTIMIZER / 1e3)
                self.inner.step()
                return True  # an overflow: the rest of Megatron's step is left out

        gpt = build(PIPELINE)
        gpt.optimizer = Slow(gpt.optimizer)
        config = ProfileConfig(("train_actor",), directory, tool=("timeline",))
        with install_hooks(gpt.chunks, config, iteration=lambda: gpt.step):
            compiling = gpt.chunks[0].register_forward_pre_hook(lambda *_: time.sleep(COMPILING / 1e3))
            for number in range(STEPS):
                gpt.train_step()
                compiling.remove()
                if number in SAVED:
                    training.save_checkpoint_and_time()  # type: ignore[attr-defined]
                if number == EVALUATED:
                    training.evaluate_and_print_results(gpt.evaluate)  # type: ignore[attr-defined]
                    gpt.log_probs_pass()  # none of the targets


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loop")
    run_ranks(loop, PIPELINE.world_size, str(directory))
    return directory


@pytest.fixture(scope="module")
def found(directory: Path) -> Iterations:
    (target,) = analyze(directory).targets
    assert target.iterations is not None
    return target.iterations


def test_what_lies_between_steps_is_known_by_its_name(found: Iterations) -> None:
    parts = {part.name: part for part in found.parts}
    count = found.count
    assert parts["optimizer"].ms >= OPTIMIZER
    assert parts["optimizer"].often == 1.0
    assert (parts["saving"].often, parts["evaluation"].often) == (3 / count, 1 / count)
    assert parts["saving"].longest_ms >= SAVING
    assert parts["evaluation"].longest_ms >= 2 * EVALUATION
    assert parts["evaluation"].rank == 1
    assert parts["train_log_probs"].often == 1 / count
    assert "evaluate" not in parts, "the schedule's calls inside are a part of the evaluation"


def test_an_iteration_that_warms_up_does_not_count(found: Iterations) -> None:
    parts = {part.name: part for part in found.parts}
    assert STEPS - 1 - WARM <= found.count <= STEPS - 2
    assert parts["forward"].longest_ms < PIPELINE.microbatches * COMPILING


def test_the_parts_of_every_iteration_add_up_to_its_wall_time(directory: Path) -> None:
    for path in directory.rglob("*" + SUFFIX):
        timeline = read_timeline(path)
        walls = np.diff(timeline.steps["start_ns"]) / 1e6
        parts = parts_of(timeline, np.arange(len(timeline.steps)))
        assert sum(parts.values()) == pytest.approx(walls, rel=0.01)
        assert (parts[UNKNOWN] >= -0.01 * walls).all()
        assert all((parts[name] >= 0).all() for name in parts if name != UNKNOWN)


def test_the_parts_add_up_to_the_iteration(found: Iterations) -> None:
    assert sum(part.ms for part in found.parts) == pytest.approx(found.ms)
    # Rank 0 is in the schedule longest, because it waits there while rank 1 still evaluates.
    named = OPTIMIZER + (3 * SAVING + EVALUATION) / found.count
    assert found.ms >= found.step_ms + named
    assert 0.0 < found.step_ms < found.ms
