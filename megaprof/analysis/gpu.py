"""What the GPU did, as arrays: every kernel, copy and memset with its time, its launch, and whose communication it is.

Kineto gives a GPU activity and the CUDA call that launched it the same ``correlation``. The launch is what ties an
activity to a range: the range is on the main thread, the launches of a backward come from autograd's own thread, and
both run while the range is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaprof.analysis.decoding import Event
from megaprof.analysis.intervals import Intervals

KERNEL = "kernel"
ACTIVITIES = (KERNEL, "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")

#: What an activity is for: its index here in `Activities.use`. ``other``: communication of a group without a name.
USES = ("compute", "tp", "ep", "cp", "pp", "dp", "other")
COMPUTE, PP, OTHER = USES.index("compute"), USES.index("pp"), USES.index("other")

#: Axes of Megatron's process groups by the description it gives them (``megatron.core.parallel_state``, 0.12 to 0.19),
#: by beginning, the longest match first. Of several axes the first with more than one rank counts.
_GROUPS: dict[str, tuple[str, ...]] = {
    "TENSOR_MODEL_PARALLEL_GROUP": ("tp",),
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": ("cp", "tp"),
    "TENSOR_AND_DATA_PARALLEL_GROUP": ("dp", "cp", "tp"),
    "EXPERT_MODEL_PARALLEL_GROUP": ("ep",),
    "EXPERT_TENSOR_PARALLEL_GROUP": ("tp",),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": ("ep", "tp"),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": ("pp", "ep", "tp"),
    "EXPERT_DATA_PARALLEL_GROUP": ("dp",),
    "CONTEXT_PARALLEL_GROUP": ("cp",),
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP": ("cp",),
    "HYBRID_DP_CP_GROUP": ("cp",),
    "PIPELINE_MODEL_PARALLEL_GROUP": ("pp",),
    "EMBEDDING_GROUP": ("pp",),
    "POSITION_EMBEDDING_GROUP": ("pp",),
    "MODEL_PARALLEL_GROUP": ("pp", "tp"),
    "DATA_PARALLEL_GROUP": ("dp", "cp"),
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP": ("dp", "cp"),
    "INTER_PARTIAL_DATA_PARALLEL_GROUP": ("dp", "cp"),
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": ("dp",),
    "INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": ("dp",),
    "WEIGHT_GRADIENT_COMM_GROUP": ("dp",),
}
#: Communication kernels that bring no metadata: DeepEP's dispatch and combine, Transformer Engine's user buffers.
_NAMES = {"deep_ep::": "ep", "hybrid_ep::": "ep", "userbuffers": "tp"}
_LONGEST = 1 << 61


@dataclass(frozen=True)
class Activities:
    """GPU activities in order of their start; one row each.

    ``spans``: start and end, wall-clock nanoseconds, shape ``[n, 2]``. ``launched``: when their launch call began.
    ``known``: whether the trace holds that call. ``use``: index into `USES`. ``kernel``: a kernel, no copy or memset.
    """

    spans: Intervals
    launched: npt.NDArray[np.int64]
    known: npt.NDArray[np.bool_]
    use: npt.NDArray[np.int8]
    kernel: npt.NDArray[np.bool_]


def spans_of(base: int, events: Sequence[Event]) -> tuple[Intervals, npt.NDArray[np.bool_]]:
    """Times in nanoseconds of those events whose times are possible, and which ones these are."""
    with np.errstate(over="ignore", invalid="ignore"):
        start = np.array([event.ts for event in events], dtype=np.float64) * 1000
        duration = np.array([event.dur for event in events], dtype=np.float64) * 1000
    # A comparison with NaN is false, so this also drops what is not a number.
    usable = (np.abs(start) < _LONGEST) & (duration >= 0) & (duration < _LONGEST)
    begin = base + np.rint(start[usable]).astype(np.int64)
    return np.column_stack((begin, begin + np.rint(duration[usable]).astype(np.int64))), usable


def activities_of(base: int, events: Sequence[Event], launches: Sequence[Event], sizes: object) -> Activities:
    """Read GPU activities and the calls that launched them; ``sizes`` has the number of ranks of every axis."""
    spans, usable = spans_of(base, events)
    uses = _Uses(sizes)
    use = np.array([uses[event.name, event.args.description] for event in events], dtype=np.int8)[usable]
    kernel = np.array([event.cat == KERNEL for event in events], dtype=np.bool_)[usable]
    launched, known = _launches(base, [e.args.correlation for e in events], launches)
    launched, known = launched[usable], known[usable]
    order = np.argsort(spans[:, 0], kind="stable")
    launched = np.where(known, np.minimum(launched, spans[:, 0]), spans[:, 0])
    return Activities(spans[order], launched[order], known[order], use[order], kernel[order])


def _launches(
    base: int, correlations: list[int], launches: Sequence[Event]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    wanted = _numbers(correlations)
    spans, usable = spans_of(base, launches)
    numbers = _numbers([event.args.correlation for event in launches])[usable]
    order = np.argsort(numbers, kind="stable")
    numbers, starts = numbers[order], spans[order, 0]
    if not len(numbers):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.bool_)
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return starts[place], (numbers[place] == wanted) & (wanted > 0)


def _numbers(values: list[int]) -> npt.NDArray[np.int64]:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:  # a hostile file
        return np.array([value if abs(value) < _LONGEST else 0 for value in values], dtype=np.int64)


class _Uses(dict[tuple[str, "str | None"], int]):
    """Index into `USES` by kernel name and description of the process group, found once for each pair."""

    def __init__(self, sizes: object) -> None:
        super().__init__()
        self.sizes = sizes

    def __missing__(self, key: tuple[str, str | None]) -> int:
        name, description = key
        self[key] = found = USES.index(self._use(name, description))
        return found

    def _use(self, name: str, description: str | None) -> str:
        if description is None and not name.startswith("nccl"):
            return next((use for part, use in _NAMES.items() if part in name), "compute")
        axes: tuple[str, ...] = ()
        for known in sorted(_GROUPS, key=len):
            if description is not None and description.startswith(known):
                axes = _GROUPS[known]
        parallel = [axis for axis in axes if (getattr(self.sizes, axis, 1) or 1) > 1]
        return parallel[0] if parallel else axes[0] if axes else "other"
