"""Megatron-LM's own ``prepare_data_for_update``, from a checkout, on its own megatron-core: log-probs have their roles.

Needs ``MEGATRON_LM_CHECKOUT``. Real: that function with its loader, the two passes over it with other weights between
them, and the forward step and log-probs in them. Replaced: what rollouts become trajectories and advantages by (a
tokenizer), the arguments, and attention over packed sequences, which only CUDA kernels compute (each row is one).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.integrations import driving
from tests.integrations.driving import host_environment, labels, prepare, skip_without_packages, traces

pytestmark = pytest.mark.hosts

WORKLOAD = GPTWorkload(pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, heads=2, seq_length=16)
ROWS = 4
NEEDED = ("yaml", "pydantic", "tensorboard")
EDGES = ("fastapi", "openai", "uvicorn")


class Options(SimpleNamespace):
    """Megatron-LM's arguments: what is not given is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def rounds(checkout: str) -> list[Any]:
    """Two rounds of log-probs; returns what each gives the trainer: the policy's own and the reference's."""
    import sys

    init_distributed()
    sys.path.insert(0, checkout)
    prepare(None, *EDGES)
    import torch
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.rl import rl_utils
    from megatron.training import global_vars

    length = WORKLOAD.seq_length
    global_vars._GLOBAL_ARGS = Options(
        seq_length=length,
        micro_batch_size=1,
        global_batch_size=ROWS,
        grpo_prompts_per_step=2,
        grpo_group_size=2,
        cuda_graph_impl="none",
        decrease_batch_size_if_needed=False,
        rl_inference_logprobs_is_correction=False,
    )
    global_vars._GLOBAL_TIMERS = lambda *args, **kwargs: SimpleNamespace(start=lambda: None, stop=lambda: None)
    init_num_microbatches_calculator(0, None, ROWS, 1, 1)
    statistics = SimpleNamespace(advantages=[0.0] * ROWS, num_turns=[1] * ROWS)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, WORKLOAD.vocab, (ROWS, length), generator=generator)
    rl_utils.compute_group_stats = lambda *args: statistics
    rl_utils.prepare_trajectories = lambda *args: (rows, torch.ones(ROWS, length).bool(), None)
    groups = [[SimpleNamespace(env_id="env", trajectory=["turn"]) for _ in range(2)] for _ in range(2)]

    def unpacked(module: Any, positional: Any, named: dict[str, Any]) -> Any:
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        return positional[:2], {"attention_mask": mask, "runtime_gather_output": True}

    found = []
    with cpu_megatron():
        gpt = build(WORKLOAD)
        for chunk in gpt.chunks:
            chunk.register_forward_pre_hook(unpacked, with_kwargs=True)
        state = gpt.chunks[0].state_dict()
        reference = {name: value if value is None else value * 0.5 for name, value in state.items()}
        given = (gpt.chunks, reference, groups, SimpleNamespace(eod=0, pad=0), False, False)
        ledger: tuple[Any, ...] = ({},) if "request_ledger" in rl_utils.prepare_data_for_update.__annotations__ else ()
        for _ in range(2):
            data = rl_utils.prepare_data_for_update(*given, *ledger)
            iterator = data[0] if isinstance(data, tuple) else data
            batch = next(iterator)
            found.append((batch[2].tolist(), batch[5].tolist()))
    return found


def test_the_policys_log_probs_and_the_references(tmp_path: Path) -> None:
    checkout = driving.checkout("MEGATRON_LM_CHECKOUT")
    for name in NEEDED:
        pytest.importorskip(
            name, reason=f"megatron.rl imports {name}, not installed here: pip install 'megaprof[hosts]'"
        )
    config = ProfileConfig(
        target=("train_actor", "train_log_probs"),
        dir=str(tmp_path),
        select="per-stage",
        steps=f"{ROWS}",  # counted per role: the second round's first pass
        activities=("cpu",),
    )
    env = host_environment(Path(checkout), config)
    skip_without_packages()
    first, second = run_ranks(rounds, WORKLOAD.world_size, checkout, timeout=240, env=env)
    assert first == second  # broadcast from the last stage
    own, reference = first[0]
    assert own != reference

    found = traces(tmp_path)
    assert sorted(found) == [
        f"train_log_probs.{role}.step{ROWS:06d}.pp{pp}" for role in ("actor", "ref") for pp in (0, 1)
    ]
    for trace in found.values():
        assert labels(trace).count("forward") == 1  # Megatron-LM calls the schedule for each row
        assert labels(trace).count("backward") == 0
