"""From the bytes of a Kineto trace to typed events: fast for a healthy file, lenient for a damaged one.

The fast path is one typed pass over the text that builds only what `Event` lists. Whatever it cannot take (an event
with a wrong type, ``NaN``, which JSON forbids and profilers write, bytes that are not UTF-8) goes through the standard
library instead, event by event, and events that stay unreadable are counted. Only a file that is no JSON object at all
is given up.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
from isal import isal_zlib

from megaprof.formats.inputs import SMALL, allowed, most_bytes, read_input

_ARGUMENTS = {"description": "Process Group Description", "collective": "Collective name"}


class Undecodable(Exception):
    """The bytes of a file are no JSON object with a list of trace events; the message says what they are instead."""


class Args(msgspec.Struct, gc=False, frozen=True, rename=_ARGUMENTS):
    """What is read of an event's ``args``.

    ``correlation`` is Kineto's number that a GPU activity shares with the call that launched it (0: none). The others
    stand at the kernels of NCCL (torch >= 2.4), ``description`` being the name Megatron gave the process group.
    """

    correlation: int = 0
    description: str | None = None
    collective: str | None = None


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


class Document(msgspec.Struct):
    """The top level of a trace, as far as it is read; ``megaprof`` is undecoded JSON, empty where it is absent."""

    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0
    megaprof: msgspec.Raw = msgspec.Raw(b"")
    unreadable_events: int = 0


_MAGIC = b"\x1f\x8b"
_GZIP = 31  # zlib's wbits for a gzip header
_PIECE = 8 << 20
#: Traces shrink to a tenth or a twentieth; what shrinks more than this is no trace, and is given up ...
MOST_SHRUNK = 250
#: ... unless it is small.
_decode = msgspec.json.Decoder(Document).decode


def load(path: Path) -> Document:
    """Read and decode ``path``, gzipped or plain (told apart by content, not by name).

    Raises Undecodable, and OSError when the file cannot be read.
    """
    try:
        return decode(read_text(path))
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None


def read_text(path: Path) -> bytes | bytearray:
    """The text of ``path``, unpacked if it is gzipped. Raises Undecodable, and OSError when it cannot be read."""
    try:
        return _decompress(read_input(path))
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None


def decode(text: bytes | bytearray) -> Document:
    """Decode the text of a trace. Raises Undecodable."""
    try:
        document = _decode(text)
        document.unreadable_events = 0  # ours, whatever the file says
        return document
    except RecursionError:
        raise Undecodable("it is nested too deeply to be a trace") from None
    except msgspec.MsgspecError:
        return _decode_leniently(text)
    except UnicodeDecodeError:
        return _decode_leniently(text)


def _decompress(data: bytes) -> bytes | bytearray:
    if not data:
        raise Undecodable("it is empty")
    if not data.startswith(_MAGIC):
        return data
    most, text = _most(len(data)), bytearray()
    try:
        while data:  # a gzip file may have several members
            stream = isal_zlib.decompressobj(_GZIP)
            while not stream.eof:
                piece = stream.decompress(data, _PIECE)
                data = stream.unconsumed_tail
                if not piece and not data and not stream.eof:
                    raise Undecodable("it is truncated: the gzip stream ends too early")
                text += piece
                if len(text) > most:
                    raise Undecodable(f"it unpacks to more than {most >> 20} MiB: more than a trace of its size can")
            data = stream.unused_data.lstrip(b"\0")
    except (OSError, zlib.error, isal_zlib.error) as fault:  # type: ignore[misc]  # its stub types a class as an instance
        raise Undecodable(f"its gzip stream is damaged: {fault}") from None
    return text


def _most(compressed: int) -> int:
    """Bytes that a file may unpack to."""
    return allowed() or max(SMALL, min(compressed * MOST_SHRUNK, most_bytes()))


def _decode_leniently(text: bytes | bytearray) -> Document:
    try:
        top = json.loads(text.decode("utf-8", "replace"))
    except RecursionError:
        raise Undecodable("it is nested too deeply to be a trace") from None
    except ValueError as fault:
        raise Undecodable(f"it is not JSON: {fault}") from None
    if not isinstance(top, dict) or not isinstance(top.get("traceEvents"), list):
        raise Undecodable("it is JSON, but not a trace: it has no list of `traceEvents`")
    base = top.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int):
        raise Undecodable("its `baseTimeNanoseconds` is not an integer")
    events = [event for raw in top["traceEvents"] if (event := _event(raw)) is not None]
    unreadable = len(top["traceEvents"]) - len(events)
    ours = msgspec.Raw(b"")
    if "megaprof" in top:
        # Back to text, so that both paths hand on the same type; not a number in strict JSON becomes a decoding error.
        ours = msgspec.Raw(json.dumps(top["megaprof"]).encode())
    return Document(events, base, ours, unreadable)


def _event(raw: Any) -> Event | None:
    for fields in (raw, _without_args(raw)):
        try:
            return msgspec.convert(fields, Event)
        except (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
            continue
    return None


def _without_args(raw: Any) -> Any:
    """An event whose arguments make no sense still has its time."""
    return {key: value for key, value in raw.items() if key != "args"} if isinstance(raw, dict) else None
