"""From a Kineto trace of any size to typed events, a piece at a time; a damaged file gives what it holds.

The text comes in pieces, unpacked ahead of us. Healthy text is cut at the last border between two events that looks
like the border between the first two, and decoded at once: a cut in a wrong place never decodes. Whatever does not
decode (an event with a wrong type, ``NaN``, which JSON forbids and profilers write, bytes that are not UTF-8) is cut
event by event, by matching brackets, and events that stay unreadable are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from megaprof.formats.inputs import PIECE, BrokenOff, unpacked

_ARGUMENTS = {
    "description": "Process Group Description",
    "collective": "Collective name",
    "allocated": "Total Allocated",
    "device": "Device Id",
    "external": "External id",
    "node": "graph node id",
}


class Undecodable(Exception):
    """The bytes of a file are no JSON object with a list of trace events; the message says what they are instead."""


class Args(msgspec.Struct, gc=False, frozen=True, rename=_ARGUMENTS):
    """What is read of an event's ``args``.

    ``correlation`` is Kineto's number that a GPU activity shares with the call that launched it, ``external`` the one
    that both share with the operator around the call (0: none), ``node`` the node of a CUDA graph that it is a run of
    (0: of none). The others stand at the kernels of NCCL and at ``record_param_comms`` (torch >= 2.4), ``description``
    being the name Megatron gave the process group, and at allocations: the bytes that are allocated after one, and on
    which device (-1: in the host's memory).
    """

    correlation: int = 0
    external: int = 0
    node: int = 0
    description: str | None = None
    collective: str | None = None
    allocated: int | None = None
    device: int | None = None


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` in microseconds (``dur`` is 0 where the event has none)."""

    name: str = ""
    ph: str = ""
    cat: str | None = None
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: Args = _NO_ARGS


Anything = TypeVar("Anything")

#: A single value, an event among them, is given up when it is longer.
_LONGEST = 16 << 20
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\]}]+")
_SPACE = re.compile(rb"\s*")
_FIRST_KEY = re.compile(rb'\{\s*"')
_CLOSES = {ord("{"): ord("}"), ord("["): ord("]")}


class _Damaged(Exception):
    """The text goes on as no JSON does; the message says how."""


class Document(Generic[Anything]):
    """A trace that is being read: its events in lists while it is iterated over, everything else behind that."""

    def __init__(self, chunks: Iterable[bytes], kind: Any, *, top: Collection[str] = ()) -> None:
        """``kind``: the type of an event. ``top``: which values beside the events are kept."""
        self.top: dict[str, msgspec.Raw] = {}
        """The values that were asked for, as JSON."""
        self.unreadable = 0
        """How many events were not of that type."""
        self.cut: str | None = None
        """Why the file ends too early, where it does."""
        self._text = _Text(chunks)
        self._kind = kind
        self._decode = msgspec.json.Decoder(list[kind]).decode
        self._wanted = frozenset(top)
        self._border: bytes | None = None

    def __iter__(self) -> Iterator[list[Anything]]:
        """Raises Undecodable, and OSError when the file cannot be read."""
        try:
            yield from self._all()
        except _Damaged as fault:
            self.cut = self._text.cut or str(fault)
            return
        except MemoryError:
            raise Undecodable("it does not fit into memory") from None
        while self._text.more():
            self._text.at = len(self._text.data)
        self.cut = self._text.cut

    def _all(self) -> Iterator[list[Anything]]:
        text = self._text
        opening = text.peek()
        if opening is None:
            raise Undecodable(text.cut or "it is empty")
        if opening == ord("["):
            text.at += 1
            yield from self._list()
        elif opening == ord("{"):
            text.at += 1
            yield from self._object()
        else:
            raise Undecodable("it is not JSON: it begins with neither { nor [")
        if text.peek() is not None:
            raise _Damaged("it is not JSON: something follows its end")

    def _object(self) -> Iterator[list[Anything]]:
        text, found = self._text, False
        while (byte := text.peek()) != ord("}"):
            if byte == ord(","):
                text.at += 1
            if text.peek() != ord('"'):
                raise text.ended("it is not JSON: it has a value without a name")
            name = _string(text.take())
            if text.peek() != ord(":"):
                raise text.ended("it is not JSON: it has a name without a value")
            text.at += 1
            byte = text.peek()
            if name == "traceEvents":
                if byte != ord("[") or found:
                    raise Undecodable("it is JSON, but not a trace: it has no list of `traceEvents`, or several")
                found = True
                text.at += 1
                yield from self._list()
            elif name in self._wanted:
                self.top[name] = msgspec.Raw(text.take())
            else:
                text.skip()
        text.at += 1
        if not found:
            raise Undecodable("it is JSON, but not a trace: it has no list of `traceEvents`")

    def _list(self) -> Iterator[list[Anything]]:
        """The events up to the end of the list, and past it."""
        text = self._text
        while (byte := text.peek()) != ord("]"):
            if byte == ord(","):
                text.at += 1
                byte = text.peek()
            if byte is None:
                raise text.ended()
            piece = self._healthy()
            if piece is not None:
                yield piece
                continue
            events, damage = self._one_by_one()
            yield self._lenient(events)
            if damage is not None:
                raise damage
        text.at += 1

    def _healthy(self) -> list[Anything] | None:
        """The next events as they are cut at the usual border; None where they do not decode so."""
        text, border = self._text, self._border
        if border is None:
            return None
        while len(text.data) - text.at < PIECE and text.more():
            pass
        end = text.data.rfind(border, text.at)
        if end < 0:
            return None
        events = self._decoded(memoryview(text.data)[text.at : end], b"}")
        if events is not None:
            text.at = end + 1
        return events

    def _decoded(self, *parts: bytes | memoryview) -> list[Anything] | None:
        """The events in a part of the list; None where it does not decode."""
        try:
            # Joined, which copies once.
            events: list[Anything] = self._decode(b"".join((b"[", *parts, b"]")))
            return events
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _one_by_one(self) -> tuple[list[bytes], _Damaged | None]:
        """The text of some events, cut exactly, and the damage that follows them. Learns how borders look."""
        text = self._text
        events: list[bytes] = []
        size = 0
        try:
            while size < PIECE:
                events.append(text.take())
                size += len(events[-1])
                begin, data = text.at, text.data
                byte = text.peek()
                if byte == ord("]"):
                    break
                if byte != ord(","):
                    raise text.ended("it is not JSON: there is no comma between two events")
                text.at += 1
                if text.peek() is None:
                    raise text.ended()
                key = _FIRST_KEY.match(text.data, text.at)
                if key is not None and text.data is data and events[-1].endswith(b"}"):
                    known, self._border = self._border, b"}" + data[begin : key.end()]
                    if known is None:
                        break
        except _Damaged as damage:
            return events, damage
        return events, None

    def _lenient(self, events: list[bytes]) -> list[Anything]:
        if (whole := self._decoded(b",".join(events))) is not None:
            return whole
        readable = [event for text in events for event in self._decode_damaged(text)]
        self.unreadable += len(events) - len(readable)
        return readable

    def _decode_damaged(self, text: bytes) -> list[Anything]:
        if (alone := self._decoded(text)) is not None:
            return alone
        try:
            raw = json.loads(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return []
        # An event whose arguments make no sense still has its time.
        for fields in (raw, {k: v for k, v in raw.items() if k != "args"}) if isinstance(raw, dict) else (raw,):
            try:
                return [msgspec.convert(fields, self._kind)]
            except (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
                continue
        return []


class _Text:
    """The text from ``at`` on, as far as it has been read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.data, self.at = b"", 0
        self.cut: str | None = None
        self._chunks = iter(chunks)
        self._ended = False

    def more(self) -> bool:
        """Read on; what lies before ``at`` is forgotten. False at the end."""
        if self._ended:
            return False
        if len(self.data) - self.at > _LONGEST:
            raise _Damaged(f"it is no trace: a value in it has more than {_LONGEST >> 20} MiB")
        try:
            chunk = next(self._chunks, None)
        except BrokenOff as fault:
            self.cut, chunk = str(fault), None
        if chunk is None:
            self._ended = True
            return False
        self.data, self.at = b"".join((memoryview(self.data)[self.at :], chunk)), 0
        return True

    def ended(self, otherwise: str = "") -> _Damaged:
        """Returns what is wrong here: the text ends, or else ``otherwise``."""
        return _Damaged(
            otherwise if otherwise and self.peek() is not None else "it is truncated: its JSON ends too early"
        )

    def peek(self) -> int | None:
        """The next byte that is no space, where ``at`` then is; None at the end."""
        skipped = 0
        while True:
            space = _SPACE.match(self.data, self.at)
            self.at = space.end() if space is not None else self.at
            if self.at < len(self.data):
                return self.data[self.at]
            skipped += len(self.data)
            if skipped > _LONGEST:
                raise _Damaged("it is not JSON: it is blank for long")
            if not self.more():
                return None

    def take(self) -> bytes:
        """The value that begins here; ``at`` is behind it then."""
        length = self._scan(keep=True)
        value = self.data[self.at : self.at + length]
        self.at += length
        return value

    def skip(self) -> None:
        """Go behind the value that begins here, however long it is."""
        length = self._scan(keep=False)
        self.at += length

    def _scan(self, *, keep: bool) -> int:
        """The length of the value that begins here. Brackets are matched outside of strings, nothing else is checked.
        Without ``keep``, ``at`` follows."""
        if self.peek() is None:
            raise self.ended()
        if self.data[self.at] not in b'{["':
            return self._scalar()
        done, open_ones = 0, bytearray()
        while True:
            for token in _TOKEN.finditer(self.data, self.at + done):
                begin, end = token.span()
                byte = self.data[begin]
                if byte == ord('"'):
                    if end == begin + 1:  # its end has not been read
                        done = begin - self.at
                        break
                elif byte in _CLOSES:
                    open_ones.append(_CLOSES[byte])
                elif not open_ones or open_ones.pop() != byte:
                    raise _Damaged("it is not JSON: its brackets do not match")
                if not open_ones:
                    return end - self.at
                done = end - self.at
            else:
                done = len(self.data) - self.at
            if not keep:
                self.at, done = self.at + done, 0
            if not self.more():
                raise self.ended()

    def _scalar(self) -> int:
        while True:
            found = _SCALAR.match(self.data, self.at)
            if found is None:
                raise _Damaged("it is not JSON: a value is missing")
            if found.end() < len(self.data) or not self.more():
                return found.end() - self.at


def _string(text: bytes) -> str:
    try:
        return str(json.loads(text.decode("utf-8", "replace")))
    except ValueError:
        return ""


def whole_number(document: Document[Any], name: str) -> int:
    """An integer beside the events; 0 where there is none. Raises Undecodable for anything else."""
    try:
        return msgspec.json.decode(document.top[name], type=int) if name in document.top else 0
    except msgspec.MsgspecError:
        raise Undecodable(f"its `{name}` is not an integer") from None


def read(path: Path, kind: Any, *, top: Collection[str] = ()) -> Document[Any]:
    """The trace in a file, to be iterated over."""
    return Document(unpacked(path), kind, top=top)
