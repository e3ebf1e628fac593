"""Finds the captures and running jobs below a directory, and reads captures in separate processes.

A browser names a place by an id, never by a path. No page waits for the traces of another page, and no trace ends the
server.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megaprof.analysis import words
from megaprof.analysis.report.drawn import boxes
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import Report, analyze
from megaprof.analysis.report.text.sentences import standstill_findings
from megaprof.analysis.trace.traces import REPORT, SQLITE, TRACE_SUFFIXES
from megaprof.cli.look import last_stand
from megaprof.formats import inputs
from megaprof.formats.job import CONTROL, RUN, Standstill
from megaprof.formats.names import is_shard, parse_artifact_name
from megaprof.formats.phrases import Unanswerable
from megaprof.formats.timeline import SUFFIX as TIMELINE

_KINDS = {
    TIMELINE: "timeline",
    SQLITE: "file of nsys",
    REPORT: "file of nsys",
    **dict.fromkeys(TRACE_SUFFIXES, "trace"),
}
#: The endings of all files that are read, whether megaprof wrote them or not.
_READ = (".json", ".gz", *_KINDS)
#: The most directory entries that are looked at, and the most places that are shown.
MOST_ENTRIES = 300_000
MOST_PLACES = 500
#: The most captures that are kept.
MOST_KEPT = 16
_PROCESSES = 2


@dataclass
class Place:
    """One directory with captures, or with a job."""

    path: Path
    name: str
    """Its path from the directory that is served, or the name of that directory itself."""
    files: dict[str, int] = field(default_factory=dict)
    """The number of files of each kind in it and in its shards."""
    targets: set[str] = field(default_factory=set)
    """The targets in the names of its files, with their roles. A timeline's name has none."""
    steps: tuple[int, int] | None = None
    """The first and the last step in the names of its files. Timelines do not count: their names have only the first
    step."""
    newest: float = 0.0
    """When the last file was written, in wall-clock seconds; 0 without a file."""
    bytes: int = 0
    job: bool = False
    """True if a job writes, or wrote, its status there."""
    outside: str | None = None
    """The name of a file in it that is a link out of the directory that is served; such a place is not read."""
    _seen: list[tuple[str, int, int]] = field(default_factory=list)

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """Addresses and titles of its other pages."""
        others = (f"/capture/{self.id}/what-if", "What if"), (f"/compare?a={self.id}", "Compare")
        return ("/", "All captures"), *others, *([(f"/live/{self.id}", "Live")] if self.job else [])

    @cached_property
    def identity(self) -> str:
        """A digest of its files: it changes when one of them does."""
        return hashlib.sha256(
            repr((str(self.path), sorted(set(self._seen)))).encode("utf-8", "surrogatepass")
        ).hexdigest()

    def add(self, entry: os.DirEntry[str], top: Path) -> None:
        """Counts a file, if it is of a kind that is read."""
        if entry.is_symlink() and entry.name.endswith(_READ):
            if not Path(os.path.realpath(entry.path)).is_relative_to(top):
                self.outside = entry.name
            return
        kind = next((kind for suffix, kind in _KINDS.items() if entry.name.endswith(suffix)), None)
        if kind is None or entry.name.startswith("."):
            return
        try:
            stat = entry.stat(follow_symlinks=False)
        except OSError:
            return
        self.files[kind] = self.files.get(kind, 0) + 1
        self.newest = max(self.newest, stat.st_mtime)
        self.bytes += stat.st_size
        self._seen.append((entry.path, stat.st_size, stat.st_mtime_ns))
        if kind != _KINDS[TIMELINE] and (named := parse_artifact_name(entry.name)) is not None:
            self.targets.add(named.target if named.role is None else f"{named.target} ({named.role})")
            first, last = self.steps or (named.step, named.step)
            self.steps = min(first, named.step), max(last, named.step)


Listing = tuple[dict[str, Place], bool]
"""The places below a directory by their ids, the newest first; and whether there are more."""


def look_below(top: Path) -> Listing:
    """Returns every place at or below ``top``. No link to a directory is followed."""
    top = top.resolve()
    places: dict[Path, Place] = {}
    left, waiting = MOST_ENTRIES, [(top, top)]
    while waiting and left > 0:
        folder, owner = waiting.pop()
        place = places.setdefault(
            owner, Place(owner, str(owner.relative_to(top)) if owner != top else top.name or str(top))
        )
        for entry in _entries(folder):
            if (left := left - 1) <= 0:
                break
            if entry.is_dir(follow_symlinks=False):
                below = Path(entry.path)
                if entry.name == CONTROL and folder == owner:  # a run is in it, or in the part of a role
                    parts = [below, *(Path(each) for each in _entries(below) if each.is_dir(follow_symlinks=False))]
                    place.job = place.job or any((part / RUN).is_file() for part in parts)
                part_of_it = entry.name == CONTROL or entry.name.startswith(".") or is_shard(entry.name)
                waiting.append((below, owner if part_of_it else below))
            else:
                place.add(entry, top)
    listed = [place for place in places.values() if place.files or place.job]
    for place, seen, outside in [(place, tuple(place._seen), place.outside) for place in places.values()]:
        for above in place.path.parents:  # reading a place also reads everything below it
            if above in places:
                places[above]._seen += seen
                places[above].outside = places[above].outside or outside
    listed.sort(key=lambda place: (-place.newest, place.name))
    shown = {place.id: place for place in listed[:MOST_PLACES]}
    for place in shown.values():
        _ = place.identity  # computed and kept here, where no one waits for it
    return shown, left <= 0 or len(listed) > MOST_PLACES


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


Brief = dict[str, Any]
"""A target at a glance, for ``brief.html``."""


@dataclass(frozen=True)
class Capture:
    report: Report
    """The report, without the data that draws its steps."""
    page: str
    drawn: dict[tuple[str, str | None], dict[str, Any]]
    """A step of each target and role."""
    briefs: tuple[Brief, ...]


def read(path: Path, links: tuple[tuple[str, str], ...], last: tuple[Standstill, float] | None) -> Capture:
    """Reads a directory; this runs in a separate process. Raises Unanswerable."""
    try:
        report = analyze(path)
        report = report if last is None else report.with_standstill(*last)
    except (OSError, MemoryError) as fault:
        raise Unanswerable(f"{path} cannot be read: {fault}") from None
    steps = report.steps()
    # Of a target with several sizes, the first ones count, as in `compare`.
    drawn = {target.key: boxes(steps[at]) for at, target in reversed([*enumerate(report.targets)]) if at in steps}
    shown = page(report, steps, links)
    briefs = tuple(
        {
            "title": words.title(*target.key),
            "verdict": target.in_brief(report.standstill),
            "step_ms": target.step_ms,
            "imbalance": target.imbalance,
            "stood_still": [
                each.text for each in standstill_findings(target.fleet.standstills if target.fleet else ())
            ],
        }
        for target in report.targets
    )
    return Capture(replace(report, drawn={}), shown, drawn, briefs)


def _begin(most_bytes: int | None) -> None:
    """Sets up a reading process. It ignores Ctrl-C, which a terminal sends to it as well: only the server ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    inputs.allow(most_bytes)


class KeptCaptures:
    """The captures that were asked for most recently. Each is read once, and again only if its files change."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._reads: OrderedDict[str, asyncio.Task[Capture]] = OrderedDict()
        #: Reads that nobody has been shown yet, by directory. The files of a running job may change faster than they
        #: are read, so what was read is shown once even if they have changed since.
        self._awaited: dict[Path, asyncio.Task[Capture]] = {}
        self._briefs: dict[str, tuple[Brief, ...] | str] = {}

    def brief(self, place: Place) -> tuple[Brief, ...] | str | None:
        """Returns the targets of a capture at a glance, or why it cannot be shown. None if it has not been read yet,
        and for a job, whose state changes even if its files do not."""
        return None if place.job else self._briefs.get(place.identity)

    async def get(self, place: Place) -> Capture:
        """Returns a capture. If it has not been read yet, or is being read, waits for that. Raises Unanswerable."""
        if place.outside is not None:
            raise Unanswerable(f"it holds a link that leads out of the directory that is served: {place.outside}")
        last = await asyncio.to_thread(last_stand, place.path) if place.job else None
        identity = place.identity
        if last is not None:  # the page says for how long: it is a minute old at most
            identity += f" {replace(last[0], seconds=last[0].seconds // 60)}"
        if isinstance(why := self._briefs.get(identity), str):
            raise Unanswerable(why)
        read = self._reads.get(identity) or self._awaited.get(place.path)
        if read is None:
            read = self._reads[identity] = asyncio.create_task(self._read(identity, place, last))
            read.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen even if no one waits
        if identity in self._reads:
            self._reads.move_to_end(identity)
        for old in [key for key, task in self._reads.items() if task.done()][:-MOST_KEPT]:
            del self._reads[old]
        self._awaited[place.path] = read
        await asyncio.wait({read})  # a request that gives up leaves it to the next one
        self._awaited.pop(place.path, None)
        return read.result()

    async def _read(self, identity: str, place: Place, last: tuple[Standstill, float] | None) -> Capture:
        try:
            capture = await asyncio.wrap_future(self._submit(place.path, place.links, last))
        except Unanswerable as fault:
            self._briefs[identity] = str(fault)
            raise
        except BrokenProcessPool:
            self._pool = None
            del self._reads[identity]  # the next request reads it again
            raise Unanswerable("the process that read it was killed, most likely for its memory") from None
        self._briefs[identity] = capture.briefs
        return capture

    def _submit(
        self, path: Path, links: tuple[tuple[str, str], ...], last: tuple[Standstill, float] | None
    ) -> Future[Capture]:
        if self._pool is None:
            alike = partial(_begin, inputs.allowed())
            self._pool = ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn"), initializer=alike)
        # A process that starts takes over what is blocked here, and begins to ignore Ctrl-C only when it has started.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(read, path, links, last)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def close(self) -> None:
        """Ends the processes, whatever they are reading."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                process.terminate()
            self._pool.shutdown(cancel_futures=True)  # waits: its semaphores are freed with its threads
            self._pool = None
