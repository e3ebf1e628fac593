"""Finds which ranks keep a job waiting, from dumps of torch's flight recorder.

All members of a process group call its collectives in the same order, so a collective has a number in its group. A rank
waits for another rank if it has called a collective that the other has not, or if it receives what the other has not
sent. A rank that others wait for, and that waits for no one, is the culprit: its host is stuck somewhere else. A send
without its receive counts only if nothing else makes a rank wait, because neither host nor device waits for it.

A rank whose device is stuck may have called everything. It is a culprit if the first operation that has not ended on
it has ended on another rank of the group, or has begun on other ranks but not on this one. If an operation is the first
that has not ended on every rank of its group, the dumps do not show which rank is at fault. Then the operation is named
instead of a rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaprof.analysis.collectives.dumps import BadDump, Dump, Group, Operation, dump_of, rank_of, read_dump
from megaprof.analysis.notes import Note
from megaprof.formats.flight import Flight
from megaprof.formats.job.standstill import Standing, Standstill

#: Collectives that have the same size on all ranks. In an all-to-all, a gather or a scatter, sizes may differ.
_EVEN = ("all_reduce", "allreduce", "broadcast", "_broadcast_oop", "_all_gather_base", "_reduce_scatter_base", "reduce")
_PIPELINE, _TENSOR = "PIPELINE_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"

Why = Literal["absent", "no_dump", "stuck", "not_begun", "differs", "crossed"]


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
    """Ranks of the group."""
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
    only the other dumps show it. ``stuck``: it does not finish what others have finished. ``not_begun``: others began
    the operation, but its device did not. ``differs``: it called another operation, or another size. ``crossed``: it
    and others wait for each other, because they call the operations of two groups in different orders."""
    awaited: Awaited
    """First operation in which others wait; for ``stuck`` and ``not_begun``, the operation that the rank does not
    finish."""
    waiting: tuple[int, ...]
    """Ranks that wait for this rank, in this operation or in another."""
    instead: str | None
    """Operation that the rank called instead, with its sizes; None unless ``why`` is ``differs``."""


@dataclass(frozen=True)
class HeldUp:
    """A rank that did not call what others called, because it waits for another rank itself. Its status says that; the
    dumps do not have the exchanges of gloo."""

    rank: int
    """Global rank."""
    stage: int | None
    """Position in its pipeline group; None if the dumps do not say."""
    waits_for: int
    """Rank that it waits for, directly or through other ranks."""
    awaited: Awaited
    """First operation in which others wait for this rank."""
    waiting: tuple[int, ...]
    """Ranks that wait for this rank, in this operation or in another."""


@dataclass(frozen=True)
class Hang:
    """The findings from the dumps of a job. This is the JSON of `megaprof hang`."""

    version: int
    """Version of this object: 1."""
    ranks: tuple[int, ...]
    """Ranks that left a dump."""
    missing: tuple[int, ...]
    """Other ranks of their groups, which left no dump."""
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
    held_up: tuple[HeldUp, ...] = ()
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
    warns of those that cannot be read. Raises BadDump if no file is a dump."""
    dumps: dict[int, Dump] = {}
    warnings = []
    files: dict[int, str] = {}
    for path in sorted(paths):
        if rank_of(path) is None:
            continue
        try:
            dump = read_dump(path)
        except (BadDump, OSError) as fault:
            warnings.append(Note("skipped", files=(path.name,), said=str(fault)))
            continue
        previous_dump = dumps.get(dump.rank)
        if previous_dump is not None:
            warnings.append(Note("twice", files=(files[dump.rank], path.name), ranks=(dump.rank,)))
        if previous_dump is None or dump.latest > previous_dump.latest:
            dumps[dump.rank], files[dump.rank] = dump, path.name
    if not dumps:
        unread = [f"{note.files[0]} is no dump that can be read: {note.said}" for note in warnings]
        raise BadDump("; ".join(unread) or "no file here is a dump of torch's flight recorder")
    return hang(dumps, warnings)


def hang_of_job(flights: Mapping[int, Flight], waits_for: Mapping[int, int]) -> Hang | None:
    """Returns who keeps a running job waiting, from the flight recorders that its stuck ranks have written, by rank;
    None if no rank has written one that can be read. ``waits_for``: the rank that a rank waits for by their
    statuses."""
    dumps, warnings = {}, []
    for rank, flight in sorted(flights.items()):
        try:
            dumps[rank] = dump_of(rank, flight)
        except BadDump as fault:
            warnings.append(Note("in_flight_unreadable", ranks=(rank,), said=str(fault)))
    return hang(dumps, warnings, waits_for) if dumps else None


def hang(dumps: Mapping[int, Dump], warnings: Sequence[Note] = (), waits_for: Mapping[int, int] | None = None) -> Hang:
    """Returns who keeps the ranks of ``dumps``, by rank, waiting. ``waits_for``: see `hang_of_job`."""
    job = _Job(dumps)
    missing_ranks = tuple(sorted({rank for ranks in job.members.values() for rank in ranks} - dumps.keys()))
    culprits = list(_differing(job))
    stuck_devices = dict(_by_device(job))
    # A rank that called something else, or whose device is stuck, waits for no one.
    culprit_ranks = stuck_devices.keys() | {culprit.rank for culprit in culprits}
    waits = {rank: operations for rank, operations in job.waits().items() if rank not in culprit_ranks}
    behind = {rank: other_ranks for rank, other_ranks in job.behind().items() if rank not in culprit_ranks}
    common_operations = job.common_operations()
    sinks = dict(_sinks(waits, behind, culprit_ranks))
    undecided_operations = {
        rank: common_operations[rank] for rank in sinks if rank in common_operations and rank not in stuck_devices
    }
    reasons = {rank: why for rank, why in sinks.items() if rank not in undecided_operations}
    held_up = []
    for rank, why in {**reasons, **stuck_devices}.items():
        if any(rank == culprit.rank for culprit in culprits):
            continue
        culprit = job.culprit(rank, why if rank in dumps else "no_dump", waits)
        awaited_rank = (waits_for or {}).get(rank)
        # If the dumps show that the other rank waits, they know better than the statuses who waits for whom.
        if why == "absent" and awaited_rank is not None and awaited_rank not in waits:
            held_up.append(HeldUp(rank, culprit.stage, awaited_rank, culprit.awaited, culprit.waiting))
        else:
            culprits.append(culprit)
    unended = {
        (
            operation.group,
            operation.number,
            frozenset(() if operation.peer is None else (rank, operation.peer)),
        ): operation
        for rank, operation in sorted(
            (undecided_operations or ({} if culprits or held_up else common_operations)).items(),
            key=lambda item: -item[1].called,
        )
    }
    awaited_operations = tuple(job.awaited(operation) for operation in unended.values())
    named_ranks = {rank for culprit in culprits for rank in (culprit.rank, *culprit.waiting)}
    named_ranks |= {rank for held in held_up for rank in (held.rank, *held.waiting)}
    named_ranks |= {rank for awaited in awaited_operations for rank in awaited.ranks}
    return Hang(
        1,
        tuple(sorted(dumps)),
        missing_ranks,
        tuple(sorted(culprits, key=lambda culprit: (culprit.awaited.since, culprit.rank))),
        sum(bool(dump.pending) for rank, dump in dumps.items() if rank not in named_ranks),
        awaited_operations,
        (*warnings, *job.disagreements()),
        tuple(sorted(held_up, key=lambda held: (held.awaited.since, held.rank))),
    )


class _Job:
    """The dumps of all ranks, by group."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dumps
        self._groups: dict[str, Group] = {}
        member_lists: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        mentioning_ranks: defaultdict[str, set[int]] = defaultdict(set)
        #: The collectives in which a rank waits: by group and number, then by rank.
        self.calls: defaultdict[tuple[str, int], dict[int, Operation]] = defaultdict(dict)
        exchanging_groups: set[str] = set()
        for rank, dump in sorted(dumps.items()):
            for name, group in dump.groups.items():
                self._groups.setdefault(name, group)
                member_lists[name].update([group.ranks] if group.ranks else [])
                mentioning_ranks[name].add(rank)
            for operation in dump.pending:
                if operation.peer is None:
                    self.calls[operation.group, operation.number][rank] = operation
            exchanging_groups |= dump.exchanging
        self._member_lists = member_lists
        #: The ranks of each group in its order; if no dump lists them, those whose dumps mention the group.
        self.members = {
            name: max(member_lists[name], key=len) if member_lists[name] else tuple(sorted(mentioning_ranks[name]))
            for name in self._groups
        }
        #: The number of the last collective that a rank called, by rank and group.
        self._called = {
            (rank, name): number
            for rank, dump in dumps.items()
            for name, number in {
                **{name: number for name, number in dump.enqueued.items() if name not in exchanging_groups},
                **dump.called,
            }.items()
        }

    def came(self, rank: int, operation: Operation) -> bool:
        """Returns whether ``rank`` has called this collective of its group."""
        return self._called.get((rank, operation.group), 0) >= operation.number

    def ended(self, rank: int, operation: Operation) -> bool:
        """Returns whether this collective has ended on ``rank``."""
        return self.came(rank, operation) and rank not in self.calls[operation.group, operation.number]

    def waits(self) -> dict[int, dict[int, Operation]]:
        """Returns the first operation in which a rank waits for another rank, by the waiting rank and the rank that it
        waits for."""
        sides = Counter(
            (rank, operation.peer, operation.group, operation.name)
            for rank, dump in self.dumps.items()
            for operation in dump.pending
            if operation.peer is not None
        )
        waits: defaultdict[int, dict[int, Operation]] = defaultdict(dict)
        sends: defaultdict[int, dict[int, Operation]] = defaultdict(dict)
        for rank, dump in self.dumps.items():
            called_counts: Counter[tuple[int, str, str]] = Counter()
            for operation in dump.pending:
                if operation.peer is None:
                    for other_rank in self.members[operation.group]:
                        if not self.came(other_rank, operation):
                            waits[rank].setdefault(other_rank, operation)
                    continue
                side = (operation.peer, operation.group, operation.name)
                called_counts[side] += 1
                if called_counts[side] > sides[operation.peer, rank, operation.group, _OTHER_SIDE[operation.name]]:
                    waits_or_sends = sends if operation.name == "send" else waits
                    waits_or_sends[rank].setdefault(operation.peer, operation)
        return dict(waits or sends)

    def common_operations(self) -> dict[int, Operation]:
        """Returns, by rank, the first operation that does not end on it, if it is also the first on all other ranks
        that take part."""
        behind = self.behind()
        return {
            rank: dump.pending[0]
            for rank, dump in self.dumps.items()
            if dump.pending and not behind.get(rank) and self._all_called(rank, dump.pending[0])
        }

    def behind(self) -> dict[int, set[int]]:
        """Returns, by rank, the other ranks that called the first operation that does not end on this rank, but have
        something else to end before it."""
        behind = {}
        for rank, dump in self.dumps.items():
            if dump.pending:
                other_ranks = set(self._others(rank, dump.pending[0]))
                busy_ranks = {
                    other_rank
                    for other_rank in other_ranks & self.dumps.keys()
                    if any(
                        _answers(pending, other_rank, dump.pending[0], rank)
                        for pending in self.dumps[other_rank].pending[1:]
                    )
                }
                behind[rank] = busy_ranks
        return {rank: busy_ranks for rank, busy_ranks in behind.items() if busy_ranks}

    def _others(self, rank: int, operation: Operation) -> Iterator[int]:
        ranks = self.members[operation.group] if operation.peer is None else (operation.peer,)
        return (other for other in ranks if other != rank)

    def _all_called(self, rank: int, operation: Operation) -> bool:
        return all(
            other_rank in self.dumps
            and any(_answers(pending, other_rank, operation, rank) for pending in self.dumps[other_rank].pending)
            for other_rank in self._others(rank, operation)
        )

    def culprit(self, rank: int, why: Why, waits: Mapping[int, Mapping[int, Operation]]) -> Culprit:
        """Returns ``rank`` as a culprit, with the operation in which others have waited for it longest."""
        awaited_by = {other_rank: operations[rank] for other_rank, operations in waits.items() if rank in operations}
        if why in ("stuck", "not_begun"):
            first_operation = self.dumps[rank].pending[0]
        else:
            first_operation = min(awaited_by.values(), key=lambda operation: operation.called)
        return Culprit(rank, self._stage(rank), why, self.awaited(first_operation), tuple(sorted(awaited_by)), None)

    def awaited(self, operation: Operation) -> Awaited:
        """Returns the operation, with what is known of its group."""
        group = self._groups[operation.group]
        return Awaited(
            operation.name,
            operation.number if operation.peer is None else None,
            group.description or operation.group,
            self.members[operation.group],
            operation.sizes,
            operation.called,
        )

    def _stage(self, rank: int) -> int | None:
        """Returns the pipeline stage of ``rank``; None if the dumps do not say. A rank that left no dump may be in no
        known pipeline group; then a tensor-parallel peer, which is on the same stage, gives the stage."""
        for peer in (rank, *self._group_with(rank, _TENSOR)):
            pipeline = self._group_with(peer, _PIPELINE)
            if pipeline:
                return pipeline.index(peer)
        return None

    def _group_with(self, rank: int, description: str) -> tuple[int, ...]:
        """Returns the ranks of the group with this description that ``rank`` is in; empty if no dump has it."""
        groups = self.members.items()
        return next(
            (ranks for name, ranks in groups if self._groups[name].description == description and rank in ranks), ()
        )

    def differing(self, rank: int, mine: Operation, theirs: Operation) -> Culprit:
        """Returns ``rank`` as a culprit that called ``mine`` where others called ``theirs``."""
        operations = self.calls[mine.group, mine.number]
        waiting_ranks = tuple(
            sorted(other_rank for other_rank, operation in operations.items() if _form(operation) == _form(theirs))
        )
        return Culprit(rank, self._stage(rank), "differs", self.awaited(theirs), waiting_ranks, _words(mine))

    def disagreements(self) -> Iterator[Note]:
        """Yields a note about each group whose ranks hold different lists of its members."""
        for name, lists in self._member_lists.items():
            if len(lists) > 1:
                group = self._groups[name].description or name
                members = (", ".join(map(str, ranks)) for ranks in sorted(lists))
                yield Note("group_differs", names=(group, name, *members))


_OTHER_SIDE = {"send": "recv", "recv": "send"}


def _answers(operation: Operation, rank: int, other_operation: Operation, other_rank: int) -> bool:
    """Returns whether ``operation`` on ``rank`` and ``other_operation`` on ``other_rank`` are the same collective,
    or the two sides of an exchange."""
    if operation.group != other_operation.group:
        return False
    if other_operation.peer is None:
        return operation.peer is None and operation.number == other_operation.number
    return (operation.peer, other_operation.peer, operation.name) == (
        other_rank,
        rank,
        _OTHER_SIDE[other_operation.name],
    )


def _form(operation: Operation) -> tuple[object, ...]:
    """Returns the properties of a collective that must be the same on all of its ranks."""
    if operation.name not in _EVEN:
        return (operation.name,)
    return operation.name, tuple(math.prod(shape) for shape in operation.sizes), operation.dtypes


def _words(operation: Operation) -> str:
    return " ".join([operation.name, *("x".join(map(str, shape)) for shape in operation.sizes)])


def _differing(job: _Job) -> Iterator[Culprit]:
    """Yields the ranks that called another operation, or another size, than most ranks of the group at the same
    number."""
    for calls in job.calls.values():
        forms = Counter(_form(operation) for operation in calls.values())
        if len(forms) < 2:
            continue
        (usual, count), (_, second_count) = forms.most_common(2)
        theirs = next(operation for operation in calls.values() if _form(operation) == usual)
        for rank, mine in calls.items():
            if _form(mine) != usual:
                yield job.differing(rank, mine, theirs)
            elif count == second_count:  # as many on either side: either may be wrong
                yield job.differing(
                    rank, mine, next(operation for operation in calls.values() if _form(operation) != usual)
                )


def _sinks(
    waits: Mapping[int, Mapping[int, Operation]], behind: Mapping[int, set[int]], culprits: Set[int]
) -> Iterator[tuple[int, Why]]:
    """Yields the ranks that others wait for and that wait for no one. If the waiting of some ranks leads to none of
    these, yields those that wait for each other in a circle. ``behind`` (see `_Job.behind`) says which ranks a rank's
    device waits for; its host need not wait for them, unless they are among the ``culprits`` that are already known."""
    waits_for = {rank: set(operations) | behind.get(rank, set()) & culprits for rank, operations in waits.items()}
    waits_for |= {rank: other_ranks for rank, other_ranks in behind.items() if rank not in waits}
    waiters_of: defaultdict[int, set[int]] = defaultdict(set)
    for rank, other_ranks in waits_for.items():
        for other_rank in other_ranks:
            waiters_of[other_rank].add(rank)
    sinks = [rank for rank in waiters_of if rank not in waits_for]
    for rank in sinks:
        yield rank, "absent"
    explained, frontier = set(sinks), sinks
    while frontier:
        frontier = [rank for other_rank in frontier for rank in waiters_of[other_rank] if rank not in explained]
        explained.update(frontier)
    circle = waits_for.keys() - explained
    while outside := {rank for rank in circle if not waiters_of[rank] & circle}:
        circle -= outside
    free_ranks = circle - waits.keys()
    for rank in free_ranks or circle:
        yield rank, "absent" if free_ranks else "crossed"


def _by_device(job: _Job) -> Iterator[tuple[int, Why]]:
    for rank, dump in job.dumps.items():
        if not dump.pending or dump.pending[0].peer is not None:
            continue
        first_operation = dump.pending[0]
        other_ranks = [other_rank for other_rank in job.members[first_operation.group] if other_rank != rank]
        if any(job.ended(other_rank, first_operation) for other_rank in other_ranks):
            yield rank, "stuck"
        elif not first_operation.started and any(
            operation.started
            for other_rank, operation in job.calls[first_operation.group, first_operation.number].items()
            if other_rank != rank
        ):
            yield rank, "not_begun"
