"""Finds the parallel axis of a GPU activity's communication, by its name and its process group.

Kineto copies the arguments of torch's operator ``record_param_comms`` to the kernels that were launched inside it.
Among them is the description of the process group. No group is named without CPU operators, in files of nsys, and for
communication that does not go through a ``ProcessGroup``. What is still certain then, `steps` finds out.
"""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

#: The uses of an activity; `Activities.use` has their index. ``other``: communication in a group that is not
#: Megatron's. ``unknown``: communication in a group that nothing names.
USES = ("compute", "tp", "ep", "cp", "pp", "dp", "other", "unknown")
AXES = USES[1:-2]
#: What is listed separately in the report's ``exposed_ms``, in its order.
GROUPS = (*AXES, "unknown")
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
#: The axes of the dimensions of a device mesh. torch calls the group of a dimension ``mesh_tp``, and of several that
#: were flattened ``mesh_dp_shard_cp``. ``sp``: sequences that are exchanged for heads (Ulysses).
_DIMENSIONS = {
    **{axis: axis for axis in AXES},
    **dict.fromkeys(("ddp", "fsdp", "efsdp", "replicate", "shard", "batch", "loss"), "dp"),
    **{"etp": "tp", "sp": "cp"},
}
_MESH = "mesh_"
#: Names of communication kernels and copies, and the axis of those that only one axis uses. ``None``: any group may
#: launch it: the libraries of collectives, symmetric memory, and copies from one device to another, which copy engines
#: make for NCCL and for symmetric memory. (A process of Megatron's computes on only one device.)
_KERNELS: tuple[tuple[str, str | None], ...] = (
    (r"deep_ep::|hybrid_ep::|uccl::(?:intranode|internode)|nccl_ep|\bEp(?:Dispatch|Combine)|mori::moe::", "ep"),
    (r"userbuffers|cross_device_reduce", "tp"),
    (rf"\b(?:nccl|rccl|msccl|oneccl|xccl|hccl|hcom_)|^{COMMUNICATES}$", None),
    (r"one_shot_all_reduce|two_shot_all_reduce|multimem_all_|multimem_one_shot|symmetric_memory::", None),
    (r"nvshmem|rocshmem|mori::|Memcpy PtoP", None),
)
_AXIS_OF_KERNEL = tuple((re.compile(names, re.IGNORECASE), axis) for names, axis in _KERNELS)
#: Parts of the names of kernels in which ranks exchange in pairs, for an all-to-all or for the pipeline.
_PAIRWISE = ("sendrecv", "alltoall")

BY_GROUP, BY_GROUP_PAIRWISE = -1, -2


def use_by_name(name: str) -> int:
    """Returns the use of an activity with this name, as an index into `USES`, or `BY_GROUP` or `BY_GROUP_PAIRWISE` if
    its group decides."""
    for pattern, axis in _AXIS_OF_KERNEL:
        if pattern.search(name):
            pairwise = any(part in name.lower() for part in _PAIRWISE)
            return USES.index(axis) if axis else BY_GROUP_PAIRWISE if pairwise else BY_GROUP
    return COMPUTE


def ranks_of(text: str) -> tuple[int, ...] | None:
    """Returns the ranks in a text such as ``"[0, 4]"``, as torch lists those of a group; None if it is another text."""
    with suppress(msgspec.MsgspecError, UnicodeError):
        return tuple(msgspec.json.decode(text, type=list[int]))
    return None


def axis_of(description: str) -> str | None:
    """Returns the first axis of the process group with this description; None if the group is not Megatron's."""
    return next(iter(axes_of(description)), None)


def use_of(description: str | None, sizes: object) -> int:
    """Returns the index into `USES` of communication in the group with this description. ``sizes``: ranks of each
    axis."""
    if description in _UNNAMED:
        return UNKNOWN
    axes = axes_of(description or "")
    parallel = parallel_of(axes or AXES, sizes)
    if axes:
        return USES.index(parallel[0] if parallel else axes[0])
    return USES.index(parallel[0]) if len(parallel) == 1 else OTHER  # a job with one parallel axis has no other


def parallel_of(axes: tuple[str, ...], sizes: object) -> list[str]:
    """Returns the axes with more than one rank."""
    return [axis for axis in axes if (getattr(sizes, axis, 1) or 1) > 1]


def axes_of(description: str) -> tuple[str, ...]:
    """Returns the axes of the process group with this description; none if the group is not Megatron's."""
    if description.startswith(_MESH):
        dimensions = description.removeprefix(_MESH).lower().split("_")
        return tuple(dict.fromkeys(_DIMENSIONS[name] for name in dimensions if name in _DIMENSIONS))
    return _GROUPS[max((name for name in _GROUPS if description.startswith(name)), key=len)]
