"""``megaprof status DIR``: what a running job is doing, and whom it waits for when it hangs."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megaprof.cli import CommandError

if TYPE_CHECKING:
    from megaprof.control.blame import Blame, Culprit
    from megaprof.control.job import Job
    from megaprof.control.status import RankStatus

#: Lines of the table, and culprits, that are shown: the whole fits on one screen whatever the world.
_LINES = 28
_CULPRITS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, help="the job's --profile-dir")
    parser.add_argument("--role", help="whose, where several roles share a save directory")


def run(arguments: argparse.Namespace) -> int:
    """Print it. Raises CommandError where there is no job any more that could be asked."""
    from megaprof.control.blame import find_culprits
    from megaprof.control.job import NoJob, find_job

    try:
        job = find_job(arguments.dir, arguments.role)
        silence = job.silence()
    except NoJob as fault:
        raise CommandError(str(fault)) from None
    if job.run.ended is not None:
        raise CommandError(str(silence))
    statuses = job.statuses()
    now = job.now(statuses, silence)
    blame = find_culprits(job.run, statuses, now)
    for line in (*_headline(job, statuses, now), *_verdict(job, statuses, blame, now), *_table(job, statuses, now)):
        sys.stdout.write("".join(c if c.isprintable() else "\ufffd" for c in line) + "\n")
    if silence is not None:
        raise CommandError(silence)
    return 0


def _headline(job: Job, statuses: dict[int, RankStatus], now: float) -> Iterator[str]:
    from megaprof.control.job import ago

    run = job.run
    sizes = run.sizes
    shape = " ".join(f"{axis}{getattr(sizes, axis)}" for axis in ("tp", "pp", "cp", "ep", "dp", "vpp"))
    role = "" if run.role is None else f", role {run.role}"
    heard = "all" if len(statuses) == run.world else f"{len(statuses)}"
    yield f"{run.world} ranks ({shape}){role}, running for {ago(now - run.started)}, {heard} of them heard"
    for target in sorted({name for each in statuses.values() for name in each.calls}):
        numbers = [step for each in statuses.values() if (step := each.step(target)) is not None]
        if numbers:
            some = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
            yield f"{target}: step {some}{_pace(target, statuses)}"
    capture = next((each.capture for each in statuses.values() if each.capture is not None), None)
    if capture is not None:
        yield f"capture {capture.get('request')}: {capture.get('state')}"
    off = sorted(each.rank for each in statuses.values() if each.off)
    if off:
        yield f"! profiling is off on rank {_some(off)}: the log says why"


def _pace(target: str, statuses: dict[int, RankStatus]) -> str:
    """Medians of all ranks. A step is a call of the schedule; between two come the optimizer, data, ..."""
    every = _median([each.seconds_between(target) for each in statuses.values()], 1e3)
    of_target = [each for each in statuses.values() if each.recent is not None and each.recent["target"] == target]
    takes = _median([each.step_ms for each in of_target])
    return (f", takes {takes} ms" if takes != "-" else "") + (f", one every {every} ms" if every != "-" else "")


def _verdict(job: Job, statuses: dict[int, RankStatus], blame: Blame, now: float) -> Iterator[str]:
    from megaprof.control.job import ago

    silent = [culprit for culprit in blame.culprits if culprit.silent]
    guilty = [culprit for culprit in blame.culprits if not culprit.silent]
    if not blame.stuck and not silent:
        return
    yield ""
    if blame.still:
        yield f"It hangs: no rank has moved for {ago(blame.still)}."
    elif blame.stuck:
        yield f"{len(blame.stuck)} of {job.run.world} ranks have not moved for long."
    unheard = [culprit for culprit in silent if culprit.status is None]
    for culprit in [culprit for culprit in silent if culprit.status is not None][:_CULPRITS]:
        yield f"! {_who(culprit)} {_silence(culprit)}{_waiting(culprit)}"
    if unheard:
        yield f"! no status at all from {len(unheard)} ranks: rank {_some([culprit.rank for culprit in unheard])}"
    for culprit in guilty[:_CULPRITS]:
        yield f"! {_who(culprit)} {_doing(culprit.status)} for {ago(culprit.seconds)}{_waiting(culprit)}"
    more = max(0, len(silent) - len(unheard) - _CULPRITS) + max(0, len(guilty) - _CULPRITS)
    if more:
        yield f"! and {more} more"


def _who(culprit: Culprit) -> str:
    status = culprit.status
    if status is None:
        return f"rank {culprit.rank}"
    return f"rank {culprit.rank} (stage {status.coords['pp']}, {status.name}, process {status.pid})"


def _silence(culprit: Culprit) -> str:
    from megaprof.control.job import ago
    from megaprof.control.run import dead

    if culprit.status is not None and dead(culprit.status.host, culprit.status.pid):
        return "is gone: the process does not exist any more"
    return f"gives no sign of life for {ago(culprit.seconds)}"


def _doing(status: RankStatus | None) -> str:
    if status is None or status.place is None:
        return "is outside of the schedule (optimizer, data, checkpoint, ...)"
    return f"is in {status.place}, {status.place.target} step {status.place.step},"


def _waiting(culprit: Culprit) -> str:
    if culprit.waiting == 1:
        return "; 1 rank waits for it"
    return f"; {culprit.waiting} ranks wait for it" if culprit.waiting else ""


def _table(job: Job, statuses: dict[int, RankStatus], now: float) -> Iterator[str]:
    """A line per rank, or per stage where there are too many."""
    yield ""
    if job.run.world <= _LINES:
        groups = {f"rank {rank}": [status] for rank, status in sorted(statuses.items())}
    else:
        groups = {}
        for _, status in sorted(statuses.items()):
            groups.setdefault(f"{status.coords['pp']}", []).append(status)
        groups = dict(sorted(groups.items(), key=lambda group: int(group[0])))
    by_rank = job.run.world <= _LINES
    rows = [("rank" if by_rank else "stage", "stage" if by_rank else "ranks", "step", "step ms", "compute ms", "where")]
    for name, members in list(groups.items())[:_LINES]:
        steps = [step for each in members if (step := each.step()) is not None]
        rows.append(
            (
                name.removeprefix("rank "),
                str(members[0].coords["pp"] if by_rank else len(members)),
                "-" if not steps else str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}",
                _median([each.step_ms for each in members]),
                _median([each.compute_ms for each in members]),
                _where(members, now),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:5], widths, strict=True)]
        yield "  ".join((*cells, row[5]))[:160]
    if len(groups) > _LINES:
        yield f"... and {len(groups) - _LINES} more stages"


def _where(members: list[RankStatus], now: float) -> str:
    """Where most of them are, and since when."""
    from megaprof.control.job import ago

    places = Counter("outside of the schedule" if each.place is None else str(each.place) for each in members)
    (most, count), *others = places.most_common()
    still = min(each.stuck(now) for each in members)
    since = f", {ago(still)}" if still >= 5 else ""
    if not others:
        return most + since
    return f"{count} in {most}; {len(members) - count} in {others[0][0]}{' and elsewhere' if others[1:] else ''}{since}"


def _median(values: list[float | None], scale: float = 1.0) -> str:
    known = [value for value in values if value is not None]
    return f"{scale * statistics.median(known):.1f}" if known else "-"


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
