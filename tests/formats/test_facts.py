"""Facts in a file: what is packed comes back, to within the unit, and damaged bytes are nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats import codes
from megaprof.formats.facts import (
    MOST_ARRIVAL_BYTES,
    PARTS,
    Arrivals,
    Modules,
    kept,
    pack_arrivals,
    pack_between,
    pack_data,
    unpack_arrivals,
    unpack_between,
    unpack_data,
    unpack_json,
    unpack_spans,
)


@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    first=st.integers(0, 1 << 40),
    longest=st.integers(1, 1 << 34),
    lengths=st.booleans(),
)
def test_what_does_not_fit_is_sampled(counts: list[int], first: int, longest: int, lengths: bool) -> None:
    random = np.random.default_rng(len(counts))
    groups = [
        Arrivals(str(name), lengths, 0, first + np.arange(count), np.sort(random.integers(0, longest, count)))
        for name, count in enumerate(counts)
    ]
    packed = pack_arrivals(groups)
    assert len(packed) <= MOST_ARRIVAL_BYTES
    for given_, found in zip(groups, unpack_arrivals(packed), strict=True):
        assert (found.group, found.lengths) == (given_.group, lengths)
        chosen = kept(given_.numbers, found.shift)
        assert (found.numbers == given_.numbers[chosen]).all()
        lost = given_.values[chosen] - found.values
        assert ((lost >= 0) & (lost <= longest / (1 << 15))).all()
        # A rank that keeps fewer keeps some of them.
        assert not (kept(given_.numbers, found.shift + 1) & ~chosen).any()
    if sum(counts) <= 200:
        assert all(found.shift == 0 for found in unpack_arrivals(packed))


@pytest.mark.parametrize("payload", [b"", b"\x05", bytes(13), b"\xff" * 40, pack_arrivals([]) + b"\x01" * 14])
def test_damaged_arrivals_say_nothing(payload: bytes) -> None:
    assert all(len(found.numbers) == 0 for found in unpack_arrivals(payload))


SPANS = st.lists(st.tuples(st.sampled_from([*PARTS, "", "something newer"]), st.integers(0, 1 << 43)), max_size=6)


@given(st.lists(SPANS, max_size=6))
def test_parts_come_back(calls: list[list[tuple[str, int]]]) -> None:
    found = unpack_between([pack_between(spans) for spans in calls])
    for spans, row in zip(calls, found, strict=True):
        took = [sum(ns for name, ns in spans if name == part) for part in PARTS]
        assert row.tolist() == pytest.approx([ns / 1e6 for ns in took], abs=0.01)


@given(SPANS)
def test_parts_come_back_where_they_were(spans: list[tuple[str, int]]) -> None:
    spans = [*spans, ("", 5_000)]
    at = -sum(ns for _, ns in spans)
    covered = dict.fromkeys(PARTS, 0)
    placed = [(part, at, at := at + ns) for part, ns in spans]
    for part, begin, end in unpack_spans(pack_between(spans), 0):
        covered[part] += end - begin
        inside = [(since, until) for name, since, until in placed if name == part]
        assert any(since - 10_000 <= begin <= end <= until + 10_000 for since, until in inside) or len(inside) > 1
    for part, ns in covered.items():
        assert ns == pytest.approx(sum(until - since for name, since, until in placed if name == part), abs=10_000)


@pytest.mark.parametrize("payload", [b"x", b"\0aaaa", b"\xffaaaa", b"\1aaaax"])
def test_damaged_parts_say_nothing(payload: bytes) -> None:
    assert not unpack_between([payload]).any()


WAITS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 40)), st.one_of(st.none(), st.integers(0, 3)), st.integers(0, 1 << 45)
    )
)


@given(WAITS)
def test_waits_come_back(waits: list[tuple[int | None, int | None, int]]) -> None:
    rows = [(codes.DATA | codes.of_microbatch(mb) | codes.of_chunk(chunk), 7, 7 + ns) for mb, chunk, ns in waits]
    found = unpack_data(pack_data(rows))
    assert found is not None
    expected = np.zeros((64, 8))
    for mb, chunk, ns in waits:
        if mb is not None and chunk is not None:
            expected[mb, chunk] += ns / 1e3
    padded = np.zeros_like(expected)
    padded[: len(found), : found.shape[1]] = found
    assert np.abs(padded - expected).max() <= max(1.0, expected.max() / (1 << 15))


def test_who_never_waits_takes_two_bytes() -> None:
    assert len(pack_data([(codes.DATA | codes.phase(0, n, 0), 5, 5) for n in range(64)])) == 2


@pytest.mark.parametrize("payload", [b"", b"\0", b"\0\0", b"\0\1x", b"\xff\1xx", b"\0\2xx"])
def test_damaged_waits_say_nothing(payload: bytes) -> None:
    assert unpack_data(payload) is None


def test_times_of_modules_come_back_and_damaged_ones_say_nothing() -> None:
    times = [(("layer", 3, None, "forward"), 8_000_000), (("embedding", None, None, "backward"), 5)]
    assert unpack_json(msgspec.json.encode(times), Modules) == times
    assert unpack_json(msgspec.json.encode(times)[:-3], Modules) == unpack_json(b"[1]", Modules) == []
