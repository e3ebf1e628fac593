"""One look at a running job: where every rank stands, which ranks the others wait for, and sentences and tables about
it, for every command."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np

from megaprof.analysis.fleet.fleet import stood_still_in
from megaprof.analysis.hang import Hang, hang_of_job
from megaprof.analysis.report.tables import Cell, Column, TableView, stacked, table
from megaprof.analysis.report.text.sentences import standstill_findings
from megaprof.analysis.words import ago, capital, counted, number, percent, ranks, ratio, sentence, stages
from megaprof.control.blame import Blame, WaitedFor, find_culprits
from megaprof.control.directory import RunningJob, Unsafe, find_job, roles_with_a_run
from megaprof.formats import timeline as format
from megaprof.formats.job import STUCK_SECONDS, RankStatus, RunRecord, Standing, Standstill, completed
from megaprof.formats.names import parse_artifact_name, shard
from megaprof.formats.phrases import Unanswerable
from megaprof.metrics import WAITS, HostBound, SlowRanks, Summary, host_bound, slow_ranks, summarise
from megaprof.parallel.peers import Flags, began, moving_median

_CULPRITS = 4
#: Seconds by which the clocks of two hosts may differ.
_CLOCKS_SECONDS = 60.0
#: Steps of a running median, in which two unlike ones do not count.
_WIDTH = 5
#: Where a job without a timeline stands still.
_NOWHERE = " Only a timeline (--profile-tool timeline) of their target shows where ranks are, and whom others wait for."

State = Literal["starts", "runs", "hangs", "died", "ended"]


@dataclass(frozen=True)
class View:
    job: RunningJob
    statuses: dict[int, RankStatus]
    """The statuses that could be read, by rank."""
    now: float
    """Wall-clock seconds, by the job's clocks."""
    blame: Blame
    silence: str | None
    """Why the job will not answer any more; None while it does."""

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.job.run, self.statuses.values())

    @cached_property
    def slow(self) -> SlowRanks | None:
        """The ranks that are slower than their peers, of the stage where they are slowest (`slow_ranks`), and since
        when the slowest one is at least half as slow as now; None if there are none."""
        slow = next(iter(slow_ranks(self.statuses[rank] for rank in self.heard)), None)
        if slow is None:
            return None
        half = 1.0 + (slow.ratio - 1.0) / 2
        both = slow.ranks[0], slow.peer
        since = self._since(both, "passes_us", lambda own, peer: own / np.maximum(peer, 1.0) > half)
        return replace(slow, since=since)

    @cached_property
    def waits(self) -> Mapping[int, float]:
        """The ranks whose training threads wait for a processor core, starting with the one that waits longest, and the
        part of the time that each waits."""
        waits = {rank: part for rank in self.heard if (part := self.statuses[rank].waits or 0.0) > WAITS}
        return dict(sorted(waits.items(), key=lambda rank_and_part: (-rank_and_part[1], rank_and_part[0])))

    @cached_property
    def host_bound(self) -> HostBound | None:
        """The stages whose GPUs wait for their host in most passes; None if there are none."""
        waits = host_bound(self.statuses[rank] for rank in self.heard)
        if waits is None:
            return None
        return replace(waits, since=self._since((waits.rank,), "host_bound", lambda share: share > 0.5))

    def _since(
        self, of: Sequence[int], figure: Literal["passes_us", "host_bound"], is_there: Callable[..., Flags]
    ) -> int | None:
        """Returns the step since which something is almost always there, by a figure of each of these ranks; None if it
        is there from the first step on, if it comes and goes, or without timelines. Running medians remove single
        unlike steps, and keep a change of level where it is."""
        if (recent := self.statuses[of[0]].recent) is None:
            return None
        of_ranks = [_by_step(self.job, rank, recent.target, figure) for rank in of]
        steps = sorted(set.intersection(*map(set, of_ranks)))
        series = (np.array([values[step] for step in steps], dtype=np.float64) for values in of_ranks)
        first = began(is_there(*(moving_median(each, _WIDTH) for each in series))) if steps else None
        return steps[first] if first else None

    @property
    def state(self) -> State:
        if self.job.run.ended is not None:
            return "ended"
        if self.silence is not None or any(culprit.silent for culprit in self.blame.culprits):
            return "died"
        if self.blame.still:
            return "hangs"
        return "runs" if any(status.calls for status in self.statuses.values()) else "starts"

    @cached_property
    def standstill(self) -> Standstill | None:
        """The standstill of the job, as its statuses show it: now, or when it, or some of its ranks, were killed in the
        middle of a step. None if it runs, or if it ended normally; its timelines show where it had stood still before.
        """
        lasts, blame = self.silence is None, self.last_blame
        outcome: Literal["lasts", "unfinished"] = "lasts" if lasts else "unfinished"
        ended = self.job.run.ended is not None and not any(culprit.silent for culprit in self.blame.culprits)
        if ended or (lasts and not blame.still):
            return None
        statuses = {rank: status for rank, status in self.statuses.items() if lasts or not status.ended}
        places = [status.place for status in statuses.values() if status.place is not None]
        if not places:
            steps = [step for status in statuses.values() if (step := status.last_step) is not None]
            inside = None if any(status.whereabouts_unknown for status in statuses.values()) else False
            if not steps or not (blame.still or (inside is None and not lasts)):
                return None
            return Standstill(max(steps), blame.still, (), 0, outcome, inside=inside)
        # Where a silent rank stands by now is not known.
        blame = replace(blame, culprits=tuple(culprit for culprit in blame.culprits if not culprit.silent))
        stuck = [statuses[culprit.rank].place for culprit in blame.culprits if culprit.rank in statuses]
        last = max((blame.still and [*filter(None, stuck)]) or places, key=lambda place: place.step)
        targets = {call.target for status in statuses.values() for call in status.calls}
        waited_for = standings(self.job.run, statuses, blame) if blame.still else ()
        waiting = len(set(blame.stuck) - {standing.rank for standing in waited_for})
        target = last.target if len(targets) > 1 else None
        return Standstill(last.step, blame.still, waited_for, waiting, outcome, target)

    @cached_property
    def standstills(self) -> tuple[Standstill, ...]:
        """The steps in which the job stands still or stood still, as the report names them: from the statuses of its
        ranks, or after it ended from its timelines."""
        if self.state == "ended":
            stood = stood_still_in(self.job.directory, self.job.run.role, os.cpu_count() or 1)
            return completed(stood, self.standstill)
        return () if self.standstill is None else (self.standstill,)

    @cached_property
    def last_blame(self) -> Blame:
        """The ranks that keep it waiting or, once it is gone, that kept it waiting at its last moment."""
        if self.silence is None:
            return self.blame
        last = max((status.time for status in self.statuses.values() if not status.ended), default=0.0)
        return _blame(self.job, self.statuses, last, afterwards=True)

    @property
    def heard(self) -> list[int]:
        return sorted(rank for rank, status in self.statuses.items() if not status.late(self.now))


def look_at(job: RunningJob, hang_after: float = STUCK_SECONDS, *, patient: bool = True) -> View:
    """Looks at ``job`` once. A rank hangs after ``hang_after`` seconds without a move. ``patient``: waits for ranks
    that may still be starting."""
    silence = job.silence()
    statuses = job.statuses()
    while patient and silence is None and job.starting(statuses):
        time.sleep(min(job.run.interval, 0.5))
        statuses = job.statuses()
    now = job.now(statuses, silence)
    return View(job, statuses, now, _blame(job, statuses, now, hang_after), silence)


def _blame(
    job: RunningJob,
    statuses: Mapping[int, RankStatus],
    now: float,
    hang_after: float = STUCK_SECONDS,
    *,
    afterwards: bool = False,
) -> Blame:
    """Returns whom the job waits for, by where its ranks stand and what they have in flight; in ``waits_for``, by where
    they stand alone. Peers that wait for each other inside a microbatch stand at the same place."""
    find = partial(find_culprits, job.run, statuses, now, hang_after, afterwards=afterwards)
    blame, called = find(), defaultdict[int, set[int]](set)
    if blame.stuck:
        hang = hang_of_job(job.in_flight(), blame.waits_for)
        named = {culprit.rank for culprit in hang.culprits}
        for other in (*hang.culprits, *hang.held_up):
            for rank in set(other.waiting) - named:
                called[rank].add(other.rank)
    return replace(find(called=called), waits_for=blame.waits_for) if called else blame


def last_stand(directory: Path) -> tuple[Standstill, float] | None:
    """Returns the standstill of the job in a save directory, of the first role that has one, and when its ranks were
    last heard of, in wall-clock seconds; None without one. May take a few seconds, like `RunningJob.silence`."""
    try:
        roles = roles_with_a_run(directory)
    except Unsafe:
        return None
    for role in roles:
        with suppress(Unanswerable):
            view = look_at(find_job(directory, role), patient=False)
            # Of several roles, some are idle while another one works.
            if view.standstill is not None and (view.standstill.inside or len(roles) == 1):
                return view.standstill, max(status.time for status in view.statuses.values())
    return None


def standings(run: RunRecord, statuses: Mapping[int, RankStatus], blame: Blame) -> tuple[Standing, ...]:
    found = []
    for rank in (culprit.rank for culprit in blame.culprits):
        if (status := statuses.get(rank)) is not None:
            place = (status.part,) if (at := status.place) is None else (at.phase, at.microbatch, at.chunk)
            found.append(Standing(rank, status.coords["pp"], *place))
        elif run.layout is not None:
            found.append(Standing(rank, run.layout.coords(rank).pp))
    return tuple(found)


def _by_step(job: RunningJob, rank: int, target: str, figure: Literal["passes_us", "host_bound"]) -> dict[int, float]:
    """Returns a figure of each step that this run made on a rank, without those that failed or that a profiler
    disturbed: the microseconds of its passes, or the part of them in which the GPU waited for its host."""
    values: dict[int, float] = {}
    for path in sorted((job.directory / shard(rank, job.run.world)).glob(f"*{format.SUFFIX}")):
        name = parse_artifact_name(path.name)
        if name is None or name.coords.rank != rank:
            continue
        try:
            timeline = format.read_timeline(path, events=figure == "host_bound")
        except format.UnreadableTimeline:
            continue
        steps = timeline.steps
        described = [each.target == target and not each.around_windows for each in timeline.metadata]
        clean = np.isin(steps["metadata"], np.flatnonzero(described))
        clean &= steps["flags"] & (format.FAILED | format.DISTURBED) == 0
        rows = np.flatnonzero(clean & (steps["start_ns"] / 1e9 > job.run.started - _CLOCKS_SECONDS))
        made: Iterable[float | None] = (
            steps["forward"][rows].astype(float) + steps["backward"][rows] + steps["combined"][rows]
        )
        if figure == "host_bound":
            made = map(timeline.host_bound_passes, rows.tolist())
        numbers = steps["step"][rows].tolist()
        values.update((step, value) for step, value in zip(numbers, made, strict=True) if value is not None)
    return values


def verdict(view: View) -> str | None:
    """Returns what is wrong with the job, in sentences; None if nothing is. Silent ranks are said elsewhere."""
    blame = view.blame
    if view.state == "ended":
        return None
    if view.silence is not None:
        return sentence(view.silence)
    if blame.still:
        unknown = any(status.whereabouts_unknown for status in view.statuses.values())
        return f"The job appears to hang: no rank has moved for {ago(blame.still)}." + (_NOWHERE if unknown else "")
    if blame.stuck:
        have = "has" if len(blame.stuck) == 1 else "have"
        return f"{len(blame.stuck)} of {counted(view.job.run.world, 'rank')} {have} not moved for long."
    complaints = []
    if (slow := view.slow) is not None:
        compute, whose = ("computes", "its") if len(slow.ranks) == 1 else ("compute", "their")
        who = f"{capital(ranks(sorted(slow.ranks)))} (stage {slow.stage})"
        since = "" if slow.since is None else f", since step {slow.since}"
        complaints.append(f"{who} {compute} {slow.ratio:.1f} times as long as {whose} peers{since}.")
    if view.waits:
        complaints.append(cores_sentence(view.waits))
    if (waits := view.host_bound) is not None:
        several = len(waits.stages) > 1
        who = f"that of stage {waits.stages[0]}" if several else "it"
        since = "" if waits.since is None else f" ({who} did not before step {waits.since})"
        share = f"{'at least ' * several}{waits.passes:.0%} of the passes of {stages(sorted(waits.stages))}{since}"
        complaints.append(f"The GPU waits for its host in {share}: a capture shows what that costs.")
    return " ".join(complaints) or None


def cores_sentence(waits: Mapping[int, float]) -> str:
    first, most = next(iter(waits.items()))
    # As in the report: a rank that waits far less than the first one is not worth looking at.
    named = sorted(rank for rank, part in waits.items() if part >= most / 2)
    several = len(named) > 1
    longest = f"rank {first} " if several else ""
    who = f"{capital(ranks(named))} wait{'s' * (not several)}"
    why = "something else runs on the cores, or there are more ranks than cores"
    return f"{who} for a processor core, {longest}for {most:.0%} of the time: {why}."


def waiting_clauses(view: View) -> Iterator[str]:
    """Yields a clause for each rank that is silent, and for each rank that the others wait for."""
    culprits = view.blame.culprits
    unheard = [culprit.rank for culprit in culprits if culprit.rank not in view.statuses]
    known = [(culprit, view.statuses[culprit.rank]) for culprit in culprits if culprit.rank in view.statuses]
    silent, guilty = ([_waited_for(*each) for each in known if each[0].silent is said] for said in (True, False))
    if not view.blame.stuck and not silent and not unheard and view.silence is None:
        return
    yield from silent[:_CULPRITS]
    if unheard:
        yield f"no status at all from {counted(len(unheard), 'rank')}: {ranks(unheard)}"
    yield from guilty[:_CULPRITS]
    if more := len(silent[_CULPRITS:]) + len(guilty[_CULPRITS:]):
        yield f"and {more} more"


def _waited_for(culprit: WaitedFor, status: RankStatus) -> str:
    who = f"rank {status.rank} (stage {status.coords['pp']}, {status.name}, process {status.pid})"
    wait = "waits" if culprit.waiting == 1 else "wait"
    waiting = f"; {counted(culprit.waiting, 'rank')} {wait} for it" * (culprit.waiting > 0)
    if not culprit.silent:
        comma = "" if status.place is None else ","
        return f"{who} has been {_place(status)}{comma} for {ago(culprit.for_s)}{waiting}"
    what = f"has given no sign of life for {ago(culprit.for_s)}"
    if culprit.gone:
        what = "is gone: the process does not exist any more"
    return f"{who} {what}; it was last seen {_place(status)}{waiting}"


def _place(status: RankStatus) -> str:
    place = status.place
    if status.whereabouts_unknown:
        return f"in step {status.last_step} or after it"
    if place is None:
        return f"outside of the schedule ({status.part or 'optimizer, data, checkpoint, ...'})"
    whose = "" if place.role is None else f" of {place.role}"
    return f"in {place}, {place.target}{whose} step {place.step}"


def silence(view: View) -> str:
    """Returns why a job does not answer any more, and how it ended."""
    sentences = ending_sentences(view)
    return " ".join((f"{view.silence}.", *sentences)) if sentences else str(view.silence)


def ending_sentences(view: View) -> list[str]:
    """Returns sentences about where a job stood still, and about the ranks that died before it ended."""
    stood = [finding.text for finding in standstill_findings(view.standstills)]
    return [*stood, *map(sentence, waiting_clauses(view) if view.state == "ended" else ())]


def collectives(view: View) -> Hang:
    """Returns who keeps the job waiting, by what its ranks have in flight; unless a collective shows that or the job is
    gone, also whom its ranks wait for by their statuses."""
    hang = hang_of_job(view.job.in_flight(), view.last_blame.waits_for)
    explained = hang.culprits or hang.unended or view.silence is not None
    outside = () if explained else standings(view.job.run, view.statuses, view.blame)
    return replace(hang, outside=outside, standstills=view.standstills)


def stages_table(view: View) -> TableView:
    """Returns the figures of every stage, and which of them the others wait for."""
    summary = view.summary
    waited_for = [rank.stage for rank in view.standstill.waited_for] if view.standstill else []
    on_gpu = any(stage.host_bound_passes is not None for stage in summary.stages)
    rows = [
        {
            Column("stage"): Cell(f"{stage.pp} waited for", "slow") if stage.pp in waited_for else stage.pp,
            Column("rank\ncount"): stage.ranks,
            Column("step"): stage.step,
            Column("step", unit="ms"): number(stage.step_ms),
            Column("passes", unit="ms"): number(stage.compute_ms),
            Column("share", "bars"): Cell(bars=(stacked([("compute", stage.compute_ms, "")]),)),
            Column("gradients", unit="ms"): number(stage.gradients_ms),
            Column("imbalance"): ratio(stage.imbalance),
            Column("slowest\nrank"): stage.slowest_rank,
            Column("its\npasses", unit="ms"): number(stage.slowest_ms),
            **({Column("passes that wait\nfor the host"): percent(stage.host_bound_passes)} if on_gpu else {}),
        }
        for stage in summary.stages
    ]
    slow = [place for place, stage in enumerate(summary.stages) if stage.pp == summary.slow_stage]
    return table("stages of the job", rows, slow)
