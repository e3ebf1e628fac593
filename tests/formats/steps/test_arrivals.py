"""Arrivals as a timeline holds them: a kilobyte at most, and the same collectives on all ranks of a group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats.steps.arrivals import MOST_BYTES, Arrivals, kept, pack_arrivals, unpack_arrivals


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
    assert len(packed) <= MOST_BYTES
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
def test_damaged_bytes_are_nothing(payload: bytes) -> None:
    assert all(len(found.numbers) == 0 for found in unpack_arrivals(payload))
