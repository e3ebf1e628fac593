"""Reads torch's flight recorder in this process, while it runs: a ring of the most recently called collectives. It
tells what a rank has in flight, and when it came to each collective, which shows the rank that comes last.

torch has no public way to read it. NCCL has one ring, and all other backends share a second one; a build without NCCL
has only the second. Together they hold all calls of the process.

The timeline reads it on the background thread. A reading costs in proportion to the size of the ring, and yields the
steps in the ring that are complete and already written. So the recorder reads at steps whose numbers are multiples of a
power of two, which it chooses by the cost of a reading. That way all ranks read at the same steps.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from megaprof.formats import timeline as format
from megaprof.formats.facts import Arrivals, pack_arrivals
from megaprof.formats.flight import Call, Entry, GroupConfig, settled
from megaprof.formats.phrases import Unanswerable
from megaprof.recorders.timeline_steps import FileRow
from megaprof.runtime.isolation import logger

#: NCCL's ring (torch 2.5 and later) and the ring of all other backends (torch 2.8 and later). Each has a handler in
#: torch's control plane and a function that read it. The handler releases the interpreter's lock. The function holds
#: it, for 20 us per entry (torch 2.13).
_RINGS = (("dump_nccl_trace_json", "_dump_nccl_trace_json"), ("fr_trace_json", "_dump_fr_trace_json"))
#: The variables that say how many collectives torch keeps. torch reads them when the first process group is made; older
#: releases read the second.
SIZE, _OLD_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
#: A host that sets these sets the size as well. Megatron-LM does, with this option.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OPTION = "--flight-recorder-dump-path"
#: Has NCCL's ring record how long each collective ran.
TIMING = "TORCH_NCCL_ENABLE_TIMING"
#: The number of collectives that torch 2.13 keeps by default.
USUAL = 2000
#: What is in flight is bounded: so many calls that have not ended, first those that are the first of their kind, and so
#: many shapes of each.
_MOST, _SHAPES = 200, 4
_C = TypeVar("_C", bound=Call)


class _Ring(msgspec.Struct, Generic[_C]):
    """The part of a ring that is read."""

    version: str | int
    entries: list[_C] = []


_calls = msgspec.json.Decoder(_Ring[Call], strict=False).decode
_entries = msgspec.json.Decoder(_Ring[Entry], strict=False).decode


def entries() -> list[Entry]:
    """Returns the collectives that this process has called, in the order of the calls, as far back as the rings go.
    Returns an empty list if torch keeps none. Raises Unanswerable."""
    return _read(_entries)


def in_flight(called: Iterable[Entry]) -> list[Entry]:
    """Returns, in the order of the calls, the last collective of each group and the first calls that have not ended."""
    last: dict[str, int] = {}
    pending: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    in_order = settled(called)
    for place, entry in enumerate(in_order):
        entry.record_id = place  # two rings count by themselves
        group = entry.process_group[0]
        if not entry.is_p2p:
            last[group] = place
        if not entry.ended:
            pending[group, entry.profiling_name if entry.is_p2p else ""].append(place)
    first = sorted(ordered for places in pending.values() for ordered in enumerate(places))[:_MOST]
    kept = [in_order[place] for place in sorted({*last.values(), *(place for _, place in first)})]
    for entry in kept:
        entry.input_sizes, entry.input_dtypes = entry.input_sizes[:_SHAPES], entry.input_dtypes[:_SHAPES]
    return kept


def calls() -> list[Call]:
    """Returns the same collectives as `entries`, but without what they were called on. It holds the interpreter's lock
    for a quarter of the time."""
    return _read(_calls)


def keep(arguments: Sequence[str], env: MutableMapping[str, str]) -> str | None:
    """Has torch keep a ring of the usual size, unless the ``arguments`` of the program or ``env`` already set one.

    Must be called before the first process group is made. Returns the name of the variable that it sets in ``env``;
    None if it sets nothing."""
    if any(name in env for name in (SIZE, _OLD_SIZE, *_DUMPS)) or any(word.startswith(_OPTION) for word in arguments):
        return None
    name = SIZE if hasattr(_module(), _RINGS[-1][1]) else _OLD_SIZE
    env[name] = str(USUAL)
    return name


def groups() -> dict[str, GroupConfig]:
    """Returns the process groups that this process is in now, by torch's name. They come from torch's own table,
    because gloo's ring does not list them."""
    table = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = dict(getattr(table, "pg_names", {})), dict(getattr(table, "pg_group_ranks", {}))
    configs = {}
    for group, name in names.items():
        places = ranks.get(group)
        if places:
            members = sorted(places, key=places.__getitem__)
            configs[str(name)] = GroupConfig(str(getattr(group, "group_desc", "")), str(members))
    return configs


def _read(decode: Callable[[bytes], _Ring[_C]]) -> list[_C]:
    module = _module()
    readers = [(handler, getattr(module, name)) for handler, name in _RINGS if hasattr(module, name)]
    if not readers:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        raise Unanswerable(f"torch {version} has no flight recorder that can be read")
    try:
        rings = [decode(_handled(module, handler) or function(True, False)).entries for handler, function in readers]
        rings = [entries for entries in rings if entries]
    except msgspec.MsgspecError as fault:
        raise Unanswerable(f"torch's flight recorder has another format: {fault}") from None
    except (TypeError, RuntimeError) as fault:
        raise Unanswerable(f"torch's flight recorder cannot be read: {fault}") from None
    if len(rings) < 2:
        return rings[0] if rings else []
    return sorted((entry for ring in rings for entry in ring), key=lambda entry: entry.time_created_ns)


def _module() -> Any:
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)


def _handled(module: Any, name: str) -> bytes | None:
    """Returns the answer of the handler ``name``. None if torch has no such handler, or it cannot be called."""
    if not (hasattr(module, "_get_handler") and hasattr(module, "_Request") and hasattr(module, "_Response")):
        return None

    class Request(module._Request):  # type: ignore[misc]
        def body(self) -> bytes:
            return b""

        def get_param(self, name: str) -> str:
            return ""

        def params(self) -> dict[str, str]:
            return {}

    class Response(module._Response):  # type: ignore[misc]
        content: bytes | str | None = None

        def set_content(self, content: bytes | str, content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            pass

    response = Response()
    try:
        module._get_handler(name)(Request(), response)
    except Exception:  # this torch does not know the name, or expects another kind of request
        return None
    content = response.content
    return content.encode() if isinstance(content, str) else content


#: The most CPU time for readings, as a part of the job's time. It adds to the timeline's own: 0.25 % of 100 ms.
BUDGET = 5e-4
#: The most written steps that are kept for the next reading, because a ring may still hold them.
_STEPS = 256
_GLOO = "gloo:"


Written = tuple[FileRow, int, int, int]
"""A step that has been written to a file: its place, its number, and when its call began and when the host finished it,
in nanoseconds of the wall clock."""


class Reading:
    """Reads the ring, and decides at which steps."""

    def __init__(self) -> None:
        self.due = 0
        """The step after which the next reading takes place. Peers read after the same step, and end it at nearly
        the same time, so they read the same steps."""
        self.took = 0.0
        self.share = 0.0
        """The CPU time of the last reading as a part of the time until the next one."""
        self._written: deque[Written] = deque(maxlen=_STEPS)
        self._groups: dict[str, GroupConfig] = {}
        self._described: dict[int, set[str]] = defaultdict(set)
        self._off = False

    def wrote(self, step: Written) -> None:
        """Notes that another step has been written."""
        self._written.append(step)

    def look(self, *, last: bool = False) -> list[tuple[FileRow, int, bytes]]:
        """Reads the ring if a reading is due. Returns the facts to write next to steps: the step's place, which fact it
        is, and its bytes. ``last``: this is the last reading, and takes place even if none is due."""
        if self._off or not self._written or not (last or self._written[-1][1] >= self.due):
            return []
        self._groups |= groups()  # at the last reading of a process its groups are already gone
        (_, oldest, start_ns, _), (_, newest, _, end_ns) = self._written[0], self._written[-1]
        began = time.thread_time()
        try:
            entries = calls()
        except Unanswerable as missing:
            self._off = True
            self._warn(str(missing))
            return []
        if not entries:
            self._warn(f"torch keeps no collectives: set {SIZE}={USUAL} before the first process group")
        facts = list(self._facts(entries))
        self.took = time.thread_time() - began
        # The cost of this reading says when the next one is due.
        seconds = max((end_ns - start_ns) / 1e9 / max(1, newest - oldest), 1e-6)
        every = 1 << max(0, int(np.ceil(np.log2(self.took / BUDGET / seconds))))
        self.due = (newest // every + 1) * every
        self.share = self.took / every / seconds
        return facts

    def _facts(self, entries: Sequence[Call]) -> Iterator[tuple[FileRow, int, bytes]]:
        parallel = {name for name, group in self._groups.items() if "," in group.ranks}
        collectives = settled(e for e in entries if not e.is_p2p and e.process_group[0] in parallel)
        times = np.array([entry.time_created_ns for entry in collectives], dtype=np.int64)
        # A ring that has overflowed begins in the middle of a step.
        since = entries[0].time_created_ns if entries and entries[0].record_id > 0 else 0
        waiting = []
        whole = 0
        for step in self._written:
            place, _, start_ns, end_ns = step
            if start_ns < since:
                continue
            whole += 1
            called = collectives[np.searchsorted(times, start_ns) : np.searchsorted(times, end_ns)]
            # Only then does torch time one of the device: up to a tenth of a second after it has ended.
            if not all(entry.retired for entry in called):
                waiting.append(step)
                continue
            groups = list(self._grouped(start_ns, called))
            if groups:
                described = self._described[place[0]]
                if new := {arrivals.group for arrivals in groups} - described:
                    described |= new
                    new_groups = {name: self._groups[name] for name in sorted(new)}
                    yield place, format.GROUPS, msgspec.json.encode(new_groups)
                yield place, format.COLLECTIVES, pack_arrivals(groups)
        if self._written and not whole and since:
            self._warn(
                f"torch keeps fewer collectives than a step has: set {SIZE} to more than {len(entries)} before "
                "the first process group"
            )
        self._written = deque(waiting, _STEPS)

    def _grouped(self, start_ns: int, called: Sequence[Call]) -> Iterator[Arrivals]:
        by_group: dict[str, list[Call]] = defaultdict(list)
        for entry in called:
            by_group[entry.process_group[0]].append(entry)
        for name, members in sorted(by_group.items()):
            host = members[0].profiling_name.startswith(_GLOO)
            times_us = {
                # One of gloo runs on the host when it is called.
                each.collective_seq_id: int((each.time_created_ns - start_ns) // 1000 if host else 1e3 * ms)
                for each in members
                if (ms := 0.0 if host else each.duration_ms) is not None
            }
            if not times_us:
                self._warn(f"torch does not time them: set {TIMING}=1 before the first process group")
                continue
            numbers, values = np.array(sorted(times_us.items()), dtype=np.int64).T
            yield Arrivals(name, not host, 0, numbers, values)

    def _warn(self, why: str) -> None:
        logger.once("megaprof: the timeline does not say who comes last to collectives: %s", why)
