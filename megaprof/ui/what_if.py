"""The what-if page: tries the change that a browser asks for, and prepares the result for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from megaprof.analysis.report.drawn import boxes, of_simulation
from megaprof.analysis.report.report import TargetReport
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
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.phrases import Unanswerable

#: The most layers of a piece that are drawn one by one.
MOST_DRAWN = 24


@dataclass(frozen=True)
class WhatIfPage:
    known: Changeable
    now: Tried
    """The setting that is shown."""
    captured: Tried
    fault: str | None
    """Why the page does not show what was asked for; None if it does."""
    before: StagesAfter
    """The stages as they were captured, averaged over the steps of the report's tables."""
    after: StagesAfter
    """The stages with this change."""
    options: tuple[str, ...] | None
    """The flags in the syntax of the host that trained; None if that host takes Megatron's own flags."""
    boxes: dict[str, Any]
    """The pipeline for the script, on an axis that is also long enough for the captured one."""
    chunks: int
    """Model chunks per stage."""
    p2p: str
    """The milliseconds of one transfer, for the form."""

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


def answer(changeable: Changeable, target: TargetReport, query: Mapping[str, str]) -> WhatIfPage:
    """Returns the page for the change that ``query`` asks for. If that cannot be tried, returns the page of the closest
    setting that can, with the reason. ``target``: its report."""
    captured = now = changeable.as_captured
    fault = None
    try:
        now = chosen(changeable, query)
        if query.get("move"):
            source, destination, letter = (*query["move"].split("-", 2), "", "")[:3]
            places = whole("move", source, -1), whole("move", destination, -1)
            now = tried(changeable, replace(now.setting, pieces=moved(now.setting.pieces, *places, letter or "t")))
    except (ValueError, Unanswerable) as mistake:
        fault = str(mistake)
    stages, p2p_ms = changeable.stages, now.setting.p2p_ms
    end = round(1000 * max(now.simulation.step_ms, captured.simulation.step_ms))
    return WhatIfPage(
        known=changeable,
        now=now,
        captured=captured,
        fault=fault,
        before=stages_after(target, changeable, captured),
        after=stages_after(target, changeable, now),
        options=options_of(target.framework, target.role, now.prediction.flags, stages),
        boxes=boxes(of_simulation(now.simulation)) | {"end": end},
        chunks=len(now.setting.pieces) // stages,
        p2p=number_of(changeable.baseline.view.p2p_ms if p2p_ms is None else p2p_ms),
    )


def starts(predictions: WhatIf) -> list[tuple[Prediction, str]]:
    """Returns the predicted layouts to begin with, and their names. Layouts that place as many layers on every stage
    have the same name, so their names contain the layout too."""
    layouts = [change for change in predictions.candidates if change.kind in ("layout", "chunks") and change.layout]
    names = [name_of(change, predictions) for change in layouts]
    return [
        (change, f"{name}: {change.layout}" if names.count(name) > 1 else name)
        for change, name in zip(layouts, names, strict=True)
    ]
