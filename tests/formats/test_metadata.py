"""The `megaprof` object: what is written is what is read, and what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats.metadata import Metadata, MicrobatchRanges, ModelChunk, read_metadata
from megaprof.parallel.topology import AXES, ParallelSizes, RankCoords

FULL = Metadata(
    target="train_actor",
    coords=RankCoords(5, pp=1, tp=1, cp=0, ep=0, dp=0, sizes=ParallelSizes(tp=2, pp=4, vpp=2)),
    steps=(3, 4),
    version="1.2",
    role="actor",
    schedule="interleaved",
    microbatches=8,
    microbatch_group_size=4,
    chunks=(ModelChunk(True, 2, (1, None), 0, False, ("dense", "moe")), ModelChunk()),
    p2p={"overlap_p2p_comm": None},
    host="node",
    pid=4_000_000,
    megatron_core="0.16.1",
    torch="2.9",
    ranges=MicrobatchRanges(False, "why"),
    truncated=True,
    truncated_reason="why",
    timeline={"clock": "device"},
)
DOCS = (Path(__file__).parents[2] / "docs" / "trace-metadata.md").read_text()


def read(plain: Any) -> Metadata:
    return read_metadata(json.dumps(plain).encode())


def test_what_is_written_is_what_is_read() -> None:
    assert read(FULL.as_dict()) == FULL
    assert read({**FULL.as_dict(), "added": {"later": 1}}) == FULL


def test_the_documented_keys_are_the_keys() -> None:
    plain = FULL.as_dict()
    del plain["timeline"]
    assert all(f"`{key}`" in DOCS for key in plain)
    assert "timeline" not in Metadata("evaluate", FULL.coords, (0, 0)).as_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"coords": None},
        {"coords": {"rank": 0}},
        {"coords": {**FULL.as_dict()["coords"], "pp": 4}},
        {"coords": {**FULL.as_dict()["coords"], "tp": True}},
        {"coords": {**FULL.as_dict()["coords"], "rank": 1 << 40}},
        {"sizes": []},
        {"sizes": {**FULL.as_dict()["sizes"], "vpp": None}},
        {"sizes": {"pp": 0}},
        {"sizes": {"tp": 2, "pp": 1 << 40}},
        {"steps": [1]},
        {"steps": [1 << 47, 1 << 47]},
        {"steps": [-1, 0]},
        {"target": 5},
        {"microbatches": 1 << 30},
        {"microbatches": 10**30},
        {"tokens": [-1]},
        {"chunks": [{"layers": -1}]},
        {"chunks": [{"layer_numbers": [1 << 40]}]},
        {"ranges": 5},
        {"host": "\ud800"},
        {"pid": 1.5},
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # each says something else
        read({**FULL.as_dict(), **change})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*AXES, "rank"]), inner),
    max_leaves=10,
)


@given(json_values, st.sampled_from(["rank", *AXES]))
def test_only_a_whole_number_inside_its_axis_is_a_coordinate(value: object, key: str) -> None:
    plain = FULL.as_dict()
    try:
        coords = read({**plain, "coords": {**plain["coords"], key: value}}).coords
    except ValueError:
        pass
    else:
        assert 0 <= getattr(coords, key) < (1 << 30 if key == "rank" else getattr(FULL.sizes, key))
        assert value == getattr(coords, key)
    with pytest.raises(ValueError):  # noqa: PT011  # each says something else
        read({**plain, "coords": value})
    del plain["coords"][key]
    with pytest.raises(ValueError, match=key):
        read(plain)


@pytest.mark.parametrize("text", [b"", b"5", b"[]", b"NaN", b"{", b'{"a":' * 100_000, b"\xff"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_metadata(text)
