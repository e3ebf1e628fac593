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
from isal import igzip, igzip_lib


class Undecodable(Exception):
    """The bytes of a file are no JSON object with a list of trace events; the message says what they are instead."""


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` in microseconds (``dur`` is 0 where the event has none)."""

    name: str = ""
    ph: str = ""
    cat: str | None = None
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class Document(msgspec.Struct):
    """The top level of a trace, as far as it is read; ``megaprof`` is still undecoded JSON."""

    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0
    megaprof: msgspec.Raw | None = None
    unreadable_events: int = 0


_MAGIC = b"\x1f\x8b"
_decode = msgspec.json.Decoder(Document).decode


def load(path: Path) -> Document:
    """Read and decode ``path``, gzipped or plain (told apart by content, not by name).

    Raises Undecodable, and OSError when the file cannot be read.
    """
    try:
        return decode(_decompress(path.read_bytes()))
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None


def decode(text: bytes) -> Document:
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


def _decompress(data: bytes) -> bytes:
    if not data:
        raise Undecodable("it is empty")
    if not data.startswith(_MAGIC):
        return data
    try:
        return bytes(igzip.decompress(data))
    except EOFError:
        raise Undecodable("it is truncated: the gzip stream ends too early") from None
    except (OSError, zlib.error, igzip_lib.IsalError) as fault:  # type: ignore[misc]  # its stub types a class as an instance
        raise Undecodable(f"its gzip stream is damaged: {fault}") from None


def _decode_leniently(text: bytes) -> Document:
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
    ours = None
    if "megaprof" in top:
        # Back to text, so that both paths hand on the same type; not a number in strict JSON becomes a decoding error.
        ours = msgspec.Raw(json.dumps(top["megaprof"]).encode())
    return Document(events, base, ours, unreadable)


def _event(raw: Any) -> Event | None:
    try:
        return msgspec.convert(raw, Event)
    except (msgspec.MsgspecError, OverflowError, RecursionError, UnicodeError):
        return None
