"""Traces decoded a piece at a time: the same as at once, whatever they hold and wherever they are cut."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.trace import decoding
from megaprof.analysis.trace.decoding import Document, Event, Undecodable
from megaprof.formats import inputs
from megaprof.formats.inputs import BrokenOff, unpacked

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
STRINGS = st.text(max_size=6) | st.sampled_from(['"', "\\", '\\"}, {"', "},\n  {", "]}", '"ph"', "{[", "é", "\ud800"])
EVENT = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "X", "X", "s", "f", "M"]) | JSON,
        "cat": st.sampled_from(["kernel", "cpu_op", "python_function", "user_annotation"]) | JSON,
    },
    optional={
        "name": STRINGS | JSON,
        "ts": st.integers(0, 1 << 50) | JSON,
        "dur": st.floats(0, 1e6) | JSON,
        "tid": st.integers(0, 9) | STRINGS,
        "args": st.fixed_dictionaries({}, optional={"correlation": st.integers(0, 99), "ph": STRINGS, "more": JSON}),
        "extra": st.lists(st.fixed_dictionaries({"ph": STRINGS, "cat": STRINGS}), max_size=3),
    },
)
UNNAMED = st.fixed_dictionaries({"name": STRINGS}, optional={"ph": st.just("i"), "args": JSON})
EVENTS = st.lists(EVENT | EVENT | UNNAMED | JSON, max_size=12)


def one_a_line(events: list[Any]) -> str:
    return "[" + ",\n".join(map(json.dumps, events)) + "\n]"


def as_torch_does(events: list[Any]) -> str:
    return json.dumps(events, indent=2)


def as_older_torch_does(events: list[Any]) -> str:
    """``ph``, ``cat`` and ``name`` stand in one line."""
    return (
        json.dumps(events, indent=2).replace('",\n    "cat": ', '", "cat": ').replace('",\n    "name": ', '", "name": ')
    )


LAYOUTS: list[Callable[[list[Any]], str]] = [
    json.dumps,
    lambda events: json.dumps(events, separators=(",", ":")),
    one_a_line,
    as_torch_does,
    as_older_torch_does,
    lambda events: json.dumps(events, indent=0),
    lambda events: json.dumps(events, indent="\t", ensure_ascii=True),
]


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    return (text[begin : begin + size] for begin in range(0, len(text), size))


def at_once(text: bytes) -> list[Event]:
    """The events that a decoder finds who has everything."""
    found = json.loads(text.decode("utf-8", "replace"))
    events = []
    for raw in found["traceEvents"] if isinstance(found, dict) else found:
        without = {key: value for key, value in raw.items() if key != "args"} if isinstance(raw, dict) else raw
        for fields in (raw, without):
            try:
                events.append(msgspec.convert(fields, Event))
                break
            except (msgspec.MsgspecError, OverflowError, UnicodeError):
                continue
    return events


def streamed(text: bytes, size: int, **options: Any) -> tuple[list[Event], Document[Event]]:
    document: Document[Event] = Document(pieces(text, size), Event, **options)
    return [event for events in document for event in events], document


@given(EVENTS, st.sampled_from(LAYOUTS), st.integers(1, 400), st.integers(1, 300), st.booleans(), st.data())
def test_pieces_of_any_size_give_what_the_whole_gives(
    events: list[Any], layout: Callable[[list[Any]], str], size: int, piece: int, bare: bool, data: st.DataObject
) -> None:
    text = layout(events)
    if not bare:
        before = data.draw(
            st.dictionaries(st.text(max_size=5).filter(lambda key: key != "traceEvents"), JSON, max_size=3)
        )
        head, tail = json.dumps(before)[1:-1], json.dumps({"after": data.draw(EVENTS), "baseTimeNanoseconds": 7})[1:]
        text = "{" + (head + ", " if head else "") + '\n"traceEvents" : ' + text + " ,\n" + tail
    raw = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "PIECE", piece)
        found, document = streamed(raw, size, top=("baseTimeNanoseconds",))
        expected = at_once(raw)
        assert repr(found) == repr(expected)  # NaN is not equal to itself
        assert document.unreadable == len(events) - len(expected)
        assert document.cut is None
        assert bare or msgspec.json.decode(document.top["baseTimeNanoseconds"]) == 7


@pytest.mark.parametrize("number", ["0.5", "-12.25", "1e5", "2.5E-3", "7"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_number_that_is_cut_anywhere_is_one_value(number: str, size: int) -> None:
    text = f'{{"before": {number}, "traceEvents": [{number}, {{"ph": "X"}}, {number}], "after": {number}}}'
    found, document = streamed(text.encode(), size, top=("before", "after"))
    assert [event.ph for event in found] == ["X"]
    assert (document.unreadable, document.cut) == (2, None)
    assert {name: bytes(value) for name, value in document.top.items()} == dict.fromkeys(
        ("before", "after"), number.encode()
    )


@given(EVENTS, st.sampled_from(LAYOUTS), st.integers(1, 100), st.data())
def test_a_file_that_ends_anywhere_gives_the_events_before(
    events: list[Any], layout: Callable[[list[Any]], str], size: int, data: st.DataObject
) -> None:
    text = ('{"a": 1, "traceEvents": ' + layout(events) + "}").encode()
    end = data.draw(st.integers(25, len(text) - 1))
    expected = at_once(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "PIECE", size)
        found, document = streamed(text[:end], size)
    assert document.cut is not None
    assert repr(found) == repr(expected[: len(found)])
    whole = [n for n in range(len(events)) if len(events) and text[:end].startswith(_up_to(layout, events, n))]
    assert len(found) + document.unreadable >= len(whole)


def _up_to(layout: Callable[[list[Any]], str], events: list[Any], number: int) -> bytes:
    """The text up to the comma behind an event."""
    begun = layout(events[: number + 1]).encode()[:-1].rstrip()
    return b'{"a": 1, "traceEvents": ' + begun + b","


@given(
    st.binary(max_size=60) | st.lists(st.sampled_from(["{", "}", "[", "]", ",", ":", '"', "1", "a", " "])),
    st.integers(1, 9),
)
def test_any_bytes_are_read_or_refused(text: bytes | list[str], size: int) -> None:
    raw = text if isinstance(text, bytes) else "".join(text).encode()
    for start in (b"", b'{"traceEvents": [{"ph": "X"}, '):
        with contextlib.suppress(Undecodable):
            streamed(start + raw, size)


def large(count: int) -> bytes:
    """Pretty-printed."""
    kinds = [("cpu_op", "aten::mm"), ("cpu_op", "record_param_comms"), ("cuda_runtime", "launch"), ("kernel", "gemm")]
    events = [
        {"ph": "X", "cat": kinds[n % 4][0], "name": kinds[n % 4][1], "ts": n, "dur": 1, "args": {"correlation": n}}
        for n in range(count)
    ]
    return ('{"traceEvents": ' + json.dumps(events, indent=2) + "}").encode()


def test_only_one_piece_is_held() -> None:
    """The producer is asked for the next piece when the last one is done."""
    behind = 0

    def counted() -> Iterator[bytes]:
        nonlocal behind
        for piece in pieces(large(100_000), 1 << 20):
            behind += len(piece)
            yield piece

    most = 0
    for events in Document[Event](counted(), Event):
        most = max(most, behind)
        behind = 0
        assert len(events) < 50_000
    assert most <= 4 << 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"traceEvents": [{"name": "a"}, {"name": "b"], "x": "further behind"}]}', "Expecting ',' delimiter"),
        ('{"traceEvents": [{"name": "a"}, {"name": "b"}', "truncated"),
        ('{"traceEvents": [{"name": "a"}, {"name": "b"}, {"na', "truncated"),
        ('{"traceEvents": [{"name": "a"}, {"name": "b"}], "x": 5', "truncated"),
        ('{"traceEvents": [{"name": "a"}, {"name": "b"}]}{}', "something follows"),
        ('{"traceEvents": [{"name": "a"}, {"name": "b"}], "x" 5}', "without a value"),
    ],
)
def test_a_damaged_file_gives_what_comes_before_the_damage(text: str, reason: str) -> None:
    found, document = streamed(text.encode(), 7)
    assert [event.name for event in found] in (["a", "b"], ["a"])
    assert reason in str(document.cut)


def test_a_single_endless_value_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_LONGEST", 1 << 16)
    text = b'{"traceEvents": [{"name": "a"}, {"name": "' + b"x" * (1 << 18)
    found, document = streamed(text, 1 << 12)
    assert [event.name for event in found] == ["a"]
    assert "has more than" in str(document.cut)
    with pytest.raises(Undecodable):
        streamed(b"z" + text, 1 << 12)


def test_what_no_json_has_costs_its_event_alone() -> None:
    shares = {"a": "0.5", "b": "0.5", "c": "inf", "d": "0.5", "e": "NaN", "f": "0.5"}
    events = ",\n".join(
        f'{{"name": "{name}", "args": {{"of": 2, "share": {share}}}}}' for name, share in shares.items()
    )
    found, document = streamed(('{"traceEvents": [' + events + "]}").encode(), 1 << 12)
    assert [event.name for event in found] == ["a", "b", "d", "e", "f"]
    assert (document.unreadable, document.cut) == (1, None)


def test_a_broken_off_gzip_stream_gives_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(large(5_000))[:-5_000])
    document = Document[Event](unpacked(path), Event)
    count = sum(map(len, document))
    assert 100 < count < 5_000
    assert document.cut == "it is truncated: the gzip stream ends too early"


def test_nobody_waits_for_a_reader_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PIECE", 1 << 12)
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(large(5_000)))
    reading = inputs.unpacked(path)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert "megaprof-unpack" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(OSError, match="No such file"):
        next(inputs.unpacked(tmp_path / "gone"))
    path.write_bytes(b"\x1f\x8b" + b"\xff" * 40)
    with pytest.raises(BrokenOff, match="damaged"):
        next(inputs.unpacked(path))
