"""What the models of a call were given, read as lengths: behind the step, and never while a device would be waited for.

What the training thread keeps (`recorders.tape.PythonTape.given`) is a reference to a few numbers. On a device they are
copied by their reader, when the step that they are of has been finished there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megaprof.formats.steps import codes
from megaprof.formats.steps.work import MASK, PACKED, SHAPES, Work

#: Of a microbatch whose positions tell where sequences begin: with more of them nothing is known, so that what is kept
#: of it is small.
MOST_SEQUENCES = 1024
#: Gets a tensor of a device, returns its numbers.
Fetch = Callable[[Any], list[Any]]


def read_work(given: Iterable[Sequence[Any]], context: int, fetch: Fetch | None) -> dict[int, Work]:
    """The work of each microbatch of which something is known; of several chunks, as the first one saw it.

    ``context``: over how many ranks a sequence is divided, which a model's shapes are without. ``fetch``: None where
    the device cannot be asked.
    """
    found: dict[int, Work] = {}
    for position, *told in given:
        number = codes.microbatch_of(position)
        if number is None or number in found:
            continue
        if len(told) == 1:
            own = _of_shape(told[0], context)
        else:
            first, second, third = told
            by_name = isinstance(first, str)
            own = _told(first, second, third, fetch) if by_name else _packed(first, second, third, fetch)
        if own is not None:
            found[number] = own
    return found


def _of_shape(shape: Sequence[int], context: int) -> Work | None:
    """Returns the lengths of an input ``[sequences, length]``: each attends to all of itself, whatever a mask then
    takes away."""
    if len(shape) != 2 or not all(shape):
        return None
    count, length = int(shape[0]), int(shape[1]) * context
    return Work(count * length, (length,) * count, SHAPES)


def _packed(boundaries: Any, padded: Any, version: int | None, fetch: Fetch | None) -> Work | None:
    """Returns the lengths by ``cu_seqlens``: where sequences begin, and where the last one ends; ``padded``: the
    same with padding."""
    if version is not None and boundaries._version != version:
        return None  # it has been written to
    ends = _numbers(boundaries, fetch)
    if ends is None or (lengths := _between(ends)) is None:
        return None
    with_padding = None if padded is None else _numbers(padded, fetch)
    return Work(max(with_padding[-1] if with_padding else 0, ends[-1]), lengths, PACKED)


def _told(source: str, told: Any, tokens: int, fetch: Fetch | None) -> Work | None:
    """Returns the lengths by a mask, or of the places where positions begin anew, in order and filled up with
    ``tokens``."""
    numbers = _numbers(told, fetch)
    if numbers is None:
        return None
    if source == MASK:
        lengths = tuple(number for number in numbers if number > 0)
        return Work(tokens, lengths, source) if lengths else None
    begins = [number for number in numbers if number < tokens]
    if len(begins) > MOST_SEQUENCES:
        return None
    found = _between([*begins, tokens])
    return None if found is None else Work(tokens, found, source)


def _between(ends: Sequence[int]) -> tuple[int, ...] | None:
    """The lengths between boundaries; empty sequences fill a host's list up. None: they are no boundaries."""
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    if not lengths or min(lengths) < 0 or max(lengths) == 0:
        return None
    return tuple(length for length in lengths if length)


def _numbers(tensor: Any, fetch: Fetch | None) -> list[int] | None:
    on_device = getattr(getattr(tensor, "device", None), "type", "cpu") != "cpu"
    if on_device and fetch is None:
        return None
    flat = tensor.reshape(-1)
    return list(map(int, fetch(flat) if on_device and fetch is not None else flat.tolist()))
