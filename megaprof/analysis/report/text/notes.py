"""Puts notes about numbers into words: a clause for each kind of note."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from msgspec.structs import replace

from megaprof.analysis.clocks.clocks import Alignment, Clock
from megaprof.analysis.notes import Kind, Note
from megaprof.analysis.report.text.words import counted, milliseconds, percent, ranks, spans, stages, steps
from megaprof.analysis.table.counted import WARM_UP
from megaprof.formats import graphs
from megaprof.formats.phrases import listed

_NO_CLOCK = (
    "the step time is the longest stage's own range, and neither slow links nor stages that enter late can be seen"
)
_LOST = "another tool may hold CUPTI, or Kineto lost them"
_FIRST = "of several steps in one window, the first is left out"
#: Kinds whose clause names the stages itself; the clauses of other kinds begin with the stages.
_NAMING_STAGES = frozenset(
    (
        "host_unnamed",
        "stages_missing",
        "stages_missing_in_step",
        "order_differs",
        "waits_for_host",
        "waits_for_rank",
        "stage_unknown",
        "stage_too_large",
        "stage_contradicts",
    )
)
_NO_STAGES = "no stages are shown"


def _shared(n: Note) -> str:
    """Returns the clause about ranks that share cores."""
    return f"{n.count} ranks share the {counted(n.of, 'physical core')} of a host"


def told(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Returns the notes with their text filled in."""
    return tuple(replace(note, text=clause(note)) for note in notes)


def said(note: Note | None) -> Note | None:
    """Returns a note with its text filled in; None for None."""
    return None if note is None else replace(note, text=clause(note))


def brief(notes: Iterable[Note]) -> str:
    """Returns the first five notes, in one line."""
    return "; ".join(map(clause, islice(notes, 5)))


def clause(note: Note) -> str:
    """Returns the clause of a note, with its stages."""
    wording = _CLAUSES[note.kind]
    text = wording if isinstance(wording, str) else wording(note)
    return f"{stages(note.stages)}: {text}" if note.stages and note.kind not in _NAMING_STAGES else text


def of_clocks(alignment: Alignment) -> list[str]:
    """Returns how far the clocks were off, a line for each host."""
    lines: dict[str, None] = {}
    for rank, clock in sorted(alignment.clocks.items()):
        if clock.messages:
            lines[f"{_of_host(alignment.hosts.get(rank), rank)}: {_off(clock)}"] = None
    reference = alignment.reference
    if not lines and len(alignment.clocks) > 1 and reference is not None:
        host = _of_host(alignment.hosts[reference], reference)
        lines[f"clocks: all ranks ran on {host}, so nothing had to be aligned"] = None
    return list(lines)


def _of_host(host: str | None, rank: int) -> str:
    return f"rank {rank}" if host is None else f"host {host}"


def _off(clock: Clock) -> str:
    off = abs(clock.offset_ns) / 1e6
    way = "ahead" if clock.offset_ns < 0 else "behind"
    messages = counted(clock.messages, "message")
    if clock.uncertainty_ns is None:
        return f"clock {off:.3f} ms {way}, bounded from one side only (by {messages}, all in one direction)"
    return f"clock {off:.3f} ms {way}, ±{clock.uncertainty_ns / 1e6:.3f} ms (from {messages})"


def _skipped(why: Callable[[Note], str]) -> Callable[[Note], str]:
    def of(note: Note) -> str:
        if note.count > 1:
            return f"{note.count} files were skipped ({', '.join(note.files)}, ...): {why(note)}"
        return f"{note.files[0]} was skipped: {why(note)}"

    return of


def _of_file(note: Note) -> str:
    return f"{note.files[0]}: " if note.files else ""


def _why(note: Note) -> str:
    return "no reason given" if note.why is None else clause(note.why)


def _joined(note: Note) -> str:
    return ", ".join(note.names)


def _contradicted(note: Note) -> str:
    off = f"a receive ends {note.ms[0]:.3g} ms before its send began"
    return f"ranks of host {note.names[0]} contradict its clock: {off}"


def _clocks_contradicted(note: Note) -> str:
    more = f" (and {note.count - 1} more pairs)" if note.count > 1 else ""
    return (
        f"messages between {' and '.join(note.names)}{more} contradict each other by {note.ms[0]:.3g} ms, whatever "
        "their clocks' offset: a clock was adjusted meanwhile, or the traces are of different runs"
    )


def _groups_unknown(note: Note) -> str:
    return (
        f"exposed {_joined(note)} {'is' if len(note.names) == 1 else 'are'} not known: the recording names no process "
        "group for some kernels or copies that may be theirs, so that time is counted as `unknown`. The torch profiler "
        "names NCCL's groups where it records operators of the CPU too (`--profile-activities cpu cuda`)"
    )


def _modules(note: Note) -> str:
    layers = f" ({'layer' if len(note.layers) == 1 else 'layers'} {spans(note.layers, 8)})" if note.layers else ""
    return f"no range for {_joined(note)}{layers}: {note.said}"


def _timelines_cut(note: Note) -> str:
    which = f"{note.count} timelines end" if note.count > 1 else f"{note.files[0]} ends"
    return (
        f"{which} in the middle of a step, as when a process is killed or still writes: everything before it was read"
    )


def _left_out(note: Note) -> str:
    return f"{steps(note.steps)} {'is' if len(note.steps) == 1 else 'are'} left out"


def _order(note: Note) -> str:
    ran, planned, schedule = note.names
    return (
        f"on {stages(note.stages)} the {ran} of microbatch {note.count} ran where Megatron's {schedule} schedule has "
        f"the {planned} of microbatch {note.of}, so another schedule ran"
    )


_CLAUSES: dict[Kind, str | Callable[[Note], str]] = {
    # single files
    "skipped": _skipped(lambda n: n.said),
    "without_steps": _skipped(lambda n: "it holds no range of a whole step (megaprof/... step=...)"),
    "misnamed": _skipped(lambda n: f"it holds {n.said}, whatever its name says"),
    "cut": lambda n: f"{n.files[0]} is read as far as it goes: {n.said}" if n.files else n.said,
    "events_left_out": lambda n: f"{_of_file(n)}{counted(n.count, 'event')} left out: impossible times or types",
    "events_without_place": lambda n: f"{_of_file(n)}{counted(n.count, 'event')} left out: no usable time or place",
    "name_disagrees": lambda n: f"{_of_file(n)}its name and its metadata disagree; the metadata ({n.said}) count",
    "graph_names_damaged": lambda n: f"{_of_file(n)}its `{graphs.KEY}` is damaged, so replays have no ranges: {n.said}",
    "without_sidecar": lambda n: (
        f"{_of_file(n)}no .nsys.json of process {n.count} lies beside it for {steps(n.steps)}: microbatches, layers "
        "and sizes are what its ranges show"
    ),
    "timeline_damaged": lambda n: f"{_of_file(n)}{n.said}; {counted(n.count, 'step')} before that read",
    "timelines_damaged": lambda n: f"{n.count} more timelines could not be read to their end",
    "timelines_cut": _timelines_cut,
    "timelines_of_host": lambda n: (
        "Timelines with the host's clock were skipped, because they show when work was given to the device, not when "
        f"it ran: {n.said}"
    ),
    "timelines_without_times": (
        "Timelines that hold no times were skipped: the GPU was not done in time, or used streams out of step"
    ),
    # kernels and passes of a call that are missing
    "kernels_not_asked": "the model ran on a GPU, and --profile-activities asked for none of its kernels",
    "kernels_unsupported": (
        "the model ran on a GPU, and the profiler could not record it: Kineto has no support for it there"
    ),
    "no_kernels": f"the model ran on a GPU, and the file holds none of its kernels: {_LOST}",
    "no_kernels_of_nsys": (
        "the model ran on a GPU, and the file holds no kernel: nsys recorded none (--trace=cuda,nvtx does)"
    ),
    "kernels_lost": lambda n: (
        f"{n.factor:.0%} of its kernel launches have no kernel in the trace: {_LOST}, or a graph was captured"
    ),
    "kernels_anonymous": lambda n: (
        f"{n.factor:.0%} of its kernel launches have no kernel that names them, as ROCm writes it: the kernels are in "
        "the trace, and name no launch, so nothing says which pass they belong to"
    ),
    "kernels_untimed": lambda n: (
        f"{n.factor:.0%} of its kernels have impossible times in the trace: none at all, or days apart from the rest"
    ),
    "kernels_shortened": (
        "some kernels cover later ones of their stream, which none can: they count until the next one begins"
    ),
    "compute_beyond_step": "by the trace its passes computed longer than the step took, so its times are wrong",
    "closed_early": lambda n: f"the window was closed early ({n.said or 'no reason given'})",
    "passes_missing": lambda n: f"it holds {n.count} {n.names[0]} ranges where {n.of} belong",
    # communication
    "groups_unknown": _groups_unknown,
    "axes_unseen": lambda n: (
        f"exposed {_joined(n)} {'is' if len(n.names) == 1 else 'are'} not known: not one kernel of such communication "
        "was found, so it goes by names that megaprof does not know, and is counted as compute"
    ),
    "groups_unnamed": (
        "communication of process groups that bear none of Megatron's names took time and is counted for no group"
    ),
    "groups_not_apart": lambda n: (
        f"exposed {_joined(n)} cannot be told apart: the collectives of a CPU trace name no process group"
    ),
    "groups_in_compute": lambda n: (
        f"exposed {_joined(n)} {'is' if len(n.names) == 1 else 'are'} in compute: "
        f"{f'in only {n.count} of {n.of} steps' if n.count else 'no'} collectives inside microbatches were recorded"
    ),
    "groups_with_waiting": lambda n: (
        f"exposed {_joined(n)} is all of the time in which torch's collectives ran, with waiting for slower peers, "
        "also where something computed beside them; what is exchanged in other ways is in compute"
    ),
    "replicas_missing": lambda n: (
        f"{n.count} of {n.of} data-parallel replicas {'was' if n.count == 1 else 'were'} captured: the tables do not "
        "show exposed dp and the gradient tail, since waiting for the others cannot be told apart from them"
    ),
    "pp_unknown": (
        "the tables do not show exposed pp: waiting for a neighbour and the transfer itself were recorded as one, and "
        "the bubble contains both"
    ),
    "pp_not_split": (
        "exposed pp cannot be split into waiting and transferring, so the bubble contains both: only one end of its "
        "exchanges is known"
    ),
    "exposed_unknown": ("exposed communication is not measured: the trace does not say who launched its GPU kernels"),
    "dump_unreadable": lambda n: (
        f"{ranks(n.ranks)}'s file {' '.join((*n.files, 'is'))} there, but cannot be read ({n.said}), so nothing is "
        f"known of {ranks(n.ranks)}"
    ),
    "group_differs": lambda n: f"ranks do not agree who is in {n.names[0]} ({n.names[1]}): {' or '.join(n.names[2:])}",
    # clocks
    "host_contradicted": lambda n: (
        f"{_contradicted(n)}, and no other clocks would explain that: the traces are of different runs"
    ),
    "host_shared": lambda n: (
        f"{_contradicted(n)}. Several machines bear this name, so each rank's clock is taken for its own"
    ),
    "clocks_contradicted": _clocks_contradicted,
    "clocks_disagree": lambda n: f"the clocks of {' and '.join(n.names)} contradict the way through other hosts",
    "clocks_unconnected": lambda n: (
        f"no captured messages connect {ranks(n.ranks)} with {listed(list(n.names))}: clocks not aligned"
    ),
    "messages_unmatched": lambda n: (
        f"rank {n.ranks[0]} sent {n.count} times to rank {n.ranks[1]}, which received {n.of} times: the first "
        f"{min(n.count, n.of)} are matched"
    ),
    "clocks_aligned": lambda n: f"the clocks of the stages' hosts were aligned by their exchanges, to {n.ms[0]:.2g} ms",
    "aligned_on_gpu": lambda n: (
        f"the stages' steps were aligned on the GPU's clock by which phase waits for which, to {n.ms[0]:.2g} ms"
    ),
    "not_aligned_on_gpu": (
        "the stages' times are on the GPU's clock, and compared by the hosts' clocks at the start of the step"
    ),
    "host_unnamed": lambda n: (
        f"no host is named for {stages(n.stages)}, so nothing says whether the stages share a clock; {_NO_CLOCK}"
    ),
    "clocks_apart": lambda n: (
        f"the stages ran on {len(n.names)} hosts ({', '.join(n.names[:4])}{', ...' if len(n.names) > 4 else ''}), "
        f"whose clocks are not aligned; {_NO_CLOCK}"
    ),
    "stages_apart": lambda n: (
        f"the stages of {steps(n.steps)} do not overlap in time: their traces are of different runs, or of replicas "
        "that run at different times; the step time is the longest stage's own range"
    ),
    "no_pipeline": lambda n: f"{ranks(n.ranks)}: no arrows, because there is no pipeline to send along",
    "exchanges_unseen": lambda n: (
        f"{ranks(n.ranks)}: no arrows, because its exchanges run on the GPU without the host waiting for them, and no "
        "kernels of theirs are known"
    ),
    "arrows_backwards": lambda n: (
        f"{n.count} messages have no arrow: by these clocks they arrived before they were sent"
    ),
    # what does not belong together
    "other_sizes": lambda n: f"traces with other sizes ({n.said}) are in the directory, too, and reported separately",
    "other_jobs": lambda n: f"{ranks(n.ranks)}'s traces are of different jobs: its coordinates or its layers changed",
    "other_layers": "ranks of one stage do not hold the same layers, so their traces are of different jobs",
    "other_schedules": "the traces are of different schedules",
    "kernels_in_some": "some traces hold GPU kernels and some do not, so their times are not comparable",
    "stages_missing": lambda n: (
        f"{n.count} of {n.of} stages captured, without {stages(n.stages)}: times between stages cover only the "
        "captured ones; --profile-select per-stage captures one rank of every stage"
    ),
    "stages_missing_in_step": lambda n: (
        f"{steps(n.steps)}{f' (call {n.count})' if n.count else ''} was captured on {stages(n.stages)} only and is "
        "left out"
    ),
    "no_common_step": ("no step was captured on every stage, so the stages' times are of different steps"),
    "stages_differ": "within one step the stages report different numbers of microbatches",
    "microbatches_differ": (
        "steps or replicas have different numbers of microbatches: those with the number that most of them have count"
    ),
    # steps that are left out, or disturbed
    "twice": lambda n: (
        f"{ranks(n.ranks)} {f'has {steps(n.steps)}' if n.steps else 'is there'} twice ({', '.join(n.files)}): the "
        "later one counts"
    ),
    "step_left_out": lambda n: f"{_left_out(n)}: {f'on {ranks(n.ranks)} ' if n.ranks else ''}{_why(n)}",
    "file_left_out": lambda n: f"{n.files[0]} is left out of the times per step: {_why(n)}",
    "not_recovered": lambda n: (
        f"steps behind the last window take {milliseconds(n.ms[1])}, those before the first took "
        f"{milliseconds(n.ms[0])}: the job is not as quick as before{f' (CUPTI: {n.said})' if n.said else ''}"
    ),
    "first_steps": lambda n: (
        f"{_left_out(n)}: the first recorded steps took over {WARM_UP:.2f} times as long as the median step"
    ),
    # what a stage lacks
    "modules_without_range": _modules,
    "combined": "forward and backward run combined: only their sum, compute, is known",
    "no_passes": lambda n: (
        f"no microbatch ranges, so only the time of the step is known: {n.said or 'the trace holds none'}"
    ),
    "launches_unknown": (
        "the trace does not say who launched its GPU kernels, so forward and backward are the host's time"
    ),
    "kernels_without_launch": ("GPU activities without a launch in the trace belong to no range and are not counted"),
    "whole_step": ("a whole step is more than its pipeline: its microbatches are reported with the calls inside it"),
    # why there is no table of passes
    "no_whole_step": lambda n: "no step was recorded whole" + ("" if n.why is None else f": {clause(n.why)}"),
    "no_timed_passes": lambda n: n.said or "no step was recorded with the times of its microbatches",
    "all_disturbed": "every step failed, stood still, or was disturbed by a window",
    "no_step_of_all": "no step was recorded by all ranks of a pipeline",
    "place_unknown": "the microbatch or the model chunk of a pass is not known",
    "place_beyond_schedule": "a pass bears a number that its schedule does not have",
    "schedule_unknown": (
        "the files do not say which schedule ran, on which model chunks, or with how many microbatches"
    ),
    "schedule_refused": lambda n: f"the schedule cannot be rebuilt: {n.said}",
    "order_differs": _order,
    # what is not predicted
    "not_replayed": lambda n: f"not replayed: {_why(n)}",
    "waits_for_host": lambda n: (
        f"the GPU waits for its host in {'at least ' if len(n.stages) > 1 else ''}{percent(n.factor)} of the passes of "
        f"{stages(n.stages)}: it has nothing else to do at both ends of them; a capture shows what that costs"
    ),
    "waits_for_rank": lambda n: (
        "no change is predicted: it is not certain how long the passes of "
        f"{ranks(n.ranks) if n.ranks else stages(n.stages)} take without waiting for a processor core, "
        f"and a change would change who waits{'' if n.why is None else f' ({_shared(n.why)})'}"
    ),
    "ranks_stay_slow": lambda n: f"every prediction leaves {ranks(n.ranks)} as slow as now",
    "nothing_to_change": (
        "nothing is predicted: a single stage has no other layout, and no sequences were captured that could be packed "
        "differently"
    ),
    "one_stage": "no layout is predicted: a single stage has no other one",
    "no_layout": lambda n: f"no other layout is predicted: {_why(n)}",
    "stage_unknown": lambda n: f"the traces of {stages(n.stages)} do not say what it holds",
    "stage_too_large": lambda n: f"the traces say that {stages(n.stages)} holds {n.count} layers",
    "stage_contradicts": lambda n: f"the traces of {stages(n.stages)} contradict themselves about its layers",
    "no_layers": "the stages hold no decoder layers",
    "layout_refused": lambda n: f"the captured layout is not one of Megatron's: {n.said}",
    "no_exchange_time": (
        "no exchange takes time in the replay: without a common clock of the stages nothing says how long exchanges "
        "take"
    ),
    "replay_off": lambda n: (
        f"the replay misses the measured step by {n.factor:.1%}, so every prediction is at least as uncertain"
    ),
    "cores_shared": lambda n: (
        f"{_shared(n)}: another layout changes what every stage costs, so its speedup may be another {n.factor:.0%} off"
    ),
    # recordings that megaprof did not make
    "sends_not_apart": ("send-receive kernels without an annotation of torch's cannot be told from all-to-all"),
    "group_unnamed": "some communication names no process group",
    "sizes_do_not_fit": lambda n: (
        f"the given sizes do not fit the {n.count} ranks that the recordings are from: {n.said}"
    ),
    "not_1f1b": lambda n: f"the exchanges of {ranks(n.ranks)}'s pipeline group do not follow 1F1B: {_NO_STAGES}",
    "pipelines_differ": lambda n: f"pipelines or steps of different sizes are recorded together: {_NO_STAGES}",
}
