"""slime's own ``train`` and ``forward_only``, from a checkout, on real megatron-core: roles and steps in the traces.

Needs ``SLIME_CHECKOUT`` and ``MEGATRON_LM_CHECKOUT`` (slime uses Megatron-LM's trainer). Real: both functions, with
their data iterator, packing, log-probs and loss. Replaced: attention over packed sequences, which only CUDA kernels
compute (each microbatch is one sequence here), the optimizer, and slime's logger.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.integrations.driving import checkout, host_environment, labels, prepare, skip_without_packages, traces

pytestmark = pytest.mark.hosts

WORKLOAD = GPTWorkload(pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, heads=2, seq_length=16)


class Options(SimpleNamespace):
    """slime's arguments: what is not given is off."""

    def __getattr__(self, name: str) -> Any:
        return None


def train(slime: str, megatron_lm: str) -> None:
    init_distributed()
    import sys

    sys.path.insert(0, megatron_lm)
    prepare(slime)
    import torch
    from slime.utils import accelerator
    from slime.utils.accelerator.cuda import CUDAAccelerator

    class OnCpu(CUDAAccelerator):  # type: ignore[misc]
        def current_device(self) -> int:
            return 0

        def device(self, index: int | None = None) -> torch.device:
            return torch.device("cpu")

        def device_name(self, index: int | None = None) -> str:
            return "cpu"

    accelerator._ACCELERATOR = OnCpu()
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    length = WORKLOAD.seq_length
    args = Options(
        data_pad_size_multiplier=length,
        seq_length=length,
        micro_batch_size=1,
        loss_type="sft_loss",
        rollout_temperature=1.0,
        check_for_nan_in_loss_and_grad=True,
        log_probs_chunk_size=-1,
    )
    slime_model.get_args = lambda: args
    slime_model.logging_utils = SimpleNamespace(log=lambda *args, **kwargs: None)

    def unpacked(module: Any, positional: Any, named: dict[str, Any]) -> Any:
        positions = torch.arange(length)[None]
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        return positional, {"input_ids": named["input_ids"], "position_ids": positions, "attention_mask": mask}

    with cpu_megatron():
        gpt = build(WORKLOAD)
        for chunk in gpt.chunks:
            chunk.register_forward_pre_hook(unpacked, with_kwargs=True)
        gpt.chunks[0].role = "actor"
        optimizer = SimpleNamespace(
            zero_grad=gpt.optimizer.zero_grad,
            scale_loss=None,
            param_groups=[],
            step=lambda: (gpt.optimizer.step(), (True, 1.0, 0))[1],
        )
        samples = 2 * WORKLOAD.microbatches
        rollout = {
            "tokens": list(torch.randint(1, WORKLOAD.vocab, (samples, length))),
            "loss_masks": [torch.ones(length - 4)] * samples,
            "total_lengths": [length] * samples,
            "response_lengths": [length - 4] * samples,
            "rollout_mask_sums": [torch.tensor(float(length - 4))] * samples,
            "micro_batch_indices": [[i] for i in range(samples)],
        }
        steps = [WORKLOAD.microbatches] * 2
        for rollout_id in range(2):
            for prefix in ("ref_", "teacher_", ""):
                log_probs = partial(slime_model.forward_only, get_log_probs_and_entropy, args, gpt.chunks)
                log_probs(get_data_iterator(rollout), steps, store_prefix=prefix)
            scheduler = SimpleNamespace(step=lambda increment: None)
            iterator = get_data_iterator(rollout)
            slime_model.train(rollout_id, gpt.chunks, optimizer, scheduler, iterator, steps, [4, 4])


def test_roles_and_steps(tmp_path: Path) -> None:
    slime, megatron_lm = checkout("SLIME_CHECKOUT"), checkout("MEGATRON_LM_CHECKOUT")
    config = ProfileConfig(
        target=("train_overall", "train_actor", "train_log_probs"),
        dir=str(tmp_path),
        select="per-stage",
        steps="train_overall=0;train_actor=3;train_log_probs=2",
        activities=("cpu",),
    )
    env = host_environment(Path(slime), config)
    env["PYTHONPATH"] += os.pathsep + megatron_lm
    skip_without_packages()
    run_ranks(train, WORKLOAD.world_size, slime, megatron_lm, timeout=240, env=env)

    found = traces(tmp_path)
    assert sorted(found) == [
        *(f"train_actor.actor.step000003.pp{pp}" for pp in (0, 1)),  # rollout 1, its second step: slime's train/step 3
        *(f"train_log_probs.{role}.step000002.pp{pp}" for role in ("actor", "ref", "teacher") for pp in (0, 1)),
        *(f"train_overall.step000000.pp{pp}" for pp in (0, 1)),  # all of rollout 0
    ]
    for name, trace in found.items():
        counts = {
            label: labels(trace).count(label) for label in ("train_log_probs", "train_actor", "forward", "backward")
        }
        if name.startswith("train_overall"):
            assert not trace["megaprof"]["truncated"]
            assert counts == {"train_log_probs": 3 * 2, "train_actor": 2, "forward": 8 * 4, "backward": 2 * 4}
        else:
            assert counts["forward"] == 4
            assert counts["backward"] == (4 if name.startswith("train_actor") else 0)
