"""Reads GPU activity into arrays: each kernel, copy and memset with its time, its launch, and its communication group
(`groups`).

Kineto gives a GPU activity and the CUDA call that launched it the same ``correlation``. The launch connects an activity
to a range, because it happens while the range is open. That also works for a backward, whose range is on the main
thread, and whose launches come from autograd's own thread.

Kernels may have run and be missing, or have impossible times. Then all numbers that come from kernels, or from the gaps
between them, are wrong. Kineto drops kernels silently if GPU activity was not requested, if another tool holds CUPTI,
if its buffers were full, or if a session follows another one too soon (pytorch/kineto#1554). It also drops a few at the
start of each session, one more each time (pytorch/pytorch#192021). The calls that launched them are still in the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.columns import COPIES, KERNEL, LAUNCHES, Columns, Events, Numbers
from megaprof.analysis.trace.groups import AXES, BY_GROUP_PAIRWISE, axes_of, parallel_of, use_by_name, use_of
from megaprof.analysis.trace.intervals import Intervals
from megaprof.formats.metadata import Metadata

#: In healthy traces (A100, H100, B200, MI300) every launch has its kernel, every kernel a possible time and, but for
#: what Megatron does between passes, a range. If a larger part than this has none, a step's numbers are not shown.
MOST_UNSEEN = 0.01
#: Nanoseconds by which activities may certainly lie apart from the rest of a recording, or as long as the rest itself.
_BEYOND = 1_000_000_000


@dataclass(frozen=True)
class Activities:
    """GPU activities in order of their start, with one row for each."""

    spans: Intervals
    """Start and end in wall-clock nanoseconds, shape ``[n, 2]``."""
    launched: npt.NDArray[np.int64]
    """When their launch call began, in wall-clock nanoseconds."""
    known: npt.NDArray[np.bool_]
    """True if the trace has the launch call."""
    use: npt.NDArray[np.int8]
    """The use of each activity, as an index into `USES`."""
    kernel: npt.NDArray[np.bool_]
    """True for kernels, and False for copies and memsets."""
    pairwise: npt.NDArray[np.bool_]
    """True for kernels of NCCL's in which ranks send to and receive from each other, for an all-to-all or for the
    pipeline."""
    direction: npt.NDArray[np.int8]
    """1 for kernels that only send, 2 for those that only receive, 0 for others."""
    node: npt.NDArray[np.int64]
    """The CUDA graph node that each activity ran, as `formats.ranges` counts them; 0 if no graph launched it."""
    name: npt.NDArray[np.int32]
    """Their names, as indices into `Events.names`."""
    said: npt.NDArray[np.int32]
    """What they, or the operators around their launches, say about a collective, as indices into `Events.said`."""
    impossible: int = 0
    """The number of activities that were left out because their times are impossible."""
    shortened: int = 0
    """The number of activities that lasted longer than is possible, and so end where the next one of their stream
    begins."""
    anonymous: int = 0
    """The number of kernels in the trace that name no call."""

    def rows(self, chosen: npt.NDArray[Any]) -> Activities:
        """Returns the activities that ``chosen`` selects, in the same order."""
        columns = {name: value[chosen] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **columns)


def activities(events: Events, sizes: object) -> tuple[Activities, Numbers]:
    """Returns the activities of a GPU, and the calls that launch a kernel or a graph, [call, 2]: when each began, in
    wall-clock nanoseconds, and whether the trace has an activity of it. ``sizes`` has the number of ranks of each axis;
    None if they are unknown."""
    kernels, copies, calls = events.take(KERNEL), events.take(*COPIES), events.take(*LAUNCHES)
    on_gpu = Columns.joined([kernels, copies])
    kernel = np.arange(len(on_gpu)) < len(kernels)
    # RCCL's kernels say nothing, nor do the copies of a collective that a copy engine runs.
    on_gpu = replace(on_gpu, said=np.where(on_gpu.said > 0, on_gpu.said, events.said_around(on_gpu)))
    by_name = np.array([*map(use_by_name, events.names)], dtype=np.int8)[on_gpu.name]
    by_group = np.array([use_of(said.description, sizes) for said in events.said], dtype=np.int8)[on_gpu.said]
    # In a group of one rank, such copies are only local. An older Kineto writes the correlation as the external id if
    # there was no operator.
    has_peers = [
        "," in (said.ranks or "")
        if sizes is None
        else said.description is not None and bool(parallel_of(axes_of(said.description) or AXES, sizes))
        for said in events.said
    ]
    peers = np.array(has_peers, dtype=np.bool_)[on_gpu.said]
    directions = [{"send": 1, "recv": 2}.get(said.collective or "", 0) for said in events.said]
    collective = ~kernel & (on_gpu.external != on_gpu.correlation) & peers
    use = np.where((by_name < 0) | collective, by_group, by_name)
    spans, launched = on_gpu.spans + events.base, on_gpu.spans[:, 0] + events.base
    correlation, number, known = on_gpu.correlation, calls.correlation, np.zeros(len(on_gpu), dtype=np.bool_)
    if len(number):
        by_number = np.argsort(number, kind="stable")
        call_of = by_number[np.minimum(np.searchsorted(number[by_number], correlation), len(number) - 1)]
        known = (number[call_of] == correlation) & (correlation > 0)
        launched = np.where(known, calls.spans[call_of, 0] + events.base, launched)
    # The clocks of host and GPU differ by microseconds, but all activities of one graph launch stay together.
    launched = np.where(on_gpu.node > 0, launched, np.minimum(launched, spans[:, 0]))
    possible = (on_gpu.spans != 0).any(axis=1)  # Kineto writes 0 for a time that it does not know
    possible[possible] = _possible(spans[possible], calls.spans + events.base)
    order = np.argsort(spans[:, 0], kind="stable")
    order = order[possible[order]]
    # The activities of a graph have one launch, and may run at the same time.
    _, index, sharing = np.unique(correlation, return_inverse=True, return_counts=True)
    alone = (correlation <= 0) | (sharing[index] == 1)
    ends = _possible_ends(spans[order], np.where(alone, on_gpu.thread, -1)[order])
    gpu = Activities(
        spans=np.column_stack((spans[order, 0], ends)),
        launched=launched[order],
        known=known[order],
        use=use[order],
        kernel=kernel[order],
        pairwise=(by_name == BY_GROUP_PAIRWISE)[order],
        direction=np.array(directions, dtype=np.int8)[on_gpu.said[order]],
        node=on_gpu.node[order],
        name=on_gpu.name[order],
        said=on_gpu.said[order],
        impossible=int((~possible).sum()) + sum(events.impossible[category] for category in (KERNEL, *COPIES)),
        shortened=int((ends < spans[order, 1]).sum()),
        anonymous=int((kernel & (correlation <= 0)).sum()),
    )
    starts = calls.rows(events.named(calls, is_start))
    return gpu, np.column_stack((starts.spans[:, 0] + events.base, np.isin(starts.correlation, correlation)))


def is_start(name: str) -> bool:
    """Returns whether a call of this name starts a kernel or a graph (``cudaLaunchKernelExC``, ``cuGraphLaunch``,
    ``hipExtModuleLaunchKernel``, ``urEnqueueKernelLaunch``), and not a copy or a host function."""
    return "Launch" in name and ("Kernel" in name or "Graph" in name)


def _possible(spans: Intervals, calls: Intervals) -> npt.NDArray[np.bool_]:
    """Returns which activities lie near the calls of the host and the middle half of the activities themselves."""
    if not len(spans):
        return np.ones(0, dtype=np.bool_)
    starts = np.sort(spans[:, 0])
    near = np.concatenate((calls.ravel(), starts[[len(starts) // 4, len(starts) * 3 // 4]]))
    first, last = int(near.min()), int(near.max())
    margin = max(last - first, _BEYOND)
    return np.asarray((spans[:, 0] >= first - margin) & (spans[:, 1] <= last + margin))


def _possible_ends(spans: Intervals, stream: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns when activities ended that run one after the other in each stream; a stream of -1: at any time.

    ROCm writes ends that cover later activities of the stream (AMD-AGI/TraceLens#669). Viewers cut such an activity off
    where the next one begins, and so does this. An activity may still begin before the one before it has ended.
    """
    ends = spans[:, 1].copy()
    for number in np.unique(stream[stream >= 0]):
        rows = np.flatnonzero((stream == number) & (spans[:, 1] > spans[:, 0]))
        starts, stream_ends = spans[rows, 0], spans[rows, 1]
        least_later_end = np.minimum.accumulate(stream_ends[::-1])[::-1][1:]
        covers = (stream_ends[:-1] > least_later_end) & (starts[1:] > starts[:-1])
        ends[rows[:-1][covers]] = starts[1:][covers]
    return ends


def without_kernels(metadata: Metadata, launches: int, *, has_gpu: bool, why: str | None) -> Note | None:
    """Returns why a trace without kernels says nothing about its step; None if the step ran on a CPU.

    ``launches``: the number of calls in the trace that launched a kernel. ``has_gpu``: whether the tool saw a GPU.
    ``why``: why the file may lack them, such as where it ends too early; None if that is not known.
    """
    on_gpu = metadata.device not in (None, "cpu") or (metadata.device is None and has_gpu)
    if not on_gpu and not launches:
        return None
    profiler = metadata.profiler
    if profiler is not None and "cuda" not in profiler.asked:
        return Note("no_kernels", said="--profile-activities did not ask for them")
    if profiler is not None and "cuda" not in profiler.recorded:
        return Note("no_kernels", said="Kineto cannot record this device")
    return Note("no_kernels", said=why or "another tool may hold CUPTI, or Kineto lost them")


def without_times(gpu: Activities) -> Note | None:
    """Returns why the times of the activities cannot be used; None if enough of them are possible."""
    count = gpu.impossible + len(gpu.spans)
    few = gpu.impossible <= MOST_UNSEEN * count
    return None if few else Note("times_impossible", factor=round(gpu.impossible / count, 2))


def without_some(gpu: Activities, launches: Numbers, start: int, end: int, why: str | None) -> Note | None:
    """Returns why there are too few kernels for the step between two moments; None if there are enough. ``launches``:
    as `activities` returns them. ``why``: as for `without_kernels`."""
    in_step = (launches[:, 0] >= start) & (launches[:, 0] < end)
    without_kernel = launches[:, 1] == 0
    launched, lost = int(in_step.sum()), int((in_step & without_kernel).sum())
    if lost <= MOST_UNSEEN * launched:
        return None
    if without_kernel.sum() - gpu.anonymous <= MOST_UNSEEN * len(launches):
        why = "it has kernels, but as on ROCm without their launches, so nothing says to which pass they belong"
    why = why or "another tool may hold CUPTI, Kineto lost them, or a graph was captured"
    return Note("kernels_lost", factor=round(lost / launched, 2), said=why)
