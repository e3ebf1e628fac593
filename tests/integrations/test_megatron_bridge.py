"""Megatron-Bridge's own ``train_step`` and ``evaluate``, from its released wheel, on real megatron-core.

Real: both functions, how they call the schedule, the dataset of packed sequences that they fine-tune on, and
``forward_step``, which tells the model of them. Replaced: the configuration containers around them, the optimizer, the
tokenizer, and attention over packed sequences, which only CUDA kernels compute. Needs what Bridge needs: megatron-core
0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megaprof import ProfileConfig
from megaprof.testing import GPTWorkload, cpu_megatron, init_distributed, run_ranks
from tests.built import VARIABLE, build_packed
from tests.integrations.driving import host_environment, labels, prepare, skip_without_packages, traces

pytestmark = pytest.mark.hosts

#: Of the sequences that each microbatch has.
LENGTHS = ((5, 9, 6), (30,), (3, 4), (21, 2))
WORKLOAD = GPTWorkload(
    pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=32, heads=2, seq_length=32, options=VARIABLE
)
FIRST = 7
#: Ends a sequence, and fills up.
END = 0


class Options(SimpleNamespace):
    """A configuration container: what is not given is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Timers:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)

    def log(self, names: list[str]) -> None: ...


class Untimed(nullcontext[None]):
    def __call__(self, **kwargs: Any) -> Any:
        return self


def train(host: str, data: str, multiple: int) -> None:
    init_distributed()
    with cpu_megatron():
        gpt = build_packed(
            WORKLOAD, LENGTHS
        )  # before something stands in for Transformer Engine: megatron-core would use it, too
        prepare(host, "transformer_engine")
        drive(gpt, data, multiple)


def packed(path: Path, multiple: int) -> str:
    """Write what Bridge's offline packing does of `LENGTHS`: each sequence padded to a ``multiple`` of tokens, and one
    more, of which no next token is asked."""
    rows = []
    for own in LENGTHS:
        tokens, begins = [], []
        for length in own:
            begins.append(len(tokens))
            tokens += [1] * length + [END] * (1 - length % -multiple)
        rows.append({"input_ids": tokens, "seq_start_id": begins, "loss_mask": [1] * len(tokens)})
    with path.open("wb") as file:
        np.save(file, np.array(rows, dtype=object))
    return str(path)


def batches(data: str, multiple: int) -> Iterator[Any]:
    """Global batches of Bridge's own dataset."""
    from megatron.bridge.data.packing.gpt_sft import GPTSFTPackedDataset

    options = {"max_seq_length": WORKLOAD.seq_length, "pad_to_max_length": True, "prompt_template": "{text} {answer}"}
    dataset = GPTSFTPackedDataset(data, SimpleNamespace(eos_id=END), pad_seq_to_mult=multiple, **options)
    while True:
        yield dataset.collate_fn([dataset[number] for number in range(len(LENGTHS))])


def drive(gpt: Any, data: str, multiple: int) -> None:
    from megatron.bridge.training import eval as bridge_eval
    from megatron.bridge.training import train as bridge
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

    count = WORKLOAD.microbatches
    init_num_microbatches_calculator(0, None, count, 1, 1)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    state = Options(
        cfg=Options(
            train=Options(micro_batch_size=1, global_batch_size=count, empty_unused_memory_level=0),
            validation=Options(eval_iters=1, eval_micro_batch_size=1, eval_global_batch_size=count),
            model=Options(seq_length=WORKLOAD.seq_length),
            optimizer=Options(),
            ddp=Options(),
            data_parallel_size=1,
            dist=Options(use_decentralized_pg=True),
            dataset=Options(dataloader_type="batch", skip_getting_attention_mask_from_dataset=True),
            rerun_state_machine=Options(),
        ),
        timers=Timers(),
        straggler_timer=Untimed(),
        train_state=SimpleNamespace(step=FIRST, consumed_valid_samples=0),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    exchange = P2PCommunicator(groups.pp, gpt.config)
    optimizer = SimpleNamespace(
        zero_grad=gpt.optimizer.zero_grad, step=lambda: (gpt.optimizer.step(), (True, 1.0, 0))[1], param_groups=[]
    )
    scheduler = SimpleNamespace(step=lambda increment: None)
    schedule = get_forward_backward_func()
    own, step = batches(data, multiple), prepare_forward_step_func(forward_step, state)
    for _ in range(2):
        bridge.train_step(step, own, gpt.chunks, optimizer, scheduler, state, groups, schedule, exchange)
        state.train_state.step += 1
    bridge_eval.evaluate(
        state,
        forward_step,
        own,
        gpt.chunks,
        None,
        state.cfg,
        p2p_communicator=exchange,
        pg_collection=groups,
    )


@pytest.mark.parametrize("multiple", [1, 4])
def test_steps_and_evaluation(multiple: int, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    if tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 19):
        pytest.skip(f"Megatron-Bridge 0.6.2 needs megatron-core 0.19, and {version('megatron-core')} is installed here")
    config = ProfileConfig(
        target=("train_actor", "train_log_probs", "evaluate"),
        dir=str(tmp_path),
        select="per-stage",
        steps=f"train_actor={FIRST + 1};train_log_probs=0;evaluate=0",
        activities=("cpu",),
    )
    host = wheel("megatron-bridge")
    env = host_environment(host, config)
    skip_without_packages()
    data = packed(tmp_path / "packed.npy", multiple)
    run_ranks(train, WORKLOAD.world_size, str(host), data, multiple, timeout=240, env=env)

    found = traces(tmp_path)
    assert sorted(found) == [
        f"{kind}.pp{pp}" for kind in ("evaluate.step000000", f"train_actor.step{FIRST + 1:06d}") for pp in (0, 1)
    ]
    for name, trace in found.items():
        # Without an alignment of its own the padding of a microbatch is one more sequence of its boundaries.
        for lengths, own in zip(trace["megaprof"]["lengths"], LENGTHS, strict=True):
            assert tuple(lengths) == (own if multiple > 1 else (*own, WORKLOAD.seq_length - sum(own)))
        assert trace["megaprof"]["tokens"] == [WORKLOAD.seq_length] * len(LENGTHS)
        assert labels(trace).count("forward") == WORKLOAD.microbatches
        assert labels(trace).count("backward") == (WORKLOAD.microbatches if name.startswith("train_actor") else 0)
