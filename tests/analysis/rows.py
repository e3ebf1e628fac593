"""The columns of a traced step's passes, row by row."""

from __future__ import annotations

from typing import NamedTuple

from megaprof.analysis.trace.steps import TracedStep
from megaprof.formats.ranges import PASSES


class Row(NamedTuple):
    kind: str
    chunk: int | None
    microbatch: int | None
    backward: tuple[int, int] | None
    start: int
    end: int
    compute: int
    working: int
    exposed: dict[str, int]


def rows(step: TracedStep) -> list[Row]:
    passes = step.passes
    found = []
    for row, (kind, ids) in enumerate(zip(passes.kind.tolist(), passes.ids.tolist(), strict=True)):
        chunk, microbatch = (None if number < 0 else number for number in ids[:2])
        backward = None if ids[2] < 0 else (ids[2], ids[3])
        start, end = passes.spans[row].tolist()
        exposed = {group: int(ns[row]) for group, ns in passes.exposed.items()}
        took = int(passes.compute[row]), int(passes.working[row])
        found.append(Row(PASSES[kind], chunk, microbatch, backward, start, end, *took, exposed))
    return found
