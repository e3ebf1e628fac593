"""Finds the parallel axis of a GPU activity's communication, by its name and its process group.

Kineto copies the arguments of torch's operator ``record_param_comms`` to the kernels that were launched inside it.
Among them is the description of the process group. No group is named without CPU operators, in files of nsys, and for
communication that does not go through a ``ProcessGroup``. `attribution` finds out what is still certain then.
"""

from __future__ import annotations

#: The uses of an activity; `Activities.use` has their index. ``other``: communication in a group that is not
#: Megatron's. ``unknown``: communication in a group that nothing names.
USES = ("compute", "tp", "ep", "cp", "pp", "dp", "other", "unknown")
AXES = USES[1:-2]
#: Axes whose ranks wait for each other inside a pass.
INSIDE = ("tp", "ep", "cp")
COMPUTE, PP, OTHER, UNKNOWN = (USES.index(use) for use in ("compute", "pp", "other", "unknown"))
#: The operator whose arguments name the group of the kernels that are launched inside it.
COMMUNICATES = "record_param_comms"

#: The axes of Megatron's process groups, by the beginning of the description that Megatron gives them
#: (``megatron.core.parallel_state``, 0.12 to the head of August 2026). The longest match counts. If there are several
#: axes, the first with more than one rank counts.
_GROUPS: dict[str, tuple[str, ...]] = {
    "": (),  # a group that is not Megatron's
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
    # Weights that are sharded over ranks with different data and gathered for each use: data parallelism, as in FSDP.
    "GTP_WEIGHT_REMAT_GROUP": ("dp",),
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": ("dp",),
}
#: The names that torch gives a group that was made without a name.
_UNNAMED = (None, "", "undefined")
#: Kernels that only one axis uses: DeepEP's and NCCL EP's dispatch and combine, Transformer Engine's user buffers.
_NAMES = {"deep_ep::": "ep", "hybrid_ep::": "ep", "nccl_ep": "ep", "userbuffers": "tp"}
#: Communication that any group may launch: torch's symmetric memory, and copies from one device to another, which copy
#: engines make for NCCL and for symmetric memory. (A process of Megatron's computes on only one device.)
_OF_ANY = (
    *("one_shot_all_reduce", "two_shot_all_reduce", "multimem_all_", "multimem_one_shot"),
    *("symmetric_memory::", "nvshmem_extension::", "nccl_extension::", "Memcpy PtoP"),
)
#: Parts of the names of NCCL's kernels in which ranks exchange in pairs, for an all-to-all or for the pipeline.
_PAIRWISE = ("SendRecv", "AlltoAll", "AllToAll")

BY_GROUP, BY_GROUP_PAIRWISE = -1, -2


class ByName(dict[str, int]):
    """Maps an activity's name to an index into `USES`, or to `BY_GROUP` or `BY_GROUP_PAIRWISE` if its group decides.
    Computed once per name."""

    def __missing__(self, name: str) -> int:
        self[name] = use = _by_name(name)
        return use


def _by_name(name: str) -> int:
    for part, axis in _NAMES.items():
        if part in name:
            return USES.index(axis)
    if name.startswith("nccl"):
        return BY_GROUP_PAIRWISE if any(part in name for part in _PAIRWISE) else BY_GROUP
    return BY_GROUP if any(part in name for part in _OF_ANY) else COMPUTE


def axis_of(description: str) -> str | None:
    """Returns the first axis of the process group with this description; None if the group is not Megatron's."""
    return next(iter(_axes(description)), None)


def use_of(description: str | None, sizes: object) -> int:
    """Returns the index into `USES` of communication in the group with this description. ``sizes``: ranks of each
    axis."""
    if description in _UNNAMED:
        return UNKNOWN
    axes = _axes(description or "")
    parallel = parallel_of(axes or AXES, sizes)
    if axes:
        return USES.index(parallel[0] if parallel else axes[0])
    return USES.index(parallel[0]) if len(parallel) == 1 else OTHER  # a job with one parallel axis has no other


def is_parallel(description: str, sizes: object) -> bool:
    """Returns whether the group with this description has more than one rank, judging by its axes."""
    return bool(parallel_of(_axes(description) or AXES, sizes))


def parallel_of(axes: tuple[str, ...], sizes: object) -> list[str]:
    """Returns the axes with more than one rank."""
    return [axis for axis in axes if (getattr(sizes, axis, 1) or 1) > 1]


def _axes(description: str) -> tuple[str, ...]:
    return _GROUPS[max((name for name in _GROUPS if description.startswith(name)), key=len)]
