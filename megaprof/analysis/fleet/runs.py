"""Which run a timeline belongs to, where several runs of a job lie in one directory.

A run that begins at a step which its rank has already passed is another one; one whose steps go on behind those of the
run before (after a checkpoint) is the same. Runs that write at once are not told apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class NoSuchRun(ValueError):
    """The timelines are of fewer runs; the message says of how many."""


Line = tuple[str, str | None, int]


class Piece(NamedTuple):
    """Steps that follow each other in one file."""

    line: Line
    """What counts steps on its own: a target and role on a rank."""
    first_step: int
    """The lowest step."""
    start_ns: int
    """When the first one began, in nanoseconds on the wall clock."""
    end_ns: int
    """When the last one ended."""


@dataclass(frozen=True)
class Runs:
    """The runs that timelines are of, and the one that is reported on."""

    begins: tuple[int, ...] = (0,)
    """From when on each may have steps, in nanoseconds on the wall clock; the oldest first."""
    chosen: int = 0
    """The number, from 0, of the one that is reported on."""

    @property
    def count(self) -> int:
        return len(self.begins)

    def has(self, start_ns: int) -> bool:
        """Whether a file whose first step began then belongs to the chosen run."""
        return max(0, bisect_right(self.begins, start_ns) - 1) == self.chosen

    def told(self) -> str | None:
        """A sentence where there is more than one run."""
        if self.count == 1:
            return None
        which = "the newest" if self.chosen == self.count - 1 else f"number {self.chosen + 1}"
        return (
            f"there are timelines of {self.count} runs; this report is about {which} (`--run N` chooses the N-th, 1 is "
            "the oldest)"
        )


def runs_of(pieces: Iterable[Piece], run: int | None = None) -> Runs:
    """``run``: which to choose, from 1; None: the newest. Raises NoSuchRun."""
    begins = [0]
    firsts: dict[Line, int] = {}
    ended = 0
    for piece in sorted(pieces, key=lambda piece: piece.start_ns):
        if piece.first_step <= firsts.get(piece.line, -1):
            # Other ranks may have begun a little earlier than those that were looked at.
            begins.append((min(ended, piece.start_ns) + piece.start_ns) // 2)
            firsts = {}
        firsts[piece.line] = min(piece.first_step, firsts.get(piece.line, piece.first_step))
        ended = max(ended, piece.end_ns)
    if run is not None and not 1 <= run <= len(begins):
        held = f"the timelines are of runs 1 to {len(begins)}" if len(begins) > 1 else "the timelines are of one run"
        raise NoSuchRun(f"{run}: {held}")
    return Runs(tuple(begins), len(begins) - 1 if run is None else run - 1)
