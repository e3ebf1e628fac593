"""The tokens of each microbatch, on real schedules with sequences of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaprof import ProfileConfig, analyze, install_hooks
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

LENGTHS = (8, 64, 16, 64, 24, 64)
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "microbatches": 6, "seq_length": 64}
WORKLOAD = GPTWorkload(pp=2, seq_lengths=LENGTHS, micro_batch_size=2, **SMALL)


def train(directory: str) -> None:
    init_distributed()
    with cpu_megatron():
        gpt = build(WORKLOAD)
        wanted = ProfileConfig(("train_actor", "evaluate"), directory, select="all", steps="1", activities=("cpu",))
        with install_hooks(gpt.chunks, wanted, iteration=lambda: gpt.step):
            for _ in range(3):
                gpt.train_step()
                gpt.evaluate()


def test_every_stage_knows_them(tmp_path: Path) -> None:
    run_ranks(train, WORKLOAD.world_size, str(tmp_path), timeout=180)
    found = [read_trace(path).metadata for path in find_traces(tmp_path)]
    assert len(found) == 4
    assert all(each.tokens == tuple(2 * length for length in LENGTHS) for each in found)
    assert all(each.seq_length == 64 for each in found), "what the schedule was told"
    (trained,) = [each.measured for each in analyze(tmp_path).targets if each.measured.target == "train_actor"]
    assert trained.tokens == (2 * min(LENGTHS), 2 * max(LENGTHS))
