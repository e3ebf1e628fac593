"""Tables of passes from timelines. Every file is opened once; steps are chosen from the first one that holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.job import Job, layers_of, place_of, schedule_of, table_of
from megaprof.analysis.diagnosis.policy import STEPS
from megaprof.analysis.diagnosis.table import CALLS, RankSteps, Table, Unfit
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PipelineSchedule

_LEFT_OUT = format.FAILED | format.CAPTURED | format.INCOMPLETE
_PASSES = {codes.FORWARD: 0, codes.BACKWARD: 1}


class _Piece(NamedTuple):
    """Some steps of one rank from one file, and what they are of."""

    metadata: Metadata
    schedule: PipelineSchedule
    steps: RankSteps


def tables_of_timelines(paths: Iterable[Path]) -> dict[Job, Table | Unfit]:
    """The table of every job, or why there is none. Files that cannot be read are left out."""
    wanted: dict[Job, npt.NDArray[np.int64]] = {}
    pieces: dict[Job, dict[int, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
    refused: dict[Job, Unfit] = {}
    for path in paths:
        try:
            timeline = format.read_timeline(path)
        except format.UnreadableTimeline:
            continue
        for job, rows in _jobs(timeline).items():
            numbers = timeline.steps["step"][rows].astype(np.int64) << CALLS | timeline.steps["index"][rows]
            chosen = wanted.setdefault(job, _spread(np.unique(numbers)))
            try:
                piece = _piece(timeline, rows[np.isin(numbers, chosen)])
            except Unfit as fault:
                refused.setdefault(job, fault)
                continue
            if piece is not None:
                pieces[job][piece.steps.rank].append(piece)
    found: dict[Job, Table | Unfit] = dict(refused)
    for job, by_rank in pieces.items():
        first = next(iter(by_rank.values()))[0]
        alike = [[piece.steps for piece in own if piece.schedule == first.schedule] for own in by_rank.values()]
        ranks = [_joined(own) for own in alike if own]
        try:
            found[job] = table_of(job, ranks, first.metadata, first.schedule)
        except Unfit as fault:
            found[job] = fault
    return found


def _jobs(timeline: format.Timeline) -> dict[Job, npt.NDArray[np.intp]]:
    """The rows of the steps of each job that have times and were not disturbed by a window."""
    found: dict[Job, npt.NDArray[np.intp]] = {}
    whole = (timeline.steps["flags"] & _LEFT_OUT) == 0
    for number, metadata in enumerate(timeline.metadata):
        job = Job(metadata.target, metadata.role, metadata.sizes)
        rows = np.flatnonzero(whole & (timeline.steps["metadata"] == number))
        if len(rows):
            found[job] = np.concatenate((found[job], rows)) if job in found else rows
    return found


def _spread(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Some of them, evenly; of several never the first, in which caches are cold."""
    numbers = numbers[1:] if len(numbers) > 3 else numbers
    places = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), STEPS)).round().astype(int))
    found: npt.NDArray[np.int64] = numbers[places]
    return found


def _piece(timeline: format.Timeline, rows: npt.NDArray[np.intp]) -> _Piece | None:
    """Raises Unfit for a schedule that no table has."""
    events = [(row, own) for row in rows.tolist() if (own := timeline.events(row)) is not None]
    if not events:
        return None
    metadata = timeline.metadata[int(timeline.steps["metadata"][events[0][0]])]
    schedule = schedule_of(metadata, metadata.forward_only)
    shape = (len(events), schedule.chunks, len(schedule.kinds), schedule.microbatches)
    start, end = np.full(shape, np.nan), np.full(shape, np.nan)
    enter, reduced = np.zeros(len(events)), np.full(len(events), np.nan)
    origin = int(timeline.steps["start_ns"][0]) // 10**15 * 10**15  # the same for all ranks: a float holds the rest
    places: dict[int, tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.bool_]]] = {}
    for t, (row, own) in enumerate(events):
        fixed = timeline.steps[row]
        number = int(fixed["shape"])
        if number not in places:
            places[number] = _places(own.code, schedule)
        which, at, finalizing = places[number]
        begun = (int(fixed["start_ns"]) - origin) / 1e6
        start[t].reshape(-1)[at] = begun + own.start[which] / 1e3
        end[t].reshape(-1)[at] = begun + own.end[which] / 1e3
        enter[t] = begun
        if finalizing.any() and metadata.sizes.dp > 1:
            reduced[t] = begun + own.end[finalizing].max() / 1e3
    replica, peer = place_of(metadata.coords)
    kept = [row for row, _ in events]
    steps = timeline.steps["step"][kept].astype(np.int64) << CALLS | timeline.steps["index"][kept]
    order = np.argsort(steps, kind="stable")
    return _Piece(
        metadata,
        schedule,
        RankSteps(
            rank=metadata.coords.rank,
            stage=metadata.coords.pp,
            replica=replica,
            peer=peer,
            host=metadata.host,
            layers=layers_of(metadata),
            steps=steps[order],
            start=start[order],
            end=end[order],
            compute=(end - start)[order],
            idle=np.zeros(shape),
            exposed={},
            enter=enter[order],
            reduced=reduced[order],
            opening=np.zeros(len(kept), dtype=np.bool_),
            device=bool(timeline.steps["flags"][kept[0]] & format.DEVICE_CLOCK),
        ),
    )


def _places(
    code: npt.NDArray[np.int64], schedule: PipelineSchedule
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Which events are passes, where in [c, k, m] each stands, and which are gradient finalisation."""
    kind = code & codes.KIND_MASK
    if (kind == codes.COMBINED).any():
        raise Unfit("forwards and backwards run combined: their own times are not known")
    which = np.flatnonzero((kind == codes.FORWARD) | (kind == codes.BACKWARD))
    at = []
    for each in code[which].tolist():
        name = codes.name(each)
        fields = {} if name is None else name.fields
        chunk, microbatch, pass_kind = fields.get("chunk"), fields.get("mb"), _PASSES[each & codes.KIND_MASK]
        if chunk is None or microbatch is None or pass_kind >= len(schedule.kinds):
            raise Unfit("the microbatch or the model chunk of a pass is not known")
        if chunk >= schedule.chunks or microbatch >= schedule.microbatches:
            raise Unfit("a pass bears a number that its schedule does not have")
        at.append((chunk * len(schedule.kinds) + pass_kind) * schedule.microbatches + microbatch)
    return which, np.array(at, dtype=np.intp), kind == codes.FINALIZE


def _joined(pieces: Sequence[RankSteps]) -> RankSteps:
    """One rank's steps from several files; of a step that ran again, the last time counts."""
    if len(pieces) == 1 and len(np.unique(pieces[0].steps)) == len(pieces[0].steps):
        return pieces[0]
    numbers = np.concatenate([piece.steps for piece in pieces])
    enter = np.concatenate([piece.enter for piece in pieces])
    order = np.lexsort((enter, numbers))
    last = order[np.append(np.diff(numbers[order]) != 0, True)]
    arrays = {
        name: np.concatenate([getattr(piece, name) for piece in pieces])[last]
        for name in ("steps", "start", "end", "compute", "idle", "enter", "reduced", "opening")
    }
    return replace(pieces[0], **arrays)
