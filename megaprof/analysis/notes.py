"""Notes that a reader of the numbers must know: each is data, and a clause that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

import msgspec
from msgspec.structs import force_setattr, replace

from megaprof.analysis.words import counted, milliseconds, percent, ranks, spans, stages, steps
from megaprof.formats.phrases import listed

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

    def __post_init__(self) -> None:
        wording = _CLAUSES[self.kind]
        text = wording if isinstance(wording, str) else wording(self)
        if self.stages and self.kind not in _NAMING_STAGES:
            text = f"{stages(self.stages)}: {text}"
        force_setattr(self, "text", text)


#: Kinds whose clause names the stages itself; the clauses of other kinds begin with the stages.
_NAMING_STAGES = frozenset(("stages_missing", "schedule_differs", "waits_for_host"))


def _files(note: Note) -> str:
    return f"{note.count} files ({', '.join(note.files)}, ...) were" if note.count > 1 else f"{note.files[0]} was"


def _why(note: Note) -> str:
    return "no reason given" if note.why is None else note.why.text


def _exposed_unknown(note: Note) -> str:
    what = f"exposed {', '.join(note.names)}" if note.names else "exposed communication"
    known = f"collectives of microbatches were recorded in {note.count} of {note.of} steps"
    known = known if note.count < note.of else "nothing says how long collectives of microbatches ran"
    why = note.said or f"{known}, so compute contains it"
    return f"{what} {'are' if len(note.names) > 1 else 'is'} not known: {why}"


def _modules(note: Note) -> str:
    layers = f" ({'layer' if len(note.layers) == 1 else 'layers'} {spans(note.layers, 8)})" if note.layers else ""
    return f"no range for {', '.join(note.names)}{layers}: {note.said}"


_CLAUSES: dict[Kind, str | Callable[[Note], str]] = {
    # single files
    "skipped": lambda n: f"{_files(n)} skipped: {n.said}",
    "cut": lambda n: f"{_files(n)} read as far as possible: {n.said}",
    "events_left_out": lambda n: (
        f"{n.files[0] + ': ' if n.files else ''}{counted(n.count, 'event') if n.count else 'some'} left out: "
        f"{n.said or 'their time, type or place cannot be true'}"
    ),
    "without_sidecar": lambda n: (
        f"{n.files[0]}: {steps(n.steps)} of process {n.count} are left out, because no .nsys.json lies beside the file "
        "for them: megaprof writes one for each window into --profile-dir when it closes"
    ),
    # kernels and passes of a call that are missing
    "no_kernels": lambda n: f"the model ran on a GPU, and the file holds none of its kernels: {n.said}",
    "kernels_lost": lambda n: f"the trace names no kernel for {n.factor:.0%} of its launches: {n.said}",
    "times_impossible": lambda n: (
        f"the times of {n.factor:.0%} of its kernels cannot be true: they are missing, or days apart from the rest"
        if n.factor
        else f"some times cannot be true: {n.said}"
    ),
    "incomplete": lambda n: n.said,
    # communication
    "exposed_unknown": _exposed_unknown,
    "groups_unnamed": lambda n: n.said,
    "groups_with_waiting": lambda n: (
        f"exposed {', '.join(n.names)} is all of the time in which torch's collectives ran, with waiting for slower "
        "peers, even while something computed; other exchanges count as compute"
    ),
    "replicas_missing": lambda n: (
        f"the tables know {n.count} of {n.of} data-parallel replicas: they do not show exposed dp, also that behind "
        "all passes, because it contains waiting for the others"
    ),
    "dump_unreadable": lambda n: (
        f"the file of {ranks(n.ranks)} cannot be read ({' '.join((*n.files, n.said))}), so nothing is known of it"
    ),
    "group_differs": lambda n: f"ranks do not agree who is in {n.names[0]} ({n.names[1]}): {' or '.join(n.names[2:])}",
    # clocks
    "clocks_unconnected": lambda n: (
        f"nothing puts {listed(list(n.names))} on the clock of {ranks(n.ranks)}: they are drawn as if they began their "
        "calls together"
    ),
    "clocks_aligned": lambda n: f"exchanges aligned the clocks of the stages, to {n.ms[0]:.2g} ms",
    "clocks_apart": lambda n: (
        f"{n.said}{f' ({listed(list(n.names), 4)})' if n.names else ''}, so neither slow links nor stages that enter "
        "late can be seen, and the step time is the longest stage's own range"
    ),
    "no_arrows": lambda n: f"no arrows for {ranks(n.ranks) if n.ranks else counted(n.count, 'message')}: {n.said}",
    # what does not belong together
    "other_sizes": lambda n: f"traces with other sizes ({n.said}) are in the directory, too, and reported separately",
    "not_comparable": lambda n: (
        f"traces{f' of {ranks(n.ranks)}' * bool(n.ranks)}{f' of {steps(n.steps)}' * bool(n.steps)} cannot be compared: "
        f"{n.said}"
    ),
    "stages_missing": lambda n: (
        f"{n.count} of {n.of} stages captured of one pipeline, without {stages(n.stages)}: times between stages cover "
        "only the captured ones; --profile-select per-stage captures one rank of every stage"
    ),
    "microbatches_differ": (
        "steps or replicas have different numbers of microbatches: those with the number that most of them have count"
    ),
    # steps that are left out, or disturbed
    "twice": lambda n: (
        f"{ranks(n.ranks)} {f'has {steps(n.steps)}' if n.steps else 'is there'} twice ({', '.join(n.files)}): the "
        "later one counts"
    ),
    "left_out": lambda n: (
        f"{', '.join(n.files) or steps(n.steps)} left out{f' on {ranks(n.ranks)}' * bool(n.ranks)}: {n.said or _why(n)}"
    ),
    "not_recovered": lambda n: (
        f"steps behind the last window take {milliseconds(n.ms[1])}, those before the first took "
        f"{milliseconds(n.ms[0])}: the job is not as quick as before{f' (CUPTI: {n.said})' if n.said else ''}"
    ),
    "first_steps": lambda n: (
        f"{steps(n.steps)} left out: the first recorded steps took over {n.factor:.2f} times as long as the median step"
    ),
    # what a stage lacks
    "modules_without_range": _modules,
    "passes_unknown": lambda n: f"forward and backward are not known: {n.said}",
    "whole_step": ("a whole step is more than its pipeline: its microbatches are reported with the calls inside it"),
    # why there is no table of passes
    "no_step": lambda n: n.said + ("" if n.why is None else f": {n.why.text}"),
    "schedule_differs": lambda n: (
        f"on {stages(n.stages)} the {n.names[0]} of microbatch {n.count} ran where Megatron's {n.names[2]} schedule "
        f"has the {n.names[1]} of microbatch {n.of}, so it was not this schedule"
        if n.names
        else n.said
    ),
    "schedule_unknown": lambda n: f"the schedule is not known: {n.said}",
    # what is not predicted
    "not_replayed": lambda n: f"not replayed: {_why(n)}",
    "waits_for_host": lambda n: (
        f"the GPU waits for its host in {'at least ' if len(n.stages) > 1 else ''}{percent(n.factor)} of the passes of "
        f"{stages(n.stages)}{f' (it did not before {steps(n.steps)})' if n.steps else ''}: it has nothing else to do "
        "at both ends of them; a capture shows what that costs"
    ),
    "ranks_stay_slow": lambda n: f"every prediction leaves {ranks(n.ranks)} as slow as now",
    "no_layout": lambda n: f"no other layout is predicted: {n.said}",
    "no_exchange_time": "in the replay exchanges take no time, because the stages have no common clock",
    "replay_off": lambda n: (
        f"the replay is {n.factor:.1%} off the measured step, so every prediction may be off by as much"
    ),
}

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
    alike: dict[tuple[Kind, str], dict[Note, None]] = {}
    for note in notes:
        alike.setdefault((note.kind, note.said), {})[note] = None
    for same in alike.values():
        if len(same) > _FEW:
            first, second = islice(same, 2)
            yield replace(first, files=first.files + second.files, count=len(same))
        else:
            yield from same


def brief(notes: Iterable[Note]) -> str:
    """Returns the first five notes, in one line."""
    return "; ".join(note.text for note in islice(notes, 5))
