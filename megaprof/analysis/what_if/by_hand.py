"""Reads from text what a person chooses to change. The command, the page and the agent's tool all call `chosen`."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.what_if.changeable import Changeable, Setting, Tried, tried
from megaprof.analysis.what_if.layouts import Layout, default_layout, parse_layout
from megaprof.analysis.what_if.packing import PLANS
from megaprof.formats.phrases import counted

_MOST_CHUNKS = 16
_LONGEST_LAYOUT = 4000
_COUNTS = re.compile(r"\d{1,5}(,\d{1,5})*")


def chosen(run: Changeable, choices: Mapping[str, str]) -> Tried:
    """Predicts the choices, which have these names: ``layout``, as Megatron writes it or as decoder layers by piece
    (``5,3``); ``chunks`` of every stage; ``microbatches``; ``p2p``: milliseconds of a transfer; ``tokens``: ``more`` if
    another number of microbatches keeps their size; ``packing``: one of `packing.PLANS`; ``was``: the number of chunks
    on the page that shows ``layout``. If ``chunks`` differs from ``was``, the layout is split anew. A choice that is
    missing or empty stays as it was captured. Raises ValueError, as `tried` does."""
    return tried(run, _setting(run, choices))


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
    measured_ms = run.baseline.measured_ms
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


def _setting(run: Changeable, choices: Mapping[str, str]) -> Setting:
    """Returns the setting that was chosen. Raises ValueError."""
    captured = run.captured
    chunks_before = len(captured.pieces) // run.stages
    chunks = whole("chunks", choices.get("chunks"), chunks_before)
    if not 1 <= chunks <= _MOST_CHUNKS:
        raise ValueError(f"chunks={chunks} must lie between 1 and {_MOST_CHUNKS}")
    packing = choices.get("packing", "").strip() or None
    if packing is not None and packing not in PLANS:
        raise ValueError(f"packing={packing[:20]!r} is none of {', '.join(PLANS)}")
    pieces = _pieces(run, choices.get("layout", "").strip())
    # A typed layout may have another number of chunks. If the number itself was changed, the layout is split anew.
    if chunks * run.stages != len(pieces) and choices.get("chunks"):
        if choices.get("layout") and "was" not in choices:
            raise ValueError(f"chunks={chunks} on {run.stages} stages is not a layout of {len(pieces)} pieces")
        if chunks != whole("was", choices.get("was"), chunks_before):
            pieces = split(captured.pieces, run.stages, chunks)
    return Setting(
        pieces,
        whole("microbatches", choices.get("microbatches"), captured.microbatches),
        _milliseconds(choices.get("p2p"), run.baseline.p2p_ms),
        choices.get("tokens", "same") != "more",
        packing,
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
    made = ["t" * count for count in layers]
    made[0], made[-1] = "E" + made[0], made[-1] + "m" * "".join(run.pieces).count("m") + "L"
    return tuple(made)


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


def moved(pieces: Layout, source: int, target: int, letter: str = "t") -> Layout:
    """Returns a layout with one decoder layer (``t``), or all MTP layers (``m``), moved from one piece to another.

    Raises ValueError if the piece has none, or if there is no such piece.
    """
    if not (0 <= source < len(pieces) and 0 <= target < len(pieces)) or letter not in ("t", "m"):
        raise ValueError(f"there is no move of {letter} from piece {source} to piece {target}")
    count = 1 if letter == "t" else pieces[source].count("m")
    if pieces[source].count(letter) < max(count, 1):
        raise ValueError(f"piece {source} has no {'decoder' if letter == 't' else 'MTP'} layer to give away")
    changed = list(pieces)
    changed[source] = changed[source].replace(letter, "", count)
    changed[target] = "".join(each * (changed[target] + letter * count).count(each) for each in "EtmL")
    return tuple(changed)


def split(pieces: Layout, stages: int, chunks: int) -> Layout:
    """Returns the same layers in another number of chunks per stage: as Megatron splits them, or as evenly as
    possible."""
    flat = "".join(pieces)
    layers, mtp = flat.count("t"), flat.count("m")
    if (even := default_layout(stages, chunks, layers, mtp)) is not None:
        return even
    per_piece, rest = divmod(layers, stages * chunks)
    made = ["t" * (per_piece + (place < rest)) for place in range(stages * chunks)]
    made[0] = "E" + made[0]
    made[-1] += "m" * mtp + "L"
    return tuple(made)
