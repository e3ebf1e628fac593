"""Chooses one captured step of a directory, and its ranks, by file names as far as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megaprof.analysis.notes import Note
from megaprof.analysis.report.text.notes import brief
from megaprof.analysis.trace.nsys_windows import NsysFile
from megaprof.analysis.trace.reading import Source, Timelines, find_timelines, read, sources_in, traces_in
from megaprof.analysis.trace.runs import Runs, runs_in
from megaprof.analysis.trace.steps import TracedStep
from megaprof.analysis.trace.traces import UnreadableTrace
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import parse_artifact_name, sanitise
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.selectors import Selector
from megaprof.parallel.topology import Place

#: If more ranks were captured, only one per stage is taken by default, because a timeline with more is unreadable.
MOST_RANKS = 64
_PREFERRED = ("train_actor", "train_overall", "train_log_probs", "evaluate")


class NothingToMerge(Unanswerable):
    """No captured step can be merged; the message says what there is instead."""


class StepName(NamedTuple):
    """One captured step, as its file names show it."""

    target: str
    """Sanitised target."""
    role: str
    """Sanitised role; empty if there is none."""
    step: int
    """The first step of the window."""

    @classmethod
    def of(cls, metadata: Metadata) -> StepName:
        """Returns the name of the step that a file's metadata describe."""
        return cls(sanitise(metadata.target), sanitise(metadata.role) if metadata.role else "", metadata.steps[0])

    def __str__(self) -> str:
        return f"{self.target}{f' ({self.role})' if self.role else ''} step {self.step}"


@dataclass(frozen=True)
class Chosen:
    """The files of one captured step."""

    name: StepName
    files: tuple[Source, ...]
    others: tuple[StepName, ...]
    """The other captured steps of the same run."""
    left_out: int
    """How many captured ranks are not among ``files``."""
    runs: Runs
    """The runs that have traces in the directory. The step belongs to the chosen run."""


def choose(
    source: Path,
    warnings: list[Note],
    *,
    target: str | None = None,
    role: str | None = None,
    step: int | None = None,
    ranks: Selector | None = None,
    run: int | None = None,
) -> Chosen:
    """Returns the latest step of the first target in `_PREFERRED`, unless ``target``, ``role`` and ``step`` choose
    another. ``ranks``: None for all ranks, or for the lowest of each stage if there are more than `MOST_RANKS`.
    ``run``: the number of the run, from 1; None for the newest.

    Files that cannot be used become ``warnings``. Raises NothingToMerge and NoSuchRun.
    """
    if not source.exists():
        raise NothingToMerge(f"{source} does not exist")
    captures: dict[StepName, list[tuple[Source, Place]]] = {}
    for file in sources_in(source):
        try:
            steps_and_places = _named(file) or [
                (StepName.of(trace.metadata), trace.metadata.coords) for trace in traces_in(file)
            ]
        except UnreadableTrace as fault:
            warnings.append(Note("skipped", files=(fault.path.name,), said=fault.reason))
            continue
        for name, coords in steps_and_places:
            captures.setdefault(name, []).append((file, coords))
    if not captures:
        raise NothingToMerge("; ".join(filter(None, (f"{source} holds no trace of megaprof's", brief(warnings)))))
    runs, steps_of_other_runs = _runs_of(source, captures, run)
    captures = {name: files for name, files in captures.items() if name not in steps_of_other_runs}
    matching_steps = [
        name
        for name in captures
        if (target is None or name.target == sanitise(target))
        and (role is None or name.role == sanitise(role))
        and (step is None or name.step == step)
    ]
    if not matching_steps:
        raise NothingToMerge(f"{source} holds no such step, but: {', '.join(map(str, sorted(captures)[:20]))}")
    chosen_step = min(
        matching_steps,
        key=lambda each: ((*_PREFERRED, each.target).index(each.target), each.target, -each.step, each.role),
    )
    files = captures.pop(chosen_step)
    captured_ranks = {coords.rank for _, coords in files}
    merged_ranks = _merged_ranks([coords for _, coords in files], captured_ranks, ranks)
    if not merged_ranks:
        raise NothingToMerge(
            f"{chosen_step} was captured on {len(captured_ranks):,} ranks, and none of them is in '{ranks}'"
        )
    merged_files = tuple(dict.fromkeys(file for file, coords in files if coords.rank in merged_ranks))
    return Chosen(chosen_step, merged_files, tuple(sorted(captures)), len(captured_ranks) - len(merged_ranks), runs)


def _runs_of(
    source: Path, captures: Mapping[StepName, Iterable[tuple[Source, Place]]], run: int | None
) -> tuple[Runs, set[StepName]]:
    """Returns the runs of the captures, and the steps that belong to other runs than the chosen one. Decides by the
    rank that has the most files. Raises NoSuchRun."""
    file_counts = Counter(
        rank for rank, _ in {(place.rank, file) for files in captures.values() for file, place in files}
    )
    rank, count = max(file_counts.items(), key=lambda item: (item[1], -item[0]))
    if count == 1 and run is None:
        return Runs(), set()  # if there were several runs, some rank would have at least two files
    begin_ns: dict[StepName, list[int]] = {}
    steps: list[TracedStep] = []
    for name, files in captures.items():
        of_rank = dict.fromkeys(file for file, place in files if place.rank == rank)
        traced = [step for file in of_rank for step in read(file).steps]
        begin_ns[name] = [step.host[0] for step in traced if StepName.of(step.metadata) == name]
        steps += traced
    timelines = find_timelines(source) if source.is_dir() else Timelines()
    runs = runs_in(steps, timelines, run)
    return runs, {name for name, starts in begin_ns.items() if starts and not any(map(runs.has, starts))}


def _merged_ranks(places: Iterable[Place], captured_ranks: set[int], ranks: Selector | None) -> set[int]:
    if ranks is not None:
        return {place.rank for place in places if ranks.selects(place)}
    if len(captured_ranks) <= MOST_RANKS:
        return captured_ranks
    lowest_by_stage: dict[int, int] = {}
    for place in places:
        lowest_by_stage[place.pp] = min(place.rank, lowest_by_stage.get(place.pp, place.rank))
    return set(lowest_by_stage.values())


def _named(source: Source) -> list[tuple[StepName, Place]]:
    """Returns the step and place in a trace's name; nothing for a file that may hold several of them."""
    name = None if isinstance(source, NsysFile) else parse_artifact_name(source.name)
    return [(StepName(name.target, name.role or "", name.step), name.place)] if name else []
