"""Which of the captured steps and ranks in a directory are meant, by file names where these say it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megaprof.analysis.clocks.timelines import Capture, capture_in, capture_of
from megaprof.analysis.trace.traces import UnreadableTrace, find_traces, read_trace
from megaprof.formats.names import parse_artifact_name, sanitise
from megaprof.parallel.selectors import Selector
from megaprof.parallel.topology import Place

#: Of more captured ranks, one of each stage is taken unless somebody says which: more are no readable timeline.
MOST_RANKS = 64
_PREFERRED = ("train_actor", "train_overall", "train_log_probs", "evaluate")


class NothingToMerge(Exception):
    """No captured step here can be merged; the message says what there is instead."""


@dataclass(frozen=True)
class Chosen:
    """The files of one captured step. ``others``: captured steps that are not it; ``left_out``: ranks of it that are
    not among ``paths``."""

    capture: Capture
    paths: tuple[Path, ...]
    others: tuple[Capture, ...]
    left_out: int


@dataclass(frozen=True)
class _File:
    path: Path
    coords: Place


def choose(
    source: Path,
    warnings: list[str],
    *,
    target: str | None = None,
    role: str | None = None,
    step: int | None = None,
    ranks: Selector | None = None,
) -> Chosen:
    """The latest step of the first target of `_PREFERRED`, unless ``target``, ``role`` and ``step`` say otherwise, and
    ``ranks`` of it; None: all, or the lowest of each stage where there are more than `MOST_RANKS`.

    A file that cannot be used is added to ``warnings``. Raises NothingToMerge.
    """
    if not source.exists():
        raise NothingToMerge(f"{source} does not exist")
    captures: dict[Capture, list[_File]] = {}
    for path in [source] if source.is_file() else find_traces(source):
        try:
            capture, coords = _read_name(path) or _read_metadata(path)
        except UnreadableTrace as fault:
            warnings.append(f"{path.name} was skipped: {fault.reason}")
            continue
        captures.setdefault(capture, []).append(_File(path, coords))
    if not captures:
        raise NothingToMerge(f"{source} holds no trace of megaprof's" + "".join(f"; {w}" for w in warnings[:5]))
    wanted = [
        capture
        for capture in captures
        if (target is None or capture.target == sanitise(target))
        and (role is None or capture.role == sanitise(role))
        and (step is None or capture.step == step)
    ]
    if not wanted:
        raise NothingToMerge(f"{source} holds no such step, but: {', '.join(map(str, sorted(captures)[:20]))}")
    chosen = min(wanted, key=lambda c: (_preference(c.target), c.target, -c.step, c.role))
    files = captures.pop(chosen)
    there = {file.coords.rank for file in files}
    taken = _taken(files, there, ranks)
    if not taken:
        raise NothingToMerge(f"{chosen} was captured on {len(there):,} ranks, and none of them is in '{ranks}'")
    paths = tuple(file.path for file in files if file.coords.rank in taken)
    return Chosen(chosen, paths, tuple(sorted(captures)), len(there) - len(taken))


def _taken(files: Iterable[_File], there: set[int], ranks: Selector | None) -> set[int]:
    if ranks is not None:
        return {file.coords.rank for file in files if ranks.selects(file.coords)}
    if len(there) <= MOST_RANKS:
        return there
    lowest: dict[int, int] = {}
    for file in files:
        lowest[file.coords.pp] = min(file.coords.rank, lowest.get(file.coords.pp, file.coords.rank))
    return set(lowest.values())


def _read_name(path: Path) -> tuple[Capture, Place] | None:
    capture, name = capture_of(path), parse_artifact_name(path.name)
    if capture is None or name is None:
        return None
    return capture, name.place


def _read_metadata(path: Path) -> tuple[Capture, Place]:
    metadata = read_trace(path).metadata
    return capture_in(metadata), metadata.coords


def _preference(target: str) -> int:
    return _PREFERRED.index(target) if target in _PREFERRED else len(_PREFERRED)
