"""A pipeline of two modules with process groups of their own, by megatron-core's own schedule and communicators."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from megaprof.testing import cpu_megatron, init_distributed

MICROBATCHES = 3
#: How many stages each module has, in the order in which the ranks run them.
STAGES = {"images": 1, "language": 2}
HIDDEN = 8


class Part(torch.nn.Module):
    """One stage of one module: ``(input of the stage before, or nothing) -> its own output``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN)
        self.given: dict[str, Any] | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        """Called by the schedule, with a list of one dictionary of tensors by module."""
        (self.given,) = tensors if isinstance(tensors, list) else (tensors,)

    def forward(self) -> torch.Tensor:
        given = next(iter(self.given.values())) if self.given else torch.ones(4, 2, HIDDEN)
        output: torch.Tensor = self.layer(given[0] if isinstance(given, list) else given)
        return output


def pipeline() -> tuple[Any, Any, Part]:
    """This rank's communicator, process groups and part of the model; a rank for each stage."""
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

    config = ModelParallelConfig(
        pipeline_dtype=torch.float32, variable_seq_lengths=True, batch_p2p_comm=True, deallocate_pipeline_outputs=False
    )
    config.hidden_size = HIDDEN
    grids, offset = {}, 0
    for name, stages in STAGES.items():
        grid = HyperCommGrid([1, 1, 1, stages], ["tp", "cp", "dp", "pp"], rank_offset=offset)
        for axis in grid.dim_names:
            grid.create_pg(axis)
        grids[name], offset = grid, offset + grid.size
    communicator = MultiModulePipelineCommunicator(
        grids, {"images": ["language"], "language": []}, config, {"s": 0, "b": 1, "h": 2}
    )
    (own,) = communicator.rank_module_map
    groups = ProcessGroupCollection(**{axis: grids[own].get_pg(axis) for axis in ("tp", "cp", "dp", "pp")})
    collection = MultiModuleProcessGroupCollection({own: groups}, "language" if own == "language" else None)
    return communicator, collection, Part(config)


def step(communicator: Any, collection: Any, part: Part) -> None:
    """One training step."""
    from megatron.core.pipeline_parallel import schedules

    (own,) = communicator.rank_module_map

    def forward(_: Any, model: Part) -> tuple[Any, Any]:
        output = model()
        if communicator.is_pp_last_stage:
            return output, lambda tensor: (tensor.sum(), {"loss": tensor.sum().detach()})
        return {own: output}, None

    schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=forward,
        data_iterator=None,
        model=[part],
        num_microbatches=MICROBATCHES,
        seq_length=4,
        micro_batch_size=2,
        forward_only=False,
        p2p_communicator=communicator,
        pg_collection=collection,
    )


def train(directory: str | None) -> float:
    """Two steps with windows that write to ``directory``, or without megaprof: the sum of this rank's gradient."""
    from megaprof import ProfileConfig, install_hooks

    init_distributed()
    torch.manual_seed(1)
    with cpu_megatron(), ExitStack() as stack:
        communicator, collection, part = pipeline()
        if directory is not None:
            config = ProfileConfig(("train_actor",), directory, steps="0:2", select="all", activities=("cpu",))
            stack.enter_context(install_hooks([part], config, groups=communicator))
        for _ in range(2):
            step(communicator, collection, part)
        return float(part.layer.weight.grad.sum())
