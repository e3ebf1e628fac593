"""Assigns GPU activities to the passes of one schedule call, by the time of each launch.

A launch while a microbatch's range is open belongs to that microbatch, whichever thread it is on. For example, the
range of a backward is on the main thread, and its launches come from autograd's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.gpu import Activities
from megaprof.analysis.trace.groups import AXES, COMPUTE, INSIDE, OTHER, PP, UNKNOWN, USES, parallel_of
from megaprof.analysis.trace.intervals import (
    Intervals,
    covered,
    difference,
    intersection,
    intervals,
    total,
    union,
    union_by,
)
from megaprof.analysis.trace.passes import Exchange
from megaprof.analysis.trace.traces import TracedRange, times_of
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata

_Rows = npt.NDArray[np.bool_]
_NOBODY = -1
_ALL = slice(None)
#: Communication that a pass has to wait for. Gradients are reduced while passes run, and exchanges are between passes.
_OF_PASSES = [USES.index(group) for group in INSIDE]


class PassOnGpu(NamedTuple):
    """One pass on the GPU, in nanoseconds."""

    exposed: dict[str, int]
    """Communication while nothing computed, by `groups.USES` except the pipeline's."""
    compute: int
    """The time in which the GPU did anything but communicate."""
    working: int
    """The time from its first kernel to its last, without exposed communication and `Attribution.host_bound`."""
    extent: tuple[int, int] | None
    """When its first kernel began and its last ended, on the wall clock of the host; None without kernels."""


@dataclass(frozen=True)
class Attribution:
    """One call on the GPU, in nanoseconds on the wall clock of its host."""

    start: int
    """When the GPU became free for the call."""
    end: int
    """The end of its last activity."""
    passes: list[PassOnGpu]
    """Its passes, in the order of their ranges."""
    exposed_by: dict[str, int]
    """Communication while nothing computed, by `groups.USES`."""
    undecided: tuple[str, ...]
    """Axes that the ``unknown`` part of ``exposed_by`` may belong to."""
    early: dict[str, int]
    """The part of ``exposed_by`` before the last pass ended."""
    outside_ns: int
    """The time in which the GPU computed outside of passes, for instance to scale gradients after the last one."""
    host_bound: Intervals
    """When the GPU idled in a pass because the host had launched nothing; disjoint."""
    pipeline: Intervals
    """When the pipeline group communicated between passes and nothing computed; disjoint."""
    exchanges: tuple[Exchange, ...]
    """Send-receive kernels of the pipeline group."""
    lost: int
    """The number of activities whose launch is not in the trace."""
    axes: frozenset[str]
    """The axes of its communication, as far as they are known."""


def attribute(
    gpu: Activities,
    metadata: Metadata,
    outer: TracedRange,
    passes: Sequence[TracedRange],
    exchanges: Sequence[TracedRange],
) -> Attribution | None:
    """Returns what the GPU did for the call ``outer``; None if it did nothing. ``passes`` and ``exchanges`` must lie
    inside ``outer`` and be sorted by start."""
    in_call = gpu.known & (gpu.launched >= outer.start) & (gpu.launched <= outer.end)
    if not in_call.any():
        return None
    use, doubtful = _by_elimination(gpu, in_call, metadata, passes, exchanges)
    computing = union(gpu.spans[use == COMPUTE])  # by whatever launched it: it hides communication at the same time
    start, end = _extent(gpu, in_call, outer)
    call_span = union(intervals([(start, end)]))
    owner = owners(gpu.launched, passes)
    owner[~in_call] = _NOBODY
    communicating = in_call & (use != COMPUTE) & (use != PP)
    compute = in_call & (use == COMPUTE)
    communication = {name: gpu.spans[in_call & (use == index)] for index, name in enumerate(USES) if index != COMPUTE}
    exposed_spans = {name: difference(union(spans), computing) for name, spans in communication.items()}
    rows_by_use = {name: in_call & (use == index) for index, name in enumerate(USES) if index not in (COMPUTE, PP)}
    exposed = [_per_owner(owner, rows, gpu.spans, len(passes), hidden_by=computing) for rows in rows_by_use.values()]
    in_pass = compute & gpu.kernel | in_call & np.isin(use, _OF_PASSES)
    extents = _extents(gpu, owner, in_pass, len(passes))
    pass_spans = extents[extents[:, 1] > extents[:, 0]]
    idle = difference(call_span, union(gpu.spans))
    # When the first kernel of a pass runs, its input has arrived. So an exchange at the same time is for another pass.
    gaps = difference(union(pass_spans), union(gpu.spans[use != PP]))
    starved = intersection(unfed(gpu, idle), union(times_of(passes)))
    host_bound = union(np.concatenate((starved, unfed(gpu, gaps, use != PP))))
    until_last_pass = union(intervals([(start, int(pass_spans[:, 1].max()) if len(pass_spans) else end)]))
    not_working = union(np.concatenate((difference(union(gpu.spans[communicating]), computing), host_bound)))
    possible = [axes for rows, axes in doubtful if total(difference(union(gpu.spans[rows]), computing))]
    undecided = tuple(axis for axis in AXES if any(axis in axes for axes in possible))
    on_gpu = zip(
        (dict(zip(rows_by_use, pass_exposed, strict=True)) for pass_exposed in zip(*exposed, strict=True)),
        _per_owner(owner, compute, gpu.spans, len(passes)),
        (extents[:, 1] - extents[:, 0] - covered(not_working, extents)).tolist(),
        ((first, last) if last > first else None for first, last in extents.tolist()),
        strict=True,
    )
    return Attribution(
        start=start,
        end=end,
        passes=[PassOnGpu(*values) for values in on_gpu],
        exposed_by={name: total(spans) for name, spans in exposed_spans.items()},
        undecided=undecided,
        early={name: total(intersection(spans, until_last_pass)) for name, spans in exposed_spans.items()},
        outside_ns=total(difference(union(gpu.spans[compute & (owner == _NOBODY)]), union(pass_spans))),
        host_bound=host_bound,
        pipeline=difference(exposed_spans["pp"], union(pass_spans)),
        exchanges=_exchanges(gpu, in_call & (use == PP), exchanges),
        axes=frozenset(AXES).intersection(USES[index] for index in np.unique(use[in_call]).tolist()),
        lost=int((~gpu.known & (gpu.spans[:, 0] >= start) & (gpu.spans[:, 1] <= end)).sum()),
    )


def owners(times: npt.NDArray[np.int64], opened: Sequence[TracedRange]) -> npt.NDArray[np.int64]:
    """Returns, for each of ``times``, the index of the innermost range that was open then; -1 if none was. ``opened``
    must be sorted by start."""
    spans = times_of(opened)
    index = np.searchsorted(spans[:, 0], times, side="right") - 1
    if not len(spans):
        return index
    return np.where((index >= 0) & (times <= spans[np.maximum(index, 0), 1]), index, _NOBODY)


def busy_in(gpu: Activities, opened: Sequence[TracedRange]) -> list[int]:
    """Returns how many nanoseconds the GPU computed for each range in ``opened``. They are of one kind, and sorted by
    start."""
    owner = owners(gpu.launched, opened)
    return _per_owner(owner, gpu.known & (gpu.use == COMPUTE) & (owner >= 0), gpu.spans, len(opened))


def _by_elimination(
    gpu: Activities,
    in_call: _Rows,
    metadata: Metadata,
    passes: Sequence[TracedRange],
    exchanges: Sequence[TracedRange],
) -> tuple[npt.NDArray[np.int8], list[tuple[_Rows, list[str]]]]:
    """Returns the use of each activity, now also known from the place of its launch. Also returns rows of communication
    whose group stays unknown, with the axes that they may belong to.

    Communication that was launched in an exchange between stages is the pipeline's. Elsewhere it belongs to an axis if
    no other is possible. Outside an exchange, ranks that send to each other are in an all-to-all, of experts or of
    context parallelism, and the pipeline's group has no other use in a pass.
    """
    use = gpu.use.copy()
    doubtful: list[tuple[_Rows, list[str]]] = []
    in_exchange = owners(gpu.launched, exchanges) >= 0
    use[in_call & in_exchange & np.isin(use, (OTHER, UNKNOWN))] = PP
    unknown = in_call & (use == UNKNOWN)
    if not unknown.any():
        return use, []
    in_pass = owners(gpu.launched, passes) >= 0
    for rows, users in (
        (unknown & gpu.pairwise, ("ep", "cp")),
        (unknown & ~gpu.pairwise & in_pass, ("tp", "ep", "cp", "dp")),
        (unknown & ~gpu.pairwise & ~in_pass, AXES),
    ):
        parallel_axes = parallel_of(users, metadata.sizes) or parallel_of(AXES, metadata.sizes)
        if metadata.version is None:  # the sizes come only from the ranges
            doubtful.append((rows, list(AXES)))
        elif len(parallel_axes) == 1:
            use[rows] = USES.index(parallel_axes[0])
        else:
            doubtful.append((rows, parallel_axes))
    return use, doubtful


def _extent(gpu: Activities, in_call: _Rows, outer: TracedRange) -> tuple[int, int]:
    """Returns the extent of a call. It begins when the host is in the call and the GPU has finished earlier work, and
    ends with the call's last activity.

    Work that was launched before the recording began has no launch in the trace. It runs before everything that this
    call launched.
    """
    first, end = int(gpu.spans[in_call, 0].min()), int(gpu.spans[in_call, 1].max())
    is_earlier = np.where(gpu.known, gpu.launched < outer.start, gpu.spans[:, 0] < first)
    earlier_ends = gpu.spans[is_earlier, 1]
    free_since = max(outer.start, int(earlier_ends.max())) if len(earlier_ends) else outer.start
    return min(first, free_since), end


def _extents(gpu: Activities, owner: npt.NDArray[np.int64], rows: _Rows, count: int) -> Intervals:
    rows = rows & (owner >= 0)
    unset = np.iinfo(np.int64).max
    first, last = np.full(count, unset), np.zeros(count, dtype=np.int64)
    np.minimum.at(first, owner[rows], gpu.spans[rows, 0])
    np.maximum.at(last, owner[rows], gpu.spans[rows, 1])
    return np.column_stack((np.where(first < unset, first, 0), last))


def _per_owner(
    owner: npt.NDArray[np.int64], rows: _Rows, spans: Intervals, count: int, hidden_by: Intervals | None = None
) -> list[int]:
    rows = rows & (owner >= 0)
    busy_owners, busy_spans = union_by(owner[rows], spans[rows])
    lengths = busy_spans[:, 1] - busy_spans[:, 0]
    if hidden_by is not None:
        lengths = lengths - covered(hidden_by, busy_spans)
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, busy_owners, lengths)
    sums_ns: list[int] = sums.tolist()
    return sums_ns


def unfed(gpu: Activities, idle: Intervals, rows: _Rows | slice = _ALL) -> Intervals:
    """Returns the idle times at whose start the GPU had finished everything that was launched before. ``rows``: the
    activities that count."""
    launched = np.searchsorted(np.sort(gpu.launched[rows]), idle[:, 0], side="right")
    begun = np.searchsorted(gpu.spans[rows, 0], idle[:, 0], side="left")
    return idle[launched <= begun]


def _exchanges(gpu: Activities, rows: _Rows, operations: Sequence[TracedRange]) -> tuple[Exchange, ...]:
    operation_of = owners(gpu.launched, operations)
    return tuple(
        Exchange(operations[index].name.label, launch, launch, start, end)
        for index, launch, (start, end) in zip(
            operation_of[rows].tolist(), gpu.launched[rows].tolist(), gpu.spans[rows].tolist(), strict=True
        )
        if index != _NOBODY and operations[index].name.label in ranges.P2P_OPERATIONS
    )
