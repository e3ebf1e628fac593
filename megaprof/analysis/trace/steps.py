"""Turns a trace into steps: the columns of their passes and exchanges, and where the rest of each step went.

On a GPU, activities belong to passes by the time of their launch. A launch while a microbatch's range is open belongs
to that microbatch, whichever thread it is on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import LAUNCHES_UNKNOWN, OVERLAPPING, PP_UNKNOWN, UNNAMED_GROUP, Note
from megaprof.analysis.trace.columns import Numbers
from megaprof.analysis.trace.gpu import MOST_UNSEEN, Activities, without_some
from megaprof.analysis.trace.groups import AXES, COMPUTE, INSIDE, OTHER, PP, UNKNOWN, USES, parallel_of
from megaprof.analysis.trace.intervals import (
    Intervals,
    busy,
    covered,
    difference,
    intersection,
    intervals,
    owners,
    total,
    union,
)
from megaprof.analysis.trace.traces import Trace, TracedRange, times_of, within
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import EXCHANGES, Pass

WHOLE_STEP = "train_overall"
RECOMPUTE = "recompute"
#: The axes that may use a collective inside a microbatch, by operation; any of tp, cp, ep and dp for other operations.
#: Megatron's tensor and data parallelism have no all-to-all: it dispatches tokens (ep) and exchanges heads (cp).
_USERS = {"all_to_all": ("ep", "cp")}
_ANY_USER = ("tp", "ep", "cp", "dp")
#: Communication that a pass has to wait for. Gradients are reduced while passes run, and exchanges are between passes.
_OF_PASSES = [USES.index(group) for group in INSIDE]

_Rows = npt.NDArray[np.bool_]
Item = TypeVar("Item")
Key = TypeVar("Key")


class ModuleKey(NamedTuple):
    """A kind of pass through a module: the module's label (`ranges.MODULES`), its layer, and the layer's MTP layer.
    ``kind`` is ``forward``, ``backward``, or ``recompute`` for a forward inside a backward pass."""

    label: str
    number: int | None
    mtp: int | None
    kind: str


class Passes(NamedTuple):
    """The passes of a step, one row for each, in the order in which the host began them. Times are nanoseconds."""

    kind: Numbers
    """The kind of each pass, as an index into `ranges.PASSES`."""
    ids: Numbers
    """[pass, 4]: chunk and microbatch; then those of the backward in a combined pass. -1: unknown, or there is none."""
    host: Intervals
    """When the host was in it."""
    spans: Intervals
    """When it ran: on the GPU, from its first kernel to its last, if the GPU was captured and ran any for it."""
    end: Numbers
    """When it ended. A pass after whose last kernel the GPU waited for the host ends when the GPU has work again."""
    compute: Numbers
    """How long it computed: on the GPU, if that was captured, else without exposed communication."""
    working: Numbers
    """How long it took without exposed communication and without the GPU's waiting for the host."""
    idle: Numbers
    """How long the GPU waited for the host until ``end``."""
    garbage: Numbers
    """By how much garbage collection delayed it: on a GPU, only while that had no work."""
    data: Numbers | None
    """How long it waited for data: on a GPU, only while that had no work. None if no range says so."""
    exposed: Mapping[str, Numbers]
    """Collectives while nothing computed, by `groups.USES` except the pipeline's."""


Exchanges = Mapping[str, Numbers]
"""Exchanges with neighbouring stages by Megatron's operation, or the wait for an overlapped one
(`megaprof.formats.ranges`), [exchange, 4]: when the host reached it (if it is a kernel, launched it) and when the host
went on; then when it began and ended, on the GPU if it is a kernel."""


@dataclass(frozen=True)
class TracedStep:
    """One outermost range on one rank: one call of ``forward_backward_func``, or a whole `train_overall` step around
    several such calls. Times are nanoseconds on the wall clock of its host."""

    target: str
    role: str | None
    """The model's role; None if unknown. In a whole step, each call inside has its own role."""
    step: int
    """Its number, in the host's numbering if there is one."""
    index: int
    """Its index among the calls of its number and target. RL trains several times per step."""
    metadata: Metadata
    source: str
    host: tuple[int, int]
    """When the host was in it."""
    extent: tuple[int, int]
    """When it ran: on the GPU, if that was captured."""
    passes: Passes
    exchanges: Exchanges
    """Its exchanges with other stages, as the host saw them."""
    finalize: Intervals
    """When the host finalised gradients; disjoint."""
    has_kernels: bool
    on_gpu: bool = False
    """True if it is known what the GPU did for it."""
    kernels: Exchanges = field(default_factory=dict)
    """Its exchanges as kernels of the pipeline's group."""
    pipeline: Intervals = field(default_factory=lambda: intervals(()))
    """When the pipeline's group communicated between passes and nothing computed; disjoint."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Nanoseconds by name, for `Table.spent`; NaN for what the trace does not show, with the reason in ``reasons``."""
    axes: frozenset[str] = frozenset()
    """The axes of its communication on the GPU, as far as they are known."""
    modules: Mapping[ModuleKey, tuple[int, ...]] = field(default_factory=dict)
    """Nanoseconds of each pass through each module."""
    incomplete: Note | None = None
    """Why a part of the step is missing; None if nothing is."""
    unseen: Note | None = None
    """Why its kernels are missing, so that it has no passes, exchanges and sums; None if none are."""
    reasons: tuple[Note, ...] = ()
    """Why some of its numbers are unknown."""

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.index

    @property
    def rank(self) -> int:
        return self.metadata.coords.rank

    @property
    def stage(self) -> int:
        return self.metadata.coords.pp

    @property
    def forward_only(self) -> bool:
        if self.target == WHOLE_STEP:  # its metadata are those of the first call inside
            return not self.passes.kind.any()
        if self.target == self.metadata.target:
            return self.metadata.forward_only
        return self.target in ("train_log_probs", "evaluate")  # a call of another target inside the window

    @property
    def laid_out(self) -> list[Pass]:
        """Everything that took time in it, in order: passes, gradient finalisation, and exchanges."""
        stage, rank, passes = self.stage, self.rank, self.passes
        boxes = []
        for kind, ids, span in zip(passes.kind.tolist(), passes.ids.tolist(), passes.spans.tolist(), strict=True):
            chunk, microbatch = (None if number < 0 else number for number in ids[:2])
            boxes.append(Pass(ranges.PASSES[kind], stage, chunk, microbatch, span[0], span[1], rank))
        others = self.kernels if self.on_gpu else {**self.exchanges, ranges.FINALIZE_GRADS: self.finalize}
        for label, times in others.items():
            boxes += [Pass(label, stage, None, None, start, end, rank) for start, end in times[:, -2:].tolist()]
        return sorted(boxes, key=lambda box: (box.start, -box.end))


def steps_of(trace: Trace) -> list[TracedStep]:
    """Returns every step in ``trace``, in order of time."""
    role_ranges = [traced for traced in trace.ranges if traced.name.role is not None]
    of_file = trace.metadata
    counts = Counter({(of_file.target, of_file.steps[0]): of_file.call})
    steps = []
    for outer in trace.ranges:
        if (number := outer.name.fields.get("step")) is None:
            continue
        target = outer.name.label
        around = (traced for traced in role_ranges if traced.start <= outer.start and outer.end <= traced.end)
        innermost = max(around, key=lambda traced: (traced.start, -traced.end), default=outer)
        role = innermost.name.role or of_file.role
        steps.append(_step(trace, outer, role, number, counts[target, number]))
        counts[target, number] += 1
    return steps


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Returns ``items`` grouped by their ``key``, in order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _step(trace: Trace, outer: TracedRange, role: str | None, number: int, index: int) -> TracedStep:
    metadata, extent = trace.metadata, (outer.start, outer.end)
    # Without its kernels, nothing is right that is computed from them and from the gaps between them.
    unseen = trace.unseen
    if unseen is None and trace.gpu is not None:
        unseen = without_some(trace.gpu, trace.launches, *extent, trace.cut)
    inner = within(trace.ranges, *extent) if unseen is None else []
    passes = [traced for traced in inner if traced.name.label in ranges.PASSES]
    spans = times_of(passes)
    took = spans[:, 1] - spans[:, 0]
    labels = ranges.GARBAGE, ranges.DATA_WAIT, ranges.FINALIZE_GRADS
    by_label = grouped(inner, lambda traced: traced.name.label)
    collecting, loading, finalize = (union(times_of(by_label.get(label, ()))) for label in labels)
    step = TracedStep(
        target=outer.name.label,
        role=role,
        step=number,
        index=index,
        metadata=metadata,
        source=trace.path.name,
        host=extent,
        extent=extent,
        passes=Passes(
            kind=np.array([ranges.PASSES.index(traced.name.label) for traced in passes], dtype=np.int64),
            ids=ids_of((traced.name for traced in passes), len(metadata.chunks)),
            host=spans,
            spans=spans,
            end=spans[:, 1],
            compute=took,
            working=took,
            idle=np.zeros_like(took),
            garbage=covered(collecting, spans),
            data=covered(loading, spans) if len(loading) else None,
            exposed={},
        ),
        exchanges={label: np.tile(times_of(of), 2) for label, of in by_label.items() if ranges.transfers(label)},
        finalize=finalize,
        has_kernels=trace.gpu is not None or unseen is not None,
        spent=dict.fromkeys((*_ANY_USER, "unknown"), 0.0 if unseen is None else np.nan),
        incomplete=unseen,
        unseen=unseen,
    )
    if unseen is not None:
        return step
    replayed = any(traced.replayed for traced in passes)
    measured = None if trace.gpu is None else _with_gpu(step, trace.gpu, collecting, loading, replayed=replayed)
    step = measured or _with_collectives(step, trace)
    if step.on_gpu and step.passes.compute.sum() > (1 + MOST_UNSEEN) * (step.extent[1] - step.extent[0]):
        impossible = Note("times_impossible", said="its passes computed longer than the step took")
        return _step(replace(trace, unseen=impossible), outer, role, number, index)
    incomplete = Note("incomplete", said=trace.cut) if trace.cut else _incomplete(step)
    return replace(step, incomplete=incomplete, modules=_modules(inner, step.passes, trace))


def ids_of(names: Iterable[ranges.RangeName], chunks: int) -> Numbers:
    """Returns the `Passes.ids` of passes with these names. ``chunks``: how many model chunks the stage has."""
    ids = []
    for name in names:
        chunk, microbatch, *backward = map(name.fields.get, ("chunk", "mb", "bchunk", "bmb"))
        chunk = 0 if chunk is None and chunks == 1 else chunk
        known = (chunk, microbatch, *((None, None) if None in backward else backward))
        ids.append([-1 if number is None else number for number in known])
    return np.array(ids, dtype=np.int64).reshape(-1, 4)


def _modules(inner: list[TracedRange], passes: Passes, trace: Trace) -> dict[ModuleKey, tuple[int, ...]]:
    """Returns the time of each pass through each module: on a GPU only what it computed, on a CPU all of it."""
    times_ns: dict[ModuleKey, list[int]] = {}
    of_modules = (traced for traced in inner if traced.name.module is not None)
    for opened in grouped(of_modules, lambda traced: traced.name.label).values():
        spans = times_of(opened)
        pass_of = owners(spans[:, 0], passes.host)
        recomputed = np.append(passes.kind, -1)[pass_of] == 1  # the last one: in no pass
        lengths_ns = spans[:, 1] - spans[:, 0]
        if trace.gpu is not None:
            computes = trace.gpu.known & (trace.gpu.use == COMPUTE)
            lengths_ns = busy(np.where(computes, owners(trace.gpu.launched, spans), -1), trace.gpu.spans, len(spans))
        for traced, again, ns in zip(opened, recomputed.tolist(), lengths_ns.tolist(), strict=True):
            kind = ranges.BACKWARD if traced.name.is_module_backward else RECOMPUTE if again else ranges.FORWARD
            key = ModuleKey(traced.name.module or "", traced.name.fields.get("n"), traced.name.fields.get("mtp"), kind)
            times_ns.setdefault(key, []).append(ns)
    return {key: tuple(samples_ns) for key, samples_ns in times_ns.items()}


def _incomplete(step: TracedStep) -> Note | None:
    metadata, kind = step.metadata, step.passes.kind
    if step.target != metadata.target or step.target == WHOLE_STEP:
        return None  # the metadata count the microbatches of another call
    if metadata.truncated and step.step >= metadata.steps[1]:  # earlier steps of the window had ended
        why = metadata.truncated_reason or "no reason given"
        return Note("incomplete", said=f"the window was closed early ({why})")
    expected = (metadata.microbatches or 0) * len(metadata.chunks)
    for number, label in enumerate(ranges.PASSES[: 1 if metadata.forward_only else 2]):
        count = int(np.isin(kind, (number, 2)).sum())  # a combined pass is a forward and a backward
        if expected and len(kind) and count != expected:
            said = f"it holds {count} {label} ranges instead of {expected}"
            return Note("incomplete", names=(label,), count=count, of=expected, said=said)
    return None


def _with_collectives(step: TracedStep, trace: Trace) -> TracedStep:
    """Returns a step with what collectives on the CPU took of its passes.

    gloo's events do not name their group, so it is found by elimination; if several are possible, it is ``unknown``. If
    no possible group has more than one rank, the collective is not communication.
    """
    sizes, passes, spent = trace.metadata.sizes, step.passes, dict(step.spent)
    collectives = trace.collectives or ()
    times = intervals((start, end) for _, start, end in collectives)
    in_passes = np.flatnonzero(covered(union(passes.host), times)).tolist()
    operations, times = [collectives[row][0] for row in in_passes], times[in_passes]
    # If microbatches all issued equally many on every chunk, none is data-parallel, which exchanges once per step.
    edges = np.searchsorted(times[:, 0], passes.host)
    issued = np.column_stack((passes.kind, passes.ids[:, 0], edges[:, 1] - edges[:, 0])).tolist()
    by_chunk = grouped(issued, lambda row: (row[0], row[1])).values()
    even = all(len(rows) > 1 and len({count for *_, count in rows}) == 1 for rows in by_chunk)

    def users_of(row: int) -> tuple[str, ...]:
        present = parallel_of(_USERS.get(operations[row], _ANY_USER), sizes)
        # FSDP gathers parameters in every microbatch, but nothing reduces gradients there. Megatron's loss calls an
        # all-reduce even if its tensor-parallel group is a single rank.
        if even and "dp" in present and (len(present) > 1 or operations[row] == "all_reduce"):
            present.remove("dp")
        return tuple(present)

    exposed: dict[str, Numbers] = {}
    reasons, hidden = [PP_UNKNOWN] if sizes.pp > 1 else [], trace.compute
    axes = parallel_of(INSIDE if trace.collectives is None else _ANY_USER, sizes)
    if trace.gpu is not None or (axes and trace.collectives is None):
        spent.update(dict.fromkeys((*axes, "unknown"), np.nan))
        names, said = ((), LAUNCHES_UNKNOWN) if trace.gpu is not None else (tuple(axes), "")
        reasons.append(Note("exposed_unknown", names=names, said=said))
    for users, rows in grouped(range(len(operations)), users_of).items():
        if not users:
            continue
        group = users[0] if len(users) == 1 else "unknown"
        spans = difference(union(times[rows]), hidden)
        hidden = union(np.concatenate((hidden, spans)))
        exposed[group] = covered(spans, passes.host) + exposed.get(group, 0)
        spent[group] = float(exposed[group].sum()) + 0.0 * spent[group]
        if len(users) > 1:
            spent.update(dict.fromkeys(users, np.nan))
            said = "the collectives of a CPU trace name no process group"
            reasons.append(Note("exposed_unknown", names=users, said=said))
    alone = passes.compute - sum(exposed.values(), np.zeros_like(passes.compute))
    passes = passes._replace(compute=alone, working=alone, exposed=exposed)
    return replace(step, passes=passes, spent=spent, reasons=tuple(reasons))


def _with_gpu(
    step: TracedStep, gpu: Activities, collecting: Intervals, loading: Intervals, *, replayed: bool
) -> TracedStep | None:
    """Returns a step with what the GPU did for it; None if it did nothing. ``replayed``: whether its passes were
    replayed from a CUDA graph, so that they took no time on the host."""
    passes, metadata = step.passes, step.metadata
    in_step = gpu.known & (gpu.launched >= step.host[0]) & (gpu.launched <= step.host[1])
    if not in_step.any():
        return None
    use, doubtful = _by_elimination(gpu, in_step, step)
    computing = union(gpu.spans[use == COMPUTE])  # by whatever launched it: it hides others
    # The step begins when the host has entered it and the GPU has finished earlier work, and ends with its last
    # activity. Work that was launched before the recording began has no launch in the trace, and runs before all this.
    first, end = int(gpu.spans[in_step, 0].min()), int(gpu.spans[in_step, 1].max())
    is_earlier = np.where(gpu.known, gpu.launched < step.host[0], gpu.spans[:, 0] < first)
    start = min(first, int(gpu.spans[is_earlier, 1].max(initial=step.host[0])))
    owner = np.where(in_step, owners(gpu.launched, passes.host), -1)
    rows = {name: in_step & (use == index) for index, name in enumerate(USES)}
    count, compute = len(passes.kind), rows.pop("compute")
    exposed = {name: difference(union(gpu.spans[of_use]), computing) for name, of_use in rows.items()}
    of_passes = (owner >= 0) & (compute & gpu.kernel | in_step & np.isin(use, _OF_PASSES))
    kernel_spans = np.tile((np.iinfo(np.int64).max, 0), (count, 1))
    np.minimum.at(kernel_spans[:, 0], owner[of_passes], gpu.spans[of_passes, 0])
    np.maximum.at(kernel_spans[:, 1], owner[of_passes], gpu.spans[of_passes, 1])
    ran = kernel_spans[:, 1] > kernel_spans[:, 0]
    kernel_spans[~ran] = 0
    pass_spans = union(kernel_spans[ran])
    # When the first kernel of a pass runs, its input has arrived. So an exchange at the same time is for another pass.
    gaps = difference(pass_spans, union(gpu.spans[use != PP]))
    idle = difference(intervals([(start, end)]), union(gpu.spans))
    starved = intersection(unfed(gpu, idle), union(passes.host))
    host_bound = union(np.concatenate((starved, unfed(gpu, gaps, use != PP))))
    not_working = union(np.concatenate([spans for name, spans in exposed.items() if name != "pp"] + [host_bound]))
    last = int(kernel_spans[ran, 1].max()) if ran.any() else end
    early = {name: total(intersection(spans, union(intervals([(start, last)])))) for name, spans in exposed.items()}
    possible = [axes for of, axes in doubtful if total(difference(union(gpu.spans[of]), computing))]
    undecided = tuple(axis for axis in AXES if any(axis in axes for axes in possible))
    delayed, waits = intersection(collecting, host_bound), intersection(loading, host_bound)
    spans = _since_data(np.where(ran[:, None], kernel_spans, passes.host), waits)
    kernels: dict[str, Numbers] = {}
    for label in filter(EXCHANGES.__contains__, step.exchanges):
        inside = rows["pp"] & (owners(gpu.launched, step.exchanges[label][:, :2]) >= 0)
        for direction, prefix in enumerate(("", "send", "recv")):  # each transfer may have a kernel of its own
            these = inside & (gpu.direction == direction)
            transfers = tuple(name for name in EXCHANGES[label] if name.startswith(prefix))
            own = next((each for each, what in EXCHANGES.items() if what == transfers), label)
            if these.any():
                times = np.column_stack((gpu.launched[these], gpu.launched[these], gpu.spans[these]))
                kernels[own] = np.concatenate((kernels.get(own, times[:0]), times))
    pass_end, waited = _until_fed(host_bound, spans, [times[:, 2] for times in kernels.values()])
    spent: dict[str, float] = {group: early[group] for group in _ANY_USER}
    spent |= {"unknown": early["unknown"] + early["other"]} | dict.fromkeys(set(undecided) - {"pp"}, np.nan)
    outside = union(gpu.spans[compute & (owner < 0)])
    spent |= {"host_bound": total(host_bound), "gradients": total(difference(outside, pass_spans))}
    if not replayed:
        for index, kind in enumerate(ranges.PASSES[:2]):
            spent[f"host_{kind}"] = int(passes.compute[passes.kind == index].sum())  # so far, what the host took
    lost = ~gpu.known & (gpu.spans[:, 0] >= start) & (gpu.spans[:, 1] <= end)
    reasons = [Note("events_left_out", said="GPU activities without a launch in the trace")] if lost.any() else []
    if unsaid := [axis for axis in undecided if metadata.sizes.pp == 1 or axis != "pp"]:
        said = "kernels or copies name no process group; `--profile-activities cpu cuda` records it for NCCL"
        reasons.append(Note("exposed_unknown", names=tuple(unsaid), said=said))
    if total(exposed["other"]) > MOST_UNSEEN * (end - start):
        reasons.append(UNNAMED_GROUP)
    return replace(
        step,
        extent=(start, end),
        on_gpu=True,
        passes=passes._replace(
            spans=spans,
            end=pass_end,
            compute=busy(np.where(compute, owner, -1), gpu.spans, count),
            working=kernel_spans[:, 1] - kernel_spans[:, 0] - covered(not_working, kernel_spans),
            idle=waited,
            garbage=covered(delayed, np.column_stack((spans[:, 0], pass_end))),
            data=None if passes.data is None else covered(waits, np.column_stack((spans[:, 0], pass_end))),
            exposed={
                name: busy(np.where(of_use, owner, -1), gpu.spans, count, hidden_by=computing)
                for name, of_use in rows.items()
                if name != "pp"
            },
        ),
        kernels=kernels,
        pipeline=difference(exposed["pp"], pass_spans),
        spent=spent,
        axes=frozenset(AXES).intersection(USES[index] for index in np.unique(use[in_step]).tolist()),
        reasons=(*reasons, *([OVERLAPPING] if gpu.shortened else [])),
    )


def _since_data(spans: Intervals, waits: Intervals) -> Intervals:
    """Returns the spans of passes, each from when its GPU began to wait for its data: until the host has these, it
    launches nothing for it. A pass waits between the end of the pass before it and its own first kernel."""
    if not len(waits) or not len(spans):
        return spans
    begins, order = spans[:, 0].copy(), np.argsort(spans[:, 0], kind="stable")
    before = np.concatenate((waits[:1, 0], np.maximum.accumulate(spans[order, 1])[:-1]))
    first = np.searchsorted(waits[:, 0], before)
    waited = first < np.searchsorted(waits[:, 1], begins[order], side="right")
    begins[order[waited]] = waits[first[waited], 0]
    return np.column_stack((begins, spans[:, 1]))


def _by_elimination(
    gpu: Activities, in_step: _Rows, step: TracedStep
) -> tuple[npt.NDArray[np.int8], list[tuple[_Rows, list[str]]]]:
    """Returns the use of each activity, now also known from the place of its launch. Also returns rows of communication
    whose group stays unknown, with the axes that they may belong to.

    Communication that was launched in an exchange between stages is the pipeline's. Elsewhere it belongs to an axis if
    no other is possible. Outside an exchange, ranks that send to each other are in an all-to-all, of experts or of
    context parallelism, and the pipeline's group has no other use in a pass.
    """
    use, metadata = gpu.use.copy(), step.metadata
    doubtful: list[tuple[_Rows, list[str]]] = []
    in_exchange = np.any([owners(gpu.launched, times[:, :2]) >= 0 for times in step.exchanges.values()], axis=0)
    use[in_step & in_exchange & np.isin(use, (OTHER, UNKNOWN))] = PP
    unknown = in_step & (use == UNKNOWN)
    in_pass = owners(gpu.launched, step.passes.host) >= 0
    for rows, users in (
        (unknown & gpu.pairwise, ("ep", "cp")),
        (unknown & ~gpu.pairwise & in_pass, _ANY_USER),
        (unknown & ~gpu.pairwise & ~in_pass, AXES),
    ):
        parallel_axes = parallel_of(users, metadata.sizes) or parallel_of(AXES, metadata.sizes)
        if len(parallel_axes) == 1:
            use[rows] = USES.index(parallel_axes[0])
        else:
            doubtful.append((rows, parallel_axes))
    return use, doubtful


def unfed(gpu: Activities, idle: Intervals, rows: _Rows | slice = slice(None)) -> Intervals:
    """Returns the idle times at whose start the GPU had finished everything that was launched before. ``rows``: the
    activities that count."""
    launched = np.searchsorted(np.sort(gpu.launched[rows]), idle[:, 0], side="right")
    begun = np.searchsorted(gpu.spans[rows, 0], idle[:, 0], side="left")
    return idle[launched <= begun]


def _until_fed(gaps: Intervals, spans: Intervals, others: Iterable[Numbers]) -> tuple[Numbers, Numbers]:
    """Returns when every pass ended, and how long the GPU waited for the host in it. If the GPU had nothing to do after
    the last kernel of a pass, the pass ends when it has work again. ``gaps``: when the GPU waited; ``others``: when
    exchanges began."""
    ends, never = spans[:, 1], np.iinfo(np.int64).max
    begins = np.append(np.sort(np.concatenate((spans[:, 0], *others))), never)
    gap, next_begin = owners(ends, gaps), begins[np.searchsorted(begins, ends)]
    next_begin = np.where(next_begin < never, next_begin, np.append(gaps[:, 1], never)[gap])
    pass_ends = np.where(gap >= 0, np.maximum(next_begin, ends), ends)
    return pass_ends, covered(gaps, spans) + pass_ends - ends
