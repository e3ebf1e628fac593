"""`megaprof status DIR`: what a running job is doing, and which rank the others wait for when it hangs."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megaprof.analysis.hang import Hang
from megaprof.analysis.report.tables import Column, TableView, row
from megaprof.analysis.report.text.sentences import hang_sentences
from megaprof.analysis.words import number, percent, ranks
from megaprof.cli import UNWELL, UsageError, local, print_json, say
from megaprof.cli.look import State, View, collectives, ending_sentences, look_at, silence, verdict, waiting_clauses
from megaprof.control.blame import WaitedFor
from megaprof.control.directory import RunningJob, Unsafe, find_job, roles_with_a_run
from megaprof.formats.job import STUCK_SECONDS, RankStatus, Standstill
from megaprof.formats.phrases import Unanswerable, ago, counted
from megaprof.metrics import HostBound, SlowRanks, Summary, longest_stage
from megaprof.parallel.topology import ParallelSizes

#: The most lines of the table: everything fits on one screen, however many ranks there are.
_LINES = 28
_WIDTH = 160
_WAIT_SECONDS = 5.0

EXAMPLES = (
    "megaprof status traces",
    "megaprof status traces --json | jq .now.imbalance",
    "megaprof status traces --hang-after 1800   # if checkpoints take up to half an hour",
)


class RankNow(RankStatus, frozen=True, kw_only=True):
    """The last status that a rank wrote, with figures derived from it."""

    step: int | None
    """Number of the last step that has begun; None before the first one."""
    still_s: float
    """Seconds since it last moved."""


@dataclass(frozen=True)
class StatusAnswer:
    """One look at a running job, as ``--json`` prints it."""

    version: int
    """The version of this object: 1."""
    state: State
    """State of the whole job."""
    reason: str | None
    """Why the job no longer answers; None while it does."""
    run: str
    """Random name of this run; other runs in the same directory have other names."""
    role: str | None
    """Role of the model; None without roles."""
    ranks: int
    """Number of ranks in the job."""
    sizes: ParallelSizes
    """The parallel sizes of the job."""
    running_s: float
    """Seconds since the job started."""
    heard: tuple[int, ...]
    """Ranks that recently gave a sign of life."""
    off: tuple[int, ...]
    """Ranks on which profiling is off after a fault."""
    now: Summary
    """Figures of the job and its stages."""
    still_s: float
    """Seconds since any rank moved, if the job appears to hang; otherwise 0."""
    stuck: tuple[int, ...]
    """Ranks that have not moved for a long time."""
    culprits: tuple[WaitedFor, ...]
    """Ranks that the job waits for: the silent ones first, then those that most others wait for."""
    collectives: Hang | None
    """Collectives that the job waits in; None if it runs, or if its ranks have not written them."""
    standstills: tuple[Standstill, ...]
    """Steps in which the job stands still, stood when it was killed, or stood before it ended, as in the report."""
    slow: SlowRanks | None
    """Ranks that are slower than their peers; None if there are none."""
    waits: dict[int, float]
    """Fraction of the time for which a rank waits for a processor core, longest first, if it is more than a tenth."""
    host_bound: HostBound | None
    """Stages whose GPUs wait for their host in most passes; None if there are none."""
    status: tuple[RankNow, ...]
    """Every rank whose status could be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"Exit code: 0 if the job runs or is starting; {UNWELL} if it appears to hang, or some or all of its ranks "
        "have died or are silent; 1 if there is no job, or it has ended; 2 if the arguments make no sense."
    )
    parser.add_argument("dir", metavar="DIR", type=local, help="the job's --profile-dir")
    parser.add_argument("--role", help="role, if several share the --profile-dir")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every rank instead of text")
    parser.add_argument(
        "--wait",
        type=float,
        default=_WAIT_SECONDS,
        metavar="S",
        help="seconds to wait for a job to start in DIR (default: %(default)g)",
    )
    parser.add_argument(
        "--hang-after",
        type=float,
        default=STUCK_SECONDS,
        metavar="S",
        help="a job hangs if no rank has moved for this many seconds, for five of its steps, and for three of its "
        "looks (default: %(default)g). Increase it if saving a checkpoint takes longer",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the status of a job. Raises Unanswerable if the job has ended."""
    if not arguments.wait >= 0:
        raise UsageError(f"--wait {arguments.wait:g} is not a valid number of seconds")
    if not arguments.hang_after > 0:
        raise UsageError(f"--hang-after {arguments.hang_after:g} is not a valid number of seconds")
    view = look_at(find(arguments.dir, arguments.role, arguments.wait), arguments.hang_after)
    if arguments.json:
        print_json(answer(view))
    if view.state == "ended":
        raise Unanswerable(silence(view))
    if not arguments.json:
        for line in in_words(view):
            say(line)
        _show_table(view)
    return 0 if view.state in ("runs", "starts") else UNWELL


def find(directory: Path, role: str | None = None, wait: float = _WAIT_SECONDS) -> RunningJob:
    """Returns the job as soon as one has started in ``directory``, which need not exist yet. Raises Unanswerable after
    ``wait`` seconds."""
    until, announced = time.monotonic() + wait, False
    with suppress(Unsafe):  # `find_job` says what is wrong
        while not roles_with_a_run(directory) and not directory.is_file() and time.monotonic() < until:
            if not announced:
                say(f"Waiting for a job to start in {directory}; Ctrl-C ends this.", file=sys.stderr)
                announced = True
            time.sleep(0.2)
    return find_job(directory, role)


def answer(view: View) -> StatusAnswer:
    run, statuses, now = view.job.run, view.statuses, view.now
    return StatusAnswer(
        version=1,
        state=view.state,
        reason=view.silence,
        run=run.run,
        role=run.role,
        ranks=run.world,
        sizes=run.sizes,
        running_s=round(now - run.started, 3),
        heard=tuple(view.heard),
        off=tuple(sorted(status.rank for status in statuses.values() if status.off)),
        now=view.summary,
        still_s=round(view.blame.still, 3),
        stuck=view.blame.stuck,
        culprits=view.blame.culprits,
        collectives=_collectives(view),
        standstills=view.standstills,
        slow=view.slow,
        waits=dict(view.waits),
        host_bound=view.host_bound,
        status=tuple(
            RankNow(**msgspec.structs.asdict(status), step=status.last_step, still_s=round(status.stuck(now), 3))
            for _, status in sorted(statuses.items())
        ),
    )


def in_words(view: View) -> list[str]:
    """Returns the ranks, the progress and the problems of a job, one sentence per line, without the table."""
    if view.state == "ended":
        return [silence(view)]
    problems = [*filter(None, [verdict(view)]), *(f"! {clause}" for clause in waiting_clauses(view))]
    hang = _collectives(view)
    if hang is not None and (hang.culprits or hang.held_up or hang.unended):
        problems += hang_sentences(hang)
    if view.state == "died":
        problems += ending_sentences(view)
    return [*_headline(view), *([""] if problems else []), *problems]


def _headline(view: View) -> Iterator[str]:
    run, statuses = view.job.run, view.statuses
    role = "" if run.role is None else f", role {run.role}"
    heard = {run.world: "all", 0: "none"}.get(len(view.heard), len(view.heard))
    last = max((status.time for status in view.statuses.values()), default=view.now)
    runs = f"ran for {ago(last - run.started)}" if view.silence else f"running for {ago(view.now - run.started)}"
    yield f"{counted(run.world, 'rank')} ({run.sizes}){role}, {runs}, {heard} of them answering"
    for target, of_role in dict.fromkeys((c.target, c.role) for status in statuses.values() for c in status.calls):
        numbers = [step for status in statuses.values() if (step := status.step_of(target, of_role)) is not None]
        if numbers:
            some = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
            whose = "" if of_role is None else f" of {of_role}"
            yield f"{target}{whose}: step {some}{_pace(target, of_role, statuses)}"
    if not any(status.calls for status in statuses.values()):
        yield "no step has begun yet"
    capture = next((status.capture for status in statuses.values() if status.capture is not None), None)
    if capture is not None and not capture.final:
        yield f"capture {capture.request}: {capture.state}"
    off = {status.rank: status.why for status in statuses.values() if status.off}
    if off:
        yield f"! profiling is off on {ranks(sorted(off))}: {next(filter(None, off.values()), 'the log says why')}"


def _pace(target: str, role: str | None, statuses: dict[int, RankStatus]) -> str:
    """Returns how long a step takes and how often one begins, as medians. A step is one call of the schedule; between
    two calls come the optimizer, data, ..."""
    takes = longest_stage(
        (status.coords["pp"], status.recent.step_ms)
        for status in statuses.values()
        if status.recent is not None and (status.recent.target, status.recent.role) == (target, role)
    )
    every = longest_stage(
        (status.coords["pp"], None if call.seconds is None else 1e3 * call.seconds)
        for status in statuses.values()
        for call in status.calls
        if (call.target, call.role) == (target, role)
    )
    clauses = [f"{verb} {number(ms)} ms" for verb, ms in (("takes", takes), ("one every", every)) if ms is not None]
    if takes and every and every > takes:
        clauses.append(f"{percent(1.0 - takes / every)} lies outside of the schedule")
    return f", {', '.join(clauses)} (medians)" if clauses else ""


def _collectives(view: View) -> Hang | None:
    """Returns the collectives that the job waits in; None if it runs, or if its ranks have not written them."""
    hang = collectives(view) if view.state in ("hangs", "died") or view.blame.stuck else None
    return hang if hang is not None and hang.ranks else None


def _show_table(view: View) -> None:
    """Prints a line per rank, or per stage if there are too many ranks."""
    from rich.console import Console

    from megaprof.analysis.report.terminal import show_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)  # a line stays one for the next command
    console.print()
    rows = []
    if by_rank := view.job.run.world <= _LINES:
        for rank, status in sorted(view.statuses.items()):
            # Where some ranks keep a timeline, the others know only the time from one step to the next.
            known = status.recent is not None or view.summary.recent is None
            times = number(status.step_ms if known else None), number(status.compute_ms)
            rows.append(row(rank, status.coords["pp"], status.last_step, *times, _where([status], view.now)))
    for stage in () if by_rank else view.summary.stages:
        members = [status for status in view.statuses.values() if status.coords["pp"] == stage.pp]
        steps = [step for status in members if (step := status.last_step) is not None]
        shown = f"{min(steps)}-{max(steps)}" if len({*steps}) > 1 else next(iter(steps), None)
        times = number(stage.step_ms), number(stage.compute_ms)
        rows.append(row(stage.pp, stage.ranks, shown, *times, _where(members, view.now)))
    keys = ("rank", "stage") if by_rank else ("stage", "rank count")
    columns = *map(Column, (*keys, "step")), Column("step, ms"), Column("passes, ms"), Column("where", "text")
    timed = any(status.step_ms is not None for status in view.statuses.values())
    title = "medians of each rank's last steps" if timed else ""
    show_table(console, TableView(title, columns, tuple(rows)), _LINES)


def _where(members: list[RankStatus], now: float) -> str:
    """Returns where most of the ranks are, and since when."""
    places = Counter(_place(status, now) for status in members)
    (most, count), *others = places.most_common()
    still = min(status.stuck(now) for status in members)
    since = f", {ago(still)}" if still >= 5 else ""
    if not others:
        return most + since
    return f"{count} in {most}; {len(members) - count} in {others[0][0]}{' and elsewhere' if others[1:] else ''}{since}"


def _place(status: RankStatus, now: float) -> str:
    if status.late(now):
        return "not heard of any more"
    if status.whereabouts_unknown:
        return "not known without a timeline"
    return str(status.place or status.part or "outside of the schedule")
