"""The what-if page: tries the change that a browser asks for, and prepares the result for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from megaprof.analysis.report.drawn import Row, StepTimeline, boxes
from megaprof.analysis.report.report import TargetReport
from megaprof.analysis.report.text.what_if import name_of
from megaprof.analysis.simulation import Simulation
from megaprof.analysis.what_if.changeable import (
    Changeable,
    StagesAfter,
    Tried,
    chosen,
    number_of,
    stages_after,
    tried,
    whole,
)
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import Layout, format_layout, options_of
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.schedules import Pass

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
        boxes=boxes(_drawn(now.simulation)) | {"end": end},
        chunks=len(now.setting.pieces) // stages,
        p2p=number_of(changeable.baseline.view.p2p_ms if p2p_ms is None else p2p_ms),
    )


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


def _drawn(replayed: Simulation) -> StepTimeline:
    """Returns a simulated step. Its rows belong to no rank."""
    stages: list[list[Pass]] = [[] for _ in range(replayed.schedule.stages)]
    for box in replayed.events:
        stages[box.stage].append(box)
    whole = (0.0, 1e6 * replayed.step_ms)
    rows = (Row(stage, None, whole, passes, 0) for stage, passes in enumerate(stages))
    return StepTimeline(0, tuple(rows), replayed.schedule.chunks, ())


def starts(predictions: WhatIf) -> list[tuple[Prediction, str]]:
    """Returns the predicted layouts to begin with, and their names. Layouts that place as many layers on every stage
    have the same name, so their names contain the layout too."""
    layouts = [change for change in predictions.candidates if change.kind in ("layout", "chunks") and change.layout]
    names = [name_of(change, predictions) for change in layouts]
    return [
        (change, f"{name}: {change.layout}" if names.count(name) > 1 else name)
        for change, name in zip(layouts, names, strict=True)
    ]
