"""The job of a save directory, as a command finds it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from megaprof.control.paths import CONTROL, Paths, control_directories
from megaprof.control.records import Absent, BadRecord
from megaprof.control.run import Run, dead, read_run
from megaprof.control.status import RankStatus, read_status, read_statuses
from megaprof.formats.names import sanitise

#: Looks at a status that seems old, before it counts as such: the clock of the job's host may be another.
_LOOKS = 3


class NoJob(Exception):
    """There is none that could be asked; the message says why."""


@dataclass(frozen=True)
class Job:
    directory: Path
    paths: Paths
    run: Run

    def leader(self) -> RankStatus | None:
        return read_status(self.paths, self.run, self.run.leader)

    def statuses(self) -> dict[int, RankStatus]:
        """Of all ranks, by rank."""
        return read_statuses(self.paths, self.run, range(self.run.world))

    def now(self, statuses: dict[int, RankStatus], silence: str | None) -> float:
        """The time by the job's clocks: while it lives, somebody wrote within an interval, whatever it is here."""
        here = time.time()
        if silence is not None or not statuses:
            return here
        latest = max(status.time for status in statuses.values())
        return min(max(here, latest), latest + self.run.interval)

    def silence(self) -> str | None:
        """Why nothing is to be expected of the job any more, None when it lives. May take a few of its intervals."""
        run = self.run
        if run.ended is not None:
            return f"the job has ended, {ago(time.time() - run.ended)} ago"
        if dead(run.host, run.pid):
            return f"the job is gone: process {run.pid} of rank {run.leader} does not exist any more"
        first = self.leader()
        if first is not None and not first.late(time.time()):
            return None
        for _ in range(_LOOKS):
            time.sleep(run.interval)
            last = self.leader()
            if last is not None and (first is None or last.time != first.time):
                return None
        heard = "never" if first is None else f"{ago(time.time() - first.time)} ago"
        name = run.host if first is None else first.name
        return f"the job does not answer: rank {run.leader} ({name}, process {run.pid}) was last heard of {heard}"


def find_job(directory: Path, role: str | None = None) -> Job:
    """The job, or a role's part of it, that writes to ``directory``. Raises NoJob."""
    found = control_directories(directory)
    if not directory.is_dir():
        raise NoJob(f"{directory} is no directory")
    if not found:
        raise NoJob(
            f"no job in {directory}: {CONTROL}/run.json does not exist there; a job listens with "
            "--profile-on-demand or --profile-tool timeline"
        )
    own = [path for path in found if role is not None and path.name == f"role-{sanitise(role)}"]
    plain = [path for path in found if path.name == CONTROL]
    root = (own or plain or found)[0]
    if not own and not plain and (role is not None or len(found) > 1):
        roles = ", ".join(path.name.removeprefix("role-") for path in found)
        raise NoJob(f"the job in {directory} has the roles {roles}: name one with --role")
    try:
        run = read_run(root)
    except Absent:
        raise NoJob(f"no job in {directory} any more") from None
    except BadRecord as fault:
        raise NoJob(f"{root / 'run.json'} {fault}") from None
    return Job(directory, Paths(root, run.world), run)


def ago(seconds: float) -> str:
    """``90`` as ``1 min 30 s``."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 and whole % 60 else "")
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"
