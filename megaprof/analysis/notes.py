"""Notes that a reader of the numbers must know, as data. `report.text.notes` has a sentence for each kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

# fmt: off
Kind = Literal[
    # files
    "skipped", "cut", "events_left_out", "without_sidecar", "dump_unreadable", "twice",
    # numbers that are missing, or of which a part is
    "no_kernels", "kernels_lost", "times_impossible", "incomplete", "passes_unknown", "modules_without_range",
    "whole_step", "exposed_unknown", "groups_with_waiting", "groups_unnamed", "group_differs", "replicas_missing",
    # clocks
    "clocks_unconnected", "clocks_aligned", "clocks_apart", "no_arrows",
    # steps, and what does not belong together
    "other_sizes", "not_comparable", "stages_missing", "microbatches_differ", "left_out", "first_steps",
    "not_recovered", "waits_for_host",
    # why there is no table of passes
    "no_step", "schedule_unknown", "schedule_differs",
    # predictions
    "not_replayed", "no_layout", "no_exchange_time", "replay_off", "ranks_stay_slow",
]
# fmt: on


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """One note about the numbers. Fields that its kind does not use are left out."""

    kind: Kind
    """Kind of the note; each kind has its own sentence."""
    files: tuple[str, ...] = ()
    """File names."""
    stages: tuple[int, ...] = ()
    """Stages, by pipeline rank."""
    ranks: tuple[int, ...] = ()
    """Global ranks."""
    steps: tuple[int, ...] = ()
    """Step numbers."""
    layers: tuple[int, ...] = ()
    """Layer numbers."""
    names: tuple[str, ...] = ()
    """Groups of ranks (``tp``, ...), hosts, clocks, modules, or kinds of passes."""
    count: int = 0
    """A number, such as how many there are."""
    of: int = 0
    """The total that ``count`` belongs to, or a number to compare it with."""
    ms: tuple[float, ...] = ()
    """Milliseconds."""
    factor: float = 0  # an int: msgspec omits only the default object, which 0.0 from elsewhere is not
    """A ratio or a fraction."""
    said: str = ""
    """Words of a file, the system or Megatron, or a reason in words."""
    why: Note | None = None
    """Reason."""
    text: str = ""
    """The note as a clause."""


PP_UNKNOWN = Note(
    "exposed_unknown",
    names=("pp",),
    said="waiting for a neighbour and the transfer were recorded as one, so the bubble contains both",
)
OVERLAPPING = Note(
    "times_impossible", said="some kernels cover later ones of their stream, so each counts until the next one begins"
)
BEYOND_SCHEDULE = Note("schedule_differs", said="a pass has a number that its schedule does not have")
UNSEEN_AXIS = "megaprof knows no kernel of it by name, so compute contains it"
LAUNCHES_UNKNOWN = "the trace does not say who launched its GPU kernels"
UNNAMED_GROUP = Note(
    "groups_unnamed", said="some communication names none of Megatron's process groups, so it counts for none of them"
)


#: Notes that say the same about at most this many files stay one note per file.
_FEW = 3


def of_files(notes: Iterable[Note]) -> Iterator[Note]:
    """Yields the notes, each about one file. Notes that say the same about more than `_FEW` files become one note, with
    two of the file names and the number of files."""
    files: dict[Note, dict[str, None]] = {}
    for note in notes:
        files.setdefault(replace(note, files=()), {}).update(dict.fromkeys(note.files))
    for note_without_files, names in files.items():
        if len(names) > _FEW:
            yield replace(note_without_files, files=tuple(names)[:2], count=len(names))
        else:
            yield from (replace(note_without_files, files=(name,)) for name in names)
