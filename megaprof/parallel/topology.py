"""Where a rank stands: its TP, PP, CP, EP and DP coordinates, read from Megatron or computed from the sizes alone.

Megatron lays its ranks out in two grids over the same world (`RankGenerator` and `initialize_model_parallel` in
`megatron/core/parallel_state.py`, the same from megatron-core 0.12 to 0.19). Both count through the axes named in
`order`, the first one fastest:

- the decoder grid has `tp`, `cp`, `dp` and `pp`, with `dp = world / (tp * cp * pp)`;
- the expert grid has `etp` in the place of `tp`, no `cp`, `ep`, and `dp = world / (etp * ep * pp)`.

Hence every coordinate is one division and one remainder: `rank // stride % size`. `tp`, `cp`, `dp` and `pp` are
positions in the decoder grid and name a rank uniquely; `ep` is the position in the expert grid.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

AXES = ("tp", "pp", "cp", "ep", "dp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class ParallelSizes:
    """How many ways a run is parallel along each axis. All are counts >= 1; ValueError otherwise.

    `dp` is Megatron's data-parallel size without context parallelism, `vpp` the model chunks per rank (1 = no virtual
    pipeline), `etp` the expert tensor-parallel size, which is `tp` when left out. Prefer `of`, which also checks that
    the sizes fit a world.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    vpp: int = 1
    etp: int = 0

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for option, value in vars(self).items():
            _whole(option, value, least=1)

    def __str__(self) -> str:
        parallel = [axis for axis in ("tp", "pp", "cp", "ep", "dp", "vpp") if getattr(self, axis) > 1]
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in parallel) or "no parallelism"

    @property
    def world(self) -> int:
        """The number of ranks that these sizes describe."""
        return self.tp * self.cp * self.dp * self.pp

    @classmethod
    def of(
        cls, world: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, vpp: int = 1, etp: int | None = None
    ) -> ParallelSizes:
        """The sizes of a world of `world` ranks, `dp` being what is left. ValueError where Megatron would refuse."""
        etp = tp if etp is None else etp
        given = {"world": world, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "vpp": vpp, "etp": etp}
        for option, value in given.items():
            _whole(option, value, least=1)
        if vpp > 1 and pp == 1:
            raise ValueError(f"vpp={vpp} needs pp of at least 2 (the interleaved schedule has no other use), got pp=1")
        dp = _quotient(world, tp=tp, cp=cp, pp=pp)
        _quotient(world, etp=etp, ep=ep, pp=pp)
        return cls(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, vpp=vpp, etp=etp)


@dataclass(frozen=True)
class Place:
    """One global rank and its coordinates along each axis, all counted from 0: what a file's name says of a rank."""

    rank: int
    """Global rank."""
    pp: int
    """Pipeline stage."""
    tp: int
    """Position in the tensor-parallel group."""
    cp: int
    """Position in the context-parallel group."""
    ep: int
    """Position in the expert-parallel group."""
    dp: int
    """Position in the data-parallel group, without context parallelism."""


@dataclass(frozen=True)
class RankCoords(Place):
    """A rank's place with the sizes that its coordinates are counted in."""

    sizes: ParallelSizes
    """How many ways the run is parallel along each axis."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the coordinates by name and `sizes` as a nested dict."""
        return {**vars(self), "sizes": dict(vars(self.sizes))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankCoords:
        """The reverse of `as_dict`. Unknown keys are ignored; what is missing or impossible is a ValueError."""
        sizes = ParallelSizes(**_numbers(data, "sizes", [*ParallelSizes.__match_args__], least=1))
        coords = _numbers({"coords": data}, "coords", ["rank", *AXES], least=0)
        for axis in AXES:
            if coords[axis] >= getattr(sizes, axis):
                raise ValueError(f"coords: {axis}={coords[axis]} is outside its size {getattr(sizes, axis)}")
        return cls(**coords, sizes=sizes)


@dataclass(frozen=True)
class WorldLayout:
    """Every rank's coordinates, computed from the sizes and Megatron's rank order: O(1) per rank.

    `order` names the axes from the fastest to the slowest, as `initialize_model_parallel(order=...)` takes it; a name
    may be missing where its size is 1. Megatron-LM uses the default, or `tp-cp-ep-pp-dp` with
    `--use-tp-pp-dp-mapping`. ValueError for an order, or for sizes, that Megatron refuses.
    """

    sizes: ParallelSizes
    order: str = DEFAULT_ORDER
    strides: dict[str, int] = field(init=False, repr=False, compare=False)
    """Distance in global ranks between neighbours along each axis (that of `ep` in the expert grid)."""

    def __post_init__(self) -> None:
        sizes = self.sizes
        expert_dp = _quotient(sizes.world, etp=sizes.etp, ep=sizes.ep, pp=sizes.pp)
        decoder = {"tp": sizes.tp, "cp": sizes.cp, "ep": 1, "dp": sizes.dp, "pp": sizes.pp}
        expert = {"tp": sizes.etp, "cp": 1, "ep": sizes.ep, "dp": expert_dp, "pp": sizes.pp}
        order = _parse_order(self.order, {axis: max(decoder[axis], expert[axis]) for axis in AXES})
        strides, expert_strides = _strides(order, decoder), _strides(order, expert)
        # Megatron asserts both: with pp not last, equal data-parallel sizes; and always, the same pipelines.
        if sizes.pp > 1 and order[-1] != "pp" and expert_dp != sizes.dp:
            raise ValueError(
                f"order {self.order!r}: with pp not last, the expert grid's dp={expert_dp} must equal dp={sizes.dp}; "
                f"put pp last, or choose etp x ep = tp x cp = {sizes.tp * sizes.cp}"
            )
        if sizes.pp > 1 and strides["pp"] != expert_strides["pp"]:
            raise ValueError(
                f"order {self.order!r}: the pipelines of the decoder and of the experts differ "
                f"(stages {strides['pp']} and {expert_strides['pp']} ranks apart); put pp last"
            )
        strides["ep"] = expert_strides["ep"]
        object.__setattr__(self, "strides", strides)

    def coords(self, rank: int) -> RankCoords:
        """The coordinates of one global rank. ValueError outside the world."""
        if not 0 <= rank < self.sizes.world:
            raise ValueError(f"rank {rank} is outside the world of {self.sizes.world} ranks")
        sizes, strides = self.sizes, self.strides
        return RankCoords(
            rank=rank,
            pp=rank // strides["pp"] % sizes.pp,
            tp=rank // strides["tp"] % sizes.tp,
            cp=rank // strides["cp"] % sizes.cp,
            ep=rank // strides["ep"] % sizes.ep,
            dp=rank // strides["dp"] % sizes.dp,
            sizes=sizes,
        )

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank at a place of the decoder grid. ValueError for a coordinate outside its axis."""
        rank = 0
        for axis, value in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            size = getattr(self.sizes, axis)
            if not 0 <= value < size:
                raise ValueError(f"{axis}={value} is outside its size {size}")
            rank += value * self.strides[axis]
        return rank

    def __len__(self) -> int:
        return self.sizes.world

    def __iter__(self) -> Iterator[RankCoords]:
        return map(self.coords, range(self.sizes.world))


class NoGrid(ValueError):
    """The process groups of this rank are no grid over all ranks of the job."""


def coords_from_groups(groups: Any, chunks: int | None = None) -> RankCoords:
    """This rank's coordinates as a model's own process groups have them: megatron-core's ``ProcessGroupCollection``
    (0.14+), for a job that may have no `parallel_state`.

    `chunks` as in `coords_from_parallel_state`; unknown, it is 1. Raises NoGrid, naming what is missing, for groups
    that are not one grid over all ranks. Groups of several modules do not say how these follow each other: their
    ``MultiModulePipelineCommunicator`` does, and is taken in the place of groups (`_chain`). No communication.
    """
    import torch.distributed as dist

    if hasattr(groups, "module_to_grid_map"):
        return _chain(groups)[0]
    if hasattr(groups, "module_pgs"):
        modules = ", ".join(groups.module_pgs)
        raise NoGrid(
            f"the pipeline consists of several modules with process groups of their own (this rank runs {modules}), "
            "which do not say how the modules follow each other: give install_hooks the pipeline's communicator, "
            "groups=p2p_communicator"
        )
    found = {axis: getattr(groups, axis, None) for axis in ("tp", "pp", "cp", "ep", "dp")}
    found = {axis: group for axis, group in found.items() if group is not None}
    lacking = {"tp", "pp", "cp", "dp"} - found.keys()
    if lacking:
        raise NoGrid(f"the model's process groups lack {', '.join(sorted(lacking))}, so ranks have no coordinates")
    expert_tp = getattr(groups, "expt_tp", None)
    count = {axis: dist.get_world_size(group) for axis, group in found.items()}
    place = dict.fromkeys(AXES, 0) | {axis: dist.get_rank(group) for axis, group in found.items()}
    remat = getattr(groups, "gtp_remat", None)
    if remat is not None:
        # Its ranks have data of their own, and are neighbours in what `parallel_state` calls the data-parallel group.
        place["dp"] = place["dp"] * dist.get_world_size(remat) + dist.get_rank(remat)
        count["dp"] *= dist.get_world_size(remat)
    sizes = ParallelSizes(vpp=chunks or 1, etp=0 if expert_tp is None else dist.get_world_size(expert_tp), **count)
    if sizes.world != dist.get_world_size():
        raise NoGrid(
            f"the model's process groups make {sizes.world} ranks (tp={sizes.tp} cp={sizes.cp} dp={sizes.dp} "
            f"pp={sizes.pp}), and the job has {dist.get_world_size()}"
        )
    return RankCoords(rank=dist.get_rank(), sizes=sizes, **place)


def layout_from_groups(groups: Any, chunks: int | None = None) -> WorldLayout | None:
    """The whole world's layout, from a model's own process groups; see `layout_from_parallel_state`."""
    import torch.distributed as dist

    if hasattr(groups, "module_to_grid_map"):
        return _chain(groups)[1]
    own = coords_from_groups(groups, chunks)
    lines = {axis: getattr(groups, axis, None) for axis in AXES}
    whole = lines["dp"] is not None and dist.get_world_size(lines["dp"]) == own.sizes.dp
    return _layout(own, lines if whole else lines | {"dp": None})


def _chain(communicator: Any) -> tuple[RankCoords, WorldLayout | None]:
    """This rank's place in a pipeline of several modules that run one behind the other, and the layout of the world.

    Each module lies on a ``HyperCommGrid`` of its own, behind the ranks of the one before it. Where all are equally
    wide, they are one grid, in which ``pp`` counts through the stages of all modules, as the schedule does
    (``MultiModulePipelineCommunicator.total_stages``, megatron-core 0.19). The layout is None where ``pp`` is not the
    slowest axis of a grid. Raises NoGrid, with the reason, for modules that do not follow each other so.
    """
    import torch.distributed as dist

    grids: Mapping[str, Any] = communicator.module_to_grid_map
    names = sorted(grids, key=lambda name: grids[name].rank_offset)
    follow = {name: list(communicator.topology.get(name, ())) for name in names}
    shapes = {name: dict(zip(grids[name].dim_names, grids[name].shape, strict=True)) for name in names}
    behind, rank, world = 0, dist.get_rank(), dist.get_world_size()
    for name, after in zip(names, [*names[1:], None], strict=True):
        if follow[name] != ([] if after is None else [after]):
            raise NoGrid(f"the modules {', '.join(names)} do not run one behind the other, so they are no one pipeline")
        if grids[name].rank_offset != behind:
            raise NoGrid(f"the module {name} does not begin behind the ranks of the one before it")
        behind += grids[name].size
    widths = {
        name: {axis: size for axis, size in shape.items() if axis != "pp" and size > 1}
        for name, shape in shapes.items()
    }
    if any(width != widths[names[0]] for width in widths.values()):
        shown = "; ".join(
            f"{name}: {' '.join(f'{axis}={size}' for axis, size in width.items()) or 'one rank a stage'}"
            for name, width in widths.items()
        )
        raise NoGrid(f"the modules' grids are not equally wide ({shown}), so ranks have no coordinates in common")
    width = widths[names[0]]
    if not width.keys() <= {"tp", "cp", "dp"} or behind != world:
        raise NoGrid(
            f"the modules' grids have {behind} ranks along {', '.join([*width, 'pp'])}, and the job has {world}; only "
            "tp, cp, dp and pp of all ranks are known"
        )
    own = next(name for name in names if rank < grids[name].rank_offset + grids[name].size)
    place, left = dict.fromkeys(AXES, 0), rank - grids[own].rank_offset
    for axis, size in shapes[own].items():
        left, position = divmod(left, size)
        if size > 1:
            place[axis] = position
    stages = {name: shape.get("pp", 1) for name, shape in shapes.items()}
    place["pp"] += sum(stages[name] for name in names[: names.index(own)])
    coords = RankCoords(rank=rank, sizes=ParallelSizes(pp=sum(stages.values()), **width), **place)
    orders = [[axis for axis, size in shape.items() if size > 1] for shape in shapes.values()]
    slowest = all("pp" not in order or order[-1] == "pp" for order in orders)
    return coords, WorldLayout(coords.sizes, "-".join([*width, "pp"])) if slowest else None


def coords_from_parallel_state(chunks: int | None = None) -> RankCoords:
    """This rank's coordinates as megatron-core's `parallel_state` has them, taken as they are.

    `chunks` is the number of model chunks on this rank, where the caller knows it (`len(model)`); otherwise
    Megatron's virtual pipeline size. ValueError if `initialize_model_parallel` has not run. No communication.
    """
    from megatron.core import parallel_state as ps

    if not _parallel_state_ready():
        raise ValueError(
            "megatron-core's parallel_state is not initialised, and the model has no process groups of its own: call "
            "parallel_state.initialize_model_parallel(...) before install_hooks(model), and give it the model"
        )
    import torch.distributed as dist

    tp = ps.get_tensor_model_parallel_world_size()
    sizes = ParallelSizes(
        tp=tp,
        pp=ps.get_pipeline_model_parallel_world_size(),
        cp=ps.get_context_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
        dp=ps.get_data_parallel_world_size(with_context_parallel=False),
        vpp=chunks or ps.get_virtual_pipeline_model_parallel_world_size() or 1,
        etp=ps.get_expert_tensor_parallel_world_size() or tp,
    )
    return RankCoords(
        rank=dist.get_rank(),
        pp=ps.get_pipeline_model_parallel_rank(),
        tp=ps.get_tensor_model_parallel_rank(),
        cp=ps.get_context_parallel_rank(),
        ep=ps.get_expert_model_parallel_rank(),
        dp=ps.get_data_parallel_rank(with_context_parallel=False),
        sizes=sizes,
    )


def layout_from_parallel_state(chunks: int | None = None) -> WorldLayout | None:
    """The whole world's layout, from this rank's process groups; None where no order explains them.

    Megatron does not keep the order it was given, but the distance between a group's members is the axis's stride,
    and the strides decide every coordinate. None means a world that is not one grid, for instance a separate encoder
    pipeline (0.12), a rank offset, or weights that are spread over data-parallel ranks beside context parallelism
    (``gtp_remat``, 0.19). ValueError as in `coords_from_parallel_state`. No communication.
    """
    own = coords_from_parallel_state(chunks)
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    if own.sizes.world != dist.get_world_size():
        return None
    groups = {
        "tp": ps.get_tensor_model_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "ep": ps.get_expert_model_parallel_group(),
        "dp": ps.get_data_parallel_group(with_context_parallel=False),
    }
    if any(isinstance(group, list) for group in groups.values()):  # several encoder pipelines meet in this rank (0.12)
        return None
    return _layout(own, groups)


def _layout(own: RankCoords, groups: Mapping[str, Any]) -> WorldLayout | None:
    """The layout in which the groups of `own` are the lines through it; None where no order explains them."""
    import torch.distributed as dist

    members = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group is not None}
    for order in permutations(DEFAULT_ORDER.split("-")):
        try:
            layout = WorldLayout(own.sizes, "-".join(order))
        except ValueError:
            continue
        if all(_line(layout, own, axis) == ranks for axis, ranks in members.items()):
            return layout
    return None


def _line(layout: WorldLayout, own: RankCoords, axis: str) -> list[int]:
    """The ranks on the axis through `own`: what Megatron's group of that axis must contain."""
    stride, size, position = layout.strides[axis], getattr(own.sizes, axis), getattr(own, axis)
    return [own.rank + (other - position) * stride for other in range(size)]


def has_groups() -> bool:
    """Whether Megatron's global process groups exist. Imports nothing of it."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state is not None and _parallel_state_ready()


def _parallel_state_ready() -> bool:
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    # The groups outlive destroy_process_group() when destroy_model_parallel() was not called: ask for both.
    return dist.is_available() and dist.is_initialized() and bool(ps.model_parallel_is_initialized())


def _parse_order(order: str, largest: Mapping[str, int]) -> list[str]:
    names = order.lower().split("-")
    for name in names:
        if name not in AXES:
            raise ValueError(f"order {order!r}: unknown axis {name!r}; known: {', '.join(AXES)}")
        if names.count(name) > 1:
            raise ValueError(f"order {order!r}: axis {name!r} stands twice")
    missing = [axis for axis in AXES if axis not in names]
    for axis in missing:
        if largest[axis] > 1:
            raise ValueError(f"order {order!r}: axis {axis!r} of size {largest[axis]} is missing")
    return missing + names  # of size 1, so their place does not matter


def _strides(order: list[str], sizes: Mapping[str, int]) -> dict[str, int]:
    strides, stride = {}, 1
    for axis in order:
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _quotient(world: int, **factors: int) -> int:
    product = math.prod(factors.values())
    if world % product:
        shown = " x ".join(f"{name}={value}" for name, value in factors.items())
        divisors = [str(n) for n in range(1, min(world, 1024) + 1) if world % n == 0]
        raise ValueError(
            f"{shown} = {product} does not divide the world of {world} ranks; what divides it: {', '.join(divisors)}"
        )
    return world // product


def _whole(option: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{option}={value!r} is not a whole number of at least {least}")
    return value


def _numbers(data: object, key: str, names: list[str], least: int) -> dict[str, int]:
    inner = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ValueError(f"{key}: not an object with {', '.join(names)}: {inner!r}")
    return {name: _whole(f"{key}.{name}", inner.get(name), least) for name in names}
