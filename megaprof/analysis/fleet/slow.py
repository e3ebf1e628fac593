"""Ranks and groups of ranks that hold the others up: by computing, in a collective, or by coming late to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megaprof.analysis.fleet.reading import Key, RankSeries
from megaprof.analysis.fleet.stragglers import Buckets, Run, coupled, groups_of, layout_of, slow_rows
from megaprof.analysis.fleet.trends import Floats, others_median
from megaprof.analysis.trace.calls import grouped
from megaprof.parallel.selectors import Selector

#: A rank that computes longer is why its pipeline comes late if that is at least this part of what the others wait: a
#: few milliseconds by chance do not explain hundreds.
EXPLAINS = 0.25

Group = tuple[int, int]  # pp and tp of ranks that synchronise gradients with each other


@dataclass(frozen=True)
class Straggler:
    """Ranks that are slower than the others of their stage."""

    what: str
    """``compute``; ``synchronisation`` of gradients among all of ``ranks``; or ``arrival``: they come to it later than
    the others, and were not found to compute longer."""
    ranks: tuple[int, ...]
    """Their global numbers; several where they wait for each other."""
    hosts: tuple[str, ...]
    """The machines that they run on, as far as known."""
    stage: int
    """Their pipeline rank; that of the first one where they are of several."""
    from_step: int
    """The first slow step, to a bucket."""
    until: int | None
    """The last slow step; None where they are slow to the end."""
    since_start: bool
    """Whether they are slow from the first step on that is known."""
    factor: float
    """Own time over the peers'."""
    own_ms: float
    """Milliseconds per step that they take."""
    peers_ms: float
    """Milliseconds per step that their peers take."""
    peers: int
    """How many ranks, or groups of as many ranks, they were compared with."""
    capture: str | None
    """The selection of ranks that would show which of them it is; None for one rank."""
    share: float | None = None
    """Where it comes and goes, the fraction of all steps in which they are slow; None: in all since ``from_step``."""
    last_step: int | None = None
    """Where it comes and goes, the last slow step."""
    unseen: tuple[int, ...] = ()
    """Ranks that wait for them inside a microbatch and have no timeline: it may be one of these."""
    computing_ms: float | None = None
    """Of ranks that come last: milliseconds per step that their pipeline computes longer than the others, in the same
    steps."""
    entering_ms: float | None = None
    """The same: milliseconds that they are away between steps for longer than the others, and so enter a step late."""
    gain_ms: float | None = None
    """Milliseconds by which the step would be shorter without it, by replay; None where none was made."""

    @property
    def cost_ms(self) -> float:
        """Milliseconds by which the step would be shorter without it: by replay, or by what it takes longer."""
        if self.gain_ms is not None:
            return self.gain_ms
        longer = self.peers_ms - self.own_ms if self.what == "arrival" else self.own_ms - self.peers_ms
        return longer * (1.0 if self.share is None else self.share)


def matrix_of(ranks: Sequence[RankSeries], name: str, buckets: Buckets) -> Floats:
    """``compute`` or ``finalize``, [rank, bucket], NaN where a rank has no steps."""
    matrix = np.full((len(ranks), len(buckets.first)), np.nan)
    for row, rank in zip(matrix, ranks, strict=True):
        begin = rank.first - buckets.begin
        row[begin : begin + len(rank.counts)] = getattr(rank, name)
    return matrix


def slow_ranks(
    key: Key,
    ranks: Sequence[RankSeries],
    at_stage: dict[int, list[int]],
    compute: Floats,
    buckets: Buckets,
) -> list[Straggler]:
    """Ranks, or groups of ranks that wait for each other inside a microbatch, that compute longer than the others of
    their stage. ``at_stage``: rows of ``compute`` [rank, bucket]; what is slow until the end comes first."""
    places = {r.coords.rank: r.coords for r in ranks}
    layout = layout_of(places.values(), key.sizes)
    row_of = {r.coords.rank: row for row, r in enumerate(ranks)}
    by_stage: dict[int, list[tuple[int, ...]]] = {pp: [] for pp in at_stage}
    for group in groups_of(places, layout):
        by_stage[places[group[0]].pp].append(group)
    found = []
    for pp, groups in by_stage.items():
        rows = [[row_of[rank] for rank in group] for group in groups]
        typical = np.array([np.nanmedian(compute[own], axis=0) if len(own) > 1 else compute[own[0]] for own in rows])
        for run in slow_rows(typical, buckets):
            found.append(_straggler(ranks, groups[run.row], pp, run, buckets, len(groups) - 1))
        # Who waits for nobody inside a microbatch stands out of its group.
        members = [(number, rank) for number, group in enumerate(groups) if len(group) > 1 for rank in group]
        if members:
            own = compute[[row_of[rank] for _, rank in members]]
            against = np.concatenate([others_median(compute[each]) for each in rows if len(each) > 1])
            for run in slow_rows(own, buckets, against=against):
                number, rank = members[run.row]
                found.append(_straggler(ranks, (rank,), pp, run, buckets, len(groups[number]) - 1))
    if layout is not None:
        found = [replace(s, unseen=tuple(sorted(coupled(layout, s.ranks[0]) - places.keys()))) for s in found]
    return sorted(found, key=lambda s: (s.until is not None, -s.cost_ms))


def _straggler(
    ranks: Sequence[RankSeries],
    members: Iterable[int],
    pp: int,
    run: Run,
    buckets: Buckets,
    peers: int,
    what: str = "compute",
) -> Straggler:
    members = tuple(sorted(members))
    hosts = {r.coords.rank: r.host for r in ranks}
    return Straggler(
        what=what,
        ranks=members,
        hosts=tuple(sorted({host for rank in members if (host := hosts[rank]) is not None})),
        stage=pp,
        from_step=int(buckets.first[run.first]),
        until=None if run.to_end else int(buckets.last[run.last]),
        since_start=run.since_start,
        factor=run.factor,
        own_ms=run.own_ms,
        peers_ms=run.peers_ms,
        peers=peers,
        capture=str(Selector.of_ranks(members)) if len(members) > 1 else None,
        share=run.share,
        last_step=None if run.share is None else int(buckets.last[run.last]),
    )


def slow_groups(
    ranks: Sequence[RankSeries], groups: list[Group], rows: Floats, buckets: Buckets, floor: float
) -> list[Straggler]:
    """Groups whose gradient synchronisation ([group, bucket]) is slower than that of the others of their stage."""
    found: list[Straggler] = []
    for pp in sorted({pp for pp, _ in groups}):
        which = [n for n, group in enumerate(groups) if group[0] == pp]
        for run in slow_rows(rows[which], buckets, floor_ms=floor):
            group = groups[which[run.row]]
            members = [r.coords.rank for r in ranks if (r.coords.pp, r.coords.tp) == group]
            found.append(_straggler(ranks, members, pp, run, buckets, len(which) - 1, "synchronisation"))
    return found


def late_ranks(
    ranks: Sequence[RankSeries],
    finalize: Floats,
    compute: Floats,
    between: Floats,
    step_ms: Floats,
    buckets: Buckets,
    slow: Sequence[Straggler],
) -> list[Straggler]:
    """Ranks that the others wait for in the gradient synchronisation, whose pipeline holds none that computes longer:
    their exchanges, their data or what runs between the steps takes longer. Those of one time are one entry.

    ``finalize``: milliseconds that each rank spends in it [rank, bucket]; ``compute``: that it computes;
    ``between``: from step to step; ``slow``: ranks that compute longer.
    """
    typical = float(np.nanmedian(step_ms))
    groups = grouped(range(len(ranks)), lambda row: (ranks[row].coords.pp, ranks[row].coords.tp))
    pipeline = {r.coords.rank: (r.coords.dp, r.coords.cp) for r in ranks}

    def explained(run: Run) -> bool:
        begin, end = buckets.first[run.first], buckets.last[run.last]
        own = pipeline[ranks[run.row].coords.rank]
        waiting = abs(run.peers_ms - run.own_ms)
        at_that_time = (s for s in slow if s.from_step <= end and begin <= (s.until or end))
        enough = (s for s in at_that_time if s.own_ms - s.peers_ms >= EXPLAINS * waiting)
        return any(own in {pipeline[rank] for rank in s.ranks} for s in enough)

    together: list[list[Run]] = []
    for rows in groups.values():
        for run in _late_rows(rows, finalize[rows], typical, buckets):
            if explained(run):
                continue
            same = [each for each in together if each[0].first <= run.last and run.first <= each[0].last]
            if same:
                same[0].append(run)
            else:
                together.append([run])
    found = []
    for runs in together:
        late = [ranks[run.row].coords for run in runs]
        members = [place.rank for place in late]
        peers = len(groups[late[0].pp, late[0].tp]) - len({pipeline[rank] for rank in members})
        computing = _longer(ranks, members, compute, runs[0])
        entering = _longer(ranks, members, between, runs[0])
        each = _straggler(ranks, members, late[0].pp, runs[0], buckets, peers, "arrival")
        found.append(replace(each, computing_ms=computing, entering_ms=entering))
    return found


def _longer(ranks: Sequence[RankSeries], members: Sequence[int], times: Floats, run: Run) -> float:
    """Milliseconds by which the worst stage of the members' pipelines takes longer than its peers, in this very
    stretch."""
    pipelines = {(r.coords.dp, r.coords.cp) for r in ranks if r.coords.rank in members}
    worst = 0.0
    for pp in {r.coords.pp for r in ranks}:
        rows = [n for n, r in enumerate(ranks) if r.coords.pp == pp]
        part = times[rows, run.first : run.last + 1]
        if len(rows) < 2 or not np.isfinite(part).any():
            continue
        longer = part - others_median(part)
        for row, values in zip(rows, longer, strict=True):
            own = (ranks[row].coords.dp, ranks[row].coords.cp)
            if own in pipelines and np.isfinite(values).any():
                worst = max(worst, float(np.nanmedian(values)))
    return worst


def _late_rows(rows: Sequence[int], own: Floats, typical: float, buckets: Buckets) -> Iterator[Run]:
    """When rows of one group are waited for by the others of it, with what both spend in the synchronisation."""
    others = others_median(own)
    # Against one step time: a step is as much longer as the others wait.
    late = np.maximum(typical + others - own, typical / 2)
    for run in slow_rows(late, buckets, against=np.full_like(late, typical)):
        alone, theirs = (float(np.nanmedian(part[run.row, run.first : run.last + 1])) for part in (own, others))
        yield replace(run, row=rows[run.row], own_ms=alone, peers_ms=theirs)
