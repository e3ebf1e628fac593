"""This rank, and what the configuration wants of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megaprof.capture.compat import check_daemon, check_model
from megaprof.capture.messages import say_start, selected
from megaprof.config.options import ProfileConfig
from megaprof.parallel.chunks import language_model
from megaprof.parallel.process_groups import (
    coords_from_parallel_state,
    has_groups,
    place_from_groups,
    place_from_parallel_state,
)
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout
from megaprof.runtime.logs import logger, show_lines


@dataclass(frozen=True)
class ThisRank:
    """This rank, and what the configuration wants of it."""

    coords: RankCoords
    """Where it stands."""
    layout: WorldLayout | None
    """How the world is laid out; None where no rank order explains it."""
    ranks: list[int] | None
    """All ranks that may capture windows, ascending; None where they cannot be counted."""
    windowed: bool
    """True: windows may open on this rank."""
    timed: bool
    """True: this rank keeps a timeline."""

    @classmethod
    def of(
        cls,
        config: ProfileConfig,
        role: str | None,
        models: tuple[Any, ...] | None,
        groups: Any = None,
        *,
        pipeline: bool,
    ) -> ThisRank:
        """``groups``: the model's own process groups, where the caller has them. Raises ValueError for ranks that this
        world does not have, and for a model that must not be profiled so.

        Ranks of other roles are not checked: such a role may run in a world of another size. Where it runs in this
        one, `Session` says which of its ranks do not exist.
        """
        coords, layout = _place(models, groups, pipeline=pipeline)
        own = config.selector(role)
        if own is not None:
            own.check(coords.sizes, layout, option=config.select_option(role))
        timed = config.timeline_selector
        if timed is not None:
            timed.check(coords.sizes, layout, option=config.named("timeline_select"))
        check_model(config, models or ())
        check_daemon(config, os.environ)
        # A role without ranks of its own has the default ones, and roles with some may turn up in any model.
        selectors = [s for each in (role, *config.roles) if (s := config.selector(each)) is not None]
        return cls(
            coords=coords,
            layout=layout,
            ranks=selected(selectors, coords, layout),
            windowed=config.windowed and any(selector.selects(coords) for selector in selectors),
            timed=timed is not None and timed.selects(coords),
        )

    def records(self, config: ProfileConfig) -> bool:
        """Returns whether anything is to be done on this rank."""
        return self.windowed or self.timed or config.listens

    @property
    def speaks(self) -> bool:
        """True for the lowest rank that captures windows: it alone says what became of them."""
        return self.coords.rank == (self.ranks[0] if self.ranks else 0)

    def announce(self, config: ProfileConfig) -> None:
        """The line at the start of the job, said by rank 0."""
        if self.coords.rank == 0 or self.speaks:
            show_lines()
        if self.coords.rank == 0:
            say_start(config, self.coords, self.ranks, self.layout)


def _place(models: tuple[Any, ...] | None, groups: Any, *, pipeline: bool) -> tuple[RankCoords, WorldLayout | None]:
    """Returns where this rank stands, and every other. A model's own process groups count where Megatron's global
    ones do not exist."""
    chunks = None if models is None else len(models)
    if pipeline:
        if not has_groups():
            groups = groups or (getattr(language_model(models[0]), "pg_collection", None) if models else None)
            if groups is not None:
                return place_from_groups(groups, chunks)
        return place_from_parallel_state(chunks)
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    layout = WorldLayout(ParallelSizes(dp=world))
    return layout.coords(rank), layout


def moved(before: RankCoords) -> bool:
    """Returns whether Megatron's global process groups give this process another place than ``before``, as they do
    after an in-process restart."""
    return has_groups() and coords_from_parallel_state(before.sizes.vpp) != before


def check_role(config: ProfileConfig, role: str, coords: RankCoords) -> None:
    """Say it where the ranks of ``role``, which runs in this world for the first time, do not all exist in it.

    Which role runs in which process is not known before it runs, and worlds have different sizes: ranks of a role of
    another world are no mistake in this one.
    """
    selector = config.selector(role)
    if selector is None:
        return
    try:
        selector.check(coords.sizes, option=config.select_option(role))
    except ValueError as mistake:
        logger.warning("megaprof: %s; %s is captured on the ranks that exist", mistake, role)
