"""What Megatron knows of this rank: its coordinates and the layout of the world, from its process groups, and what its
model chunks hold: layers and their kinds, embedding, MTP layers, loss.

Nothing here communicates: process groups know their members.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import permutations
from types import SimpleNamespace
from typing import Any

from megaprof.parallel.topology import AXES, DEFAULT_ORDER, ParallelSizes, RankCoords, WorldLayout


class NoGrid(ValueError):
    """The process groups of this rank do not form a grid over all ranks of the job."""


def coordinates_and_layout(groups: Any = None, chunks: int | None = None) -> tuple[RankCoords, WorldLayout | None]:
    """Returns this rank's `coordinates` and the world's layout, from this rank's process groups.

    Megatron does not keep the order it was given, but the distance between a group's members is the axis's stride,
    and the strides decide every coordinate. The layout is None if no rank order explains Megatron's global groups: the
    world is not one grid, for instance because of a separate encoder pipeline (0.12), a rank offset, or weights that
    are spread over data-parallel ranks beside context parallelism (``gtp_remat``, 0.19).

    Raises NoGrid for ``groups`` that are not one grid over all ranks. Groups of several modules do not say how these
    follow each other. Their ``MultiModulePipelineCommunicator`` does, so it can be passed as ``groups`` (`_chain`).
    """
    import torch.distributed as dist

    if hasattr(groups, "module_to_grid_map"):
        return _chain(groups)
    if hasattr(groups, "module_pgs"):
        modules = ", ".join(groups.module_pgs)
        raise NoGrid(
            f"the pipeline consists of several modules with process groups of their own (this rank runs {modules}), "
            "which do not say how the modules follow each other: give install_hooks the pipeline's communicator, "
            "groups=p2p_communicator"
        )
    coords, by_axis = coordinates(groups, chunks)
    sizes, world = coords.sizes, dist.get_world_size()
    if sizes.world != world and groups is not None:
        raise NoGrid(
            f"the model's process groups make {sizes.world} ranks (tp={sizes.tp} cp={sizes.cp} dp={sizes.dp} "
            f"pp={sizes.pp}), and the job has {world}"
        )
    if dist.get_world_size(by_axis["dp"]) != sizes.dp:  # it is a part of what `parallel_state` calls data-parallel
        del by_axis["dp"]
    return coords, _layout(coords, by_axis) if sizes.world == world else None


def coordinates(groups: Any = None, chunks: int | None = None) -> tuple[RankCoords, dict[str, Any]]:
    """Returns this rank's coordinates, and the process group along each axis that they come from: ``groups``, a model's
    own (megatron-core's ``ProcessGroupCollection``, 0.14+), or Megatron's global ones (`parallel_state`).

    ``chunks``: the number of model chunks on this rank, if the caller knows it (`len(model)`); otherwise it is
    Megatron's virtual pipeline size, or 1. Raises NoGrid if groups are missing, and ValueError if there are none.
    """
    import torch.distributed as dist

    if groups is None:
        if not has_groups():
            raise ValueError(
                "megatron-core's parallel_state is not initialised, and the model has no process groups of its own: "
                "call parallel_state.initialize_model_parallel(...) before install_hooks(model), and give it the model"
            )
        from megatron.core import parallel_state as ps

        chunks, pp = (
            chunks or ps.get_virtual_pipeline_model_parallel_world_size(),
            ps.get_pipeline_model_parallel_group(),
        )
        groups = SimpleNamespace(
            tp=ps.get_tensor_model_parallel_group(),
            # Several encoder pipelines may meet in this rank, which has the same place in each (0.12).
            pp=pp[0] if isinstance(pp, list) else pp,
            cp=ps.get_context_parallel_group(),
            ep=ps.get_expert_model_parallel_group(),
            dp=ps.get_data_parallel_group(with_context_parallel=False),
            expt_tp=ps.get_expert_tensor_parallel_group(),
        )
    by_axis = {axis: group for axis in AXES if (group := getattr(groups, axis, None)) is not None}
    missing_axes = {"tp", "pp", "cp", "dp"} - by_axis.keys()
    if missing_axes:
        raise NoGrid(f"the model's process groups lack {', '.join(sorted(missing_axes))}, so ranks have no coordinates")
    expert_tp = getattr(groups, "expt_tp", None)
    count = {axis: dist.get_world_size(group) for axis, group in by_axis.items()}
    places = dict.fromkeys(AXES, 0) | {axis: dist.get_rank(group) for axis, group in by_axis.items()}
    remat = getattr(groups, "gtp_remat", None)
    if remat is not None:
        # Its ranks have data of their own, and are neighbours in what `parallel_state` calls the data-parallel group.
        places["dp"] = places["dp"] * dist.get_world_size(remat) + dist.get_rank(remat)
        count["dp"] *= dist.get_world_size(remat)
    sizes = ParallelSizes(vpp=chunks or 1, etp=0 if expert_tp is None else dist.get_world_size(expert_tp), **count)
    return RankCoords(rank=dist.get_rank(), sizes=sizes, **places), by_axis


def _chain(communicator: Any) -> tuple[RankCoords, WorldLayout | None]:
    """Returns this rank's place and the world's layout if several modules, one after another, are the pipeline.

    Each module has a ``HyperCommGrid`` of its own, whose ranks follow those of the module before it. If all are equally
    wide, they are one grid, in which ``pp`` counts through the stages of all modules, as the schedule does
    (``MultiModulePipelineCommunicator.total_stages``, megatron-core 0.19). The layout is None if ``pp`` is not the
    slowest axis of a grid. Raises NoGrid, with the reason, if the modules are not arranged like this.
    """
    import torch.distributed as dist

    grids: Mapping[str, Any] = communicator.module_to_grid_map
    names = sorted(grids, key=lambda name: grids[name].rank_offset)
    successors = {name: list(communicator.topology.get(name, ())) for name in names}
    shapes = {name: dict(zip(grids[name].dim_names, grids[name].shape, strict=True)) for name in names}
    next_rank, rank, world = 0, dist.get_rank(), dist.get_world_size()
    for name, successor in zip(names, [*names[1:], None], strict=True):
        if successors[name] != ([] if successor is None else [successor]):
            raise NoGrid(f"the modules {', '.join(names)} do not run one behind the other, so they are no one pipeline")
        if grids[name].rank_offset != next_rank:
            raise NoGrid(f"the module {name} does not begin behind the ranks of the one before it")
        next_rank += grids[name].size
    widths = {
        name: {axis: size for axis, size in shape.items() if axis != "pp" and size > 1}
        for name, shape in shapes.items()
    }
    if any(width != widths[names[0]] for width in widths.values()):
        description = "; ".join(
            f"{name}: {' '.join(f'{axis}={size}' for axis, size in width.items()) or 'one rank a stage'}"
            for name, width in widths.items()
        )
        raise NoGrid(f"the modules' grids are not equally wide ({description}), so ranks have no coordinates in common")
    width = widths[names[0]]
    if not width.keys() <= {"tp", "cp", "dp"} or next_rank != world:
        raise NoGrid(
            f"the modules' grids have {next_rank} ranks along {', '.join([*width, 'pp'])}, and the job has {world}; "
            "only tp, cp, dp and pp of all ranks are known"
        )
    module = next(name for name in names if rank < grids[name].rank_offset + grids[name].size)
    coordinates, remainder = dict.fromkeys(AXES, 0), rank - grids[module].rank_offset
    for axis, size in shapes[module].items():
        remainder, position = divmod(remainder, size)
        if size > 1:
            coordinates[axis] = position
    stages = {name: shape.get("pp", 1) for name, shape in shapes.items()}
    coordinates["pp"] += sum(stages[name] for name in names[: names.index(module)])
    coords = RankCoords(rank=rank, sizes=ParallelSizes(pp=sum(stages.values()), **width), **coordinates)
    orders = [[axis for axis, size in shape.items() if size > 1] for shape in shapes.values()]
    pp_is_slowest = all("pp" not in order or order[-1] == "pp" for order in orders)
    return coords, WorldLayout(coords.sizes, "-".join([*width, "pp"])) if pp_is_slowest else None


def _layout(coords: RankCoords, groups: Mapping[str, Any]) -> WorldLayout | None:
    """Returns the layout in which these groups are the lines through a rank; None if no order explains them."""
    import torch.distributed as dist

    members = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
    for order in permutations(DEFAULT_ORDER.split("-")):
        try:
            layout = WorldLayout(coords.sizes, "-".join(order))
        except ValueError:
            continue
        first = {axis: coords.rank - getattr(coords, axis) * layout.strides[axis] for axis in members}
        if all(
            ranks == [first[axis] + position * layout.strides[axis] for position in range(getattr(coords.sizes, axis))]
            for axis, ranks in members.items()
        ):
            return layout
    return None


def has_groups() -> bool:
    """Returns whether Megatron's global process groups exist. Imports nothing of it."""
    if (parallel_state := sys.modules.get("megatron.core.parallel_state")) is None:
        return False
    import torch.distributed as dist

    # The groups outlive destroy_process_group() when destroy_model_parallel() was not called: ask for both.
    return dist.is_available() and dist.is_initialized() and bool(parallel_state.model_parallel_is_initialized())


def describe_chunk(chunk: Any) -> dict[str, Any]:
    """Returns the contents of a model chunk, with None for each item that the model does not say.

    GPTModel, HybridModel and similar models share ``pre_process`` (owns the embedding), ``post_process`` (owns the
    output layer and the loss), ``decoder.layers`` and ``mtp``; T5 has ``encoder.layers``, too, and BERT has them alone.
    """
    language = language_model(chunk)
    encoder = getattr(getattr(language, "encoder", None), "layers", None)
    decoder = getattr(getattr(language, "decoder", None), "layers", None)
    layers = None if encoder is decoder is None else [*(encoder or ()), *(decoder or ())]
    kinds = [*("encoder" for _ in (encoder or ())), *map(_kind, decoder or ())]
    mtp = getattr(getattr(language, "mtp", None), "layers", None)
    return {
        "embedding": getattr(language, "pre_process", None),
        "layers": None if layers is None else len(layers),
        "layer_numbers": None if layers is None else [getattr(layer, "layer_number", None) for layer in layers],
        "kinds": None if layers is None else kinds,
        "mtp": 0 if mtp is None else len(mtp),
        "loss": getattr(language, "post_process", None),
    }


def innermost(model: Any) -> Any:
    """Returns the model inside its wrappers (DistributedDataParallel, Float16Module, ...), which all call it
    ``module``."""
    while (inner := getattr(model, "module", None)) is not None and callable(inner):
        model = inner
    return model


def language_model(chunk: Any) -> Any:
    """Returns the module of a model chunk that has the decoder. Multimodal models hold it one level down, and LLaVA
    exposes the decoder itself."""
    model = innermost(chunk)
    inner = getattr(model, "language_model", None)
    return model if inner is None else inner


def _kind(layer: Any) -> str:
    """Returns ``moe`` or ``dense`` by the layer's MLP; ``attention`` or ``mlp`` for the half layers of a hybrid stack;
    else the layer's class name (Mamba and others have no MLP)."""
    mlp, attention = getattr(layer, "mlp", None), getattr(layer, "self_attention", None)
    if mlp is None:
        return type(layer).__name__
    if hasattr(mlp, "router"):
        return "moe"
    # The placeholder for a part that a layer does not have.
    without_mlp, without_attention = (type(part).__name__ == "IdentityOp" for part in (mlp, attention))
    if without_mlp == without_attention:
        return "dense"
    return "attention" if without_mlp else "mlp"
