"""The work of each microbatch, on real schedules with sequences of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.table.files import tables_in
from megaprof.analysis.table.table import Table
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats import timeline as format
from megaprof.formats.work import unpack_work
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

LENGTHS = (8, 64, 16, 64, 24, 64)
PACKS = ((8, 56), (64,), (16,), (1, 1, 62), (24,), (30, 30))
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "microbatches": 6, "seq_length": 64}
ROWS = GPTWorkload(pp=2, seq_lengths=LENGTHS, micro_batch_size=2, **SMALL)
PACKED = GPTWorkload(pp=2, packs=PACKS, **SMALL)
ALONE = GPTWorkload(packs=PACKS, **SMALL)


def train(directories: Mapping[str, GPTWorkload]) -> None:
    """One run after another in the same processes, since starting these takes longest."""
    init_distributed()
    with cpu_megatron():
        for directory, workload in directories.items():
            gpt = build(workload)
            wanted = ProfileConfig(
                ("train_actor", "evaluate"),
                directory,
                select="all",
                steps="1",
                activities=("cpu",),
                tool=("torch", "timeline"),
            )
            with install_hooks(gpt.chunks, wanted, iteration=lambda gpt=gpt: gpt.step):
                for _ in range(3):
                    gpt.train_step()
                    gpt.evaluate()


EXPERTS = GPTWorkload(ep=2, num_experts=4, **SMALL)


def route(directories: Mapping[str, bool]) -> None:
    """All tokens go to the experts of rank 0, or to experts by chance."""
    init_distributed()
    with cpu_megatron():
        for directory, biased in directories.items():
            gpt = build(EXPERTS)
            for layer in gpt.chunks[0].module.decoder.layers:
                router = layer.mlp.router
                router.config.moe_router_force_load_balancing = not biased
                if biased:
                    gating, favour = router.gating, torch.tensor([1e3, 1e3, 0.0, 0.0])
                    router.gating = lambda hidden, gating=gating, favour=favour: gating(hidden) + favour
            wanted = ProfileConfig(("train_actor",), directory, select="all", steps="1", activities=("cpu",))
            with install_hooks(gpt.chunks, wanted, iteration=lambda gpt=gpt: gpt.step):
                for _ in range(2):
                    gpt.train_step()


def test_the_tokens_of_every_expert_are_counted(tmp_path: Path) -> None:
    runs = {str(tmp_path / "biased"): True, str(tmp_path / "even"): False}
    run_ranks(route, EXPERTS.world_size, runs, timeout=180)
    for directory, biased in runs.items():
        traces = [read_trace(path).metadata for path in find_traces(Path(directory))]
        found = {metadata.coords.rank: metadata.expert_tokens for metadata in traces}
        (table,) = tables_in(Path(directory)).values()
        assert isinstance(table, Table)
        assert table.experts is not None
        sums = [sum(found[rank] or ()) for rank in range(2)]
        assert table.experts.tolist() == [[[float(own) for own in sums]]]
        # Both ranks have each microbatch's tokens, which go to two experts in every layer.
        assert sum(sums) == 2 * 2 * EXPERTS.layers * EXPERTS.microbatches * EXPERTS.seq_length
        if biased:
            assert (found[0], found[1]) == ((sums[0] // 2,) * 2, (0, 0))
        else:
            assert max(sums) < 1.5 * min(sums)  # drawn at random, in some versions once for all layers


def test_the_work_of_every_microbatch_is_recorded(tmp_path: Path) -> None:
    for together in ((ROWS, PACKED), (ALONE,)):
        runs = {str(tmp_path / f"{len(together)}{number}"): workload for number, workload in enumerate(together)}
        run_ranks(train, together[0].world_size, runs, timeout=180)
        for directory, workload in runs.items():
            check(Path(directory), workload)


def check(directory: Path, workload: GPTWorkload) -> None:
    packed = workload.packs is not None
    lengths = workload.packs or tuple((length, length) for length in LENGTHS)
    expected = [(sum(own), len(own), sum(each * each for each in own)) for own in lengths]
    traces = [read_trace(path).metadata for path in find_traces(directory)]
    assert len(traces) == 2 * workload.world_size
    for metadata in traces:
        assert metadata.lengths == lengths
        assert metadata.tokens == tuple(tokens for tokens, _, _ in expected)
        assert metadata.lengths_from == ("packed_seq_params" if packed else "shapes")
    files = [format.read_timeline(path) for path in directory.glob("*" + format.SUFFIX)]
    assert len(files) == workload.world_size
    for timeline in files:
        assert timeline.damage is None
        told = timeline.facts(format.WORK)
        assert len(told) == 2, "once for each target, since nothing changes"
        for payload in told.values():
            found = unpack_work(payload)
            assert found is not None
            assert found[0] == ("packed_seq_params" if packed else "shapes")
            assert np.array_equal(found[1], expected)
            assert len(payload) == 1 + 16 * len(expected)
