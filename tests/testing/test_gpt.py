"""The GPT workload: megatron-core's own model and schedules give the right numbers, the same every time."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof.testing import BuiltGPT, GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from megaprof.testing.gpt import _layout_options
from tests.built import VARIABLE, digests, layer_numbers

SMALL: dict[str, Any] = {"layers": 4, "hidden": 64, "seq_length": 32}
UNEVEN = GPTWorkload(pp=2, layout=(3, 1), **SMALL)
EXPERTS = GPTWorkload(ep=2, dtype="bfloat16", **SMALL)
COMBINED = GPTWorkload(ep=2, dtype="bfloat16", options={"overlap_moe_expert_parallel_comm": True}, **SMALL)
COMPARED = {
    "one stage": GPTWorkload(dp=2, **SMALL),
    "1F1B": UNEVEN,
    "interleaved": GPTWorkload(pp=2, vpp=2, **SMALL),
}
STEPS = 4
GENERAL = GPTWorkload(pp=4, layout=(2, 1, 2, 1), **{**SMALL, "layers": 6})


def set_weights_by_name(gpt: BuiltGPT) -> None:
    """The same weights for every split of the model over stages: drawn from each parameter's name in the whole."""
    for chunk, numbers in zip(gpt.chunks, layer_numbers(gpt), strict=True):
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                index = parts.index("layers") + 1
                parts[index] = f"number {numbers[int(parts[index])]}"
            seed = int.from_bytes(hashlib.sha256(".".join(parts).encode()).digest()[:7], "big")
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(0.02 * values)


def run_twice(workload: GPTWorkload) -> list[dict[str, Any]]:
    """A run that asks for the schedule anew in each step, and one that asks once, as Megatron-LM does."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    runs = []
    for once in (False, True):
        gpt = build(workload)
        gpt.optimizer.param_groups[0]["lr"] = 3e-3
        func = get_forward_backward_func() if once else None
        losses = [gpt.train_step(func) for _ in range(STEPS)]
        log_probs = gpt.log_probs_pass(func)
        evaluated = gpt.evaluate(func)
        runs.append(
            {
                "layers": list(map(len, layer_numbers(gpt))),
                "losses": losses,
                "evaluated": evaluated,
                "log_probs": [tensor.mean().item() for tensor in log_probs],
                "shapes": [tuple(tensor.shape) for tensor in log_probs],
                "next": gpt.train_step(func),
                "digests": digests(gpt),
            }
        )
    return runs


def two_ranks() -> dict[str, Any]:
    init_distributed()
    results: dict[str, Any] = {}
    with cpu_megatron():
        results["uneven"] = run_twice(UNEVEN)
        for name, workload in COMPARED.items():
            gpt = build(workload)
            set_weights_by_name(gpt)
            results[name] = gpt.evaluate() + gpt.train_step(), gpt.train_step()
    return results


def two_of_other_workloads() -> dict[str, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    init_distributed()
    results: dict[str, Any] = {"lengths": {}}
    with cpu_megatron():
        for vpp in (None, 2):
            gpt = build(GPTWorkload(pp=2, vpp=vpp, options=VARIABLE, **SMALL))
            gpt.lengths = (32, 8, 16, 24)
            gpt.train_step()
            results["lengths"][vpp] = [tensor.shape[1] for tensor in gpt.log_probs_pass()]
        gpt = build(GPTWorkload(tp=2, ep=1, **SMALL))
        results["tensor parallel"] = [gpt.train_step() for _ in range(2)]
        gpt = build(EXPERTS)
        results["experts"] = [gpt.train_step() for _ in range(3)]
        if "overlap_moe_expert_parallel_comm" in inspect.signature(TransformerConfig).parameters:  # 0.14 and later
            gpt = build(COMBINED)
            results["combined"] = [gpt.train_step() for _ in range(3)]
    return results


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2, timeout=240)


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    return run_ranks(two_of_other_workloads, 2, timeout=240)


def test_uneven_layout_is_built(two: list[dict[str, Any]]) -> None:
    assert [rank["uneven"][0]["layers"] for rank in two] == [[3], [1]]


def test_training_learns(two: list[dict[str, Any]]) -> None:
    losses = two[1]["uneven"][0]["losses"]
    assert [len(step) for step in losses] == [UNEVEN.microbatches] * STEPS
    assert sum(losses[-1]) < 0.95 * sum(losses[0])
    assert all(step == [] for step in two[0]["uneven"][0]["losses"])


def test_same_seed_same_bits(two: list[dict[str, Any]]) -> None:
    for rank in two:
        first, second = rank["uneven"]
        assert first == second
    assert two[0]["uneven"][0]["digests"] != two[1]["uneven"][0]["digests"]


def test_log_probs_are_those_of_the_next_step(two: list[dict[str, Any]]) -> None:
    run = two[1]["uneven"][0]
    assert run["shapes"] == [(UNEVEN.micro_batch_size, UNEVEN.seq_length)] * UNEVEN.microbatches
    assert run["log_probs"] == pytest.approx([-loss for loss in run["next"]], rel=1e-5)
    assert len(run["evaluated"]) == UNEVEN.microbatches
    assert two[0]["uneven"][0]["log_probs"] == []


def test_schedules_agree_on_the_numbers(two: list[dict[str, Any]]) -> None:
    first_losses, _ = two[0]["one stage"]
    for schedule in ("1F1B", "interleaved"):
        assert two[1][schedule][0] == pytest.approx(first_losses, rel=1e-5)
    # After a step the second replica has moved the weights of "one stage"; the other two still agree.
    assert two[1]["interleaved"][1] == pytest.approx(two[1]["1F1B"][1], rel=1e-4)


@pytest.mark.slow
def test_microbatches_of_different_lengths(others: list[dict[str, Any]]) -> None:
    assert others[1]["lengths"] == {None: [32, 8, 16, 24], 2: [32, 8, 16, 24]}


@pytest.mark.slow
def test_tensor_parallel_ranks_agree(others: list[dict[str, Any]]) -> None:
    assert others[0]["tensor parallel"] == others[1]["tensor parallel"]
    assert all(len(losses) == SMALL["layers"] for losses in others[0]["tensor parallel"])


@pytest.mark.slow
def test_combined_1f1b_agrees_with_plain_experts(others: list[dict[str, Any]]) -> None:
    for rank in others:
        assert sum(rank["experts"][-1]) < sum(rank["experts"][0])
        for combined, plain in zip(rank.get("combined", ()), rank["experts"], strict="combined" in rank):
            assert combined == pytest.approx(plain, rel=0.01)  # bfloat16


def four_ranks() -> dict[str, Any]:
    init_distributed()
    results: dict[str, Any] = {}
    with cpu_megatron():
        gpt = build(GPTWorkload(tp=2, ep=2, pp=1, **SMALL))
        results["tp ep"] = gpt.train_step()
        gpt = build(GPTWorkload(pp=2, dp=2, overlap_grad_reduce=True, **SMALL))
        gpt.train_step()
        results["reduced"], _ = digests(gpt)
        try:
            gpt = build(GENERAL)
        except ValueError as error:
            results["general"] = str(error)
        else:
            gpt.train_step()
            results["general"] = list(map(len, layer_numbers(gpt)))
    return results


@pytest.mark.slow
def test_layouts_and_groups_of_four_ranks() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = run_ranks(four_ranks, 4, timeout=240)
    general = [rank["general"] for rank in ranks]
    if "pipeline_model_parallel_layout" in inspect.signature(TransformerConfig).parameters:
        assert general == [[2], [1], [2], [1]]
    else:
        assert all("has no pipeline_model_parallel_layout" in message for message in general)
    # dp is the inner dimension: ranks 0, 1 hold the first stage, 2, 3 the second.
    reduced = [rank["reduced"] for rank in ranks]
    assert (reduced[0], reduced[2]) == (reduced[1], reduced[3])
    assert ranks[0]["tp ep"] == ranks[1]["tp ep"] != ranks[2]["tp ep"] == ranks[3]["tp ep"]


@pytest.mark.parametrize(
    ("schedstat", "patient", "times"),
    [
        ("600 1200 7", True, 1.0),
        ("600 6000 7", True, 2.75),
        ("600 6000 7", False, 1.0),
        ("6 60000 7", True, 8.0),
        ("0 0 0", True, 1.0),
        (None, True, 1.0),
    ],
)
def test_patient_layers_wait_longer_the_less_of_a_core_their_rank_got(
    schedstat: str | None, patient: bool, times: float, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path) -> str:
        assert str(path) == "/proc/thread-self/schedstat"
        if schedstat is None:
            raise FileNotFoundError
        return schedstat

    found: list[tuple[float, float]] = []
    monkeypatch.setattr("megaprof.testing.gpt.Path.read_text", read_text)
    monkeypatch.setattr("megaprof.testing.gpt.pace", lambda modules, takes: found.append(takes()))
    build(replace(one_rank.workload, layer_ms=(10.0, 30.0), patient=patient))
    assert found == [pytest.approx((10.0 * times, 30.0 * times))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pp": 3}, r"layers=4: must be a multiple of the 3 chunks"),
        ({"pp": 2, "layout": (3, 1, 0)}, r"layout=\(3, 1, 0\): must have 2 numbers"),
        ({"pp": 2, "layout": (3, 2)}, r"layout=\(3, 2\): must be layer counts with sum layers=4"),
        ({"tp": 0}, r"tp=0: must be positive"),
        ({"heads": 5}, r"hidden=64: must be a multiple of heads=5"),
        ({"tp": 3}, r"tp=3: must divide heads=4"),
        ({"ep": 2, "num_experts": 3}, r"num_experts=3: must be a multiple of ep=2"),
        ({"ep": 2, "dp": 3}, r"dp=3: must be a multiple of ep=2"),
        ({"vpp": 2}, r"vpp=2: needs pp > 1"),
        ({"pp": 2, "vpp": 2, "microbatches": 3}, r"microbatches=3: must be a multiple of pp=2"),
        ({"dtype": "int8"}, r"must be one of float32, bfloat16"),
        ({"layer_ms": (-1.0, 2.0)}, r"layer_ms=\(-1\.0, 2\.0\): must not be negative"),
        ({"layer_ms": (float("nan"), 2.0)}, r"must not be negative"),
    ],
)
def test_impossible_workloads_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTWorkload(**{**SMALL, **fields})


def test_sizes_follow_from_the_workload() -> None:
    workload = GPTWorkload(tp=2, pp=2, ep=2, vpp=2, layout=(1, 2, 0, 1), **SMALL)
    assert workload.world_size == 8
    assert workload.experts == 4
    try:
        assert _layout_options(workload)["pipeline_model_parallel_layout"] == "Et|tt||tL"
    except ValueError as refused:
        assert "0.13+ has" in str(refused)  # noqa: PT017
