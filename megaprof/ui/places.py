"""Finds the captures and running jobs below a directory. A browser names each of them by an id, never by a path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megaprof.analysis.trace.nsys.files import REPORT, SQLITE
from megaprof.analysis.trace.traces import TRACE_SUFFIXES
from megaprof.formats.job import CONTROL, RUN
from megaprof.formats.names import is_shard, parse_artifact_name
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
        """Its id in addresses."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]

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

    def contain(self, seen: Iterable[tuple[str, int, int]], outside: str | None) -> None:
        """Adds the files of a place that lies inside this one."""
        self._seen += seen
        self.outside = self.outside or outside


@dataclass(frozen=True)
class Listing:
    """The places below a directory."""

    places: tuple[Place, ...]
    more: bool
    """True if there are more places than are listed."""

    def find(self, identity: str) -> Place | None:
        """Returns the place with this id; None if there is none."""
        return next((place for place in self.places if place.id == identity), None)


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
                places[above].contain(seen, outside)
    listed.sort(key=lambda place: (-place.newest, place.name))
    shown = tuple(listed[:MOST_PLACES])
    for place in shown:
        _ = place.id, place.identity  # computed and kept here, where no one waits for it
    return Listing(shown, left <= 0 or len(listed) > MOST_PLACES)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return
