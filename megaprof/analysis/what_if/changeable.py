"""A captured run that can be changed: another layout, other microbatches, virtual stages, transfers, or packings.

A change is a `Setting`, and `predicted` returns its step. The report's own candidates and a person's choice both go
through it, so both give the same number for the same change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megaprof.analysis.diagnosis.policy import OTHER_CHUNKS
from megaprof.analysis.samples import Interval
from megaprof.analysis.simulation.replay import rescheduled
from megaprof.analysis.simulation.simulate import Simulation
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.changes import Baseline, Change, Kind, Prediction, baseline, priced
from megaprof.analysis.what_if.contents import Costs, Held, split
from megaprof.analysis.what_if.layouts import Layout, check_layout, format_layout, layers_per_stage, to_flags
from megaprof.analysis.what_if.memory import Memory, in_flight_layers
from megaprof.analysis.what_if.packing import Sequences, plan
from megaprof.formats.phrases import counted

MOST_MICROBATCHES = 4096
_MOST_PASSES = 200_000
_MOST_P2P_MS = 1e6
#: How many ways to divide the contents into layers and ends are drawn, for every draw of the contents.
WAYS = 2


class NotCaptured(ValueError):
    """Raised if a change makes sense, but the captured files do not show what its step would take."""


@dataclass(frozen=True)
class Setting:
    """The choices that can be made for a run: the layout, the microbatches of a step, the milliseconds of every
    transfer between stages (None: as captured), and one of `packing.PLANS` (None: as captured). If ``same_tokens``,
    another number of microbatches shares the tokens of the captured step; otherwise each keeps its size."""

    pieces: Layout
    microbatches: int
    p2p_ms: float | None = None
    same_tokens: bool = True
    packing: str | None = None


@dataclass(frozen=True)
class Changeable:
    """A captured run whose chunks have known contents: its unchanged steps, its layout, and the memory that its stages
    had allocated (None: not measured). ``slower`` [s] is how many times as long as its peers the slowest rank of each
    stage takes. Its ``sequences`` are None if they are not known, or if all microbatches are ``alike``: equally many
    tokens in equally long sequences."""

    baseline: Baseline
    held: Held
    memory: Memory | None
    slower: Floats | float = 1.0
    sequences: Sequences | None = None
    alike: bool = False

    @property
    def pieces(self) -> Layout:
        """The captured layout."""
        return self.held.pieces

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.held.stages

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a step."""
        return self.baseline.replay.schedule.microbatches

    @property
    def captured(self) -> Setting:
        """The run as it was captured."""
        return Setting(self.pieces, self.microbatches)

    @cached_property
    def as_captured(self) -> Tried:
        """The captured setting, predicted like any other."""
        return tried(self, self.captured)

    @cached_property
    def in_flight(self) -> list[int]:
        """For every stage, the largest number of layers times microbatches whose activations it holds at once."""
        return in_flight_layers(self.pieces, self.baseline.replay.schedule)

    @cached_property
    def costs(self) -> Costs:
        """The estimated costs of layers."""
        return split(self.baseline.content, self.held)

    @cached_property
    def sure(self) -> Costs:
        """The costs of layers in every draw of steps and microbatches."""
        return split(self.baseline.drawn, self.held)

    @cached_property
    def free(self) -> Costs:
        """The costs of layers in draws that also vary what the data leave open."""
        return split(np.concatenate([self.baseline.drawn] * WAYS), self.held, np.random.default_rng(0))

    def change(self, setting: Setting) -> Change:
        """Returns what ``setting`` changes besides the layout. Raises ValueError if Megatron has no such schedule."""
        replay = rescheduled(self.baseline.replay, len(setting.pieces) // self.stages, setting.microbatches)
        tokens = self.microbatches / setting.microbatches if setting.same_tokens else 1.0
        return Change(replay, tokens, setting.p2p_ms)


@dataclass(frozen=True)
class Tried:
    """The effect of a setting. ``simulation`` is the replayed pipeline of a captured step of about average length. The
    passes of each stage take ``longer`` times as long in the average step, and it runs no pass for ``idle_ms``."""

    setting: Setting
    prediction: Prediction
    simulation: Simulation
    longer: tuple[float, ...]
    idle_ms: tuple[float, ...]


def predicted(run: Changeable, kind: Kind, setting: Setting) -> tuple[Prediction, Floats]:
    """Predicts a setting with the captured packing, as `priced` does. Raises ValueError if Megatron has no such
    schedule."""
    pieces, change, captured = setting.pieces, run.change(setting), run.baseline.replay.schedule
    unsure = OTHER_CHUNKS * (len(pieces) != len(run.pieces))
    estimated, sure, free = (costs.of(pieces) for costs in (run.costs, run.sure, run.free))
    prediction, gains = priced(run.baseline, kind, estimated, sure, free, change, unsure)
    schedule = change.replay.schedule
    memory = run.memory if change.tokens == 1.0 else None
    fits, needed = (None, None) if memory is None else memory.fit(pieces, schedule)
    prediction = replace(
        prediction,
        layout=format_layout(pieces),
        layers=layers_per_stage(pieces, run.stages),
        chunks=None if schedule.chunks == captured.chunks else schedule.chunks,
        microbatches=None if schedule.microbatches == captured.microbatches else schedule.microbatches,
        tokens=change.tokens,
        activations=1.0 if schedule.forward_only else change.tokens,
        flags=() if pieces == run.pieces else flags_of(run.held, pieces),
        in_flight=tuple(in_flight_layers(pieces, schedule)),
        fits=fits,
        needed=needed,
    )
    return prediction, gains


def tried(run: Changeable, wanted: Setting) -> Tried:
    """Predicts ``wanted``.

    Raises ValueError if Megatron refuses it or if it is too large to predict, and NotCaptured.
    """
    asked = run
    if wanted.packing is not None:
        run, laid = _repacked(run, wanted)
        wanted = replace(wanted, microbatches=run.microbatches)
    _check(run, wanted)
    prediction, _ = predicted(run, "by_hand", wanted)
    change = run.change(wanted)
    if wanted.packing is not None:
        both = laid.step_ms
        if (wanted.pieces, change) != (run.pieces, run.baseline.as_is):  # predicted on top of what was laid
            both = prediction.step_ms + laid.step_ms + Interval.of(-laid.step_ms.value)
        took = Prediction.of("by_hand", asked.baseline.measured_ms, both)
        prediction = replace(prediction, step_ms=took.step_ms, speedup=took.speedup)
    if not wanted.same_tokens:
        times = wanted.microbatches / run.microbatches
        prediction = replace(prediction, speedup=prediction.speedup * times, step_tokens=times)
    prediction = replace(
        prediction,
        microbatches=None if wanted.microbatches == asked.microbatches else wanted.microbatches,
        p2p_ms=wanted.p2p_ms,
        packing=wanted.packing,
    )
    content = run.costs.of(wanted.pieces)
    before = asked.baseline.stages_ms(asked.baseline.content, asked.baseline.as_is)
    longer = run.baseline.stages_ms(content, change) / np.maximum(before, 1e-9)
    idle_ms = run.baseline.idle_ms(content, change)
    return Tried(
        wanted, prediction, run.baseline.simulated(content, change), tuple(longer.tolist()), tuple(idle_ms.tolist())
    )


def _repacked(run: Changeable, wanted: Setting) -> tuple[Changeable, Prediction]:
    """Returns the run with its sequences packed as ``wanted``, and the prediction of that. Raises ValueError."""
    packing, count, sequences = wanted.packing or "", wanted.microbatches, run.sequences
    if sequences is None:
        alike = "all microbatches have equally many tokens in equally long sequences, so any packing is the same"
        why = alike if run.alike else "the lengths of the sequences were not captured"
        raise NotCaptured(f"packing={packing}: {why}")
    laid = plan(sequences, packing, None if count == run.microbatches else count)
    if laid is None:
        raise ValueError(
            f"packing={packing}: the sequences cannot lie so in {counted(count, 'microbatch')} of at most "
            f"{sequences.most} tokens, which is what memory was seen to hold"
        )
    return replace(run, baseline=baseline(sequences.run, laid.passes, laid.replay)), laid.prediction


def _check(run: Changeable, wanted: Setting) -> None:
    """Raises ValueError for a setting that is impossible or would take too long to predict."""
    flat, count = "".join(run.pieces), wanted.microbatches
    check_layout(wanted.pieces, run.stages, flat.count("t"), flat.count("m"))
    chunks = len(wanted.pieces) // run.stages
    if not 1 <= count <= MOST_MICROBATCHES:
        raise ValueError(f"microbatches={count} must lie between 1 and {MOST_MICROBATCHES}")
    if run.stages * chunks * count > _MOST_PASSES:
        raise ValueError(f"{run.stages} stages x {chunks} chunks x {count} microbatches are too many to try by hand")
    if wanted.p2p_ms is not None and not 0 <= wanted.p2p_ms <= _MOST_P2P_MS:
        raise ValueError(f"p2p_ms={wanted.p2p_ms:g} must be a number of milliseconds from 0 on")


def flags_of(held: Held, pieces: Layout) -> tuple[str, ...]:
    """Returns Megatron's flags for a layout; none if no option of Megatron describes it.

    Megatron's even split needs no flag for its layers. One is given all the same, to replace a flag that the run has
    now. A hybrid model has its layout in its pattern, and Megatron refuses other flags next to that.
    """
    if held.hybrid:
        pattern = held.pattern(pieces)
        return () if pattern is None else ("--hybrid-layer-pattern", pattern)
    flags = to_flags(pieces, held.stages)
    if any(flag.startswith(("--decoder", "--account", "--pipeline")) for flag in flags):
        return flags
    return ("--decoder-first-pipeline-num-layers", str(layers_per_stage(pieces, held.stages)[0]), *flags)
