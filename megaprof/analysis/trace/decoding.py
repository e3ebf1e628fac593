"""Decodes a Kineto trace of any size to typed events, a piece at a time. A damaged file yields its readable events.

The text comes in pieces, which are unpacked ahead of the decoding. A piece is cut at the last border between two events
that looks like the border between the first two, and is decoded at once. This is safe, because text that is cut in a
wrong place never decodes. Text that does not decode (an event with a wrong type, ``NaN``, bytes that are not UTF-8) is
cut by Python's own decoder, value by value. Events that stay unreadable are counted. If a file ends too early, the
events before its end are still yielded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from megaprof.formats.inputs import PIECE, BrokenOff

_ARGUMENTS = {
    "description": "Process Group Description",
    "group": "Process Group Name",
    "ranks": "Process Group Ranks",
    "collective": "Collective name",
    "label": "name",
    "external": "External id",
    "node": "graph node id",
}


class Undecodable(Exception):
    """The bytes of a file are not a JSON object with a list of trace events; the message says what they are instead."""


class Args(msgspec.Struct, gc=False, frozen=True, rename=_ARGUMENTS):
    """The part of an event's ``args`` that is read.

    ``correlation`` is Kineto's number that a GPU activity shares with the call that launched it. ``external`` is the
    number that both share with the operator around the call (0: none). ``node`` is the node of a CUDA graph that the
    activity ran (0: none). NCCL's kernels and ``record_param_comms`` (torch >= 2.4) have more, among it
    ``description``, the name that Megatron gave the process group, and its ``ranks`` as JSON. ``label``: the name of a
    process.
    """

    correlation: int = 0
    external: int = 0
    node: int = 0
    description: str | None = None
    group: str | None = None
    ranks: str | None = None
    collective: str | None = None
    label: str | None = None


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` are in microseconds (``dur`` is 0 if the event has none)."""

    name: str = ""
    ph: str = ""
    cat: str | None = None
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: Args = _NO_ARGS


Anything = TypeVar("Anything")

#: The longest single value, such as an event, that is read.
_LONGEST = 16 << 20
_SPACE = re.compile(rb"\s*")
#: Matches where a number that has been read may go on in the next piece: ``0`` is one, and so is ``0.5``.
_MAY_GO_ON = re.compile(rb"[0-9.eE+-]*\Z")
_BORDER = re.compile(rb'\}\s*,\s*\{\s*"')
#: Finds the end of a value in text of one character per byte; numbers of any length are left as they are.
_value_in = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode
#: An error that is at most this many bytes before the end of the text may come from the text's being cut there.
_CUT_OFF = 16


#: Why text is damaged that ends inside a value.
_TRUNCATED = "it is truncated: its JSON ends too early"


class Document(Generic[Anything]):
    """A trace that is being read. Iterating yields its events in lists; the attributes are complete after that."""

    def __init__(self, chunks: Iterable[bytes], kind: Any, *, top: Collection[str] = ()) -> None:
        """``chunks``: its text, in pieces of any size. ``kind``: the type of an event. ``top``: the names of the other
        top-level values that are kept."""
        self.top: dict[str, msgspec.Raw] = {}
        """The values that were asked for, as JSON."""
        self.unreadable = 0
        """The number of events that were not of type ``kind``."""
        self.cut: str | None = None
        """Why the file ends too early; None if it does not."""
        # The text that has been read and not used yet, which begins at the cursor.
        self._data, self._at, self._characters = b"", 0, ""
        self._chunks, self._ended = iter(chunks), False
        self._kind = kind
        self._decode = msgspec.json.Decoder(list[kind]).decode
        self._wanted = frozenset(top)
        self._border: bytes | None = None

    def __iter__(self) -> Iterator[list[Anything]]:
        """Yields the events. Raises Undecodable, and OSError if the file cannot be read."""
        try:
            if self._peek() is None:
                raise Undecodable(self.cut or "it is empty")
            if self._passes(b"["):
                yield from self._list()
            elif self._passes(b"{"):
                yield from self._object()
            else:
                raise Undecodable("it is not JSON: it begins with neither { nor [")
            if self._peek() is not None:
                raise BrokenOff("it is not JSON: something follows its end")
        except BrokenOff as fault:
            self.cut = self.cut or str(fault)

    def _object(self) -> Iterator[list[Anything]]:
        has_events = False
        while not self._passes(b"}"):
            self._passes(b",")
            name = self._value()
            if not self._passes(b":"):
                raise BrokenOff(_TRUNCATED if self._peek() is None else "it is not JSON: it has a name without a value")
            if name == b'"rocprofiler-sdk-tool"':
                raise Undecodable("it is a file of rocprofv3, which megaprof does not read")
            if name == b'"traceEvents"':
                if has_events or not self._passes(b"["):
                    raise Undecodable("it is JSON, but not a trace: it has no list of `traceEvents`, or several")
                has_events = True
                yield from self._list()
            else:
                value = self._value()
                if (key := name[1:-1].decode("utf-8", "replace")) in self._wanted:
                    self.top[key] = msgspec.Raw(value)
        if not has_events:
            raise Undecodable("it is JSON, but not a trace: it has no list of `traceEvents`")

    def _list(self) -> Iterator[list[Anything]]:
        """Yields the events up to the end of the list, and goes past it."""
        end = -1
        while not self._passes(b"]"):
            self._passes(b",")
            if self._border is not None:
                self._more(PIECE)
                end = self._data.rfind(self._border, self._at)
            events = self._decoded(memoryview(self._data)[self._at : end], b"}") if end >= 0 else None
            if events is None:  # they have no border, or do not decode if they are cut at the last one
                yield from self._one_by_one()
            else:
                self._at = end + 1
                yield events

    def _decoded(self, *parts: bytes | memoryview) -> list[Anything] | None:
        """Returns the events in a part of the list; None if it does not decode."""
        try:
            # Joined, which copies once.
            events: list[Anything] = self._decode(b"".join((b"[", *parts, b"]")))
            return events
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _one_by_one(self) -> Iterator[list[Anything]]:
        """Yields some events, cut exactly, and learns what their borders look like. Raises BrokenOff after yielding the
        events before the damage."""
        border = self._border
        events: list[bytes] = []
        damage: BrokenOff | None = None
        while damage is None and sum(map(len, events)) < PIECE:
            try:
                events.append(self._value())
            except BrokenOff as fault:
                damage = fault
                # The next border is where an event would end.
                end = -1 if self._border is None else self._data.find(self._border, self._at + 1)
                if str(fault) != _TRUNCATED and end >= 0:
                    damage, self._at = None, end + 1
                    self.unreadable += 1
            match = _BORDER.match(self._data, self._at - 1)
            self._border = match[0] if match else self._border
            if (border is None and self._border is not None) or not self._passes(b","):
                break
        decoded = self._decoded(b",".join(events))
        if decoded is None:
            decoded = [event for event_text in events for event in self._repaired(event_text)]
        yield decoded
        if damage is not None:
            raise damage

    def _repaired(self, text: bytes) -> list[Anything]:
        """Returns the event in ``text``, without its arguments if they make no sense, because it still has its time.
        Counts an event that stays unreadable."""
        if (events := self._decoded(text)) is not None:
            return events
        with suppress(ValueError, RecursionError):
            raw = json.loads(text.decode("utf-8", "replace"), strict=False)
            bare = {key: value for key, value in raw.items() if key != "args"} if isinstance(raw, dict) else raw
            for fields in (raw, bare):
                with suppress(msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
                    return [msgspec.convert(fields, self._kind)]
        self.unreadable += 1
        return []

    def _more(self, size: int) -> bool:
        """Reads until there are ``size`` bytes from the cursor on, and drops the text before. Returns False if it read
        nothing."""
        pieces: list[bytes | memoryview] = [memoryview(self._data)[self._at :]]
        if (length := len(pieces[0])) > _LONGEST:
            raise BrokenOff(f"it is no trace: a value in it has more than {_LONGEST >> 20} MiB")
        while length < min(size, _LONGEST + 1) and not self._ended:
            try:
                chunk = next(self._chunks, None)
            except BrokenOff as fault:
                self.cut, chunk = str(fault), None
            self._ended = chunk is None
            pieces.append(chunk or b"")
            length += len(pieces[-1])
        if length == len(pieces[0]):
            return False
        self._data, self._at, self._characters = b"".join(pieces), 0, ""
        return True

    def _peek(self) -> bytes | None:
        """Moves the cursor to the next byte that is not white space, and returns that byte; None at the end."""
        skipped = 0
        while True:
            space = _SPACE.match(self._data, self._at)
            self._at = space.end() if space is not None else self._at
            if self._at < len(self._data):
                return self._data[self._at : self._at + 1]
            skipped += len(self._data)
            if skipped > _LONGEST:
                raise BrokenOff("it is not JSON: it is blank for long")
            if not self._more(1):
                return None

    def _passes(self, byte: bytes) -> bool:
        """Moves past ``byte`` and returns True, if that comes next."""
        if self._peek() != byte:
            return False
        self._at += 1
        return True

    def _value(self) -> bytes:
        """Moves past the value that begins here, and returns its text."""
        if self._peek() is None:
            raise BrokenOff(_TRUNCATED)
        end = self._end()
        # Twice as much text each time, so that a long value is not scanned too often.
        while (end is None or _MAY_GO_ON.match(self._data, end)) and self._more(2 * (len(self._data) - self._at)):
            end = self._end()
        if end is None:
            raise BrokenOff(_TRUNCATED)
        value, self._at = self._data[self._at : end], end
        return value

    def _end(self) -> int | None:
        """Returns where the value that begins here ends; None if the text ends first."""
        self._characters = self._characters or self._data.decode("latin-1")
        try:
            return _value_in(self._characters, self._at)[1]
        except json.JSONDecodeError as fault:
            if fault.pos + _CUT_OFF < len(self._data) and "Unterminated" not in fault.msg:
                raise BrokenOff(f"it is not JSON: {fault.msg}") from None
            return None
        except RecursionError:
            raise BrokenOff("it is not JSON: it is nested too deeply") from None
