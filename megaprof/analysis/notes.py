"""Notes that a reader of the numbers must know, as data. `report.text.notes` has a sentence for each kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

# fmt: off
Kind = Literal[
    # single files
    "skipped", "without_steps", "misnamed", "cut", "events_left_out", "events_without_place", "name_disagrees",
    "graph_names_damaged", "without_sidecar", "timeline_damaged", "timelines_damaged", "timelines_cut",
    "timelines_of_host", "timelines_without_times",
    # kernels and passes of a call that are missing
    "kernels_not_asked", "kernels_unsupported", "no_kernels", "no_kernels_of_nsys", "kernels_lost", "kernels_anonymous",
    "kernels_untimed", "kernels_shortened", "compute_beyond_step", "closed_early",
    "passes_missing",
    # communication
    "groups_unknown", "groups_unnamed", "axes_unseen", "groups_not_apart", "groups_in_compute", "groups_with_waiting",
    "pp_unknown", "pp_not_split", "exposed_unknown", "dump_unreadable", "group_differs",
    # clocks
    "host_contradicted", "host_shared", "clocks_contradicted", "clocks_disagree", "clocks_unconnected",
    "messages_unmatched", "clocks_aligned", "aligned_on_gpu", "not_aligned_on_gpu", "host_unnamed", "clocks_apart",
    "stages_apart", "no_pipeline", "exchanges_unseen", "arrows_backwards",
    # what does not belong together
    "other_sizes", "other_jobs", "other_layers", "other_schedules", "kernels_in_some", "stages_missing",
    "stages_missing_in_step", "replicas_missing", "no_common_step", "stages_differ", "microbatches_differ",
    # steps that are left out, or disturbed
    "twice", "not_recovered", "first_steps",     "step_left_out", "file_left_out",
    # what a stage lacks
    "modules_without_range", "combined", "waits_for_host", "no_passes", "launches_unknown", "kernels_without_launch",
    "whole_step",
    # why there is no table of passes
    "no_whole_step", "no_timed_passes", "all_disturbed", "no_step_of_all",
    "place_unknown", "place_beyond_schedule", "schedule_unknown", "schedule_refused", "order_differs",
    # what is not predicted
    "not_replayed", "waits_for_rank", "ranks_stay_slow", "nothing_to_change", "one_stage", "no_layout", "stage_unknown",
    "stage_too_large", "stage_contradicts", "no_layers", "layout_refused", "no_exchange_time", "replay_off",
    "cores_shared",
    # recordings that megaprof did not make
    "sends_not_apart", "group_unnamed", "sizes_do_not_fit", "not_1f1b", "pipelines_differ",
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
    """Words of a file, the system or Megatron."""
    why: Note | None = None
    """Reason."""
    text: str = ""
    """The note as a clause."""


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
