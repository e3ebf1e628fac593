"""The what-if page: tries the change that a browser asks for, and prepares the result for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.report.drawn import boxes_of
from megaprof.analysis.what_if.by_hand import chosen, moved, number_of, whole
from megaprof.analysis.what_if.changeable import Changeable, Setting, Tried, tried
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import format_layout, options_of
from megaprof.analysis.what_if.packing import PLANS

PACKINGS = PLANS
#: The most layers of a piece that are drawn one by one.
MOST_DRAWN = 24


@dataclass(frozen=True)
class Piece:
    """One model chunk of a stage."""

    place: int
    """Its number among all pieces, in the order in which a microbatch passes them."""
    layers: int
    """Its decoder layers."""
    embedding: bool
    """True if it holds the embedding."""
    mtp: int
    """Its MTP layers."""
    loss: bool
    """True if it holds the loss."""
    earlier: str | None
    """The destination, in words, of a layer that moves towards the embedding; None for the first piece."""
    later: str | None
    """The destination, in words, of a layer that moves towards the loss; None for the last piece."""


@dataclass(frozen=True)
class StageRow:
    """One stage of a tried layout."""

    stage: int
    """Its pipeline rank."""
    pieces: tuple[Piece, ...]
    """Its pieces, by model chunk."""
    compute_ms: float
    """Milliseconds of computation in a step."""
    share: float
    """Its compute, in percent of the compute of the slowest stage."""
    bubble: float
    """The fraction of the pipeline's time in which it computes nothing."""
    in_flight: int
    """The most layers times microbatches whose activations it holds."""


@dataclass(frozen=True)
class WhatIfPage:
    """The content of the what-if page."""

    known: Changeable
    """The captured run."""
    now: Tried
    """The setting that is shown."""
    captured: Tried
    """The run as it was captured, by the same simulation."""
    fault: str | None
    """Why the page does not show what was asked for; None if it does."""

    @property
    def change(self) -> float:
        """The change in time per token, as a fraction of the time in the captured run; negative if it is quicker."""
        return 1.0 / self.now.prediction.speedup - 1.0

    @property
    def severity(self) -> str:
        """``fine`` if the step surely gets quicker, ``slow`` if it surely gets slower, otherwise empty."""
        if not self.now.prediction.tells:
            return ""
        return "fine" if self.change < 0 else "slow"

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return len(self.now.setting.pieces) // self.known.stages

    @property
    def rows(self) -> list[StageRow]:
        """The rows of all stages."""
        pieces, simulated = self.now.setting.pieces, self.now.simulation
        longest = max(simulated.stage_ms) or 1.0
        return [
            StageRow(
                stage,
                tuple(self._piece(place) for place in range(stage, len(pieces), self.known.stages)),
                computed,
                100 * computed / longest,
                simulated.bubble_fraction[stage],
                (self.now.prediction.in_flight or ())[stage],
            )
            for stage, computed in enumerate(simulated.stage_ms)
        ]

    def _piece(self, place: int) -> Piece:
        piece, last = self.now.setting.pieces[place], len(self.now.setting.pieces) - 1
        return Piece(
            place,
            piece.count("t"),
            "E" in piece,
            piece.count("m"),
            "L" in piece,
            self._where(place - 1) if place else None,
            self._where(place + 1) if place < last else None,
        )

    def _where(self, place: int) -> str:
        chunk, stage = divmod(place, self.known.stages)
        return f"stage {stage}" + (f" chunk {chunk}" if self.chunks > 1 else "")

    @property
    def boxes(self) -> dict[str, Any]:
        """The pipeline for the script, on an axis that is also long enough for the captured one."""
        end = round(1000 * max(self.now.simulation.step_ms, self.captured.simulation.step_ms))
        return boxes_of(self.now.simulation) | {"end": end}

    def query(self, target: int, **other: object) -> str:
        """Returns the query of an address that shows the same setting, except for the fields in ``other``."""
        setting = self.now.setting
        return urlencode(
            {
                "t": target,
                "layout": format_layout(setting.pieces),
                "was": self.chunks,
                "chunks": self.chunks,
                "microbatches": setting.microbatches,
                "p2p": number_of(setting.p2p_ms),
                "tokens": "same" if setting.same_tokens else "more",
                "packing": setting.packing or "",
            }
            | other
        )


def answer(known: Changeable, query: Mapping[str, str]) -> WhatIfPage:
    """Returns the page for the change that ``query`` asks for. If that cannot be tried, returns the page of the closest
    setting that can, with the reason."""
    captured = known.as_captured
    try:
        now = chosen(known, query)
    except ValueError as mistake:
        return WhatIfPage(known, captured, captured, str(mistake))
    if not query.get("move"):
        return WhatIfPage(known, now, captured, None)
    try:
        return WhatIfPage(
            known, tried(known, replace(now.setting, pieces=_moved(now.setting, query["move"]))), captured, None
        )
    except ValueError as mistake:
        return WhatIfPage(known, now, captured, str(mistake))


def host_options(target: TargetReport, prediction: Prediction) -> tuple[str, ...] | None:
    """Returns the flags in the syntax of the host that trained; None if that host takes Megatron's own flags."""
    return options_of(target.measured.framework, target.measured.role, prediction.flags, len(prediction.layers))


def _moved(setting: Setting, move: str) -> tuple[str, ...]:
    source, _, rest = move.partition("-")
    target, _, letter = rest.partition("-")
    return moved(setting.pieces, whole("move", source, -1), whole("move", target, -1), letter or "t")
