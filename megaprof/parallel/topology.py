"""The coordinates of ranks along TP, PP, CP, EP and DP, computed from the parallel sizes and Megatron's rank order.
`megatron` reads those of this rank from Megatron.

Megatron lays its ranks out in two grids over the same world (`RankGenerator` and `initialize_model_parallel` in
`megatron/core/parallel_state.py`, the same from megatron-core 0.12 to 0.19). Both count through the axes named in
`order`, the first one fastest:

- the decoder grid has `tp`, `cp`, `dp` and `pp`, with `dp = world / (tp * cp * pp)`;
- the expert grid has `etp` instead of `tp`, no `cp`, `ep`, and `dp = world / (etp * ep * pp)`.

Hence every coordinate is one division and one remainder: `rank // stride % size`. `tp`, `cp`, `dp` and `pp` are
positions in the decoder grid and name a rank uniquely; `ep` is the position in the expert grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AXES = ("tp", "pp", "cp", "ep", "dp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class ParallelSizes:
    """The parallel sizes of a run. Each is at least 1; ValueError otherwise."""

    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Number of pipeline stages."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    dp: int = 1
    """Megatron's data-parallel size, without context parallelism."""
    vpp: int = 1
    """Model chunks per rank; 1 means no virtual pipeline."""
    etp: int = 0
    """Expert tensor-parallel size; 0 stands for ``tp``."""

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        for option, value in vars(self).items():
            checked_number(option, value, least=1)

    def __str__(self) -> str:
        larger_axes = [axis for axis in ("tp", "pp", "cp", "ep", "dp", "vpp") if getattr(self, axis) > 1]
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in larger_axes) or "no parallelism"

    @property
    def world(self) -> int:
        """The number of ranks that these sizes describe."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True)
class Coords:
    """A global rank and its coordinates along each axis, all counted from 0."""

    rank: int
    pp: int
    tp: int
    cp: int
    ep: int
    dp: int
    """Without context parallelism."""


@dataclass(frozen=True)
class RankCoords(Coords):
    """A rank's coordinates, and the parallel sizes that they refer to."""

    sizes: ParallelSizes


@dataclass(frozen=True)
class WorldLayout:
    """Computes the coordinates of any rank from the sizes and Megatron's rank order, in constant time.

    `order` names the axes from the fastest to the slowest, as in `initialize_model_parallel(order=...)`; an axis of
    size 1 may be missing. Megatron-LM uses the default, or `tp-cp-ep-pp-dp` with `--use-tp-pp-dp-mapping`. Raises
    ValueError for an order or sizes that Megatron refuses.
    """

    sizes: ParallelSizes
    order: str = DEFAULT_ORDER
    strides: dict[str, int] = field(init=False, repr=False, compare=False)
    """Distance in global ranks between neighbours along each axis (that of `ep` in the expert grid)."""

    def __post_init__(self) -> None:
        sizes = self.sizes
        expert_dp, left = divmod(sizes.world, sizes.etp * sizes.ep * sizes.pp)
        if left:
            raise ValueError(
                f"etp={sizes.etp} x ep={sizes.ep} x pp={sizes.pp} = {sizes.etp * sizes.ep * sizes.pp} does not divide "
                f"the world of {sizes.world} ranks"
            )
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
        """Returns the coordinates of a global rank. Raises ValueError outside the world."""
        if not 0 <= rank < self.sizes.world:
            raise ValueError(f"rank {rank} is outside the world of {self.sizes.world} ranks")
        places = {axis: rank // stride % getattr(self.sizes, axis) for axis, stride in self.strides.items()}
        return RankCoords(rank=rank, sizes=self.sizes, **places)

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Returns the global rank at a place of the decoder grid, each position of which must be inside its axis."""
        return sum(self.strides[axis] * at for axis, at in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)))


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


def checked_number(option: str, value: object, least: int) -> int:
    """Returns a whole number of at least ``least``. Raises ValueError, which names ``option``, for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{option}={value!r} is not a whole number of at least {least}")
    return value
