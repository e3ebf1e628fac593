"""Packing a step's events, in C and in Python: both give the same bytes, and what is read back is what was noted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats import codes
from megaprof.recorders import tape
from megaprof.recorders.tape import pack, pack_in_python

in_c = pytest.mark.skipif(tape.pack_in_c is None, reason="megaprof was built without a C compiler")

ZERO = 7_000_000_123
EVENTS = st.lists(
    st.tuples(st.integers(0, (1 << 40) - 1), st.integers(0, 10**12), st.one_of(st.integers(0, 10**7), st.just(10**12))),
    max_size=60,
)


def noted(events: list[tuple[int, int, int]]) -> np.ndarray:
    """Events of code, nanoseconds after the step's start and length, as the tape has them."""
    return np.array([(code, ZERO + start, ZERO + start + length) for code, start, length in events], dtype=np.int64)


@in_c
@given(EVENTS)
def test_both_give_the_same_bytes(events: list[tuple[int, int, int]]) -> None:
    assert tape.pack_in_c(noted(events), ZERO) == pack_in_python(noted(events), ZERO)


@in_c
@given(st.integers(0, 1 << 34), st.integers(0, 1 << 34))
def test_both_choose_the_same_unit(after: int, length: int) -> None:
    """Microseconds from 16 bits on: where rounding adds one, too."""
    events = noted([(codes.FORWARD, 1000 * after, 1000 * length)])
    assert tape.pack_in_c(events, ZERO) == pack_in_python(events, ZERO)


@pytest.mark.parametrize("packing", [pack_in_python, pytest.param(pack, marks=in_c)])
def test_events_come_in_the_order_of_their_starts(packing: object) -> None:
    """Exchanges inside a combined pass end, and so are noted, before it."""
    inside, around, wait = codes.exchange("send_forward"), codes.combined(16, 16), codes.wait("recv_prev")
    events = noted([(inside, 2_000, 3_000), (around, 1_000, 9_000), (wait, 20_000, 4_600), (1, 20_000, 70_000)])
    order, times, totals = packing(events, ZERO)  # type: ignore[operator]
    assert np.frombuffer(order, dtype=np.int64).tolist() == [around, inside, 1, wait]
    assert times[0] == 0
    assert np.frombuffer(times, dtype="<u2", offset=1).tolist() == [1, 9, 1, 3, 18, 70, 0, 5]
    assert dict(zip(codes.KINDS.values(), totals, strict=True)) == {
        "forward": 70,
        "backward": 0,
        "combined": 9,
        "finalize": 0,
        "p2p": 8,
    }


@pytest.mark.parametrize("packing", [pack_in_python, pytest.param(pack, marks=in_c)])
def test_a_step_without_events_is_empty(packing: object) -> None:
    assert packing(b"", ZERO) == (b"", b"", (0, 0, 0, 0, 0))  # type: ignore[operator]


@pytest.mark.parametrize("packing", [pack_in_python, pytest.param(pack, marks=in_c)])
@pytest.mark.parametrize(("start", "length"), [(-2_000, 5_000), (5_000, -2_000)])
def test_impossible_times_are_refused(packing: object, start: int, length: int) -> None:
    with pytest.raises(ValueError, match="order of their starts"):
        packing(noted([(1, start, length)]), ZERO)  # type: ignore[operator]
