"""The parts of a host's loop in a file: what is packed comes back, and damaged bytes are nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats.steps.between import PARTS, pack_between, unpack_between

STEPS = st.lists(st.dictionaries(st.sampled_from([*PARTS, "something newer"]), st.integers(0, 1 << 41)), max_size=6)


@given(STEPS)
def test_what_is_packed_comes_back(steps: list[dict[str, int]]) -> None:
    found = unpack_between([pack_between(step) for step in steps])
    for step, row in zip(steps, found, strict=True):
        assert row.tolist() == pytest.approx([step.get(part, 0) // 1000 / 1e3 for part in PARTS])


@pytest.mark.parametrize("payload", [b"x", b"\0aaaa", b"\xffaaaa", b"\1aaaax"])
def test_damaged_bytes_say_nothing(payload: bytes) -> None:
    assert not unpack_between([payload]).any()
