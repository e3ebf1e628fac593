"""What a person chooses to change, from text: the command, the page and the agent's tool all ask `chosen`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megaprof.analysis.what_if.changeable import Changeable, Setting, Tried, tried
from megaprof.analysis.what_if.layouts import Layout, default_layout, parse_layout
from megaprof.analysis.what_if.packing import PLANS
from megaprof.formats.phrases import counted

_MOST_CHUNKS = 16
_LONGEST_LAYOUT = 4000
_COUNTS = re.compile(r"\d{1,5}(,\d{1,5})*")


def chosen(known: Changeable, choices: Mapping[str, str]) -> Tried:
    """Predict what is chosen by name: ``layout``, as Megatron writes it or as decoder layers by piece (``5,3``);
    ``chunks`` of every stage; ``microbatches``; ``p2p``, milliseconds of a transfer; ``tokens``, ``more`` where other
    microbatches stay as large; ``packing``, one of `packing.PLANS`. What is missing or empty stays as it was captured.
    Raises ValueError, as `tried`."""
    return tried(known, _setting(known, choices))


def _setting(known: Changeable, choices: Mapping[str, str]) -> Setting:
    """Raises ValueError."""
    captured = known.captured
    chunks_before = len(captured.pieces) // known.stages
    chunks = whole("chunks", choices.get("chunks"), chunks_before)
    if not 1 <= chunks <= _MOST_CHUNKS:
        raise ValueError(f"chunks={chunks} must lie between 1 and {_MOST_CHUNKS}")
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


def _pieces(known: Changeable, text: str) -> Layout:
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
