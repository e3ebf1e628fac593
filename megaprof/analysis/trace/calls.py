"""Turns a trace into schedule calls: when each microbatch ran, and how long it waited for collectives.

A *call* is one outermost range: one ``forward_backward_func`` call on one rank, or a whole `train_overall` step around
several such calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple, TypeVar

import numpy as np

from megaprof.analysis.notes import LAUNCHES_UNKNOWN, OVERLAPPING, PP_UNKNOWN, UNNAMED_GROUP, Note
from megaprof.analysis.trace.attribution import Attribution, attribute, busy_in, owners
from megaprof.analysis.trace.gpu import Peak, memory_of
from megaprof.analysis.trace.groups import AXES, INSIDE, parallel_of
from megaprof.analysis.trace.intervals import Intervals, covered, difference, intervals, union
from megaprof.analysis.trace.passes import Exchange, MeasuredPass, Pass
from megaprof.analysis.trace.traces import Collective, Trace, TracedRange, times_of
from megaprof.analysis.trace.unseen import MOST_UNSEEN, without_some
from megaprof.formats import ranges
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PassId

#: The groups whose communication is listed separately, in the order of the report's ``exposed_ms``. ``unknown`` is
#: communication whose group the recording does not show.
GROUPS = (*AXES, "unknown")
WHOLE_STEP = "train_overall"
RECOMPUTE = "recompute"
#: Communication of an unknown group gets a note if it takes at least this fraction of the call.
_UNNAMED = 0.01
_NO_GROUP = "kernels or copies name no process group; `--profile-activities cpu cuda` records it for NCCL"

#: Targets that have no backward, for files that do not say so.
FORWARD_ONLY = ("train_log_probs", "evaluate")
#: The axes that may use a collective inside a microbatch, by operation; any of tp, cp, ep and dp for other operations.
#: Megatron's tensor and data parallelism have no all-to-all: it dispatches tokens (ep) and exchanges heads (cp).
_USERS = {"all_to_all": ("ep", "cp")}
_ANY_USER = ("tp", "ep", "cp", "dp")

Item = TypeVar("Item")
Key = TypeVar("Key")


class ModuleKey(NamedTuple):
    """A kind of pass through a module: the module's label (`ranges.MODULES`), its layer, and the layer's MTP layer.
    ``kind`` is ``forward``, ``backward``, or ``recompute`` for a forward inside a backward pass."""

    label: str
    number: int | None
    mtp: int | None
    kind: str


@dataclass(frozen=True)
class Call:
    """One schedule call on one rank; times in nanoseconds on the wall clock of its host."""

    label: str
    """Its target."""
    step: int
    """Its step, in the host's numbering if there is one."""
    index: int
    """Its index among the calls of its step and label, from 0. RL trains several times per step."""
    metadata: Metadata
    """The rank's metadata, from its trace."""
    source: str
    """The name of the trace's file."""
    start: int
    """When the host began it."""
    end: int
    """When the host finished it."""
    phases: tuple[MeasuredPass, ...]
    """Its passes in the order in which the host began them."""
    exchanges: tuple[Exchange, ...]
    """Its exchanges with other stages, as the host saw them; their kernels are in ``gpu``."""
    exposed_ns: dict[str, int | None]
    """Exposed communication by group, on a CPU only that of passes; None if the trace does not show it, with the reason
    in ``reasons``."""
    incomplete: Note | None
    """Why a part of the step is missing; None if nothing is."""
    has_kernels: bool
    """True if kernels ran on a GPU."""
    reasons: tuple[Note, ...]
    """Why some of its numbers are unknown."""
    finalize: Intervals = field(compare=False)
    """When it finalised gradients."""
    modules: dict[ModuleKey, tuple[int, ...]]
    """Nanoseconds of each pass through each module."""
    gpu: Attribution | None = field(compare=False, default=None)
    """The call on the GPU; None if that was not captured."""
    role: str | None = None
    """The model's role; None if unknown. In a whole step, each call inside has its own role."""
    unseen: Note | None = None
    """Why its kernels are missing in the trace, so that it has no passes, exchanges and sums; None if none are
    missing."""
    collecting: Intervals = field(compare=False, default_factory=lambda: intervals(()))
    """When Python collected garbage."""
    replayed: bool = False
    """True if its passes were replayed from a CUDA graph, so they took no time on the host."""
    memory: Peak | None = None
    """Memory allocated on its device; None if that was not captured."""

    @property
    def extent(self) -> tuple[int, int]:
        """When it ran: on the GPU, if that was captured."""
        return (self.gpu.start, self.gpu.end) if self.gpu else (self.start, self.end)

    @property
    def laid_out(self) -> list[Pass[int]]:
        """Everything that took time in it, in order: passes, gradient finalisation, and exchanges."""
        exchanges = self.exchanges if self.gpu is None else self.gpu.exchanges
        entries: list[Pass[int]] = [*self.phases]
        entries += (
            Pass(exchange.label, self.stage, None, None, exchange.start, exchange.end, self.rank)
            for exchange in exchanges
        )
        if self.gpu is None:
            entries += (
                Pass(ranges.FINALIZE_GRADS, self.stage, None, None, start, end, self.rank)
                for start, end in self.finalize.tolist()
            )
        return sorted(entries, key=lambda entry: (entry.start, -entry.end))

    @property
    def key(self) -> tuple[int, int]:
        """Its step, and its index among the calls of that step."""
        return self.step, self.index

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.metadata.coords.rank

    @property
    def stage(self) -> int:
        """Its pipeline rank."""
        return self.metadata.coords.pp

    @property
    def forward_only(self) -> bool:
        if self.label == WHOLE_STEP:  # its metadata are those of the first call inside
            return all(phase.kind == ranges.FORWARD for phase in self.phases)
        if self.label == self.metadata.target:
            return self.metadata.forward_only
        return self.label in FORWARD_ONLY


def calls_of(trace: Trace) -> list[Call]:
    """Returns every schedule call in ``trace``, in order of time."""
    outermost = [(traced, step) for traced in trace.ranges if (step := traced.name.fields.get("step")) is not None]
    role_ranges = [traced for traced in trace.ranges if traced.name.role is not None]
    call_counts: Counter[tuple[str, int]] = Counter()
    calls = []
    for outer, step in outermost:
        label = outer.name.label
        call = _call(trace, outer, step, call_counts[label, step])
        enclosing = [traced for traced in role_ranges if traced.start <= outer.start and outer.end <= traced.end]
        role = (
            max(enclosing, key=lambda traced: (traced.start, -traced.end)).name.role
            if enclosing
            else trace.metadata.role
        )
        calls.append(replace(call, role=role))
        call_counts[label, step] += 1
    return calls


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Returns ``items`` grouped by their ``key``, in order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _call(trace: Trace, outer: TracedRange, step: int, index: int) -> Call:
    metadata, label = trace.metadata, outer.name.label
    inner_ranges = [traced for traced in trace.ranges if outer.start <= traced.start and traced.end <= outer.end]
    passes = [traced for traced in inner_ranges if traced.name.label in ranges.PASSES]
    finalizing = [traced for traced in inner_ranges if traced.name.label == ranges.FINALIZE_GRADS]
    finalize = union(times_of(finalizing))
    exchanges = [traced for traced in inner_ranges if traced.name.is_p2p]
    gpu = None if trace.gpu is None else attribute(trace.gpu, metadata, outer, passes, exchanges)
    if gpu is not None:
        phases = tuple(_phase(traced, metadata, *on_gpu) for traced, on_gpu in zip(passes, gpu.passes, strict=True))
        split, reasons = _split_gpu(metadata, gpu)
        reasons += [OVERLAPPING] if trace.gpu is not None and trace.gpu.shortened else []
    else:
        exposed_spans, ambiguous = _exposed_spans(trace, passes)
        exposed_ns = {group: covered(spans, times_of(passes)).tolist() for group, spans in exposed_spans.items()}
        phases = tuple(
            _phase(traced, metadata, {group: pass_ns[index] for group, pass_ns in exposed_ns.items()})
            for index, traced in enumerate(passes)
        )
        split, reasons = _split(trace, phases, ambiguous)
    call = Call(
        label=label,
        step=step,
        index=index,
        metadata=metadata,
        source=trace.path.name,
        start=outer.start,
        end=outer.end,
        phases=phases,
        exchanges=tuple(
            Exchange(traced.name.label, traced.start, traced.end, traced.start, traced.end) for traced in exchanges
        ),
        exposed_ns=split,
        incomplete=Note("incomplete", said=trace.cut) if trace.cut else _incomplete(label, step, metadata, phases),
        has_kernels=trace.has_kernels,
        reasons=tuple(reasons),
        finalize=finalize,
        modules=_modules(inner_ranges, passes, trace),
        gpu=gpu,
        collecting=union(times_of([traced for traced in inner_ranges if traced.name.label == ranges.GARBAGE])),
        replayed=any(traced.replayed for traced in passes),
        memory=memory_of(trace.memory, outer.start, outer.end),
    )
    unseen = trace.unseen or without_some(trace.launches, outer.start, outer.end)
    if gpu is not None and sum(phase.gpu_ns or 0 for phase in phases) > (1 + MOST_UNSEEN) * (gpu.end - gpu.start):
        unseen = unseen or Note("times_impossible", said="its passes computed longer than the step took")
    return call if unseen is None else _emptied(call, unseen)


def _emptied(call: Call, unseen: Note) -> Call:
    """Returns ``call`` without anything that is computed from kernels and the gaps between them."""
    return replace(
        call,
        unseen=unseen,
        incomplete=unseen,
        has_kernels=True,
        phases=(),
        exchanges=(),
        exposed_ns=dict.fromkeys(GROUPS),
        reasons=(),
        finalize=intervals(()),
        modules={},
        gpu=None,
    )


def _phase(
    traced: TracedRange,
    metadata: Metadata,
    exposed: Mapping[str, int],
    gpu_ns: int | None = None,
    gpu_working_ns: int | None = None,
    gpu_span: tuple[int, int] | None = None,
) -> MeasuredPass:
    start, end = gpu_span or (traced.start, traced.end)
    backward_chunk, backward_microbatch = traced.name.fields.get("bchunk"), traced.name.fields.get("bmb")
    backward = None
    if backward_chunk is not None and backward_microbatch is not None:
        backward = PassId(ranges.BACKWARD, backward_chunk, backward_microbatch)
    return MeasuredPass(
        kind=traced.name.label,
        stage=metadata.coords.pp,
        chunk=_chunk(traced, metadata),
        microbatch=traced.name.fields.get("mb"),
        start=start,
        end=end,
        rank=metadata.coords.rank,
        host=(traced.start, traced.end),
        exposed=exposed,
        gpu_ns=gpu_ns,
        gpu_working_ns=gpu_working_ns,
        backward=backward,
    )


def _modules(
    inner_ranges: list[TracedRange], passes: list[TracedRange], trace: Trace
) -> dict[ModuleKey, tuple[int, ...]]:
    """Returns the time of each pass through each module: on a GPU only what it computed, on a CPU all of it."""
    times_ns: dict[ModuleKey, list[int]] = {}
    for opened in grouped(
        (traced for traced in inner_ranges if traced.name.module is not None), lambda traced: traced.name.label
    ).values():
        pass_indices = owners(np.array([traced.start for traced in opened], dtype=np.int64), passes).tolist()
        lengths_ns = (
            [traced.end - traced.start for traced in opened] if trace.gpu is None else busy_in(trace.gpu, opened)
        )
        for traced, pass_index, ns in zip(opened, pass_indices, lengths_ns, strict=True):
            recomputed = pass_index >= 0 and passes[pass_index].name.label == ranges.BACKWARD
            kind = ranges.BACKWARD if traced.name.is_module_backward else RECOMPUTE if recomputed else ranges.FORWARD
            key = ModuleKey(traced.name.module or "", traced.name.fields.get("n"), traced.name.fields.get("mtp"), kind)
            times_ns.setdefault(key, []).append(ns)
    return {key: tuple(samples_ns) for key, samples_ns in times_ns.items()}


def _split_gpu(metadata: Metadata, gpu: Attribution) -> tuple[dict[str, int | None], list[Note]]:
    """Returns exposed communication by group, except the pipeline's, of which one rank does not see both ends."""
    split: dict[str, int | None] = {group: gpu.exposed_by[group] for group in GROUPS}
    reasons: list[Note] = []
    split.update(dict.fromkeys(gpu.undecided))
    if metadata.sizes.pp > 1:
        split["pp"] = None
    if undecided := [axis for axis in gpu.undecided if metadata.sizes.pp == 1 or axis != "pp"]:
        reasons.append(Note("exposed_unknown", names=tuple(undecided), said=_NO_GROUP))
    if gpu.exposed_by["other"] > _UNNAMED * (gpu.end - gpu.start):
        reasons.append(UNNAMED_GROUP)
    return split, reasons


def _exposed_spans(trace: Trace, passes: list[TracedRange]) -> tuple[dict[str, Intervals], list[tuple[str, ...]]]:
    """Returns when collectives of passes were exposed, by group, as disjoint sets. Also returns the possible groups of
    collectives that may belong to several, and so are ``unknown``.

    gloo's events do not name their group, so it is found by elimination. If no possible group has more than one rank,
    the collective is not communication.
    """
    sizes, pass_spans = trace.metadata.sizes, union(times_of(passes))
    pass_collectives = list(compress(trace.collectives, covered(pass_spans, times_of(trace.collectives))))
    even_counts = _even(passes, pass_collectives)

    def users_of(collective: Collective) -> tuple[str, ...]:
        possible = _USERS.get(collective.operation, _ANY_USER)
        present = [group for group in possible if getattr(sizes, group) > 1]
        # FSDP gathers parameters in every microbatch, but nothing reduces gradients there. Megatron's loss calls an
        # all-reduce even if its tensor-parallel group is a single rank.
        if even_counts and "dp" in present and (len(present) > 1 or collective.operation == "all_reduce"):
            present.remove("dp")
        return tuple(present)

    exposed_spans: dict[str, Intervals] = {}
    ambiguous, hidden = [], trace.compute
    for users, collectives in grouped(pass_collectives, users_of).items():
        if not users:
            continue
        group = users[0] if len(users) == 1 else "unknown"
        ambiguous += [users] if len(users) > 1 else []
        spans = difference(union(times_of(collectives)), hidden)
        exposed_spans[group] = union(np.concatenate((exposed_spans[group], spans))) if group in exposed_spans else spans
        hidden = union(np.concatenate((hidden, spans)))
    return exposed_spans, ambiguous


def _split(
    trace: Trace, passes: Sequence[MeasuredPass], ambiguous: Sequence[tuple[str, ...]]
) -> tuple[dict[str, int | None], list[Note]]:
    """Returns exposed communication of passes by group. ``ambiguous``: groups that the trace does not distinguish."""
    sizes = trace.metadata.sizes
    split: dict[str, int | None] = dict.fromkeys(GROUPS, 0)
    reasons: list[Note] = []
    if not trace.knows_collectives:
        return _split_unseen(trace, split)
    if sizes.pp > 1:
        split["pp"] = None
        reasons.append(PP_UNKNOWN)
    if trace.has_kernels:
        split.update(dict.fromkeys((*parallel_of(AXES, sizes), "unknown")))
        reasons.append(Note("exposed_unknown", said=LAUNCHES_UNKNOWN))
        return split, reasons
    for group in {group for phase in passes for group in phase.exposed}:
        split[group] = (split[group] or 0) + sum(phase.exposed.get(group, 0) for phase in passes)
    for users in ambiguous:
        split.update(dict.fromkeys(users))
        said = "the collectives of a CPU trace name no process group"
        reasons.append(Note("exposed_unknown", names=users, said=said))
    return split, reasons


def _split_unseen(trace: Trace, split: dict[str, int | None]) -> tuple[dict[str, int | None], list[Note]]:
    """Returns the split of a trace without collectives: what passes waited for is unknown."""
    sizes, reasons = trace.metadata.sizes, []
    if sizes.pp > 1:
        split["pp"] = None
        reasons.append(PP_UNKNOWN)
    axes = parallel_of(INSIDE, sizes)
    if axes:
        split.update(dict.fromkeys((*axes, "unknown")))
        reasons.append(Note("exposed_unknown", names=tuple(axes)))
    return split, reasons


def _even(passes: list[TracedRange], collectives: list[Collective]) -> bool:
    """Returns whether all microbatches issued the same number of collectives, on every chunk. Then none of these is
    data-parallel, because gradients and parameters are exchanged once per step."""
    times = times_of(passes)
    edges = np.searchsorted(np.array([collective.start for collective in collectives], dtype=np.int64), times)
    counts: dict[tuple[str, int | None], list[int]] = {}
    for phase, count in zip(passes, (edges[:, 1] - edges[:, 0]).tolist(), strict=True):
        counts.setdefault((phase.name.label, phase.name.fields.get("chunk")), []).append(count)
    return all(len(numbers) > 1 and len(set(numbers)) == 1 for numbers in counts.values())


def _incomplete(label: str, step: int, metadata: Metadata, phases: tuple[MeasuredPass, ...]) -> Note | None:
    if label != metadata.target or label == WHOLE_STEP:
        return None  # the metadata count the microbatches of another call
    if metadata.truncated and step >= metadata.steps[1]:  # earlier steps of the window had ended
        said = f"the window was closed early ({metadata.truncated_reason or 'no reason given'})"
        return Note("incomplete", said=said)
    if metadata.microbatches is None or not metadata.chunks or not phases:
        return None
    expected = metadata.microbatches * len(metadata.chunks)
    kind_counts = Counter(phase.kind for phase in phases)
    for kind in (ranges.FORWARD,) if metadata.forward_only else (ranges.FORWARD, ranges.BACKWARD):
        count = kind_counts[kind] + kind_counts[ranges.COMBINED]
        if count != expected:
            said = f"it holds {count} {kind} ranges instead of {expected}"
            return Note("incomplete", names=(kind,), count=count, of=expected, said=said)
    return None


def _chunk(phase: TracedRange, metadata: Metadata) -> int | None:
    chunk = phase.name.fields.get("chunk")
    return 0 if chunk is None and len(metadata.chunks) == 1 else chunk
