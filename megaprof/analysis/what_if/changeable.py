"""A captured run that can be changed: another layout, other microbatches, virtual stages, transfers, or packings.

A change is a `Setting`, and `predicted` returns its step. The report's own candidates and a person's choice both go
through it, so both give the same number for the same change. `chosen` reads a person's choice from text, for the
command, the page and the agent's tool.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined
from megaprof.analysis.diagnosis.policy import OTHER_CHUNKS
from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.samples import Interval
from megaprof.analysis.simulation import Simulation, played, rescheduled
from megaprof.analysis.table.table import Floats
from megaprof.analysis.what_if.changes import (
    PLANS,
    Change,
    Kind,
    Prediction,
    Sequences,
    changed,
    longest,
    plan,
    priced,
    repacked,
)
from megaprof.analysis.what_if.contents import Costs, Model, StageMemory, costs_of, in_flight_layers
from megaprof.analysis.what_if.layouts import (
    Layout,
    check_layout,
    default_layout,
    format_layout,
    layers_per_stage,
    of_counts,
    parse_layout,
)
from megaprof.formats.phrases import Unanswerable, counted

MOST_MICROBATCHES = 4096
_MOST_PASSES, _MOST_P2P_MS = 200_000, 1e6
_MOST_CHUNKS, _LONGEST_LAYOUT = 16, 4000
_COUNTS = re.compile(r"\d{1,5}(,\d{1,5})*")
#: How many ways to divide the contents into layers and ends are drawn, for every draw of the contents.
WAYS = 2


@dataclass(frozen=True)
class Setting:
    """The choices that can be made for a run: the layout, the microbatches of a step, the milliseconds of every
    transfer between stages (None: as captured), and one of `changes.PLANS` (None: as captured). If ``same_tokens``,
    another number of microbatches shares the tokens of the captured step; otherwise each keeps its size."""

    pieces: Layout
    microbatches: int
    p2p_ms: float | None = None
    same_tokens: bool = True
    packing: str | None = None


@dataclass(frozen=True)
class Changeable:
    """A captured run whose chunks have known contents: its unchanged steps, its layout, and the memory that its stages
    had allocated (None: not measured). Its ``sequences`` are None if they are not known, or if all microbatches are
    ``alike``: equally many tokens in equally long sequences."""

    baseline: Examined
    model: Model
    memory: StageMemory | None
    sequences: Sequences | None = None
    alike: bool = False

    @property
    def pieces(self) -> Layout:
        """The captured layout."""
        return self.model.pieces

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.model.stages

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a step."""
        return self.baseline.view.replay.schedule.microbatches

    @property
    def captured(self) -> Setting:
        """The run as it was captured."""
        return Setting(self.pieces, self.microbatches)

    @cached_property
    def as_captured(self) -> Tried:
        """The captured setting, predicted like any other."""
        return tried(self, self.captured)

    @cached_property
    def costs(self) -> Costs:
        """The estimated costs of layers."""
        return costs_of(self.baseline.view.now[0], self.model)

    @cached_property
    def sure(self) -> Costs:
        """The costs of layers in every draw of steps and microbatches."""
        return costs_of(self.baseline.draws.now, self.model)

    @cached_property
    def free(self) -> Costs:
        """The costs of layers in draws that also vary what the data leave open."""
        return costs_of(np.concatenate([self.baseline.draws.now] * WAYS), self.model, np.random.default_rng(0))

    def change(self, setting: Setting) -> Change:
        """Returns what ``setting`` changes besides the layout. Raises ValueError if Megatron has no such schedule."""
        replay = rescheduled(self.baseline.view.replay, len(setting.pieces) // self.stages, setting.microbatches)
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
    pieces, change, captured = setting.pieces, run.change(setting), run.baseline.view.replay.schedule
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
        flags=() if pieces == run.pieces else run.model.flags(pieces),
        in_flight=tuple(in_flight_layers(pieces, schedule)),
        fits=fits,
        needed=needed,
    )
    return prediction, gains


def tried(run: Changeable, wanted: Setting) -> Tried:
    """Predicts ``wanted``.

    Raises ValueError if Megatron refuses it or if it is too large to predict, and Unanswerable.
    """
    asked = run
    if wanted.packing is not None:
        run, laid = _repacked(run, wanted, wanted.packing)
        wanted = replace(wanted, microbatches=run.microbatches)
    flat, count = "".join(run.pieces), wanted.microbatches
    check_layout(wanted.pieces, run.stages, flat.count("t"), flat.count("m"))
    chunks = len(wanted.pieces) // run.stages
    if not 1 <= count <= MOST_MICROBATCHES:
        raise ValueError(f"microbatches={count} must lie between 1 and {MOST_MICROBATCHES}")
    if run.stages * chunks * count > _MOST_PASSES:
        raise ValueError(f"{run.stages} stages x {chunks} chunks x {count} microbatches are too many to try by hand")
    if wanted.p2p_ms is not None and not 0 <= wanted.p2p_ms <= _MOST_P2P_MS:
        raise ValueError(f"p2p_ms={wanted.p2p_ms:g} must be a number of milliseconds from 0 on")
    prediction, _ = predicted(run, "by_hand", wanted)
    change = run.change(wanted)
    if wanted.packing is not None:
        both = laid.step_ms
        if (wanted.pieces, change) != (run.pieces, run.change(run.captured)):  # predicted on top of what was laid
            both = prediction.step_ms + laid.step_ms + Interval.of(-laid.step_ms.value)
        took = Prediction.of("by_hand", asked.baseline.step_ms, both)
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
    steps = changed(run.baseline.view, run.costs.of(wanted.pieces), change)
    before, stages_ms = (each.passes.sum(axis=(3, 4, 5)).mean(axis=(0, 1)) for each in (asked.baseline.view, steps))
    longer = stages_ms / np.maximum(before, 1e-9)
    # Until the longest pipeline ends. This is never negative, because a pipeline takes as long as any of its stages.
    idle_ms = steps.pipelines_ms.max(axis=1).mean() - stages_ms
    # The longest pipeline of the captured step whose replay is nearest to the average one.
    replayed_ms = run.baseline.view.pipelines_ms.max(axis=1)
    row = int(np.abs(replayed_ms - replayed_ms.mean()).argmin())
    place = row, int(steps.pipelines_ms[row].argmax())
    simulation = played(steps.replay, steps.passes[place], entry=steps.entry[place], link=steps.link[place])
    return Tried(wanted, prediction, simulation, tuple(longer.tolist()), tuple(idle_ms.tolist()))


def _repacked(run: Changeable, wanted: Setting, packing: str) -> tuple[Changeable, Prediction]:
    """Returns the run with its sequences packed as ``wanted``, and the prediction of that. Raises ValueError."""
    count, sequences = wanted.microbatches, run.sequences
    if sequences is None:
        alike = "all microbatches have equally many tokens in equally long sequences, so any packing is the same"
        why = alike if run.alike else "the lengths of the sequences were not captured"
        raise Unanswerable(f"packing={packing}: {why}")
    laid = plan(sequences, packing, None if count == run.microbatches else count)
    if laid is None:
        raise ValueError(
            f"packing={packing}: the sequences cannot lie so in {counted(count, 'microbatch')} of at most "
            f"{sequences.most} tokens, which is what memory was seen to hold"
        )
    prediction, steps = repacked(sequences, laid)
    return replace(run, baseline=longest(steps)), prediction


def chosen(run: Changeable, choices: Mapping[str, str]) -> Tried:
    """Predicts the choices, which have these names: ``layout``, as Megatron writes it or as decoder layers by piece
    (``5,3``); ``chunks`` of every stage; ``microbatches``; ``p2p``: milliseconds of a transfer; ``tokens``: ``more`` if
    another number of microbatches keeps their size; ``packing``: one of `changes.PLANS`; ``was``: the number of chunks
    on the page that shows ``layout``. If ``chunks`` differs from ``was``, the layout is split anew. A choice that is
    missing or empty stays as it was captured. Raises as `tried` does."""
    captured = run.captured
    chunks_before = len(captured.pieces) // run.stages
    chunks = whole("chunks", choices.get("chunks"), chunks_before)
    if not 1 <= chunks <= _MOST_CHUNKS:
        raise ValueError(f"chunks={chunks} must lie between 1 and {_MOST_CHUNKS}")
    for name, known in (("packing", tuple(PLANS)), ("tokens", ("same", "more"))):
        if (choice := choices.get(name, "").strip()) and choice not in known:
            raise ValueError(f"{name}={choice[:20]!r} is none of {', '.join(known)}")
    pieces = _pieces(run, choices.get("layout", "").strip())
    # A typed layout may have another number of chunks. If the number itself was changed, the layout is split anew.
    if chunks * run.stages != len(pieces) and choices.get("chunks"):
        if choices.get("layout") and "was" not in choices:
            raise ValueError(f"chunks={chunks} needs a layout of {chunks * run.stages} pieces, not of {len(pieces)}")
        if chunks != whole("was", choices.get("was"), chunks_before):
            pieces = split(captured.pieces, run.stages, chunks)
    wanted = Setting(
        pieces,
        whole("microbatches", choices.get("microbatches"), captured.microbatches),
        _milliseconds(choices.get("p2p"), run.baseline.view.p2p_ms),
        choices.get("tokens", "").strip() != "more",
        choices.get("packing", "").strip() or None,
    )
    return tried(run, wanted)


@dataclass(frozen=True)
class StagesAfter:
    """All stages with a chosen change, averaged over the steps of the report's tables; without a change, their numbers.
    What was not measured is None.

    By pipeline rank: the milliseconds that a stage computes in a step, and its bubble as a fraction of the step. In
    all: the average ``bubble``, and the ``imbalance``, compute of the slowest stage / of the average one.
    """

    compute_ms: tuple[float | None, ...]
    bubbles: tuple[float | None, ...]
    bubble: float | None
    imbalance: float | None


def stages_after(measured: TargetStages, run: Changeable, effect: Tried) -> StagesAfter:
    """Returns the stages of the report's tables as the replays change them.

    What a stage computes changes in proportion to its replayed passes. Its bubble grows by as much as the stage idles
    longer in the replay, and shrinks in proportion: the tables and the replay need not agree on how long it idles.
    """
    measured_ms = run.baseline.step_ms
    step = effect.prediction.step_ms.value / measured_ms
    compute, bubbles = list[float | None](), list[float | None]()
    for stage in measured.stages:
        now, then = (each.idle_ms[stage.pp] / measured_ms for each in (run.as_captured, effect))
        before = stage.bubble_fraction
        compute.append(None if stage.compute_ms is None else stage.compute_ms.mean * effect.longer[stage.pp])
        bubbles.append(None if before is None else (before + then - now if then >= now else before * then / now) / step)
    known, computed = ([each for each in values if each is not None] for values in (bubbles, compute))
    return StagesAfter(
        tuple(compute),
        tuple(bubbles),
        statistics.fmean(known) if known else None,
        None if measured.imbalance is None else max(computed) / statistics.fmean(computed),
    )


def _pieces(run: Changeable, text: str) -> Layout:
    """Returns the layout in ``text``, or the captured one if it is empty. Raises ValueError."""
    if len(text) > _LONGEST_LAYOUT:
        raise ValueError(f"the layout is longer than {_LONGEST_LAYOUT} characters")
    if not text:
        return run.pieces
    if not _COUNTS.fullmatch(text):
        return parse_layout(text, run.stages)
    layers = [int(count) for count in text.split(",")]
    if len(layers) % run.stages:
        raise ValueError(f"layout={text} has {counted(len(layers), 'piece')}, not a multiple of pp={run.stages}")
    if sum(layers) != (held := "".join(run.pieces).count("t")):
        raise ValueError(f"layout={text} has {counted(sum(layers), 'decoder layer')}, the model has {held}")
    return of_counts(layers, "".join(run.pieces).count("m"))


def whole(name: str, text: str | None, default: int) -> int:
    """Returns the chosen number, or ``default`` without one. Raises ValueError."""
    if text is None or not text.strip():
        return default
    if not text.strip().isascii() or not text.strip().isdecimal() or len(text.strip()) > 9:
        raise ValueError(f"{name}={text.strip()[:20]!r} is not a whole number")
    return int(text)


def number_of(ms: float) -> str:
    """Returns ``ms`` with at most three decimal places, and no zeros at their end."""
    return f"{ms:.3f}".rstrip("0").rstrip(".")


def _milliseconds(text: str | None, captured: float) -> float | None:
    """Returns the chosen time; None for the captured one, which the page shows rounded. Raises ValueError."""
    if text is None or not text.strip() or text.strip() == number_of(captured):
        return None
    try:
        ms = float(text.strip()[:30])
    except ValueError:
        ms = math.nan
    if not math.isfinite(ms):
        raise ValueError(f"p2p={text.strip()[:20]!r} is not a number of milliseconds")
    return ms


def split(pieces: Layout, stages: int, chunks: int) -> Layout:
    """Returns the same layers in another number of chunks per stage: as Megatron splits them, or as evenly as
    possible."""
    flat = "".join(pieces)
    layers, mtp = flat.count("t"), flat.count("m")
    if (even := default_layout(stages, chunks, layers, mtp)) is not None:
        return even
    per_piece, rest = divmod(layers, stages * chunks)
    return of_counts((per_piece + (place < rest) for place in range(stages * chunks)), mtp)
