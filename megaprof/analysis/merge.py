"""Merges the captured ranks of a step into one Perfetto timeline, in Chrome's JSON trace format.

Each rank is a process, named by its coordinates and sorted by stage. All are on the clock of their table of passes, as
in a report. An arrow leads from each send to its receive. Step and ranks are chosen by file names as far as possible.
Each rank is read twice, once for the clocks and once for its events. Ranks are written one after the other, event by
event, so no whole trace is in memory.

Process, thread and flow ids are unique only within a file, so each gets a new one. Perfetto takes a process id of 0 for
the idle task, and a thread id that equals a process id for its main thread, so the new ids avoid both.
"""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from isal import igzip

from megaprof.analysis.notes import Note, brief
from megaprof.analysis.table.matching import Ends, ends_of, exchanged
from megaprof.analysis.table.table import Unfit
from megaprof.analysis.table.traced import jobs_of, table_of
from megaprof.analysis.trace.columns import KERNEL
from megaprof.analysis.trace.decoding import Document, Undecodable
from megaprof.analysis.trace.reading import Runs, Timelines, read, recordings_in, runs_in, traces_in
from megaprof.analysis.trace.steps import TracedStep, grouped, steps_of
from megaprof.analysis.trace.traces import MERGED, NSYS_SUFFIXES, refusing
from megaprof.formats import ranges
from megaprof.formats.inputs import BrokenOff, unpacked
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import appearing, parse_artifact_name, sanitise
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.selectors import Selector
from megaprof.parallel.topology import Coords
from megaprof.version import __version__

_FIRST_THREAD = 1 << 21  # above every process id, which is a rank + 1
_BUFFER = 1 << 20
_INSIDE_NS = 10  # an arrow that ended exactly with a slice would belong to the next slice
_ARRIVAL_NS = 5  # the length of the slice in which an arrow ends; less than _INSIDE_NS, so it is inside the receive
_LONGEST = 1 << 53  # microseconds
_OF_PROCESS = ("process_name", "process_labels", "process_sort_index")
#: If more ranks were captured, only one per stage is taken by default, because a timeline with more is unreadable.
MOST_RANKS = 64
_PREFERRED = ("train_actor", "train_overall", "train_log_probs", "evaluate")


class StepName(NamedTuple):
    """One captured step, as its file names show it: sanitised target, sanitised role (empty without one), and the first
    step of the window."""

    target: str
    role: str
    step: int

    @classmethod
    def of(cls, metadata: Metadata) -> StepName:
        """Returns the name of the step that a file's metadata describe."""
        return cls(sanitise(metadata.target), sanitise(metadata.role) if metadata.role else "", metadata.steps[0])

    def __str__(self) -> str:
        return f"{self.target}{f' ({self.role})' if self.role else ''} step {self.step}"


@dataclass(frozen=True)
class MergeAnswer:
    """The result of a merge, as ``--json`` prints it."""

    version: int
    """The version of this object: 1."""
    file: str
    """The written file, as given on the command line."""
    bytes: int
    """Size of the written file in bytes."""
    target: str
    """Target of the merged step."""
    role: str | None
    """Role of the merged step; None without one."""
    step: int
    """Number of the step, or of the first one in its files."""
    ranks: tuple[int, ...]
    """Merged ranks, ordered by stage."""
    left_out: int
    """Number of captured ranks of this step that were left out."""
    events: int
    """Number of events."""
    arrows: int
    """Number of arrows from sends to receives."""
    clocks: tuple[str, ...]
    """How far apart the clocks were, in sentences."""
    warnings: tuple[str, ...]
    """Warnings, in sentences."""
    others: tuple[str, ...]
    """Captured steps of the same run that were not merged."""
    run: int
    """Number of the run that the step belongs to; 1 is the oldest."""
    runs: int
    """Number of runs with files in the directory, as in a report."""

    @property
    def name(self) -> StepName:
        """Name of the merged step."""
        return StepName(self.target, self.role or "", self.step)


@dataclass
class _Rank:
    """A rank that will be written. ``events`` reads those of a file with several processes or windows. ``arrows``: the
    events that draw its ends of arrows, by the range in which they start or end."""

    path: Path
    events: Callable[[], Iterator[dict[str, Any]]] | None
    coords: Coords
    steps: tuple[TracedStep, ...]
    ends: Ends
    start: int
    base: int
    arrows: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)


def merge(
    source: Path,
    out: Path,
    *,
    target: str | None = None,
    role: str | None = None,
    step: int | None = None,
    ranks: Selector | None = None,
    run: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeAnswer:
    """Merges one captured step under ``source`` into ``out`` (gzipped if that ends in ``.gz``).

    `_choose` chooses the run, step and ranks. ``progress(done, total)`` is called after each file. ``out``
    appears whole or not at all. It replaces nothing but an older merged timeline. Files that cannot be used become
    warnings.

    Raises:
        Unanswerable: there is no such step, or none of its files can be read.
        NoSuchRun: there are fewer runs.
        ValueError: ``out`` exists and is not a merged timeline.
        OSError: ``out`` cannot be written.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a directory, not a file")
    if out.exists() and not (out.is_file() and out.stat().st_size == 0) and not is_merged(out):
        raise ValueError(f"{out} exists and is no merged timeline of megaprof's: it is not overwritten")
    warnings: list[Note] = []
    name, files, left_out, others, runs = _choose(source, warnings, target, role, step, ranks, run)
    ranks_read = []
    for number, file in enumerate(files):
        ranks_read += _examine(file, name, warnings)
        progress(number + 1, 2 * len(files))
    by_rank: dict[int, _Rank] = {}
    for rank in sorted(ranks_read, key=lambda rank: (rank.start, rank.path)):
        if runs.has(rank.start):
            if (earlier := by_rank.get(rank.coords.rank)) is not None:
                files_of_both = earlier.path.name, rank.path.name
                warnings.append(Note("twice", ranks=(rank.coords.rank,), files=files_of_both))
            by_rank[rank.coords.rank] = rank
    ranks_read = list(by_rank.values())
    if not ranks_read:
        raise Unanswerable(f"no file of {name} can be read: {brief(warnings)}")
    ranks_read.sort(key=lambda rank: (rank.coords.pp, rank.coords.rank))
    numbers = itertools.count(1)
    offset_ns, clocks = _one_clock(ranks_read, warnings)
    arrows = _connect(ranks_read, offset_ns, numbers, warnings)
    events = _write(
        out, name, ranks_read, offset_ns, numbers, warnings, lambda done: progress(len(files) + done, 2 * len(files))
    )
    return MergeAnswer(
        version=1,
        file=str(out),
        bytes=out.stat().st_size,
        target=name.target,
        role=name.role or None,
        step=name.step,
        ranks=tuple(rank.coords.rank for rank in ranks_read),
        left_out=left_out,
        events=events,
        arrows=arrows,
        clocks=clocks,
        warnings=tuple(note.text for note in warnings),
        others=tuple(map(str, others)),
        run=runs.chosen + 1,
        runs=runs.count,
    )


def _examine(path: Path, name: StepName, warnings: list[Note]) -> list[_Rank]:
    """Reads the places and messages of the ranks in a file."""
    try:
        traces = traces_in(path)
    except Undecodable as fault:
        warnings.append(Note("skipped", files=(path.name,), said=str(fault)))
        return []
    ranks = []
    for trace in traces:
        warnings += trace.warnings
        found_step = StepName.of(trace.metadata)
        if found_step == name:
            start = trace.ranges[0].start if trace.ranges else 0
            steps = tuple(steps_of(trace))
            ends = ends_of(trace.metadata, steps)
            ranks.append(_Rank(trace.path, trace.events, trace.metadata.coords, steps, ends, start, trace.base))
        elif trace.events is None:
            warnings.append(Note("skipped", files=(trace.path.name,), said=f"it holds {found_step}"))
    return ranks


def _one_clock(ranks: list[_Rank], warnings: list[Note]) -> tuple[dict[int, int], tuple[str, ...]]:
    """Returns the nanoseconds to add to the times of each rank, and how far the clock of each host was off from the
    first one.

    Offsets are those of the table of passes. A rank that is not in it shares its host's clock with those that are. The
    first rank of a host without any begins together with the table.
    """
    names = {rank.coords.rank: f"host {rank.ends.metadata.host}" for rank in ranks}
    offset_ns, within = dict[int, int](), ""
    for job in jobs_of(step for rank in ranks for step in rank.steps):
        with suppress(Unfit):
            if (table := table_of(job)).clocks and not offset_ns:
                # Replicas that reduce no gradients begin independently.
                together = (table.ranks if table.reduces else table.ranks[:1]).ravel().tolist()
                offset_ns = {rank: table.offset_of(rank, 0) for rank in together if rank in names}
                within = "" if table.aligned_ms is None else f", ±{table.aligned_ms:.3f} ms"
    first = next(rank for rank in names if rank in (offset_ns or names))
    of_clock = {names[rank]: ns for rank, ns in offset_ns.items()}
    known = {names[first], *of_clock}
    for rank in sorted(ranks, key=lambda rank: rank.start):
        name = names[rank.coords.rank]
        offset_ns.setdefault(rank.coords.rank, of_clock.setdefault(name, -rank.start))
    if apart := tuple(sorted(of_clock.keys() - known)):
        warnings.append(Note("clocks_unconnected", ranks=(first,), names=apart))
    offset_ns = {rank: offset_ns[rank] - offset_ns[first] for rank in names}
    behind_ms = {names[rank]: ns / 1e6 for rank, ns in offset_ns.items() if names[rank] in known}
    clocks = (
        f"{name}: clock {abs(ms):.3f} ms {'ahead' if ms < 0 else 'behind'}{within}"
        for name, ms in behind_ms.items()
        if name != names[first]
    )
    return offset_ns, tuple(clocks)


def _connect(ranks: list[_Rank], offset_ns: Mapping[int, int], numbers: Iterator[int], warnings: list[Note]) -> int:
    """Gives each rank its ends of the arrows. Returns the number of arrows."""
    for reason in dict.fromkeys(rank.ends.unknown for rank in ranks):
        if reason and len(ranks) > 1:
            unknown_ranks = tuple(rank.coords.rank for rank in ranks if rank.ends.unknown == reason)
            warnings.append(Note("no_arrows", ranks=unknown_ranks, said=reason))
    by_number, arrows, backwards = {rank.coords.rank: rank for rank in ranks}, 0, 0
    for message, sending, receiving in exchanged({number: rank.ends for number, rank in by_number.items()}):
        sender, receiver = by_number[sending], by_number[receiving]
        send, receive = sender.ends.sends[message], receiver.ends.receives[message]
        departure, arrival = (
            max(end.within[0], min(time, end.within[1] - _INSIDE_NS))
            for end, time in ((send, send.time[0]), (receive, receive.time[1]))
        )
        if arrival + offset_ns[receiving] < departure + offset_ns[sending]:
            backwards += 1
            continue
        arrow = {"cat": "p2p", "name": f"{message.kind} mb={message.microbatch} chunk={message.chunk}"}
        number, base = next(numbers), ranks[0].base
        sent, received = (departure + offset_ns[sending] - base) / 1000, (arrival + offset_ns[receiving] - base) / 1000
        sender.arrows.setdefault(send.within, []).append({"ph": "s", **arrow, "id": number, "ts": sent})
        # Perfetto reverses an arrow that ends in an older slice than the one it starts in. A receive that waits for a
        # late neighbour began before the send, so its arrow ends in a slice of its own.
        receiver.arrows.setdefault(receive.within, []).extend(
            (
                {"ph": "X", **arrow, "ts": received, "dur": _ARRIVAL_NS / 1000},
                {"ph": "f", "bp": "e", **arrow, "id": number, "ts": received},
            )
        )
        arrows += 1
    if backwards:
        warnings.append(Note("no_arrows", count=backwards, said="by these clocks they arrived before they were sent"))
    return arrows


def _write(
    out: Path,
    name: StepName,
    ranks: list[_Rank],
    offset_ns: Mapping[int, int],
    numbers: Iterator[int],
    warnings: list[Note],
    progress: Callable[[int], None],
) -> int:
    threads, written = itertools.count(_FIRST_THREAD), 0
    with appearing(out) as raw:
        file: Any = raw
        if out.suffix == ".gz":
            file = io.BufferedWriter(igzip.IGzipFile(filename="", mode="wb", fileobj=raw), _BUFFER)
        base = ranks[0].base
        clocks = {str(rank): ns for rank, ns in offset_ns.items()}
        names = {"version": __version__, "target": name.target, "role": name.role or None, "step": name.step}
        header = {MERGED: {**names, "offset_ns": clocks}, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
        file.write(msgspec.json.encode(header)[:-1] + b',"traceEvents":[')
        for position, rank in enumerate(ranks):
            at, host, dropped = rank.coords, rank.ends.metadata.host, 0
            title = f"pp{at.pp} tp{at.tp} cp{at.cp} ep{at.ep} dp{at.dp} (rank {at.rank})"
            named = [
                {"ph": "M", "name": f"process_{kind}", "pid": at.rank + 1, "tid": 0, "ts": 0, "args": {kind: value}}
                for kind, value in (("name", title), ("labels", host), ("sort_index", position))
            ]
            copied = _copied(rank, rank.base - base + offset_ns[at.rank], threads, numbers)
            for line in itertools.chain(map(msgspec.json.encode, named), copied):
                if line is None:
                    dropped += 1
                else:
                    file.write((b",\n" if written else b"\n") + line)
                    written += 1
            if dropped:
                warnings.append(Note("events_left_out", files=(rank.path.name,), count=dropped))
            progress(position + 1)
        file.write(b"\n]}\n")
        if file is not raw:
            file.close()
    return written


def _events(rank: _Rank) -> Iterator[Any]:
    """Yields the events of a rank, decoded piece by piece, and None for everything that is not an event. Raises
    Unanswerable if the file has changed since it was first read."""
    try:
        with refusing():
            if rank.events is not None:
                yield from rank.events()
                return
            document = Document[Any](unpacked(rank.path), Any)
            for events in document:
                yield from events
            yield from itertools.repeat(None, document.unreadable)
    except Undecodable as fault:
        raise Unanswerable(f"{rank.path} changed while it was read: {fault}") from None


def _copied(rank: _Rank, shift: int, threads: Iterator[int], numbers: Iterator[int]) -> Iterator[bytes | None]:
    """Yields the events of a rank as JSON, with new ids and with times ``shift`` nanoseconds later, arrows after their
    range; None for an event that is left out."""
    pid, encode = rank.coords.rank + 1, msgspec.json.encode
    new_tids: dict[tuple[Any, Any], int] = {}
    new_ids: dict[Any, int] = {}
    for event in _events(rank):
        time = _time(event)
        place = (event.get("pid"), event.get("tid", 0)) if isinstance(event, dict) else (None, None)
        if time is None or not all(isinstance(part, (int, str)) for part in place):
            yield None
            continue
        if event["ph"] == "M" and event.get("name") in _OF_PROCESS:
            continue
        tid = new_tids.get(place)
        if tid is None:
            tid = new_tids[place] = next(threads)
            if isinstance(place[1], str) and place[1]:  # Kineto puts its window's end on a thread without a name
                name = {"name": place[1]}
                yield encode({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": name})
        event["pid"], event["tid"], event["ts"] = pid, tid, (time + shift) / 1000
        for key in ("id", "bind_id"):
            if key in event:
                old_id = json.dumps(event[key], sort_keys=True)
                event[key] = new_ids[old_id] if old_id in new_ids else new_ids.setdefault(old_id, next(numbers))
        try:
            yield encode(event)
        except (ValueError, TypeError, RecursionError, OverflowError):
            yield None
            continue
        if event["ph"] == "X" and (event.get("cat") == KERNEL or str(event.get("name")).startswith(ranges.PREFIX)):
            start = rank.base + time
            for arrow in rank.arrows.pop((start, start + round(event.get("dur", 0) * 1000)), ()):
                yield encode({**arrow, "pid": pid, "tid": tid})


def _time(event: Any) -> int | None:
    """Returns an event's ``ts`` in nanoseconds; None if it has none, or if its duration is impossible."""
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        return None
    ts: Any = event.get("ts", 0 if event["ph"] == "M" else None)
    duration = event.get("dur", 0)
    for number in (ts, duration):
        # This also refuses NaN, because a comparison with NaN is false.
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) < _LONGEST:
            return None
    return round(float(ts) * 1000) if duration >= 0 else None


def is_merged(path: Path) -> bool:
    """Returns whether the file is a merged timeline of megaprof's."""
    try:
        return next(unpacked(path), b"").startswith(b'{"' + MERGED.encode())
    except (OSError, BrokenOff):
        return False


def _choose(
    source: Path,
    warnings: list[Note],
    target: str | None,
    role: str | None,
    step: int | None,
    ranks: Selector | None,
    run: int | None,
) -> tuple[StepName, list[Path], int, list[StepName], Runs]:
    """Returns a captured step, its files, how many captured ranks are not in them, the other steps of the same run, and
    the runs that have traces: the step belongs to the chosen one.

    It is the latest step of the first target in `_PREFERRED`, unless ``target``, ``role`` and ``step`` choose another.
    ``ranks``: None for all ranks, or for the lowest of each stage if there are more than `MOST_RANKS`. ``run``: the
    number of the run, from 1; None for the newest with captures. Files that cannot be used become ``warnings``. Raises
    Unanswerable and NoSuchRun.
    """
    if not source.exists():
        raise Unanswerable(f"{source} does not exist")
    captures: dict[StepName, list[tuple[Path, Coords]]] = {}
    sources, timelines = recordings_in(source)
    for file in sources:
        # A file of nsys may hold several.
        parsed = None if file.suffix in NSYS_SUFFIXES else parse_artifact_name(file.name)
        if parsed:
            name = StepName(parsed.target, parsed.role or "", parsed.step)
            captures.setdefault(name, []).append((file, parsed.coords))
            continue
        try:
            for trace in traces_in(file):
                captures.setdefault(StepName.of(trace.metadata), []).append((file, trace.metadata.coords))
        except Undecodable as fault:
            warnings.append(Note("skipped", files=(file.name,), said=str(fault)))
    if not captures:
        none = f"{source} holds no trace of megaprof's" + ", but timelines (megaprof report)" * bool(timelines.paths)
        raise Unanswerable("; ".join(filter(None, (none, brief(warnings)))))
    runs, steps_of_other_runs = _runs_of(timelines, captures, run)
    captures = {name: files for name, files in captures.items() if name not in steps_of_other_runs}
    matching_steps = [
        name
        for name in captures
        if (target is None or name.target == sanitise(target))
        and (role is None or name.role == sanitise(role))
        and (step is None or name.step == step)
    ]
    if not captures:
        raise Unanswerable(f"{source} holds no capture of run {runs.chosen + 1}")
    if not matching_steps:
        raise Unanswerable(f"{source} holds no such step, but: {', '.join(map(str, sorted(captures)[:20]))}")
    chosen_step = min(
        matching_steps,
        key=lambda each: ((*_PREFERRED, each.target).index(each.target), each.target, -each.step, each.role),
    )
    files = captures.pop(chosen_step)
    merged_ranks = captured_ranks = {coords.rank for _, coords in files}
    if ranks is not None:
        merged_ranks = {coords.rank for _, coords in files if ranks.selects(coords)}
        if absent := ranks.absent([coords for _, coords in files]):
            warnings.append(Note("incomplete", said=f"not captured, and so not merged: {absent}"))
    elif len(captured_ranks) > MOST_RANKS:
        of_stages = grouped((coords for _, coords in files), lambda coords: coords.pp).values()
        merged_ranks = {min(coords.rank for coords in of_stage) for of_stage in of_stages}
    if not merged_ranks:
        raise Unanswerable(
            f"{chosen_step} was captured on {len(captured_ranks):,} ranks, and none of them is in '{ranks}'"
        )
    merged_files = [*dict.fromkeys(file for file, coords in files if coords.rank in merged_ranks)]
    return chosen_step, merged_files, len(captured_ranks) - len(merged_ranks), sorted(captures), runs


def _runs_of(
    timelines: Timelines, captures: Mapping[StepName, Iterable[tuple[Path, Coords]]], run: int | None
) -> tuple[Runs, set[StepName]]:
    """Returns the runs, as a report tells them apart, and the steps that belong to other runs than the chosen one, by
    default the newest with captures. If there are timelines, they tell runs apart, with the captures of one rank.
    Raises NoSuchRun."""
    files_of: defaultdict[int, dict[Path, None]] = defaultdict(dict)
    for file, coords in itertools.chain.from_iterable(captures.values()):
        files_of[coords.rank][file] = None
    fullest = min(files_of, key=lambda rank: (-len(files_of[rank]), rank))
    every = dict.fromkeys(itertools.chain.from_iterable(files_of.values()))
    if len(every) == 1 and run is None:
        return Runs(), set()
    few = files_of[fullest] if timelines.paths else every
    steps = [step for file in few for step in read(file).steps]
    runs = runs_in(steps, timelines, run)
    if runs.count > 1:
        steps += [step for file in every if file not in few for step in read(file).steps]
    if run is None:
        runs = replace(runs, chosen=max((runs.index(step.host[0]) for step in steps), default=runs.chosen))
    by_name = grouped(steps, lambda step: StepName.of(step.metadata))
    return runs, {name for name, of_name in by_name.items() if not any(runs.has(step.host[0]) for step in of_name)}
