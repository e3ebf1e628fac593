"""What reports and pages draw, as data: captured and simulated steps, and curves over a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.diagnosis.lengths import Lengths
from megaprof.analysis.diagnosis.stages import Stage, TargetStages
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.reading import FleetReading, Key, RankRow
from megaprof.analysis.notes import Note
from megaprof.analysis.table.iterations import UNKNOWN, median_iteration, spans_of
from megaprof.analysis.table.table import Table, Unfit
from megaprof.analysis.trace.steps import TracedStep
from megaprof.formats import ranges
from megaprof.formats.phrases import listed
from megaprof.parallel.schedules import Pass

_KINDS = (ranges.FORWARD, ranges.BACKWARD, ranges.COMBINED, ranges.FINALIZE_GRADS, "exchange")
#: What the ranks of a role do in a step of reinforcement learning: how it is drawn, and its parts of an iteration.
PHASES = {
    "training": ("forward", ("train_actor", "optimizer", "data")),
    "log-probs": ("backward", ("train_log_probs", "reference")),
    "rollout": ("dp", ("rollout", "rewards")),
    "weight sync": ("pp", ("weight_sync",)),
    "offload": ("ep", ("offload",)),
    "waiting": ("bubble", (ranges.WAITING,)),
    "unknown": ("unknown", (UNKNOWN,)),
    "other": ("cp", ()),
}
#: Width and height of the drawing of a curve, in its own units.
WIDTH, HEIGHT = 960, 120


@dataclass(frozen=True)
class Row:
    """One rank in a drawn step: the first of a stage, or a slow one; or the first of a role; or a simulated stage.
    Times are nanoseconds of its host's wall clock."""

    stage: int | str
    """Its stage, or its role."""
    rank: int | None
    extent: tuple[float, float]
    passes: Sequence[Pass]
    """Everything in the call, in order."""
    offset_ns: int
    """Nanoseconds to add to the times of this row, so that all rows are on one clock."""


@dataclass(frozen=True)
class StepTimeline:
    step: int
    rows: tuple[Row, ...]
    """One row for every captured stage and slow rank, by pipeline rank."""
    chunks: int
    """The most model chunks that a stage has."""
    notes: tuple[str, ...]
    """Clauses that say what a reader must know about the clocks."""

    @property
    def ms(self) -> float:
        begins, ends = ([row.extent[end] + row.offset_ns for row in self.rows] for end in (0, 1))
        return (max(ends) - min(begins)) / 1e6

    @property
    def kinds(self) -> list[str]:
        """Returns the kinds of boxes in the step, in the order of a legend."""
        there = {_kind(box.kind) for row in self.rows for box in row.passes}
        return [kind for kind in _KINDS if kind in there]


def _drawn(measured: TargetStages) -> Sequence[Stage]:
    """Returns the rows of the tables that are drawn. Replicas that only run forward passes do not wait for each other,
    so a slow rank of another replica may be in the same step at another time: it is left out."""
    return measured.stages if measured.forward_only else measured.shown


def of_steps(steps: Iterable[TracedStep], measured: TargetStages, table: Table | Unfit) -> StepTimeline:
    """Returns one step on the first rank of every stage in ``measured`` and on the slow ranks, on the clock of the
    table. Of its steps it is the one nearest to the average, and of several the last, so that the drawing is as long as
    the numbers say. Without a table, it is the first call of the last step, which all hosts begin alike."""
    row_of = {rank: place for place, stage in enumerate(_drawn(measured)) for rank in stage.ranks}
    of_ranks = [step for step in steps if step.rank in row_of]
    if isinstance(table, Unfit):
        key = min(step.key for step in of_ranks if step.step == measured.steps[-1])
    else:  # the first of the reversed steps is the last
        t = len(table.length) - 1 - int(np.abs(table.length - table.length.mean()).round(6)[::-1].argmin())
        key = int(table.steps[t]), int(table.calls[t])
    same = sorted((step for step in of_ranks if step.key == key), key=lambda step: -step.rank)
    chosen = [step for _, step in sorted({row_of[step.rank]: step for step in same}.items())]
    notes = ["a profiler recorded it, which makes most steps longer", *_of_clocks(measured)]
    hosts = tuple(sorted({step.metadata.host for step in chosen}))
    if isinstance(table, Table):
        offsets = [table.offset_of(step.rank, t) for step in chosen]
    else:
        offsets = [-step.extent[0] if len(hosts) > 1 else 0 for step in chosen]
        apart = Note("clocks_apart", names=hosts, said="nothing aligns the hosts' clocks")
        notes += [apart.text] * (len(hosts) > 1)
    if any(step.has_kernels and not step.on_gpu for step in chosen):
        notes.append("these are the host's times: when work was given to the GPU, not when the GPU did it")
    rows = (Row(s.stage, s.rank, s.extent, s.laid_out, ns) for s, ns in zip(chosen, offsets, strict=True))
    return StepTimeline(key[0], tuple(rows), max(max(len(s.metadata.chunks), 1) for s in chosen), tuple(notes))


def of_table(table: Table, measured: TargetStages, reading: FleetReading) -> StepTimeline:
    """Returns the last step of a table, on the clock of the table: of a run that became slow, it shows the present.
    The first rank of every stage, and slow ranks, are drawn with everything that their timelines hold."""
    key = Key(table.target, table.role, table.sizes)
    t = int(np.searchsorted(table.steps, table.steps[-1]))
    rows = []
    for stage in _drawn(measured):
        call = reading.call(key, stage.ranks[0], int(table.steps[t]), int(table.calls[t]))
        if not call:
            continue  # the file has gone since the table was made
        whole, *passes = call
        offset_ns = table.offset_of(stage.ranks[0], t)
        rows.append(Row(stage.pp, stage.ranks[0], (whole.start, whole.end), passes, offset_ns))
    return StepTimeline(int(table.steps[t]), tuple(rows), table.schedule.chunks, tuple(_of_clocks(measured)))


def of_roles(reading: FleetReading, roles: Sequence[tuple[Key, RankRow]]) -> StepTimeline:
    """Returns what a rank of each role does in one iteration: that of median length on the first of these ranks. Each
    is on the wall clock of its host, and blank while it waits. There are no rows if no iteration is whole."""
    names = [key.role or key.target for key, _ in roles]
    files, rows = [[*reading.timelines.steps_of(rank.files, key)] for key, rank in roles], []
    step, *extent = median_iteration(files[0]) or (0, 0, 0)
    phase_of = {part: phase for phase, (_, parts) in PHASES.items() for part in parts}
    for name, (_, rank), of_rank in zip(names, roles, files, strict=True):
        if spans := spans_of(of_rank, *extent):
            whole = spans[0][1], spans[-1][2]
            phases = ((phase_of.get(part, "other"), begin, end) for part, begin, end in spans if part != ranges.WAITING)
            passes = [Pass(phase, 0, None, None, begin, end) for phase, begin, end in phases]
            rows.append(Row(name, rank.coords.rank, whole, passes, 0))
    hosts = sorted({rank.host for _, rank in roles})
    notes = [f"it is the iteration of median length on rank {roles[0][1].coords.rank} of {names[0]}"]
    notes += [f"each row is on the clock of its host, which nothing aligns: {listed(hosts, 4)}"] * (len(hosts) > 1)
    return StepTimeline(step, tuple(rows), 1, tuple(notes))


def _of_clocks(measured: TargetStages) -> list[str]:
    return [note.text for note in measured.warnings if note.kind in ("clocks_aligned", "clocks_apart")]


def boxes(step: StepTimeline) -> dict[str, Any]:
    """Returns the rows for the script. Times are microseconds from the start of the step.

    The list ``boxes`` of a row is flat, with five numbers for each box: start (relative to the start of the previous
    box), duration, kind, microbatch and chunk (-1: unknown or none).
    """
    first = min(row.extent[0] + row.offset_ns for row in step.rows)
    names = sorted({box.kind for row in step.rows for box in row.passes})
    numbers = {name: number for number, name in enumerate(names)}
    packed = []
    for row in step.rows:
        shift, flat, before = row.offset_ns - first, list[int](), 0
        for box in row.passes:
            start, end = (round((time + shift) / 1000) for time in (box.start, box.end))
            unknown = (-1 if value is None else value for value in (box.microbatch, box.chunk))
            flat += [start - before, end - start, numbers[box.kind], *unknown]
            before = start
        span = [round((time + shift) / 1000) for time in row.extent]
        packed.append({"stage": row.stage, "rank": row.rank, "span": span, "boxes": flat})
    return {"names": names, "kinds": list(map(_kind, names)), "chunks": step.chunks, "rows": packed}


def _kind(name: str) -> str:
    return PHASES[name][0] if name in PHASES else name if name in _KINDS else "exchange"


def scatter(lengths: Lengths) -> tuple[list[tuple[float, float, float]], float, float]:
    """Returns the scatter plot of ``lengths``, in the units of `WIDTH` and `HEIGHT`: for each microbatch its distance
    from the left, from the top as measured, and from the top as the lengths predict; the sum of squared lengths at the
    right end; and the longest time in milliseconds, which is near the top."""
    widest = max(squares for squares, _, _ in lengths.drawn)
    longest = max(max(measured, by_work) for _, measured, by_work in lengths.drawn)

    def top(ms: float) -> float:
        return HEIGHT * (1.0 - 0.95 * ms / longest)

    dots = [(0.98 * WIDTH * squares / widest, top(ms), top(by_work)) for squares, ms, by_work in lengths.drawn]
    return dots, widest, longest


def curve(fleet: Fleet, causes: Iterable[Cause]) -> tuple[tuple[str, ...], list[tuple[int, float]], float] | None:
    """Returns the step time over the run, in the units of `WIDTH` and `HEIGHT`: the points of each stretch without a
    gap, in the syntax of SVG; the steps from which on something is slow, each with its distance from the left; and the
    milliseconds at the upper end of the axis. None if fewer than two points are known."""
    times = [ms for ms in fleet.times.step_ms if ms is not None]
    if len(times) < 2 or max(times) <= 0:
        return None
    top, begin = max(times), fleet.buckets[0]
    span = max(fleet.buckets[-1] - begin, 1)
    stretches: list[list[str]] = [[]]
    for step, ms in zip(fleet.buckets, fleet.times.step_ms, strict=True):
        if ms is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{(step - begin) / span * WIDTH:.1f},{(1 - ms / top) * (HEIGHT - 10) + 5:.1f}")
    lines = tuple(" ".join(stretch) for stretch in stretches if stretch)
    onsets = {cause.since for cause in causes if cause.since is not None}
    onsets |= {shift.step for shift in fleet.shifts if shift.change > 0}
    return lines, [(step, (step - begin) / span * WIDTH) for step in sorted(onsets)], top
