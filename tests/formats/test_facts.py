"""Facts in a file: what is packed comes back, to within the unit, and damaged bytes are nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from megaprof.formats import codes
from megaprof.formats.facts import (
    MOST_ARRIVAL_BYTES,
    PARTS,
    Arrivals,
    Between,
    DataWaits,
    Groups,
    Modules,
    kept,
    pack_arrivals,
    pack_between,
    pack_data,
    unpack,
    unpack_arrivals,
)
from megaprof.formats.timeline import Memory, Waited


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


@given(SPANS)
def test_parts_come_back(spans: list[tuple[str, int]]) -> None:
    found = unpack(pack_between(spans), Between)
    assert found is not None
    numbers = found[::2]
    expected = [PARTS.index(name) + 1 if name in PARTS else 0 for name, ns in spans if ns >= 1000]
    assert set(expected) <= set(numbers) <= {PARTS.index(name) + 1 if name in PARTS else 0 for name, _ in spans}
    for number in set(numbers):
        name = PARTS[number - 1] if number else None
        took = sum(ns for part, ns in spans if part == name or (name is None and part not in PARTS))
        us = [us for each, us in zip(numbers, found[1::2], strict=True) if each == number]
        assert 1000 * sum(us) == pytest.approx(took, abs=6_000)


WAITS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 40)), st.one_of(st.none(), st.integers(0, 3)), st.integers(0, 1 << 45)
    )
)


@given(WAITS)
def test_waits_come_back(waits: list[tuple[int | None, int | None, int]]) -> None:
    rows = [(codes.DATA | codes.of_microbatch(mb) | codes.of_chunk(chunk), 7, 7 + ns) for mb, chunk, ns in waits]
    found = unpack(pack_data(rows), DataWaits)
    assert found is not None
    expected = np.zeros((8, 64))
    for mb, chunk, ns in waits:
        if mb is not None and chunk is not None and ns >= 500:
            expected[chunk, mb] += ns / 1e3
    padded = np.zeros_like(expected)
    for chunk, of_chunk in enumerate(found):
        padded[chunk, : len(of_chunk)] = of_chunk
    assert np.abs(padded - expected).max() <= 0.5


def test_who_never_waits_takes_one_byte() -> None:
    assert len(pack_data([(codes.DATA | codes.phase(0, n, 0), 5, 5) for n in range(64)])) == 1


def test_times_of_modules_come_back() -> None:
    times = [(("layer", 3, None, "forward"), 8_000_000), (("embedding", None, None, "backward"), 5)]
    assert unpack(msgpack.encode(times), Modules) == times


@pytest.mark.parametrize(
    "payload", [b"", b"\0", b"\x91", b"\x91\x92\xff\x01", b"\xc1", b"\xa1\xff", b"\x91\xa1\xff", b"\x91\xff"]
)
@pytest.mark.parametrize("kind", [Between, DataWaits, Groups, Modules, Memory, Waited])
def test_damaged_facts_say_nothing(payload: bytes, kind: type[object]) -> None:
    assert unpack(payload, kind) is None
