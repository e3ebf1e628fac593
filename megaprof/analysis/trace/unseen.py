"""Detects kernels that ran and are missing in the trace, or have impossible times there. Then all numbers that come
from kernels, or from the gaps between them, are wrong.

Kineto drops kernels silently if GPU activity was not requested, if another tool holds CUPTI, if its buffers were full,
or if a session follows another one too soon (pytorch/kineto#1554). It also drops a few at the start of each session,
one more each time (pytorch/pytorch#192021). The calls that launched them are still in the trace.
"""

from __future__ import annotations

import numpy as np

from megaprof.analysis.notes import Note
from megaprof.analysis.trace.gpu import Activities, Launches
from megaprof.formats.metadata import Metadata

#: In healthy traces (A100, H100, B200, MI300) every launch has its kernel, and every kernel a possible time. If a
#: larger part than this has none, a step's numbers are not shown.
MOST_UNSEEN = 0.01


def without_kernels(metadata: Metadata, launches: int, *, has_gpu: bool, nsys: bool = False) -> Note | None:
    """Returns why a trace without kernels says nothing about its step; None if the step ran on a CPU.

    ``launches``: the number of calls in the trace that launched a kernel. ``has_gpu``: whether the tool saw a GPU.
    ``nsys``: whether the tool is Nsight Systems. Older files do not say where the model was. But they have the number
    of the machine's cores only for a run without a GPU.
    """
    on_gpu = metadata.device not in (None, "cpu") or (metadata.device is None and metadata.cores is None and has_gpu)
    if not on_gpu and not launches:
        return None
    profiler = metadata.profiler
    if profiler is not None and "cuda" not in profiler.asked:
        return Note("no_kernels", said="--profile-activities did not ask for them")
    if profiler is not None and "cuda" not in profiler.recorded:
        return Note("no_kernels", said="Kineto cannot record this device")
    lost = "nsys records them with --trace=cuda,nvtx" if nsys else "another tool may hold CUPTI, or Kineto lost them"
    return Note("no_kernels", said=lost)


def without_times(gpu: Activities | None) -> Note | None:
    """Returns why the times of the activities cannot be used; None if enough of them are possible."""
    if gpu is None or gpu.impossible <= MOST_UNSEEN * (gpu.impossible + len(gpu.spans)):
        return None
    return Note("times_impossible", factor=round(gpu.impossible / (gpu.impossible + len(gpu.spans)), 2))


def without_some(launches: Launches | None, start: int, end: int) -> Note | None:
    """Returns why there are too few kernels for the step between two moments; None if there are enough, or if the tool
    does not record launches."""
    if launches is None:
        return None
    launched, lost = (
        int(np.subtract(*np.searchsorted(times, (end, start)))) for times in (launches.times, launches.unanswered)
    )
    if lost <= MOST_UNSEEN * launched:
        return None
    if len(launches.unanswered) - launches.anonymous <= MOST_UNSEEN * len(launches.times):
        why = "the trace has them, but as on ROCm without their launch, so nothing says to which pass they belong"
    else:
        why = "another tool may hold CUPTI, Kineto lost them, or a graph was captured"
    return Note("kernels_lost", factor=round(lost / launched, 2), said=why)
