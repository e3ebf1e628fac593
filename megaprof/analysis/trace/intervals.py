"""Sets of time intervals as arrays of shape ``[n, 2]``: start and end in nanoseconds, int64, start <= end.

A *disjoint* set is sorted, and its intervals neither overlap nor touch. `union` turns any set into a disjoint one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]

_ROUNDING = 2  # nanoseconds


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Returns an array of ``(start, end)`` pairs, of shape ``[0, 2]`` if there are none."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)


def union(spans: Intervals) -> Intervals:
    """Returns the same points in time as a disjoint set, without empty intervals."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate(([True], spans[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.column_stack((spans[first, 0], reach[last]))


def total(disjoint: Intervals) -> int:
    """Returns the length of a disjoint set in nanoseconds."""
    return int((disjoint[:, 1] - disjoint[:, 0]).sum())


def covered(disjoint: Intervals, spans: Intervals) -> npt.NDArray[np.int64]:
    """Returns how many nanoseconds of each of ``spans`` lie in a disjoint set; shape ``[len(spans)]``."""
    if not len(disjoint):
        return np.zeros(len(spans), dtype=np.int64)
    starts, ends = disjoint[:, 0], disjoint[:, 1]
    cumulated = np.concatenate(([0], np.cumsum(ends - starts)))

    def up_to(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        begun = np.searchsorted(starts, times, side="right")
        running = np.where(begun > 0, np.maximum(ends[begun - 1] - times, 0), 0)
        return np.asarray(cumulated[begun] - running)

    return up_to(spans[:, 1]) - up_to(spans[:, 0])


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Returns the points that are in both of two disjoint sets, as a disjoint set."""
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    counts = np.maximum(np.searchsorted(right[:, 0], left[:, 1], side="left") - first, 0)
    left_repeated = np.repeat(left, counts, axis=0)
    # The position of each repeated row in its group, counted from the group's first partner.
    offsets = np.arange(len(left_repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
    partners = right[np.repeat(first, counts) + offsets]
    return np.column_stack(
        (np.maximum(left_repeated[:, 0], partners[:, 0]), np.minimum(left_repeated[:, 1], partners[:, 1]))
    )


def difference(left: Intervals, right: Intervals) -> Intervals:
    """Returns the points of one disjoint set that are not in another, as a disjoint set."""
    if not len(left) or not len(right):
        return left
    lowest = min(left[0, 0], right[0, 0]) - 1
    highest = max(left[-1, 1], right[-1, 1]) + 1
    gaps = np.column_stack((np.concatenate(([lowest], right[:, 1])), np.concatenate((right[:, 0], [highest]))))
    return intersection(left, gaps)


def owners(times: npt.NDArray[np.int64], spans: Intervals) -> npt.NDArray[np.int64]:
    """Returns, for each of ``times``, the index of the innermost of ``spans`` that was open then; -1 if none was.
    ``spans`` must be sorted by start."""
    index = np.searchsorted(spans[:, 0], times, side="right") - 1
    if not len(spans):
        return index
    return np.where((index >= 0) & (times <= spans[np.maximum(index, 0), 1]), index, -1)


def leaves(threads: npt.NDArray[np.int64], spans: Intervals) -> npt.NDArray[np.bool_]:
    """Returns which of properly nested intervals contain no other interval of the same thread; shape ``[len(spans)]``.

    Neighbours may overlap by `_ROUNDING`, because Kineto rounds microseconds. Then neither counts as inside the other.
    """
    if not len(spans):
        return np.zeros(0, dtype=np.bool_)
    order = np.lexsort((-spans[:, 1], spans[:, 0], threads))
    threads, starts, ends = threads[order], spans[order, 0], spans[order, 1]
    sorted_leaves = np.ones(len(spans), dtype=np.bool_)
    sorted_leaves[:-1] = (threads[1:] != threads[:-1]) | (starts[1:] >= ends[:-1] - _ROUNDING)
    result = np.empty(len(spans), dtype=np.bool_)
    result[order] = sorted_leaves
    return result


def busy(
    owners: npt.NDArray[np.int64], spans: Intervals, count: int, hidden_by: Intervals | None = None
) -> npt.NDArray[np.int64]:
    """Returns for how many nanoseconds at least one of the intervals of each owner ran and nothing in the disjoint set
    ``hidden_by`` did; shape ``[count]``. ``owners``: whose each of ``spans`` is; below 0: nobody's."""
    keep = (owners >= 0) & (spans[:, 1] > spans[:, 0])
    owners, spans = owners[keep], spans[keep]
    # Uses ranks instead of times, so that the owners fit one after the other into int64.
    points, ranks = np.unique(spans, return_inverse=True)
    laid_out = union(ranks.reshape(-1, 2) + (owners * len(points))[:, None])
    owners = laid_out[:, 0] // max(len(points), 1)
    spans = points[laid_out - (owners * len(points))[:, None]]
    hidden = 0 if hidden_by is None else covered(hidden_by, spans)
    busy_ns = np.zeros(count, dtype=np.int64)
    np.add.at(busy_ns, owners, spans[:, 1] - spans[:, 0] - hidden)
    return busy_ns
