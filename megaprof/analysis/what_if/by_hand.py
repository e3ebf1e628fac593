"""What a change that a person chooses would do: another layout, other microbatches, virtual stages, another transfer.

It is predicted as the report's own candidates are (`candidates`, `packing`), from the same replays, so both say the
same number for the same change; the drawn pipeline and its bubble are those of one of these replays. The command, the
page and the agent's tool all ask `chosen`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megaprof.analysis.diagnosis.examine import Price
from megaprof.analysis.simulation.replay import rescheduled
from megaprof.analysis.simulation.simulate import Simulation
from megaprof.analysis.what_if.candidates import Known, relaid
from megaprof.analysis.what_if.changes import Change, Prediction, captured
from megaprof.analysis.what_if.layouts import Layout, check_layout, default_layout, parse_layout
from megaprof.analysis.what_if.packing import PLANS, Packed, plan
from megaprof.formats.phrases import counted

MOST_MICROBATCHES = 4096
MOST_CHUNKS = 16
_MOST_PASSES = 200_000
_MOST_P2P_MS = 1e6
_LONGEST_LAYOUT = 4000
_COUNTS = re.compile(r"\d{1,5}(,\d{1,5})*")


class NotCaptured(ValueError):
    """What was asked for makes sense, and the run does not tell it."""


@dataclass(frozen=True)
class Setting:
    """What a person may choose of a run."""

    pieces: Layout
    """The layers of every model chunk, in the order in which a microbatch passes them."""
    microbatches: int
    """Microbatches of a step."""
    p2p_ms: float
    """Milliseconds of one transfer between stages."""
    same_tokens: bool = True
    """Whether other microbatches share the tokens of the captured step; else each stays as large as it was."""
    packing: str | None = None
    """How the sequences of the step lie in its microbatches, one of `packing.PLANS`; None: as they were captured."""


@dataclass(frozen=True)
class Tried:
    """What a setting would do."""

    setting: Setting
    """What was chosen."""
    prediction: Prediction
    """The step, how uncertain that is, flags and memory."""
    simulation: Simulation
    """The pipeline of the captured step that takes about as long as the average one."""

    @property
    def bubble(self) -> float:
        """Part of the pipeline in which nothing is computed, average over stages."""
        return sum(self.simulation.bubble_fraction) / len(self.simulation.bubble_fraction)

    @property
    def imbalance(self) -> float | None:
        """The slowest stage's compute over the average stage's; None where nothing is computed."""
        computed = self.simulation.stage_ms
        return max(computed) * len(computed) / sum(computed) if sum(computed) else None


@dataclass(frozen=True)
class ByHand(Known):
    """A captured run that can be changed."""

    sequences: Packed | None = None
    """Its sequences; None where they are not known, or all alike."""
    alike: bool = False
    """Whether its microbatches are all alike."""

    @property
    def captured(self) -> Setting:
        """The run as it was captured."""
        return Setting(self.pieces, self.microbatches, self.run.p2p_ms)

    @cached_property
    def as_captured(self) -> Tried:
        """The captured setting, tried like any other."""
        return tried(self, self.captured)


def tried(known: ByHand, wanted: Setting) -> Tried:
    """Predict ``wanted``. Raises ValueError where Megatron refuses it, or where it is more than can be answered at
    once, and NotCaptured."""
    asked = known
    if wanted.packing is not None:
        known, laid = _repacked(known, wanted)
        wanted = replace(wanted, microbatches=known.microbatches)
    run = known.run
    chunks, count = _checked(known, wanted)
    larger = known.microbatches / count if wanted.same_tokens else 1.0
    change = Change(rescheduled(run.replay, chunks, count), larger, wanted.p2p_ms - run.p2p_ms)
    found = relaid(known, "by_hand", wanted.pieces, change).prediction
    if wanted.packing is not None:
        both = laid if (wanted.pieces, change) == (known.pieces, run.as_is) else _sum(asked, laid, found)
        found = replace(found, step_ms=both.step_ms, speedup=both.speedup, low=both.low, high=both.high)
    if not wanted.same_tokens:
        found = found.of_tokens(count / known.microbatches)
    found = replace(
        found,
        microbatches=None if count == asked.microbatches else count,
        p2p_ms=None if wanted.p2p_ms == asked.captured.p2p_ms else wanted.p2p_ms,
        packing=wanted.packing,
    )
    return Tried(wanted, found, run.simulated(known.costs.of(wanted.pieces)[None], change))


def chosen(known: ByHand, choices: Mapping[str, str]) -> Tried:
    """Predict what is chosen by name: ``layout``, as Megatron writes it or as decoder layers by piece (``5,3``);
    ``chunks`` of every stage; ``microbatches``; ``p2p``, milliseconds of a transfer; ``tokens``, ``more`` where other
    microbatches stay as large; ``packing``, one of `packing.PLANS`. What is missing or empty stays as it was captured.
    Raises ValueError, as `tried`."""
    return tried(known, _setting(known, choices))


def _setting(known: ByHand, choices: Mapping[str, str]) -> Setting:
    """Raises ValueError."""
    captured = known.captured
    chunks_before = len(captured.pieces) // known.stages
    chunks = whole("chunks", choices.get("chunks"), chunks_before)
    if not 1 <= chunks <= MOST_CHUNKS:
        raise ValueError(f"chunks={chunks} must lie between 1 and {MOST_CHUNKS}")
    packing = choices.get("packing", "").strip() or None
    if packing is not None and packing not in PLANS:
        raise ValueError(f"packing={packing[:20]!r} is none of {', '.join(PLANS)}")
    pieces = _pieces(known, choices.get("layout", "").strip())
    # A layout that was typed may have another number of chunks; one that is asked for by number gets another layout.
    if chunks != whole("was", choices.get("was"), chunks_before) and chunks * known.stages != len(pieces):
        pieces = split(captured.pieces, known.stages, chunks)
    return Setting(
        pieces,
        whole("microbatches", choices.get("microbatches"), captured.microbatches),
        _milliseconds(choices.get("p2p"), captured.p2p_ms),
        choices.get("tokens", "same") != "more",
        packing,
    )


def _pieces(known: ByHand, text: str) -> Layout:
    """Raises ValueError."""
    if len(text) > _LONGEST_LAYOUT:
        raise ValueError(f"the layout is longer than {_LONGEST_LAYOUT} characters")
    if not text:
        return known.pieces
    if not _COUNTS.fullmatch(text):
        return parse_layout(text, known.stages)
    layers = [int(count) for count in text.split(",")]
    if len(layers) % known.stages:
        raise ValueError(f"layout={text} has {counted(len(layers), 'piece')}, not a multiple of pp={known.stages}")
    if sum(layers) != (held := "".join(known.pieces).count("t")):
        raise ValueError(f"layout={text} has {counted(sum(layers), 'decoder layer')}, the model has {held}")
    made = ["t" * count for count in layers]
    made[0], made[-1] = "E" + made[0], made[-1] + "m" * "".join(known.pieces).count("m") + "L"
    return tuple(made)


def whole(name: str, text: str | None, default: int) -> int:
    """A number that was chosen; ``default`` without one. Raises ValueError."""
    if text is None or not text.strip():
        return default
    if not text.strip().isascii() or not text.strip().isdecimal() or len(text.strip()) > 9:
        raise ValueError(f"{name}={text.strip()[:20]!r} is not a whole number")
    return int(text)


def number_of(ms: float) -> str:
    """As few digits as give it back to three places."""
    return f"{ms:.3f}".rstrip("0").rstrip(".")


def _milliseconds(text: str | None, captured: float) -> float:
    if text is None or not text.strip() or text.strip() == number_of(captured):
        return captured  # the page shows it rounded
    try:
        found = float(text.strip()[:30])
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"p2p={text.strip()[:20]!r} is not a number of milliseconds")
    return found


def _repacked(known: ByHand, wanted: Setting) -> tuple[ByHand, Prediction]:
    """The run with its sequences otherwise in its microbatches, and what that takes. Raises ValueError."""
    packing, count, own = wanted.packing or "", wanted.microbatches, known.sequences
    if own is None:
        alike = "all microbatches have as many tokens in sequences as long"
        why = alike if known.alike else "the lengths of the sequences were not captured"
        raise NotCaptured(f"packing={packing}: {why}")
    found = plan(own, packing, None if count == known.microbatches else count)
    if found is None:
        raise ValueError(
            f"packing={packing}: the sequences cannot lie so in {counted(count, 'microbatch')} of at most "
            f"{own.most} tokens, which is what memory was seen to hold"
        )
    return replace(known, run=captured(own.run, found.passes, found.replay)), found.prediction


def _sum(known: ByHand, laid: Prediction, beside: Prediction) -> Prediction:
    """Two changes, of which the second was predicted beside the first: their gains add up, and so do their errors'
    squares."""
    gain = known.measured_ms - beside.step_ms
    below, above = (math.hypot(*(each.reach_ms[end] - each.step_ms for each in (laid, beside))) for end in (0, 1))
    return Prediction.of("by_hand", known.measured_ms, Price(gain, gain - above, gain + below))


def _checked(known: ByHand, wanted: Setting) -> tuple[int, int]:
    """Chunks and microbatches of a setting. Raises ValueError."""
    flat, count = "".join(known.pieces), wanted.microbatches
    check_layout(wanted.pieces, known.stages, flat.count("t"), flat.count("m"))
    chunks = len(wanted.pieces) // known.stages
    if not 1 <= count <= MOST_MICROBATCHES:
        raise ValueError(f"microbatches={count} must lie between 1 and {MOST_MICROBATCHES}")
    if known.stages * chunks * count > _MOST_PASSES:
        raise ValueError(f"{known.stages} stages x {chunks} chunks x {count} microbatches are too many to try by hand")
    if not 0 <= wanted.p2p_ms <= _MOST_P2P_MS:
        raise ValueError(f"p2p_ms={wanted.p2p_ms:g} must be a number of milliseconds from 0 on")
    return chunks, count


def moved(pieces: Layout, source: int, target: int, letter: str = "t") -> Layout:
    """One decoder layer (``t``), or all MTP layers (``m``), from one piece to another; the rest stays where it is.

    Raises ValueError where the piece has none, or there is no such piece.
    """
    if not (0 <= source < len(pieces) and 0 <= target < len(pieces)) or letter not in ("t", "m"):
        raise ValueError(f"there is no move of {letter} from piece {source} to piece {target}")
    count = 1 if letter == "t" else pieces[source].count("m")
    if pieces[source].count(letter) < max(count, 1):
        raise ValueError(f"piece {source} has no {'decoder' if letter == 't' else 'MTP'} layer to give away")
    changed = list(pieces)
    changed[source] = changed[source].replace(letter, "", count)
    changed[target] = _in_order(changed[target] + letter * count)
    return tuple(changed)


def split(pieces: Layout, stages: int, chunks: int) -> Layout:
    """The same layers in another number of chunks per stage: as Megatron splits them, or as evenly as they go."""
    flat = "".join(pieces)
    layers, mtp = flat.count("t"), flat.count("m")
    if (even := default_layout(stages, chunks, layers, mtp)) is not None:
        return even
    each, rest = divmod(layers, stages * chunks)
    made = ["t" * (each + (place < rest)) for place in range(stages * chunks)]
    made[0] = "E" + made[0]
    made[-1] += "m" * mtp + "L"
    return tuple(made)


def _in_order(piece: str) -> str:
    return "".join(letter * piece.count(letter) for letter in "EtmL")
