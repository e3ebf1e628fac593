"""Ranges inside the replay of a CUDA graph, from the names that its kernels were captured with.

A replay is one launch, so all its kernels share one moment. Here each of the ranges that a replay went through gets
moments of its own, nanoseconds behind that launch and in the order of the GPU, and its kernels count as launched then.
So whoever reads a trace finds ranges and launches as those of a step that was not replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.gpu import Activities
from megaprof.formats import ranges
from megaprof.formats.graphs import GraphNames
from megaprof.formats.ranges import RangeName

Named = tuple[RangeName, int, int]
"""A range, when it began and when it ended, in wall-clock nanoseconds."""


def replayed(gpu: Activities, names: GraphNames) -> tuple[Activities, list[Named]]:
    """``gpu`` with launches of their own for the kernels that have ``names``, and the ranges around those."""
    which = _stacks(gpu.node, names)
    rows = np.flatnonzero((which >= 0) & gpu.known)
    launched, found = gpu.launched.copy(), list[Named]()
    parsed = [[read for name in stack if (read := ranges.parse(name)) is not None] for stack in names.stacks]
    for moment in np.unique(gpu.launched[rows]).tolist():
        of_replay = rows[gpu.launched[rows] == moment]  # in order of their start
        used, first = np.unique(which[of_replay], return_index=True)
        ordered = _ordered([names.stacks[stack] for stack in used[np.argsort(first)].tolist()])
        place = {names.stacks.index(stack): number for number, stack in enumerate(ordered)}
        launched[of_replay] = moment + np.array([place[stack] for stack in which[of_replay].tolist()], dtype=np.int64)
        found += _around([parsed[names.stacks.index(stack)] for stack in ordered], moment)
    return replace(gpu, launched=launched), found


def _stacks(nodes: npt.NDArray[np.int64], names: GraphNames) -> npt.NDArray[np.int64]:
    """For every node the index of its stack; -1 for none."""
    if not names.runs:
        return np.full(len(nodes), -1, dtype=np.int64)
    first, last, stack = np.array(names.runs, dtype=np.int64).T
    place = np.searchsorted(first, nodes, side="right") - 1
    return np.where((place >= 0) & (nodes <= last[place]), stack[place], -1)


def _ordered(stacks: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """``stacks``, which come in the order of their first kernels, so that what lies in one range stands together."""
    begun: dict[tuple[str, ...], int] = {}
    for stack in stacks:
        for depth in range(1, len(stack) + 1):
            begun.setdefault(stack[:depth], len(begun))
    return sorted(stacks, key=lambda stack: [begun[stack[:depth]] for depth in range(1, len(stack) + 1)])


def _around(stacks: Sequence[Sequence[RangeName]], moment: int) -> Iterator[Named]:
    """The ranges of ``stacks``, of which the n-th one's kernels are launched ``n`` nanoseconds after ``moment``."""
    open_ranges: list[tuple[RangeName, int]] = []
    for number, stack in enumerate([*stacks, []]):
        same = 0
        while same < min(len(open_ranges), len(stack)) and open_ranges[same][0] == stack[same]:
            same += 1
        while len(open_ranges) > same:
            name, began = open_ranges.pop()
            yield name, moment + began, moment + number - 1
        open_ranges += [(name, number) for name in stack[same:]]
