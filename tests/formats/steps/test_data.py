"""Waits for data in a file: what is packed comes back, to within the unit, and damaged bytes are nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats.steps import codes
from megaprof.formats.steps.data import pack_data, unpack_data

WAITS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 40)), st.one_of(st.none(), st.integers(0, 3)), st.integers(0, 1 << 45)
    )
)


@given(WAITS)
def test_what_is_packed_comes_back(waits: list[tuple[int | None, int | None, int]]) -> None:
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
def test_damaged_bytes_say_nothing(payload: bytes) -> None:
    assert unpack_data(payload) is None
