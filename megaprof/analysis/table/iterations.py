"""Where whole iterations of the host's loop go: from the first call of a step to the first call of the next one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.facts import PARTS, part_of_call, unpack_between, unpack_data, unpack_spans
from megaprof.formats.ranges import DATA_WAIT, WAITING

#: Flags of calls whose times do not count.
LEFT_OUT = format.FAILED | format.DISTURBED | format.INCOMPLETE
DATA, EXCHANGES, GRADIENTS, UNKNOWN = DATA_WAIT, "exchanges", "gradients", "between"
#: The parts inside the calls of the schedule.
STEP = (DATA, "forward", "backward", "combined", EXCHANGES, GRADIENTS)
ROLLOUT = "rollout"
#: The parts that only a job of reinforcement learning has.
OF_RL = ("reference", ROLLOUT, "rewards", "weight_sync", WAITING)

Parts = Mapping[str, npt.NDArray[np.float64]]
"""Milliseconds of each iteration, by the name of the part."""


@dataclass(frozen=True)
class PartOfIteration:
    """A part of the iterations. Milliseconds are of an average iteration, so those of all parts add up to it."""

    name: str
    """``data_wait``: forwards waited for data. ``forward``, ``backward``, ``combined``: the passes without that.
    ``exchanges``: the rest of the calls of the schedule, which is exchanges and waiting for other stages.
    ``gradients``: gradients were finalised. ``optimizer``, ``evaluation``, ``saving``, ``logging``, ``data``,
    ``rewards``, ``weight_sync``, ``offload``: what the host did between calls. A target, or ``reference``: other calls
    of the schedule. ``rollout``: a rollout, or the wait for one after weights were synchronised. ``waiting``: the
    process had been asked for nothing else. ``garbage_collection``: Python collected garbage outside of all of these.
    ``between``: it is not known what the host did between calls."""
    ms: float
    """Mean of the ranks that were read."""
    often: float
    """The fraction of the iterations that have it."""
    longest_ms: float
    """The longest in one iteration on one rank."""
    rank: int
    """The rank with most of it."""
    rank_ms: float
    """Milliseconds of this rank."""


@dataclass(frozen=True)
class Iterations:
    """Where the iterations of a job go."""

    count: int
    """The number of iterations on the rank with most of them."""
    ms: float
    """Milliseconds from the start of the first call of a step to that of the next, on average over ranks."""
    step_ms: float
    """The part of it inside the calls of the schedule, on the rank that is in them longest: others wait for it."""
    parts: tuple[PartOfIteration, ...]
    """Its parts: those inside of the step, then the others, and what is not known."""
    quicker_rollout_ms: float | None = None
    """Milliseconds of an iteration if rollouts took a fifth less time; null if the ranks wait for none."""
    rollout_ahead_ms: float | None = None
    """Milliseconds of an iteration if each rollout ran beside the rest of the iteration before it, as quickly as now;
    null if the ranks wait for none."""

    def ms_of(self, *names: str) -> float:
        """Returns the milliseconds of these parts."""
        return sum(part.ms for part in self.parts if part.name in names)


def _iterations(
    timeline: format.Timeline, rows: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_], npt.NDArray[np.float64]] | None:
    """Returns which of ``rows`` begin the iterations in a file, and the one behind them; which iterations count; and
    the milliseconds that each has of each of `PARTS`. None without a whole one. See `parts_of`."""
    steps, facts = timeline.steps[rows], timeline.facts(format.BETWEEN)
    first = np.flatnonzero(steps["index"] == 0)
    if len(first) < 2:
        return None
    before = [facts.get(row) for row in rows.tolist()]
    between = unpack_between([payload or b"" for payload in before])
    known = np.array([before[call] is not None for call in first[1:]]) & (np.diff(steps["step"][first]) == 1)
    begin = between[first, PARTS.index(ROLLOUT)] > 0.0
    if begin.any():
        begin[0] |= before[first[0]] is None  # the first one of a process
    begins = np.flatnonzero(begin) if begin.any() else np.arange(len(first))
    if len(begins) < 2:
        return None
    whole, first = np.logical_and.reduceat(known[: begins[-1]], begins[:-1]), first[begins]
    # What a fact tells is of the time before its call.
    between = np.add.reduceat(between[1 : first[-1] + 1], first[:-1])
    left_out = np.sort(timeline.steps["start_ns"][timeline.steps["flags"] & LEFT_OUT > 0])  # calls of all targets
    whole &= np.diff(np.searchsorted(left_out, steps["start_ns"][first])) == 0
    return first, whole, between


def parts_of(timeline: format.Timeline, rows: npt.NDArray[np.intp]) -> Parts:
    """Returns the parts of the iterations in a file, of the steps of one target and role, which may have different
    numbers of microbatches. They add up to the wall time of each, on a GPU's clock as far as that agrees with the
    host's. With rollouts, an iteration has all steps from one to the next. Iterations in which a window was open, or a
    call failed, or whose next step is missing, do not count."""
    if (found := _iterations(timeline, rows)) is None:
        return {}
    steps, (first, whole, between) = timeline.steps[rows], found
    waits_us = np.zeros(len(timeline.steps))
    for row, payload in timeline.facts(format.DATA).items():
        if row < len(waits_us) and (waits := unpack_data(payload)) is not None:
            waits_us[row] = waits.sum()

    def sums(us: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(np.add.reduceat(us, first)[:-1][whole] / 1e3)

    calls = {name: sums(steps[name].astype(float)) for name in ("duration", *codes.KINDS.values())}
    parts = {DATA: np.minimum(sums(waits_us[rows]), calls["forward"] + calls["combined"])}
    in_forward = np.minimum(parts[DATA], calls["forward"])
    parts |= {"forward": calls["forward"] - in_forward, "backward": calls["backward"]}
    parts |= {"combined": calls["combined"] - (parts[DATA] - in_forward), GRADIENTS: calls["finalize"]}
    parts[EXCHANGES] = np.maximum(calls["duration"] - sum(parts.values()), 0.0)
    of_calls = timeline.metadata[steps["metadata"][0]]
    own = part_of_call(of_calls.target, of_calls.role)
    parts |= {name: between[whole, place] for place, name in enumerate(PARTS) if name != own}
    parts[UNKNOWN] = np.diff(steps["start_ns"][first])[whole] / 1e6 - sum(parts.values())
    return parts


OneRank = Iterable[tuple[format.Timeline, npt.NDArray[np.intp]]]
"""The files of a rank, each with the positions of the steps of one target and role."""


def median_iteration(files: OneRank) -> tuple[int, int, int] | None:
    """Returns the first step of the iteration of median length on one rank, and when it began and ended, in nanoseconds
    of the wall clock; None without a whole one."""
    lengths = []
    for timeline, rows in files:
        if (found := _iterations(timeline, rows)) is not None:
            first, whole, _ = found
            numbers, begins = (timeline.steps[name][rows[first]].tolist() for name in ("step", "start_ns"))
            each = zip(numbers, begins, begins[1:], whole, strict=False)
            lengths += [(end - begin, number, begin, end) for number, begin, end, counts in each if counts]
    return sorted(lengths)[(len(lengths) - 1) // 2][1:] if lengths else None


def spans_of(files: OneRank, begin: int, end: int) -> list[tuple[str, int, int]]:
    """Returns what a rank did from ``begin`` to ``end``, nanoseconds of the wall clock: each part with when it began
    and ended, in order, without a gap."""
    found = []
    for timeline, rows in files:
        starts, facts = timeline.steps["start_ns"][rows], timeline.facts(format.BETWEEN)
        # From the last call before the time until the first one behind it, whose fact is about the time before it.
        near = slice(max(int(starts.searchsorted(begin, "right")) - 1, 0), int(starts.searchsorted(end)) + 1)
        for row, step in zip(rows[near].tolist(), timeline.steps[rows[near]], strict=True):
            metadata, start = timeline.metadata[step["metadata"]], int(step["start_ns"])
            own = part_of_call(metadata.target, metadata.role), start, start + 1000 * int(step["duration"])
            found += [own, *unpack_spans(facts.get(row, b""), start)]
    spans, at = list[tuple[str, int, int]](), begin
    for part, *times in sorted(found, key=itemgetter(1)):
        since, until = (min(max(time, at), end) for time in times)
        spans += [(UNKNOWN, at, since)] * bool(spans)
        spans.append((part, since, until))
        at = until
    return [(part, since, until) for part, since, until in spans if since < until]


def iterations_of(by_rank: Mapping[int, Sequence[Parts]]) -> Iterations | None:
    """Returns where the iterations of these ranks go; None if no whole one is known."""
    ranks: dict[int, Parts] = {}
    for rank, files in by_rank.items():
        if whole := [parts for parts in files if len(parts.get(UNKNOWN, ()))]:
            ranks[rank] = {name: np.concatenate([parts[name] for parts in whole]) for name in whole[0]}
    if not ranks:
        return None
    names = (*STEP, *(name for name in PARTS if any(name in parts for parts in ranks.values())), UNKNOWN)
    # A GPU finishes a step after its host has gone on, so what is left is less than nothing in some iterations.
    means = {rank: {name: float(np.mean(parts.get(name, 0.0))) for name in names} for rank, parts in ranks.items()}
    found = []
    for name in names:
        ms = {rank: max(of_rank[name], 0.0) for rank, of_rank in means.items()}
        dearest = max(ms, key=lambda rank: ms[rank])
        took = [parts[name] for parts in ranks.values() if name in parts]
        if ms[dearest] > 0.0:
            often = float(np.mean(np.concatenate(took) > 0.0))
            longest = max(float(of_rank.max()) for of_rank in took)
            mean = float(np.mean([*ms.values()]))
            found.append(PartOfIteration(name, mean, often, longest, dearest, ms[dearest]))
    count, whole_ms = max(len(parts[UNKNOWN]) for parts in ranks.values()), sum(part.ms for part in found)
    step_ms = max(sum(of_rank[name] for name in STEP) for of_rank in means.values())
    iterations = Iterations(count, whole_ms, step_ms, tuple(found))
    if (rollout_ms := iterations.ms_of(ROLLOUT)) == 0.0:
        return iterations
    # Whichever is shorter, the rollout or the rest, hides behind the other one.
    beside = [np.minimum(parts[ROLLOUT], sum(parts.values()) - parts[ROLLOUT]).mean() for parts in ranks.values()]
    return replace(
        iterations,
        quicker_rollout_ms=whole_ms - rollout_ms / 5,
        rollout_ahead_ms=whole_ms - max(float(np.mean(beside)), 0.0),
    )
