"""Holds the events of a file as columns, and reads those of Kineto's (`nsys` fills the same ones). Everything
else of a trace is a view of these columns.

A column is an array with one number for each event. Names of events, and what is said about collectives, are numbered
in the order in which they first occur.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from megaprof.analysis.trace.decoding import Document, Event, Undecodable
from megaprof.analysis.trace.groups import COMMUNICATES, COMPUTE, use_by_name
from megaprof.analysis.trace.intervals import Intervals
from megaprof.formats.inputs import fits, unpacked

Numbers = npt.NDArray[np.int64]

KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver")
ANNOTATION, OPERATOR = "user_annotation", "cpu_op"
#: Larger times, in nanoseconds, are impossible. Base, start and duration each stay below a quarter of int64, so no sum
#: of them overflows.
LONGEST = 1 << 61
#: The most bytes of memory that one event takes while a report is made.
_ROW_BYTES = 200
#: Operators that are read even if no others are: they say what the kernels inside them communicate. Before torch 2.0,
#: steps and the names of collectives are operators as well.
_SPEAKS = re.compile(rf"{COMMUNICATES}|ProfilerStep#|nccl:")

Meaning = TypeVar("Meaning")


class Said(NamedTuple):
    """What an event says about a collective; None for what it does not say."""

    collective: str | None = None
    group: str | None = None
    description: str | None = None
    ranks: str | None = None


@dataclass(frozen=True)
class Columns:
    """Events in the order of reading, category by category. A column has one row for each, or none if their categories
    do not have it."""

    name: npt.NDArray[np.int32]
    """Their names, as indices into `Events.names`."""
    spans: Intervals
    """Start and end in nanoseconds from the base of the file, shape ``[n, 2]``."""
    thread: npt.NDArray[np.int32]
    """Process and thread, for activities of a GPU device and stream, as indices into `Events.threads`."""
    correlation: Numbers
    """Kineto's number that a GPU activity shares with the call that launched it; 0: none."""
    external: Numbers
    """The number that both share with the operator around the call; 0: none."""
    node: Numbers
    """The node of a CUDA graph that the activity ran, as `formats.ranges` counts them; 0: none."""
    said: npt.NDArray[np.int32]
    """What they say about a collective, as indices into `Events.said`; 0: nothing."""

    def __len__(self) -> int:
        return len(self.name)

    @staticmethod
    def joined(pieces: Iterable[Columns]) -> Columns:
        """Returns the events of all pieces, one after the other."""
        columns = zip(*(vars(piece).values() for piece in (_NONE, *pieces)), strict=True)
        return Columns(*map(np.concatenate, columns))

    def rows(self, chosen: npt.NDArray[Any]) -> Columns:
        """Returns the events that ``chosen`` selects."""
        return Columns(*(column[chosen] if len(column) else column for column in vars(self).values()))


_NAME, _START, _DURATION, _PLACE = attrgetter("name"), attrgetter("ts"), attrgetter("dur"), attrgetter("pid", "tid")
_SAID = attrgetter(*(f"args.{field}" for field in Said._fields))
#: The types in which values are collected; those of all other columns are numbers in an event's arguments.
_TYPES = {"name": "i", "start": "d", "duration": "d", "thread": "i", "said": "i"}
#: The columns that a category has, besides names and times.
_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((KERNEL, *COPIES), ("thread", "correlation", "external", "node", "said")),
    **dict.fromkeys(LAUNCHES, ("correlation",)),
    **{COMMUNICATES: ("external", "said"), ANNOTATION: (), OPERATOR: ("thread",)},
}


class Events:
    """Events of one file, or of one process in it. Readers fill it."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        """The moment from which times in the file count, in nanoseconds since the epoch."""
        self.impossible: Counter[str] = Counter()
        """The number of events without a possible time, by category."""
        self.cut: set[int] = set()
        """The ends of our ranges that were open when the process or the recording ended, if the file says so."""
        self.names: list[str] = []
        self.threads: list[tuple[Any, ...]] = []
        """Process, and thread or stream, of each place."""
        self.said: list[Said] = [Said()]
        self._columns: defaultdict[str, list[Columns]] = defaultdict(list)

    def put(self, category: str, **columns: npt.NDArray[Any]) -> None:
        """Adds events of a category. ``columns``: fields of `Columns`."""
        self._columns[category].append(replace(_NONE, **columns))

    def has(self, category: str) -> bool:
        """Returns whether there are events of a category, including those without a possible time."""
        return category in self._columns

    def take(self, *categories: str) -> Columns:
        """Returns the events of some categories, and forgets them. ``COMMUNICATES`` is a category of its own."""
        return Columns.joined(piece for category in categories for piece in self._columns.pop(category, ()))

    def named(self, columns: Columns, wanted: Callable[[str], Any]) -> npt.NDArray[np.bool_]:
        """Returns for each event whether its name is ``wanted``, which is asked once for each name."""
        return np.array([bool(wanted(name)) for name in self.names], dtype=np.bool_)[columns.name]

    def meant(self, meaning: Callable[[str], Meaning | None], *columns: Columns) -> list[tuple[Meaning, int, int]]:
        """Returns what the names of events mean, with their start and end in nanoseconds since the epoch, in order of
        their start, an enclosing event before those inside it. Leaves out events whose name means None."""
        meanings = [*map(meaning, self.names)]
        meant = [
            (meant, start, end)
            for each in columns
            for number, (start, end) in zip(each.name.tolist(), (each.spans + self.base).tolist(), strict=True)
            if (meant := meanings[number]) is not None
        ]
        return sorted(meant, key=lambda entry: (entry[1], -entry[2]))

    def said_around(self, on_gpu: Columns) -> npt.NDArray[np.int32]:
        """Returns what the operators around the launches of activities say, as indices into ``said``; 0: nothing."""
        operators = self.take(COMMUNICATES)
        operators = operators.rows(operators.external > 0)
        if not len(operators):
            return np.zeros(len(on_gpu), dtype=np.int32)
        operators = operators.rows(np.argsort(operators.external, kind="stable"))
        index = np.searchsorted(operators.external, on_gpu.external, side="right") - 1
        return np.where(operators.external[index] == on_gpu.external, operators.said[index], 0).astype(np.int32)


_EMPTY, _EMPTY_32 = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
_NONE = Columns(_EMPTY_32, _EMPTY.reshape(0, 2), _EMPTY_32, _EMPTY, _EMPTY, _EMPTY, _EMPTY_32)


class KinetoEvents(Events):
    """The events of one trace of Kineto's. Raises Undecodable, and OSError if the file cannot be read."""

    def __init__(
        self,
        path: Path,
        *,
        top: Collection[str] = (),
        columns: Mapping[str, tuple[str, ...]] = _COLUMNS,
        operators: Callable[[KinetoEvents], bool] = lambda events: False,
    ) -> None:
        """``top``: the names of other top-level values that ``document`` keeps. ``columns``: the columns that each
        category has, besides names and times; other categories are not read. ``operators`` is asked before each
        piece, until it says no, whether operators of the CPU are read, with what is known by then."""
        super().__init__()
        self.processes: set[str] = set()
        """The names that processes have."""
        # Each key is numbered when it is first asked for.
        self._numbers, self._places = defaultdict[str, int](count().__next__), defaultdict[Any, int](count().__next__)
        self._words = defaultdict[Any, int](count(1).__next__, {Said(): 0})
        self._use_of = cache(use_by_name)
        self._wanted = columns
        self._collected: defaultdict[str, dict[str, array[Any]]] = defaultdict(dict)
        self._rows = 0
        self.document = document = Document[Event](unpacked(path), Event, top=("baseTimeNanoseconds", *top))
        with_operators = True
        for events in document:
            with_operators = with_operators and operators(self)
            self._add(events, with_operators)
            if not fits(self._rows * _ROW_BYTES):
                raise Undecodable("it has more events than fit into memory (see --max-input-mib)")
        try:
            self.base = msgspec.json.decode(document.top.get("baseTimeNanoseconds", b"0"), type=int)
        except msgspec.MsgspecError:
            raise Undecodable("its `baseTimeNanoseconds` is not an integer") from None
        if not -LONGEST < self.base < LONGEST:
            raise Undecodable("its `baseTimeNanoseconds` is out of range")
        self.names, self.threads, self.said = [*self._numbers], [*self._places], [*map(Said._make, self._words)]
        while self._collected:
            category, collected = self._collected.popitem()
            values = {column: np.array(of_events) for column, of_events in collected.items()}
            with np.errstate(over="ignore", invalid="ignore"):
                start, duration = values.pop("start") * 1000, values.pop("duration") * 1000
            # A comparison with NaN is false, so this also drops times that are not a number.
            possible = (np.abs(start) < LONGEST) & (duration >= 0) & (duration < LONGEST)
            self.impossible[category] += int((~possible).sum())
            begin = np.rint(start[possible]).astype(np.int64)
            spans = np.column_stack((begin, begin + np.rint(duration[possible]).astype(np.int64)))
            self.put(category, spans=spans, **{column: each[possible] for column, each in values.items()})

    def _add(self, events: Sequence[Event], operators: bool) -> None:
        by_category: defaultdict[str | None, list[Event]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        for name, of_category in by_category.items():
            category = (name or "").lower()
            if category == OPERATOR:
                speaking = {name for name in {each.name for each in of_category} if _SPEAKS.match(name)}
                if COMMUNICATES in self._wanted and COMMUNICATES in speaking:
                    self._collect(COMMUNICATES, [each for each in of_category if each.name == COMMUNICATES])
                if not operators:
                    of_category = [each for each in of_category if each.name in speaking] if speaking else []
            if category in self._wanted and of_category:
                self._collect(category, [event for event in of_category if event.ph == "X"])
            elif name is None:
                self.processes |= {event.args.label for event in of_category if event.ph == "M" and event.args.label}

    def _collect(self, category: str, events: Sequence[Event]) -> None:
        """Collects what is read of some events. It becomes columns when all of it is there."""
        self._rows += len(events)
        self._columns.setdefault(category, [])
        for column in ("start", "duration", "name", *self._wanted[category]):
            values: Iterable[Any]
            if column in ("start", "duration"):
                values = map(_START if column == "start" else _DURATION, events)
            elif column == "name":
                values = map(self._numbers.__getitem__, map(_NAME, events))
            elif column == "thread":
                values = map(self._places.__getitem__, map(_PLACE, events))
            elif column == "said":
                use_of, words = self._use_of, self._words
                values = [0 if use_of(event.name) == COMPUTE else words[_SAID(event)] for event in events]
            else:
                numbers = [*map(attrgetter(f"args.{column}"), events)]
                try:
                    values = array("q", numbers)
                except OverflowError:  # the file is hostile
                    values = [number if abs(number) < LONGEST else 0 for number in numbers]
            self._collected[category].setdefault(column, array(_TYPES.get(column, "q"))).extend(values)
