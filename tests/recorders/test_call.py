"""Lengths of sequences, from what models were given: on the host, and on a device that is behind (faked)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaprof.formats import codes
from megaprof.formats.facts import MASK, PACKED, POSITIONS, SHAPES, Work, pack_work, unpack_work
from megaprof.hooks.plain import _inputs_of
from megaprof.recorders import call
from megaprof.recorders.call import read_work


def on_device(numbers: list[int]) -> Any:
    """A tensor that only `fetch` may read."""
    tensor = SimpleNamespace(device=SimpleNamespace(type="cuda"), _version=0, numbers=numbers)
    tensor.reshape = lambda _: tensor
    return tensor


def fetch(tensor: Any) -> list[Any]:
    return list(tensor.numbers)


def read(*given: Any, context: int = 1, fetch: Any = fetch) -> Work | None:
    return read_work([(codes.of_microbatch(3), *given)], context, fetch).get(3)


def test_lengths_lie_between_boundaries() -> None:
    ends, padded = torch.tensor([[0, 3, 3, 8]], dtype=torch.int32), torch.tensor([0, 4, 4, 12])
    assert read(ends, padded, 0) == Work(12, (3, 5), PACKED)
    assert read(ends, None, None) == Work(8, (3, 5), PACKED)
    assert read(on_device([0, 3, 8]), on_device([0, 4, 12]), 0) == Work(12, (3, 5), PACKED)
    assert read(on_device([0, 3, 8]), None, 0, fetch=None) is None, "the device cannot be asked"
    assert read(on_device([0, 3, 8]), None, 1) is None, "the host has written to it since"
    assert read(torch.tensor([0, 8, 3]), None, 0) is None, "they are no boundaries"
    assert read(torch.tensor([0]), None, 0) is None
    assert read((2, 7), context=4) == Work(56, (28, 28), SHAPES)
    assert read((2, 7, 64)) is None
    assert read_work([(codes.of_chunk(1), (2, 7))], 1, fetch) == {}, "of no microbatch"
    shapes = [(2, 7), (2, 7), (2, 7, 64), (2, 7), (1, 7), (2, 7)]
    works = read_work([(codes.of_microbatch(number), shape) for number, shape in enumerate(shapes)], 1, fetch)
    assert works == {n: Work(7 * s[0], (7,) * s[0], SHAPES) for n, s in enumerate(shapes) if len(s) == 2}


def test_masks_and_positions_tell_of_models_without_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = torch.zeros(2, 4), torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 0, 1, 2, 3]])
    assert read(*(_inputs_of(ids, attention_mask=mask) or ())) == Work(8, (3, 2), MASK)
    for given in (positions, torch.stack([positions] * 3)):
        assert read(*(_inputs_of(position_ids=given) or ())) == Work(12, (3, 2, 1, 2, 4), POSITIONS)
    assert read(*(_inputs_of(ids, attention_mask=torch.ones(2, 1, 4, 4)) or ())) == Work(8, (4, 4), SHAPES)
    assert _inputs_of() is None
    monkeypatch.setattr("megaprof.hooks.plain.MOST_SEQUENCES", 4)
    monkeypatch.setattr(call, "MOST_SEQUENCES", 4)
    assert read(*(_inputs_of(position_ids=positions) or ())) is None, "too many to keep"


def test_a_timeline_has_the_sums() -> None:
    found = {0: Work(12, (3, 5), PACKED), 2: Work(8, (4, 4), SHAPES)}
    unpacked = unpack_work(pack_work(found))
    assert unpacked is not None
    assert unpacked[0] == SHAPES, "the least exact"
    assert unpacked[1][[0, 2]].tolist() == [[12, 2, 34], [8, 2, 32]]
    assert not (unpacked[1][1] == unpacked[1][1]).any(), "nothing is known of it"
    assert unpack_work(b"") is unpack_work(b"\x09") is unpack_work(b"\x01too short") is None
