"""What a change that a person chooses would do: another layout, other microbatches, virtual stages, another transfer.

It is predicted as the report's own candidates are (`candidates`), from the same replays, so both say the same number
for the same change; the drawn pipeline and its bubble are those of one of these replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megaprof.analysis.simulation.simulate import Simulation
from megaprof.analysis.what_if.candidates import Known, relaid, rescheduled
from megaprof.analysis.what_if.changes import Change, Prediction, described
from megaprof.analysis.what_if.layouts import Layout, check_layout, default_layout, format_layout
from megaprof.analysis.what_if.memory import in_flight_layers
from megaprof.formats.phrases import counted

MOST_MICROBATCHES = 4096
MOST_CHUNKS = 16
_MOST_PASSES = 200_000
_MOST_P2P_MS = 1e6


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


@dataclass(frozen=True)
class Tried:
    """What a setting would do."""

    setting: Setting
    """What was chosen."""
    prediction: Prediction
    """The step, how uncertain that is, flags and memory."""
    simulation: Simulation
    """The pipeline of the captured step that takes about as long as the average one."""
    in_flight: tuple[int, ...]
    """Of every stage the most layers times microbatches whose activations it holds at once."""

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
    once."""
    run = known.run
    chunks, count = _checked(known, wanted)
    larger = known.microbatches / count if wanted.same_tokens else 1.0
    change = Change(rescheduled(known, chunks, count), larger, wanted.p2p_ms - run.p2p_ms)
    found = relaid(known, "by_hand", _named(known, wanted, chunks), wanted.pieces, change)
    if larger != 1.0:
        found = described(found, assumes="a microbatch's time is in proportion to its tokens")
    if larger > 1.0 and not run.replay.schedule.forward_only:
        found = described(found, memory=f"every microbatch holds {larger:.3g} times the activations")
    needs = in_flight_layers(wanted.pieces, change.replay.schedule)
    return Tried(wanted, found.prediction, run.simulated(known.costs.of(wanted.pieces)[None], change), tuple(needs))


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


def _named(known: ByHand, wanted: Setting, chunks: int) -> str:
    captured, said = known.captured, []
    if wanted.pieces != captured.pieces:
        said.append(format_layout(wanted.pieces))
    if chunks * known.stages != len(captured.pieces):
        said.append(f"{counted(chunks, 'model chunk')} per stage")
    if wanted.microbatches != captured.microbatches:
        said.append(counted(wanted.microbatches, "microbatch"))
    if wanted.p2p_ms != captured.p2p_ms:
        said.append(f"transfers of {wanted.p2p_ms:.3g} ms")
    return ", ".join(said) or "as captured"


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
