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

from megaprof.analysis.trace.gpu import Activities
from megaprof.formats import ranges
from megaprof.formats.graphs import GraphNames
from megaprof.formats.ranges import RangeName

#: Megatron counts tokens between passes, outside any range. If a larger part of a replay's kernels has no name, kernels
#: of passes have none either.
MOST_UNNAMED = 0.01

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
    which = _runs(gpu.node, names)
    place = np.searchsorted(passes[:, 0], gpu.launched, side="right") - 1
    outside = np.ones(len(place), dtype=np.bool_)
    if len(passes):
        outside = (place < 0) | (gpu.launched > passes[np.maximum(place, 0), 1])
    rows = np.flatnonzero((gpu.node > 0) & gpu.known & outside)
    launched, found, unnamed = gpu.launched.copy(), list[Named](), None
    stacks = [[read for name in stack if (read := ranges.parse(name)) is not None] for stack in names.stacks]
    rows = rows[np.argsort(gpu.launched[rows], kind="stable")]
    moments, first = np.unique(gpu.launched[rows], return_index=True)
    for moment, of_replay in zip(moments.tolist(), np.split(rows, first[1:]), strict=bool(len(moments))):
        kernels = which[of_replay[gpu.kernel[of_replay]]]
        if not len(kernels) or (share := float((kernels < 0).mean())) == 1:
            continue  # this graph is the host's own
        if share > MOST_UNNAMED:
            unnamed = f"{share:.0%} of the kernels of its CUDA graph bear no name of a range"
            continue
        of_replay = of_replay[which[of_replay] >= 0]
        used, number = np.unique(which[of_replay], return_inverse=True)
        launched[of_replay] = moment + 1 + number  # kernels without a name keep their time, in no range
        found += _around([stacks[names.runs[run][2]] for run in used.tolist()], moment + 1)
    return Replays(replace(gpu, launched=launched), tuple(found), unnamed)


def _runs(nodes: npt.NDArray[np.int64], names: GraphNames) -> npt.NDArray[np.int64]:
    """Returns the index of each node's run; -1 if it has none."""
    if not names.runs:
        return np.full(len(nodes), -1, dtype=np.int64)
    first, last, _ = np.array(names.runs, dtype=np.int64).T
    place = np.searchsorted(first, nodes, side="right") - 1
    return np.where((place >= 0) & (nodes <= last[place]), place, -1)


def _around(stacks: Sequence[Sequence[RangeName]], moment: int) -> list[Named]:
    """Returns the ranges in ``stacks``. Kernels of the n-th stack are launched ``n`` nanoseconds after ``moment``."""
    found: list[tuple[RangeName, int]] = []
    ends: list[int] = []
    opened: list[int] = []  # the indices in `found` of the ranges around the previous stack
    for number, stack in enumerate(stacks):
        same = 0
        while same < min(len(opened), len(stack)) and found[opened[same]][0] == stack[same]:
            same += 1
        opened = [*opened[:same], *range(len(found), len(found) + len(stack) - same)]
        found += [(name, moment + number) for name in stack[same:]]
        ends += [0] * (len(stack) - same)
        for each in opened:
            ends[each] = moment + number
    return [(name, began, ended) for (name, began), ended in zip(found, ends, strict=True)]
