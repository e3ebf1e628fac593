"""Finds which ranks keep a job waiting, from dumps of torch's flight recorder.

All members of a process group call its collectives in the same order, so a collective has a number in its group. A rank
waits for another rank if it has called a collective that the other has not, or if it receives what the other has not
sent. A rank that others wait for, and that waits for no one, is the culprit: its host is stuck somewhere else. The
exchanges of a batch end together. A send without its receive, and without receives in its batch, counts only for a rank
that waits for nothing else, and not if the receiver waits for that rank in turn: it may end without the receiver.

A rank whose device is stuck may have called everything. It is a culprit if the first operation that has not ended on
it has ended on another rank of the group, or has begun on other ranks but not on this one. If an operation is the first
that has not ended on every rank of its group, the dumps do not show which rank is at fault. Then the operation is named
instead of a rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import permutations, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Literal

from megaprof.analysis.dumps import ENDING, Dump, Operation, dump_of, read_dump
from megaprof.analysis.notes import Note
from megaprof.formats.flight import Flight
from megaprof.formats.job import Standing, Standstill
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.peers import Waits

#: Collectives that have the same size on all ranks. In an all-to-all, a gather or a scatter, sizes may differ.
_EVEN = ("all_reduce", "allreduce", "broadcast", "_broadcast_oop", "_all_gather_base", "_reduce_scatter_base", "reduce")
_PIPELINE, _TENSOR = "PIPELINE_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"

Why = Literal["absent", "no_dump", "unreadable", "stuck", "not_begun", "differs", "crossed", "held_up"]


@dataclass(frozen=True)
class Awaited:
    """An operation that does not end."""

    operation: str
    """Name in torch: ``all_reduce``, ``_all_gather_base``, ``send``."""
    number: int | None
    """Number among the collectives of the group; None for an exchange."""
    group: str
    """Megatron's description of the group, such as ``TENSOR_MODEL_PARALLEL_GROUP``; its name if there is none."""
    ranks: tuple[int, ...]
    """Ranks of the group; for an exchange, its two ranks."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of its inputs on the waiting rank."""
    since: float
    """When the first waiting rank called it, in seconds since 1970."""


@dataclass(frozen=True)
class Culprit:
    """A rank that keeps others waiting."""

    rank: int
    """Global rank."""
    stage: int | None
    """Position in its pipeline group; None if the dumps do not say."""
    why: Why
    """``absent``: the rank did not call what others called. ``no_dump``: as ``absent``, but the rank left no dump, so
    only the other dumps show it. ``unreadable``: its dump cannot be read, so nothing is known of it. ``stuck``: it
    does not finish what others have finished. ``not_begun``: others began the operation, but its device did not.
    ``differs``: it called another operation of the same group, or another size. ``crossed``: it and others wait for
    each other, because they call operations in different orders. ``held_up``: it did not call what others called,
    because it waits for another rank itself. Its status says that; the dumps do not have the exchanges of gloo."""
    awaited: Awaited
    """First operation in which others wait; for ``stuck`` and ``not_begun``, the operation that the rank does not
    finish."""
    waiting: tuple[int, ...]
    """Ranks that wait for this rank, in this operation or in another."""
    instead: str | None
    """For ``differs``, the operation that the rank called instead, with its sizes; for ``crossed``, the one that it
    waits in; otherwise None."""
    waits_for: int | None = None
    """For ``held_up``, the rank that it waits for, directly or through other ranks; otherwise None."""


@dataclass(frozen=True)
class Hang:
    """The findings from the dumps of a job. This is the JSON of `megaprof hang`."""

    version: int
    """Version of this object: 1."""
    ranks: tuple[int, ...]
    """Ranks that left a dump."""
    missing: tuple[int, ...]
    """Other ranks of their groups, which left no dump. ``warnings`` names dumps that cannot be read."""
    culprits: tuple[Culprit, ...]
    """Ranks that keep the job waiting, starting with the one that others have waited for longest."""
    behind: int
    """Number of other ranks with an operation that does not end, which `culprits`, `held_up` and `unended` do not
    name."""
    unended: tuple[Awaited, ...]
    """Operations that do not end, although all ranks of their group have called them and have nothing to finish before
    them. Then the device of one of the ranks, or the network between them, is at fault."""
    warnings: tuple[Note, ...]
    """Notes about the dumps."""
    held_up: tuple[Culprit, ...] = ()
    """Ranks that others wait for, but that wait for another rank themselves, by the statuses of a running job. They are
    no culprits."""
    outside: tuple[Standing, ...] = ()
    """Ranks that others wait for outside of collectives, from the statuses of a running job; only if no collective
    keeps anyone waiting."""
    standstills: tuple[Standstill, ...] = ()
    """Steps in which the job stands still, stood when it was killed, or stood before it ended, as in the report. Empty
    for dumps of torch's watchdog."""


def hang_of(paths: Iterable[Path]) -> Hang:
    """Returns who keeps a job waiting, from the dumps among ``paths``. Ignores files whose names end in no rank, and
    warns of those that cannot be read. Raises Unanswerable if no file is a dump."""
    dumps: dict[int, Dump] = {}
    warnings = []
    files: dict[int, str] = {}
    for path in sorted(paths):
        if (ending := ENDING.search(path.name)) is None:
            continue
        rank = int(ending["rank"])
        try:
            dump = read_dump(rank, path)
        except (Unanswerable, OSError) as fault:
            warnings.append(Note("dump_unreadable", files=(path.name,), ranks=(rank,), said=str(fault)))
            continue
        if rank in dumps:
            warnings.append(Note("twice", files=(files[rank], path.name), ranks=(rank,)))
        if rank not in dumps or dump.latest > dumps[rank].latest:
            dumps[rank], files[rank] = dump, path.name
    if not dumps:
        unread = [f"{note.files[0]} is no dump that can be read: {note.said}" for note in warnings]
        raise Unanswerable("; ".join(unread) or "no file here is a dump of torch's flight recorder")
    return hang(dumps, warnings)


def hang_of_job(flights: Mapping[int, Flight], waits_for: Mapping[int, int]) -> Hang:
    """Returns who keeps a running job waiting, from the flight recorders that its stuck ranks have written, by rank.
    ``waits_for``: the rank that a rank waits for by their statuses."""
    dumps, warnings = {}, []
    for rank, flight in sorted(flights.items()):
        try:
            dumps[rank] = dump_of(rank, flight)
        except Unanswerable as fault:
            warnings.append(Note("dump_unreadable", ranks=(rank,), said=str(fault)))
    return hang(dumps, warnings, waits_for)


def hang(dumps: Mapping[int, Dump], warnings: Sequence[Note] = (), waits_for: Mapping[int, int] | None = None) -> Hang:
    """Returns who keeps the ranks of ``dumps``, by rank, waiting. ``waits_for``: see `hang_of_job`."""
    job = _Job(dumps)
    unread = {rank for note in warnings if note.kind == "dump_unreadable" for rank in note.ranks} - dumps.keys()
    culprits = {culprit.rank: culprit for culprit in _differing(job)}
    stuck_devices = dict(_by_device(job))
    # A rank that called something else, or whose device is stuck, waits for no one.
    decided = stuck_devices.keys() | culprits.keys()
    waits = job.waits(dumps.keys() - decided)
    common_operations = {
        rank: operation
        for rank, dump in dumps.items()
        for operation in reversed(dump.first() if rank not in waits.keys() | decided else ())
        if not job.absent(operation)
    }
    graph = Waits(waits)
    undecided = graph.sinks & common_operations.keys()
    reasons: dict[int, Why] = {
        **dict.fromkeys(graph.sinks - undecided, "absent"),
        **dict.fromkeys(graph.circle, "crossed"),
        **stuck_devices,
    }
    held_up = {}
    for rank, why in reasons.items():
        waited_for = (waits_for or {}).get(rank)
        if rank in culprits:
            continue
        if rank not in dumps:
            why = "unreadable" if rank in unread else "no_dump"
        # If the dumps show that the other rank waits, they know better than the statuses who waits for whom.
        if why == "absent" and waited_for is not None and waited_for not in waits:
            held_up[rank] = replace(job.culprit(rank, why, waits), why="held_up", waits_for=waited_for)
        else:
            culprits[rank] = job.culprit(rank, why, waits)
    differing = [culprit for culprit in culprits.values() if culprit.why == "differs"]
    for one, other in permutations(differing, 2):  # what most ranks called is right
        if one.rank in other.waiting and len(one.waiting) < len(other.waiting):
            culprits.pop(one.rank, None)
    unended: dict[tuple[str, int | None, tuple[int, ...]], Awaited] = {}
    shown = {rank: common_operations[rank] for rank in undecided} or ({} if culprits or held_up else common_operations)
    for operation in sorted(shown.values(), key=_called):
        awaited = job.awaited(operation)
        unended.setdefault((operation.group, awaited.number, awaited.ranks), awaited)
    named = {rank for awaited in unended.values() for rank in awaited.ranks}
    named |= {rank for one in (*culprits.values(), *held_up.values()) for rank in (one.rank, *one.waiting)}
    return Hang(
        1,
        tuple(sorted(dumps)),
        tuple(sorted({rank for ranks in job.members.values() for rank in ranks} - dumps.keys() - unread)),
        tuple(sorted(culprits.values(), key=_since)),
        sum(bool(dump.pending) for rank, dump in dumps.items() if rank not in named),
        tuple(unended.values()),
        (*warnings, *job.disagreements),
        tuple(sorted(held_up.values(), key=_since)),
    )


#: The order of operations, and of culprits: who has waited longest comes first.
_called, _since = attrgetter("called"), attrgetter("awaited.since", "rank")


class _Job:
    """The dumps of all ranks, by group."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dumps
        #: The collectives in which a rank waits: by group and number, then by rank.
        self.calls: defaultdict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)
        #: The numbers of the first collectives that have not ended, by rank and group.
        self.first: dict[tuple[int, str], int] = {}
        # One direction of the exchanges of a rank: the rank, the group, ``send`` or ``recv``, and the other rank.
        exchanges: defaultdict[tuple[int, str, str, int], list[Operation]] = defaultdict(list)
        #: What each group is called: Megatron's description, or its name.
        self._descriptions: dict[str, str] = {}
        groups: defaultdict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for rank, dump in sorted(dumps.items()):
            for name, (description, ranks) in dump.groups.items():
                self._descriptions.setdefault(name, description or name)
                groups[name][rank] = ranks
            for operation in dump.pending:
                if operation.peer is not None:
                    exchanges[rank, operation.group, operation.name, operation.peer].append(operation)
                    continue
                self.calls[operation.group, operation.number][rank] = operation
                self.first.setdefault((rank, operation.group), operation.number)
        #: The ranks of each group in its order; if no dump lists them, those whose dumps mention the group.
        self.members: dict[str, tuple[int, ...]] = {}
        #: A note about each group whose ranks hold different lists of its members.
        self.disagreements: list[Note] = []
        for name, by_rank in groups.items():
            lists = {*by_rank.values()} - {()}
            self.members[name] = max(lists, key=len, default=tuple(by_rank))
            if len(lists) > 1:
                members = (", ".join(map(str, ranks)) for ranks in sorted(lists))
                self.disagreements.append(Note("group_differs", names=(self._descriptions[name], name, *members)))
        named = [(self._descriptions[name], ranks) for name, ranks in self.members.items()]
        self._stages = {rank: stage for name, ranks in named if name == _PIPELINE for stage, rank in enumerate(ranks)}
        self._peers = {rank: ranks for name, ranks in named if name == _TENSOR for rank in ranks}
        #: The other side of each exchange; None if it was not called.
        self._answers: dict[Operation, Operation | None] = {}
        for (caller, group_name, name, peer), operations in exchanges.items():
            others = exchanges.get((peer, group_name, "recv" if name == "send" else "send", caller), [])
            self._answers |= zip_longest(operations, others[: len(operations)])
        #: The number of the last collective that a rank called, by rank and group.
        exchanging = frozenset().union(*(dump.exchanging for dump in dumps.values()))
        self._called = {
            (rank, name): number
            for rank, dump in dumps.items()
            for name, number in {**dump.enqueued, **dump.called}.items()
            if name in dump.called or name not in exchanging
        }
        #: By collective, the ranks that did not call it, and those that have something else to end before.
        self._absent, self._late = {}, {}
        for call, callers in self.calls.items():
            first = next(iter(callers.values()))
            self._absent[call] = [rank for rank in self.members[call[0]] if not self.came(rank, first)]
            self._late[call] = [rank for rank, operation in callers.items() if not self._is_first(operation)]

    def came(self, rank: int, operation: Operation) -> bool:
        """Returns whether ``rank`` has called this collective of its group."""
        return self._called.get((rank, operation.group), 0) >= operation.number

    def waits(self, ranks: Set[int]) -> dict[int, dict[int, Operation]]:
        """Returns the operation in which one of ``ranks`` waits for another rank, by the waiting rank and the rank that
        it waits for. It waits in the first operations that do not end on it: for ranks that did not call them, and for
        ranks that have something else to end before. In a later operation, it waits for ranks that do nothing."""
        waits = {rank: self._waits_in(self.dumps[rank].first()) for rank in ranks}
        # What closes a circle may have ended by itself: a send without its receive, or one exchange of a batch.
        circle = Waits(waits).circle
        begun = {rank for rank in circle if any(map(self._answers.get, self.dumps[rank].first()))}
        known = {rank: self._waits_in(self.dumps[rank].first(sends=False)) for rank in circle - begun}
        if begun or any(known.values()):
            waits |= known | {rank: {} for rank in begun}
        # The other side of an exchange may be an earlier one, in a batch that waits for a third rank.
        together = dict(waits)
        waiting = [rank for rank, operations in waits.items() if operations]
        for rank in waiting:
            for answer in filter(None, map(self._answers.get, self.dumps[rank].first())):
                if together.get(answer.rank) == {} and self._is_first(answer):
                    together[answer.rank] = {rank: answer}
                    waiting.append(answer.rank)
        circle = Waits(together).circle
        waits |= {rank: operations for rank, operations in together.items() if rank not in circle}
        for rank in ranks:
            for operation in self.dumps[rank].pending:
                for other_rank in self.absent(operation) if operation.name != "send" else ():
                    if other_rank not in self.dumps or not self.dumps[other_rank].pending:
                        waits[rank].setdefault(other_rank, operation)
        return {rank: operations for rank, operations in waits.items() if operations}

    def _waits_in(self, batch: Iterable[Operation]) -> dict[int, Operation]:
        """Returns the ranks that one batch waits for, each with what it receives from it rather than what it sends."""
        receives_last = sorted(batch, key=lambda operation: operation.name != "send")
        return {
            rank: operation for operation in receives_last for rank in (*self.absent(operation), *self._busy(operation))
        }

    def absent(self, operation: Operation) -> Collection[int]:
        """Returns the ranks that did not call an operation that a rank has called."""
        if operation.peer is None:
            return self._absent[operation.group, operation.number]
        return () if self._answers[operation] is not None else (operation.peer,)

    def _busy(self, operation: Operation) -> Collection[int]:
        """Returns the ranks that called it, but have something else to end before."""
        if operation.peer is None:
            return self._late[operation.group, operation.number]
        answer = self._answers[operation]
        return () if answer is None or self._is_first(answer) else (answer.rank,)

    def _is_first(self, operation: Operation) -> bool:
        return operation.batch == self.dumps[operation.rank].pending[0].batch

    def culprit(self, rank: int, why: Why, waits: Mapping[int, Mapping[int, Operation]]) -> Culprit:
        """Returns ``rank`` as a culprit, with the operation in which others have waited for it longest."""
        awaited_by = {waiter: operations[rank] for waiter, operations in waits.items() if rank in operations}
        own = self.dumps[rank].pending[0] if rank in self.dumps and self.dumps[rank].pending else None
        awaited = own if own is not None and why in ("stuck", "not_begun") else min(awaited_by.values(), key=_called)
        instead = None
        if why == "crossed":
            own = min(waits[rank].values(), key=_called)
            instead = f"{_words(own)} of {self.awaited(own).group}"
        differs = own is not None and (own.group, not own.between) == (awaited.group, bool(awaited.between))
        if own and differs and why in ("absent", "crossed"):
            why, instead = "differs", _words(own)
        return Culprit(rank, self.stage(rank), why, self.awaited(awaited), tuple(sorted(awaited_by)), instead)

    def awaited(self, operation: Operation) -> Awaited:
        """Returns the operation, with what is known of its group."""
        return Awaited(
            operation.name,
            operation.number if operation.peer is None else None,
            self._descriptions[operation.group],
            operation.between or self.members[operation.group],
            operation.sizes,
            operation.called,
        )

    def stage(self, rank: int) -> int | None:
        """Returns the pipeline stage of ``rank``; None if the dumps do not say. A rank that left no dump may be in no
        known pipeline group; then a tensor-parallel peer, which is on the same stage, gives the stage."""
        stages = (self._stages.get(each) for each in (rank, *self._peers.get(rank, ())))
        return next((stage for stage in stages if stage is not None), None)


def _words(operation: Operation) -> str:
    return " ".join([operation.name, *("x".join(map(str, shape)) for shape in operation.sizes)])


def _differing(job: _Job) -> Iterator[Culprit]:
    """Yields the ranks that called another operation, or another size, than most ranks of the group at the same
    number; all of them if as many are on either side."""
    for calls in job.calls.values():
        by_form: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, operation in calls.items():
            elements = *(math.prod(shape) for shape in operation.sizes), *operation.dtypes
            by_form[(operation.name, *(elements if operation.name in _EVEN else ()))].append(rank)
        usual, second, *_ = *sorted(by_form.values(), key=len, reverse=True), []
        for ranks in by_form.values():
            others = second if ranks is usual else usual
            for rank in ranks if len(ranks) <= len(others) else ():
                awaited, waiting = job.awaited(calls[others[0]]), tuple(sorted(others))
                yield Culprit(rank, job.stage(rank), "differs", awaited, waiting, _words(calls[rank]))


def _by_device(job: _Job) -> Iterator[tuple[int, Why]]:
    for (group, number), operations in job.calls.items():
        first = next(iter(operations.values()))
        # The collectives of a group end in order.
        may_be = (rank for rank in job.members[group] if number < job.first.get((rank, group), math.inf))
        ended = any(job.came(rank, first) for rank in may_be)
        begun = any(operation.started for operation in operations.values())
        for rank, operation in operations.items():
            if operation is job.dumps[rank].pending[0]:
                if ended:
                    yield rank, "stuck"
                elif begun and not operation.started:
                    yield rank, "not_begun"
