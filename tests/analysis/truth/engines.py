"""What a diagnosis says of a directory of files, in one form for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.diagnosis.diagnose import diagnose as diagnosed
from megaprof.analysis.diagnosis.examine import examine
from megaprof.analysis.report.report import analyze
from megaprof.analysis.table.table import Unfit
from megaprof.analysis.what_if.what_if import WhatIf
from tests.analysis.tables import tables_in


@dataclass(frozen=True)
class Named:
    """A cause. ``price``: milliseconds of a step, with its 90 % interval; None where none is given."""

    kind: str
    stage: int | None = None
    ranks: tuple[int, ...] = ()
    group: str | None = None
    price: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        where = self.group if self.group and self.kind == "communication" else self.stage
        ranks = f" rank {','.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.kind}{'' if where is None else f':{where}'}{ranks}"


@dataclass(frozen=True)
class Advised:
    """A layout as Megatron's ``--pipeline-model-parallel-layout`` writes it, and the predicted speedup."""

    layout: str
    speedup: float
    low: float
    high: float
    best: bool


@dataclass(frozen=True)
class Said:
    """``in_order``: whether a price is that of a cause beside the dearer ones mended, or of it alone."""

    named: tuple[Named, ...]
    advised: tuple[Advised, ...]
    in_order: bool


def report(directory: Path) -> Said:
    """`megaprof report`, by its JSON."""
    (target,) = analyze(directory).targets
    return Said(tuple(map(_named, target.causes)), tuple(_layouts(target.what_if)), in_order=True)


def _named(cause: Cause) -> Named:
    at = cause.price
    return Named(cause.kind, cause.stage, cause.ranks, cause.group, at.value, at.low, at.high)


def _layouts(found: WhatIf) -> Iterator[Advised]:
    for each in found.candidates:
        if each.layout:
            is_best = found.best is not None and found.best.layout == each.layout
            yield Advised(each.layout, each.speedup.value, each.speedup.low, each.speedup.high, is_best)


def diagnose(directory: Path) -> Said:
    """`megaprof.analysis.diagnosis`, from the same files."""
    (table,) = tables_in(directory).values()
    if isinstance(table, Unfit):
        raise table
    named = (
        Named(each.kind, each.stage, each.ranks, each.group, each.price.value, each.price.low, each.price.high)
        for each in diagnosed(examine(table)).causes
    )
    return Said(tuple(named), (), in_order=True)


ENGINES: dict[str, Callable[[Path], Said]] = {"report": report, "diagnose": diagnose}
