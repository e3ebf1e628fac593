"""Changes that a run may have: other layouts, other numbers of chunks, other microbatches, balanced stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from megaprof.analysis.simulation.replay import Replay, rescheduled
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.changes import Captured, Change, Kind, Priced, described, priced
from megaprof.analysis.what_if.contents import Costs, Held, split
from megaprof.analysis.what_if.layout_search import search
from megaprof.analysis.what_if.layouts import Layout, format_layout, layers_per_stage, to_flags
from megaprof.analysis.what_if.memory import Memory, in_flight_layers
from megaprof.parallel.schedules import PipelineSchedule

_MOST_LAYOUTS = 3
#: Layouts that are priced, of those with the shortest undisturbed step.
_PRICED = 6
_CHUNK_COUNTS = (1, 2, 3, 4)
#: No layout is more certain than this, as a fraction of the step: runs of one layout in turns with others differ by as
#: much (`make bench-whatif`: 1 to 3 %), and one run does not show it.
RERUN = 0.02
#: What chunks of another number may cost beyond their layers, as a fraction of the step: a published pair of GPU runs
#: had a last stage that became 3 % slower with two chunks.
OTHER_CHUNKS = 0.03
#: Ways to divide contents, for every draw of them.
_WAYS = 2


@dataclass(frozen=True)
class Known:
    """A captured run of which it is known what its chunks hold."""

    run: Captured
    """Its steps."""
    held: Held
    """Its layout."""
    memory: Memory | None
    """What the stages had allocated; None where that was not measured."""
    shared: float = 0.0
    """What stages that share cores do to each other's costs, as a fraction of the step."""
    slower: Floats | float = 1.0
    """[s]: how many times as long as its peers the slowest rank of a stage takes; 1 where none is slow."""

    @property
    def pieces(self) -> Layout:
        """The captured layout."""
        return self.held.pieces

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.held.stages

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.run.replay.schedule.microbatches

    @property
    def measured_ms(self) -> float:
        """The measured step."""
        return self.run.measured_ms

    @cached_property
    def in_flight(self) -> list[int]:
        """Of every stage the most layers times microbatches whose activations it holds at once."""
        return in_flight_layers(self.pieces, self.run.replay.schedule)

    @cached_property
    def costs(self) -> Costs:
        """What layers cost, as estimated."""
        return split(self.run.content[0], self.held)

    @cached_property
    def sure(self) -> Costs:
        """By every draw of steps and microbatches."""
        return split(self.run.drawn, self.held)

    @cached_property
    def free(self) -> Costs:
        """By draws that take what the data leave open, too."""
        drawn = np.concatenate([self.run.drawn] * _WAYS)
        return split(drawn, self.held, np.random.default_rng(0))


def relaid(known: Known, kind: Kind, pieces: Layout, change: Change | None = None) -> Priced:
    """The run with other ``pieces``, or with its own."""
    change = change or known.run.as_is
    other = len(pieces) != len(known.pieces)
    apart = float(np.hypot(known.shared, OTHER_CHUNKS * other)) if pieces != known.pieces else 0.0
    own, sure, free = (each.of(pieces) for each in (known.costs, known.sure, known.free))
    found = priced(known.run, kind, own, sure, free, change, float(np.hypot(apart, RERUN)))
    schedule, captured = change.replay.schedule, known.run.replay.schedule
    needs = in_flight_layers(pieces, schedule)
    fit = None if known.memory is None or change.larger != 1.0 else known.memory.fit(pieces, schedule)
    return described(
        found,
        layout=format_layout(pieces),
        layers=tuple(layers_per_stage(pieces, known.stages)),
        chunks=None if schedule.chunks == captured.chunks else schedule.chunks,
        microbatches=None if schedule.microbatches == captured.microbatches else schedule.microbatches,
        **_larger(change.larger, schedule),
        flags=() if pieces == known.pieces else placed(known.held, pieces),
        in_flight=tuple(needs),
        fits=None if fit is None else fit.fits,
        needed=None if fit is None else fit.needed,
    )


def _larger(tokens: float, schedule: PipelineSchedule) -> dict[str, float]:
    return {"tokens": tokens, "activations": 1.0 if schedule.forward_only else tokens}


def layouts(known: Known) -> list[Priced]:
    """The quickest layouts other than the captured one, whether they gain anything or not; of those that do not fit
    into the measured memory only the quickest."""
    predictions = [relaid(known, "layout", pieces) for pieces in _quickest(known, known.run.replay, _PRICED)]
    return sorted(predictions, key=lambda each: each.prediction.step_ms)[:_MOST_LAYOUTS]


def _quickest(known: Known, replay: Replay, most: int) -> list[Layout]:
    """The layouts other than the captured one with the shortest undisturbed step; where some do not fit into the
    measured memory the quickest that do, behind the quickest of all."""
    schedule = replay.schedule
    same = schedule.chunks == known.run.replay.schedule.chunks
    factor = known.costs.factor if same else known.costs.of_stage[:, None]
    searched = partial(
        search,
        known.costs.units,
        replay,
        p2p_ms=known.run.p2p_ms,
        factor=factor * np.reshape(known.slower, (-1, 1, 1)),
        top=most + 1,
    )
    others = [pieces for pieces in searched() if pieces != known.pieces]
    memory = known.memory
    if memory is None:
        return others[:most]

    def fits(pieces: Layout) -> bool:
        return memory.fit(pieces, schedule).fits

    if not all(map(fits, others)):
        bounded = searched(needs=partial(memory.part, schedule=schedule))
        fitting = [pieces for pieces in bounded if pieces != known.pieces]
        others = [*(pieces for pieces in others[:1] if not fits(pieces)), *fitting]
    return others[:most]


def chunk_counts(known: Known) -> Iterator[Priced]:
    """Other numbers of model chunks per stage, in the quickest layout of each; where that does not fit into the
    measured memory in the quickest that does, too."""
    layers, captured = "".join(known.pieces).count("t"), known.run.replay.schedule.chunks
    for chunks in _CHUNK_COUNTS:
        if chunks == captured or layers < chunks * known.stages:
            continue
        try:
            change = Change(rescheduled(known.run.replay, chunks, known.microbatches))
        except ValueError:
            continue  # Megatron refuses this number of microbatches with so many chunks
        for pieces in _quickest(known, change.replay, 1 if known.memory is None else 2):
            yield relaid(known, "chunks", pieces, change)


def balanced(run: Captured) -> Priced:
    """The measured work spread evenly over all chunks, as if layers could be divided."""

    def even(content: Floats) -> Floats:
        return np.broadcast_to(content.mean(axis=(-3, -2), keepdims=True), content.shape)

    drawn = even(run.drawn)
    return priced(run, "balanced", even(run.content[0]), drawn, drawn, beside=RERUN)


def microbatch_counts(run: Captured) -> Iterator[Priced]:
    """Twice and half as many microbatches, of the same tokens in all."""
    own = run.replay.schedule
    many = own.microbatches
    for count in (2 * many, many // 2):
        if count < 1 or (count < many and many % 2):
            continue
        try:
            change = Change(rescheduled(run.replay, own.chunks, count), many / count)
        except ValueError:
            continue  # Megatron refuses this number of microbatches
        free = np.concatenate([run.drawn] * _WAYS)
        found = priced(run, "microbatches", run.content[0], run.drawn, free, change, RERUN)
        yield described(found, microbatches=count, **_larger(change.larger, own))


def placed(held: Held, pieces: Layout) -> tuple[str, ...]:
    """Megatron's flags for a layout. Its even split needs none for its layers; said aloud, it replaces a flag that the
    run has now. A hybrid model has its layout in its pattern, and Megatron refuses the other flags beside that."""
    if held.hybrid:
        pattern = held.pattern(pieces)
        return () if pattern is None else ("--hybrid-layer-pattern", pattern)
    stages, flags = held.stages, to_flags(pieces, held.stages)
    if any(flag.startswith(("--decoder", "--account", "--pipeline")) for flag in flags):
        return flags
    return ("--decoder-first-pipeline-num-layers", str(layers_per_stage(pieces, stages)[0]), *flags)
