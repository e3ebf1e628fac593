"""Restores the ranges inside the replay of a CUDA graph, from the names that its kernels were captured with.

A replay is one launch, so all its kernels have the same launch time. This module gives each range in it times of its
own, nanoseconds after that launch and in the order of the capture. The kernels of a range count as launched at its
time. So the rest of the analysis finds ranges and launches as in a step without a replay. The times fit into the launch
itself, which takes longer: a few microseconds, and a nanosecond or more for each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.gpu import MOST_UNSEEN, Activities
from megaprof.formats import ranges
from megaprof.formats.graphs import GraphNames
from megaprof.formats.ranges import RangeName

Named = tuple[RangeName, int, int]
"""A range, its start and its end, in wall-clock nanoseconds."""


@dataclass(frozen=True)
class Replays:
    """The ranges in the replays of a trace."""

    gpu: Activities
    """The activities, with launch times of their own if their range is known."""
    ranges: tuple[Named, ...]
    """The ranges, sorted by start, with an enclosing range before those inside it. Only their order has a meaning,
    because they took no time on the host."""
    unnamed: str | None
    """Why the ranges of some replay are unknown; None if all are known."""


def replayed(gpu: Activities, names: GraphNames, passes: npt.NDArray[np.int64]) -> Replays:
    """Returns the ranges in graphs that were launched outside the host's ``passes``, a disjoint set of times. The graph
    of a layer is launched inside a pass, so its pass is known already."""
    run_of_row = _runs(gpu.node, names)
    pass_index = np.searchsorted(passes[:, 0], gpu.launched, side="right") - 1
    outside_passes = np.ones(len(pass_index), dtype=np.bool_)
    if len(passes):
        outside_passes = (pass_index < 0) | (gpu.launched > passes[np.maximum(pass_index, 0), 1])
    rows = np.flatnonzero((gpu.node > 0) & gpu.known & outside_passes)
    launched, named_ranges, unnamed = gpu.launched.copy(), list[Named](), None
    stacks = [[parsed for name in stack if (parsed := ranges.parse(name)) is not None] for stack in names.stacks]
    rows = rows[np.argsort(gpu.launched[rows], kind="stable")]
    moments, first = np.unique(gpu.launched[rows], return_index=True)
    for moment, replay_rows in zip(moments.tolist(), np.split(rows, first[1:]), strict=bool(len(moments))):
        kernel_runs = run_of_row[replay_rows[gpu.kernel[replay_rows]]]
        if not len(kernel_runs) or (share := float((kernel_runs < 0).mean())) == 1:
            continue  # this graph is the host's own
        if share > MOST_UNSEEN:  # Megatron counts tokens between passes, outside any range
            unnamed = f"{share:.0%} of the kernels of its CUDA graph have no name of a range"
            continue
        replay_rows = replay_rows[run_of_row[replay_rows] >= 0]
        used_runs, run_number = np.unique(run_of_row[replay_rows], return_inverse=True)
        launched[replay_rows] = moment + 1 + run_number  # kernels without a name keep their time, in no range
        named_ranges += _around([stacks[names.runs[run][2]] for run in used_runs.tolist()], moment + 1)
    return Replays(replace(gpu, launched=launched), tuple(named_ranges), unnamed)


def _runs(nodes: npt.NDArray[np.int64], names: GraphNames) -> npt.NDArray[np.int64]:
    """Returns the index of each node's run; -1 if it has none."""
    if not names.runs:
        return np.full(len(nodes), -1, dtype=np.int64)
    first, last, _ = np.array(names.runs, dtype=np.int64).T
    run_index = np.searchsorted(first, nodes, side="right") - 1
    return np.where((run_index >= 0) & (nodes <= last[run_index]), run_index, -1)


def _around(stacks: Sequence[Sequence[RangeName]], moment: int) -> list[Named]:
    """Returns the ranges in ``stacks``. Kernels of the n-th stack are launched ``n`` nanoseconds after ``moment``."""
    opened: list[tuple[RangeName, int]] = []
    ends: list[int] = []
    enclosing: list[int] = []  # the indices in `opened` of the ranges around the previous stack
    for number, stack in enumerate(stacks):
        depth = 0
        while depth < min(len(enclosing), len(stack)) and opened[enclosing[depth]][0] == stack[depth]:
            depth += 1
        enclosing = [*enclosing[:depth], *range(len(opened), len(opened) + len(stack) - depth)]
        opened += [(name, moment + number) for name in stack[depth:]]
        ends += [0] * (len(stack) - depth)
        for index in enclosing:
            ends[index] = moment + number
    return [(name, begin, end) for (name, begin), end in zip(opened, ends, strict=True)]
