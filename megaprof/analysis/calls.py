"""From a trace to its schedule calls: which microbatch ran when, and how much of it was waiting for a collective.

A *call* is one outermost range: one ``forward_backward_func`` call on one rank, or a whole `train_overall` step around
several of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megaprof import ranges
from megaprof.analysis.intervals import Intervals, covered, difference, intervals, total, union
from megaprof.analysis.traces import Collective, Metadata, Range, Trace

#: The groups whose communication is split apart, in the order of the report's ``exposed_ms``.
GROUPS = ("tp", "ep", "cp", "pp", "dp")
WHOLE_STEP = "train_overall"

_PHASES = (ranges.FORWARD, ranges.BACKWARD, ranges.COMBINED)
_FORWARD_ONLY = ("train_log_probs", "evaluate")
#: Who may use a collective inside a microbatch, by operation; any of tp, cp, ep and dp where not listed. Megatron's
#: tensor and data parallelism have no all-to-all: tokens are dispatched by it (ep), and heads exchanged (cp).
_USERS = {"all_to_all": ("ep", "cp")}
_ANY_USER = ("tp", "ep", "cp", "dp")


@dataclass(frozen=True)
class Phase:
    """One microbatch's forward, backward or combined pass on one model chunk; times in nanoseconds.

    ``exposed_ns`` is the part in which a collective ran and no operator did.
    """

    kind: str
    microbatch: int | None
    chunk: int | None
    start: int
    end: int
    exposed_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end - self.start

    @property
    def compute_ns(self) -> int:
        return self.duration_ns - self.exposed_ns


@dataclass(frozen=True)
class Call:
    """One schedule call on one rank.

    ``index`` counts the calls of one step and label (RL trains several times per step). ``busy_ns`` is the union of
    phases and gradient finalisation, what is not waiting for another stage. ``exposed_ns`` by group, None where the
    trace cannot tell, with the reason in ``reasons``. ``incomplete``: why its sums are no whole step's, or None.
    """

    label: str
    step: int
    index: int
    metadata: Metadata
    source: str
    start: int
    end: int
    phases: tuple[Phase, ...]
    busy_ns: int
    exposed_ns: dict[str, int | None]
    incomplete: str | None
    has_kernels: bool
    reasons: tuple[str, ...]

    @property
    def forward_only(self) -> bool:
        if self.label == self.metadata.target:
            return self.metadata.forward_only
        return self.label in _FORWARD_ONLY


def calls_of(trace: Trace) -> list[Call]:
    """Every schedule call in ``trace``, in order of time."""
    exposed = difference(_collective_times(trace.collectives), trace.compute)
    outermost = [r for r in trace.ranges if r.name.fields.get("step") is not None]
    seen: Counter[tuple[str, int]] = Counter()
    calls = []
    for outer in outermost:
        label, step = outer.name.label, outer.name.fields["step"]
        if step is None:
            continue
        calls.append(_call(trace, outer, step, seen[label, step], exposed))
        seen[label, step] += 1
    return calls


def _call(trace: Trace, outer: Range, step: int, index: int, exposed: Intervals) -> Call:
    metadata, label = trace.metadata, outer.name.label
    inside = [r for r in trace.ranges if outer.start <= r.start and r.end <= outer.end]
    passes = [r for r in inside if r.name.label in _PHASES]
    finalize = union(_times([r for r in inside if r.name.label == ranges.FINALIZE_GRADS]))
    phases = tuple(
        Phase(
            kind=r.name.label,
            microbatch=r.name.fields.get("mb"),
            chunk=_chunk(r, metadata),
            start=r.start,
            end=r.end,
            exposed_ns=waited,
        )
        for r, waited in zip(passes, covered(exposed, _times(passes)).tolist(), strict=True)
    )
    busy = total(union(_times([r for r in inside if r.name.label in (*_PHASES, ranges.FINALIZE_GRADS)])))
    if metadata.sizes.dp == 1:
        # No data-parallel group to wait for: what is waited for here is another stage (tied embeddings).
        busy -= int(covered(exposed, finalize).sum())
    split, reasons = _split(trace, passes, finalize)
    return Call(
        label=label,
        step=step,
        index=index,
        metadata=metadata,
        source=trace.path.name,
        start=outer.start,
        end=outer.end,
        phases=phases,
        busy_ns=busy,
        exposed_ns=split,
        incomplete=_incomplete(label, metadata, phases),
        has_kernels=trace.has_kernels,
        reasons=tuple(reasons),
    )


def _split(trace: Trace, passes: list[Range], finalize: Intervals) -> tuple[dict[str, int | None], list[str]]:
    """Exposed communication by group, by elimination: gloo's events do not name their group."""
    sizes = trace.metadata.sizes
    split: dict[str, int | None] = dict.fromkeys(GROUPS, 0)
    reasons: list[str] = []
    if sizes.dp > 1:
        split["dp"] = total(finalize)
    if sizes.pp > 1:
        split["pp"] = None
        reasons.append(
            "exposed pp is not measured: a CPU trace cannot tell waiting for a neighbour from transferring, "
            "so both are in the bubble"
        )
    if trace.has_kernels:
        for group in ("tp", "ep", "cp", "dp"):
            if getattr(sizes, group) > 1:
                split[group] = None
        reasons.append("exposed communication is not measured: it runs in GPU kernels, which are not read")
        return split, reasons
    passing = union(_times(passes))
    within = [c for c, part in zip(trace.collectives, _overlaps(trace.collectives, passing), strict=True) if part]
    even = _even(passes, within)
    by_user: dict[tuple[str, ...], list[Collective]] = {}
    for collective in within:
        possible = _USERS.get(collective.operation, _ANY_USER)
        present = [group for group in possible if getattr(sizes, group) > 1]
        if even and len(present) > 1 and "dp" in present:
            present.remove("dp")
        by_user.setdefault(tuple(present), []).append(collective)
    for users, collectives in by_user.items():
        if len(users) == 1 and (known := split[users[0]]) is not None:
            alone = difference(_collective_times(collectives), trace.compute)
            split[users[0]] = known + int(covered(alone, passing).sum())
        elif len(users) > 1:
            split.update(dict.fromkeys(users))
            reasons.append(
                f"exposed {', '.join(users)} are not told apart: the collectives of a CPU trace name no process group"
            )
    return split, reasons


def _even(passes: list[Range], collectives: list[Collective]) -> bool:
    """Whether every microbatch issued equally many collectives, on every chunk: then none of them is of gradients or
    parameters, which data-parallel ranks exchange once per step."""
    times = _times(passes)
    edges = np.searchsorted(np.array([c.start for c in collectives], dtype=np.int64), times)
    counts: dict[tuple[str, int | None], list[int]] = {}
    for phase, count in zip(passes, (edges[:, 1] - edges[:, 0]).tolist(), strict=True):
        counts.setdefault((phase.name.label, phase.name.fields.get("chunk")), []).append(count)
    return all(len(each) > 1 and len(set(each)) == 1 for each in counts.values())


def _overlaps(collectives: tuple[Collective, ...], passes: Intervals) -> list[int]:
    times: list[int] = covered(passes, _times(collectives)).tolist()
    return times


def _incomplete(label: str, metadata: Metadata, phases: tuple[Phase, ...]) -> str | None:
    if label != metadata.target or label == WHOLE_STEP:
        return None  # the metadata count the microbatches of another call
    if metadata.truncated:
        return f"the window was closed early ({metadata.truncated_reason or 'no reason given'})"
    if metadata.microbatches is None or not metadata.chunks or not phases:
        return None
    expected = metadata.microbatches * len(metadata.chunks)
    found = Counter(p.kind for p in phases)
    for kind in (ranges.FORWARD,) if metadata.forward_only else (ranges.FORWARD, ranges.BACKWARD):
        count = found[kind] + found[ranges.COMBINED]
        if count != expected:
            return f"it holds {count} {kind} ranges where {expected} belong"
    return None


def _chunk(phase: Range, metadata: Metadata) -> int | None:
    chunk = phase.name.fields.get("chunk")
    return 0 if chunk is None and len(metadata.chunks) == 1 else chunk


def _times(things: list[Range] | tuple[Collective, ...] | list[Collective]) -> Intervals:
    return intervals((t.start, t.end) for t in things)


def _collective_times(collectives: tuple[Collective, ...] | list[Collective]) -> Intervals:
    return union(_times(collectives))
