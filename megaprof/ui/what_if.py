"""The what-if page: tries the change that a browser asks for, and prepares the result for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.report.document import TargetReport
from megaprof.analysis.report.drawn import boxes_of
from megaprof.analysis.report.text.what_if import name_of
from megaprof.analysis.what_if.changeable import (
    Changeable,
    StagesAfter,
    Tried,
    chosen,
    moved,
    number_of,
    stages_after,
    tried,
    whole,
)
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import format_layout, options_of
from megaprof.analysis.what_if.packing import PLANS
from megaprof.analysis.what_if.what_if import WhatIf

PACKINGS = PLANS
#: The most layers of a piece that are drawn one by one.
MOST_DRAWN = 24


@dataclass(frozen=True)
class StageRow:
    """One stage of a tried layout."""

    stage: int
    places: range
    """The numbers of its pieces among all, in the order in which a microbatch passes them."""
    compute_ms: float | None
    share: float
    """Its compute, in percent of the compute of the slowest stage."""
    bubble: float | None
    in_flight: int
    """The most layers times microbatches whose activations it holds."""


@dataclass(frozen=True)
class WhatIfPage:
    """The content of the what-if page."""

    known: Changeable
    measured: TargetStages
    now: Tried
    """The setting that is shown."""
    captured: Tried
    fault: str | None
    """Why the page does not show what was asked for; None if it does."""

    @property
    def change(self) -> float:
        """The change in time per token, as a fraction of the time in the captured run; negative if it is quicker."""
        return 1.0 / self.now.prediction.speedup.value - 1.0

    @property
    def severity(self) -> str:
        """``fine`` if the step surely gets quicker, ``slow`` if it surely gets slower, otherwise empty."""
        return "" if self.now.prediction.speedup.holds(1.0) else "fine" if self.change < 0 else "slow"

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return len(self.now.setting.pieces) // self.known.stages

    @cached_property
    def after(self) -> StagesAfter:
        """The stages with this change, averaged over the steps of the report's tables."""
        return stages_after(self.measured, self.known, self.now)

    @cached_property
    def before(self) -> StagesAfter:
        """The stages as they were captured."""
        return stages_after(self.measured, self.known, self.captured)

    @property
    def rows(self) -> list[StageRow]:
        """The rows of all stages."""
        longest = max((ms or 0.0 for ms in self.after.compute_ms), default=0.0) or 1.0
        return [
            StageRow(
                stage.pp,
                range(stage.pp, len(self.now.setting.pieces), self.known.stages),
                compute_ms,
                100 * (compute_ms or 0.0) / longest,
                bubble,
                (self.now.prediction.in_flight or ())[stage.pp],
            )
            for stage, compute_ms, bubble in zip(
                self.measured.stages, self.after.compute_ms, self.after.bubbles, strict=True
            )
        ]

    def stage_of(self, place: int) -> str | None:
        """Returns the stage of a piece in words, with its chunk if there are several; None if there is none."""
        chunk, stage = divmod(place, self.known.stages)
        if not 0 <= place < len(self.now.setting.pieces):
            return None
        return f"stage {stage}" + (f" chunk {chunk}" if self.chunks > 1 else "")

    @property
    def boxes(self) -> dict[str, Any]:
        """The pipeline for the script, on an axis that is also long enough for the captured one."""
        end = round(1000 * max(self.now.simulation.step_ms, self.captured.simulation.step_ms))
        return boxes_of(self.now.simulation) | {"end": end}

    @property
    def p2p(self) -> str:
        """The milliseconds of one transfer, for the form."""
        chosen = self.now.setting.p2p_ms
        return number_of(self.known.baseline.p2p_ms if chosen is None else chosen)

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
                "p2p": self.p2p,
                "tokens": "same" if setting.same_tokens else "more",
                "packing": setting.packing or "",
            }
            | other
        )


def answer(changeable: Changeable, measured: TargetStages, query: Mapping[str, str]) -> WhatIfPage:
    """Returns the page for the change that ``query`` asks for. If that cannot be tried, returns the page of the closest
    setting that can, with the reason. ``measured``: the stages of the report."""
    captured = now = changeable.as_captured
    fault = None
    try:
        now = chosen(changeable, query)
        if query.get("move"):
            source, _, rest = query["move"].partition("-")
            target, _, letter = rest.partition("-")
            places = whole("move", source, -1), whole("move", target, -1)
            now = tried(changeable, replace(now.setting, pieces=moved(now.setting.pieces, *places, letter or "t")))
    except ValueError as mistake:
        fault = str(mistake)
    return WhatIfPage(changeable, measured, now, captured, fault)


def host_options(target: TargetReport, prediction: Prediction) -> tuple[str, ...] | None:
    """Returns the flags in the syntax of the host that trained; None if that host takes Megatron's own flags."""
    return options_of(target.framework, target.role, prediction.flags, len(prediction.layers))


def starts(predictions: WhatIf) -> list[tuple[Prediction, str]]:
    """Returns the predicted layouts to begin with, and their names. Layouts that place as many layers on every stage
    have the same name, so their names contain the layout too."""
    layouts = [change for change in predictions.candidates if change.kind in ("layout", "chunks") and change.layout]
    names = [name_of(change, predictions) for change in layouts]
    return [
        (change, f"{name}: {change.layout}" if names.count(name) > 1 else name)
        for change, name in zip(layouts, names, strict=True)
    ]
