"""Reads the lengths of the sequences that the models of a call were given. It reads after the step, and never waits
for a device.

The training thread keeps only references to a few numbers (`recorders.tape.PythonTape.given`). If they are on a device,
the reader copies them once the device has finished the step that they belong to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megaprof.formats.steps import codes
from megaprof.formats.steps.work import MASK, PACKED, SHAPES, Work

#: The most sequences that are read from the positions of a microbatch. If there are more, its lengths count as unknown,
#: so that little is kept of it.
MOST_SEQUENCES = 1024
#: Takes a tensor on a device, and returns its numbers.
Fetch = Callable[[Any], list[Any]]


def read_work(given: Iterable[Sequence[Any]], context: int, fetch: Fetch | None) -> dict[int, Work]:
    """Returns the work of every microbatch whose work is known. With several chunks, the first one that saw it counts.

    ``context``: the number of ranks over which a sequence is divided. The shapes that a model sees cover only one
    rank's part. ``fetch``: None if the device cannot be asked.
    """
    works: dict[int, Work] = {}
    last_shape: Sequence[int] = ()
    work_of_shape: Work | None = None
    for position, *inputs in given:
        microbatch = None if position is None else codes.place(position)[0]
        if microbatch is None or microbatch in works:
            continue
        if len(inputs) == 1:
            (shape,) = inputs
            if shape != last_shape:  # most jobs have only one shape, and their microbatches share one Work
                last_shape, work_of_shape = shape, _of_shape(shape, context)
            work = work_of_shape
        else:
            first, second, third = inputs
            read = _of_mask_or_positions if isinstance(first, str) else _packed
            work = read(first, second, third, fetch)
        if work is not None:
            works[microbatch] = work
    return works


def _of_shape(shape: Sequence[int], context: int) -> Work | None:
    """Returns the lengths of an input ``[sequences, length]``. Every sequence counts in full, even if a mask later
    removes some of it."""
    if len(shape) != 2 or not all(shape):
        return None
    count, length = int(shape[0]), int(shape[1]) * context
    return Work(count * length, (length,) * count, SHAPES)


def _packed(boundaries: Any, padded: Any, version: int | None, fetch: Fetch | None) -> Work | None:
    """Returns the lengths from ``cu_seqlens``: the places where sequences begin, and where the last one ends.
    ``padded``: the same boundaries with padding."""
    if version is not None and boundaries._version != version:
        return None  # it has been written to
    ends = _numbers(boundaries, fetch)
    if ends is None or (lengths := _between(ends)) is None:
        return None
    with_padding = None if padded is None else _numbers(padded, fetch)
    return Work(max(with_padding[-1] if with_padding else 0, ends[-1]), lengths, PACKED)


def _of_mask_or_positions(source: str, tensor: Any, tokens: int, fetch: Fetch | None) -> Work | None:
    """Returns the lengths from the sums of a mask, or from the places where positions start again. Those places are in
    order, and the list is filled up with ``tokens``."""
    numbers = _numbers(tensor, fetch)
    if numbers is None:
        return None
    if source == MASK:
        lengths = tuple(number for number in numbers if number > 0)
        return Work(tokens, lengths, source) if lengths else None
    begins = [number for number in numbers if number < tokens]
    if len(begins) > MOST_SEQUENCES:
        return None
    gaps = _between([*begins, tokens])
    return None if gaps is None else Work(tokens, gaps, source)


def _between(ends: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the lengths between boundaries. Leaves out empty sequences, with which a host fills up its list. None if
    the numbers cannot be boundaries."""
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
