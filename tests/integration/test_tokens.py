"""The work of each microbatch, on real schedules with sequences of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.report.report import analyze
from megaprof.analysis.table.table import Table
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.analysis.what_if.changes import sequences_of
from megaprof.formats import timeline as format
from megaprof.formats.facts import unpack_work
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.faults import linger
from tests.analysis.tables import tables_in
from tests.built import VARIABLE, build_packed

LENGTHS = (8, 64, 16, 64, 24, 64)
PACKS = ((8, 56), (64,), (16,), (1, 1, 62), (24,), (30, 30))
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "microbatches": 6, "seq_length": 64}
ROWS = GPTWorkload(pp=2, micro_batch_size=2, options=VARIABLE, **SMALL)
PACKED = GPTWorkload(pp=2, options=VARIABLE, **SMALL)
REPLICAS = GPTWorkload(dp=2, options=VARIABLE, **SMALL)


def train(directories: Mapping[str, GPTWorkload]) -> None:
    """One run after another in the same processes, since starting these takes longest."""
    init_distributed()
    with cpu_megatron():
        for directory, workload in directories.items():
            gpt = build(workload) if workload == ROWS else build_packed(workload, PACKS)
            if workload == ROWS:
                gpt.lengths = LENGTHS
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


EXPERTS = GPTWorkload(ep=2, num_experts=4, **SMALL | {"microbatches": 3})


#: Milliseconds of a token in an expert's forward: far more than the rest of a layer, so that experts decide how quick a
#: rank is on a busy machine, too.
TOKEN_MS = 0.2


def route(directories: Mapping[str, str]) -> None:
    """All tokens go to the experts of rank 0 ("biased"), or as many to each rank ("even"), or so and rank 0 takes three
    times as long for each ("machine")."""
    rank, _ = init_distributed()
    tokens = 0

    def noted(experts: Any, inputs: Any, named: Any) -> None:
        nonlocal tokens
        tokens = int((inputs[1] if len(inputs) > 1 else named["tokens_per_expert"]).sum())

    with cpu_megatron():
        for directory, kind in directories.items():
            gpt = build(EXPERTS)
            # By turns to the first expert of each rank and to the second.
            favoured = torch.tensor([[1e3, 1e3, 0, 0]] if kind == "biased" else [[1e3, 0, 1e3, 0], [0, 1e3, 0, 1e3]])
            token_ms = TOKEN_MS * (3 if kind == "machine" and rank == 0 else 1)

            def gating(hidden: Any, own: Any, favoured: Any = favoured) -> Any:
                logits = own(hidden)
                return logits + favoured.repeat(logits.numel() // favoured.numel(), 1).view_as(logits)

            for layer in gpt.chunks[0].module.decoder.layers:
                layer.mlp.router.gating = partial(gating, own=layer.mlp.router.gating)
                layer.mlp.experts.register_forward_pre_hook(noted, with_kwargs=True)
                linger([layer.mlp.experts], lambda _, ms=token_ms: (ms * tokens, 2 * ms * tokens))
            wanted = ProfileConfig(("train_actor",), directory, select="all", steps="1:3", activities=("cpu",))
            with install_hooks(gpt.chunks, wanted, iteration=lambda gpt=gpt: gpt.step):
                for _ in range(3):
                    gpt.train_step()


@pytest.mark.slow
def test_the_tokens_of_every_expert_are_counted_and_name_a_slow_rank(tmp_path: Path) -> None:
    runs = {str(tmp_path / kind): kind for kind in ("biased", "even", "machine")}
    run_ranks(route, EXPERTS.world_size, runs, timeout=180)
    for directory, kind in runs.items():
        traces = [read_trace(path).metadata for path in find_traces(Path(directory))]
        found = {metadata.coords.rank: metadata.expert_tokens for metadata in traces}
        (table,) = tables_in(Path(directory)).values()
        assert isinstance(table, Table)
        assert table.experts is not None
        sums = [sum(found[rank] or ()) for rank in range(2)]
        assert table.experts.tolist() == [[[float(own) for own in sums]]]
        # Both ranks have each microbatch's tokens, which go to two experts in every layer.
        assert sum(sums) == 2 * 2 * EXPERTS.layers * EXPERTS.microbatches * EXPERTS.seq_length
        if kind == "biased":
            assert (found[0], found[1]) == ((sums[0] // 2,) * 2, (0, 0))
        else:
            assert sums[0] == sums[1]
        (target,) = analyze(Path(directory)).targets
        slow = {(cause.ranks, cause.reason) for cause in target.causes if cause.kind == "slow_rank"}
        # With even experts a busy machine may be why a rank is slow; experts are not.
        assert (((0,), "expert_load") in slow) == (kind == "biased")
        assert ((0,), "machine") in slow or kind != "machine"


def test_the_work_of_every_microbatch_is_recorded(tmp_path: Path) -> None:
    runs = {str(tmp_path / str(number)): workload for number, workload in enumerate((ROWS, PACKED, REPLICAS))}
    run_ranks(train, ROWS.world_size, runs, timeout=180)
    for directory, workload in runs.items():
        check(Path(directory), workload)


def check(directory: Path, workload: GPTWorkload) -> None:
    packed = workload != ROWS
    lengths = PACKS if packed else tuple((length, length) for length in LENGTHS)
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
    if workload == REPLICAS:  # their steps may be one after the other, as nothing makes them begin together
        return
    (table,) = (each for key, each in tables_in(directory).items() if key.target == "train_actor")
    assert isinstance(table, Table)
    # Lengths are from the captured step, and how long passes take is from those without a profiler.
    assert 1 not in table.steps
    assert [each for _, each in table.sequences] == [[list(lengths)]]
    assert sequences_of(examine(table)) is not None
