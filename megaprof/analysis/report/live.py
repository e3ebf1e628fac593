"""The tables of a running job, for `watch` and for the live page."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megaprof.analysis.report.tables import Cell, Column, TableView, row, stacked
from megaprof.analysis.report.text.words import ABSENT, number, percent
from megaprof.metrics.figures import SlowRanks, Summary


def stages_now(summary: Summary, waited_for: Collection[int] = ()) -> TableView:
    """Returns the figures of every stage. ``waited_for``: stages that the others wait for."""
    on_gpu = any(stage.host_bound_passes is not None for stage in summary.stages)
    rows = [
        row(
            Cell(f"{stage.pp} waited for", "slow") if stage.pp in waited_for else stage.pp,
            stage.ranks,
            stage.step,
            number(stage.step_ms),
            number(stage.compute_ms),
            Cell(bars=(stacked([("compute", stage.compute_ms, "")]),)),
            number(stage.gradients_ms),
            ratio(stage.imbalance),
            stage.slowest_rank,
            number(stage.slowest_ms),
            *([percent(stage.host_bound_passes)] if on_gpu else []),
            emphasis="slow" if stage.pp == summary.slow_stage else "",
        )
        for stage in summary.stages
    ]
    columns = (
        Column("stage"),
        Column("rank\ncount"),
        Column("step"),
        Column("step", unit="ms"),
        Column("compute", unit="ms"),
        Column("share", "bars"),
        Column("gradients", unit="ms"),
        Column("imbalance"),
        Column("slowest\nrank"),
        Column("its\ncompute", unit="ms"),
        *([Column("passes that wait\nfor the host")] if on_gpu else []),
    )
    return TableView("stages of the job", columns, tuple(rows))


def slow_ranks(slowest: Sequence[SlowRanks]) -> TableView:
    """Returns the slow ranks of some stages."""
    rows = [
        row(slow.ranks[0], slow.stage, number(slow.compute_ms), number(slow.peers_ms), f"{slow.ratio:.1f}")
        for slow in slowest
    ]
    columns = Column("computes", unit="ms"), Column("its peers", unit="ms"), Column("times as long")
    return TableView("slow ranks", (Column("rank"), Column("stage"), *columns), tuple(rows))


def ratio(value: float | None) -> str:
    """Returns a ratio with two decimals; ``-`` for None."""
    return ABSENT if value is None else f"{value:.2f}"
