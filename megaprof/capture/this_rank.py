"""What the configuration means for this rank: its place in the job, whether it captures windows or keeps a timeline,
and whether a model forbids windows that stay open between calls. Rank 0 logs it once for the job.

FSDP2 keeps its parameters in DTensors. So ``model.to("cpu")``, the manual way of offloading, exchanges them with
``torch.utils.swap_tensors``, which fails on a tensor with weak references: "_apply(): Couldn't swap ...". While a
window is open, torch.profiler holds such references to every tensor that an operator saw, if it records shapes or
FLOPs. With stacks it holds the parameters of ordinary modules. We have not seen it hold a DTensor then (torch 2.13),
but nothing promises that it never does. After a window it holds nothing.

Frameworks offload manually inside their loop when models share a GPU. FSDP2's own offload swaps nothing, and neither
does Megatron, which moves flat buffers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from megaprof.config.options import BY_SCHEDULE, ProfileConfig, flag
from megaprof.config.values import TRAIN_OVERALL, parse_schedule
from megaprof.parallel.machine import local_ranks
from megaprof.parallel.megatron import coordinates, coordinates_and_layout, has_groups, language_model
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout
from megaprof.recorders.timeline_steps import BEFORE, BEHIND
from megaprof.runtime.isolation import logger, show_lines


@dataclass(frozen=True)
class ThisRank:
    """A rank's place in the job, and what it records."""

    coords: RankCoords
    layout: WorldLayout | None
    """The layout of the job's ranks; None if no order of the parallel axes explains it."""
    speaks: bool
    """True for the lowest rank of each selection, which alone logs what became of its windows."""
    neighbours: int
    """How many other ranks of this host may close a window when this rank does. Without ``LOCAL_WORLD_SIZE``, each rank
    counts as the only one of its host."""
    windowed: bool
    timed: bool

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
        """Returns this rank's place and what it records. Rank 0 logs the line at the start of the job. ``groups``: the
        model's own process groups, if the caller has them.

        Raises ValueError for selected ranks that the job does not have, and for a model that cannot be profiled this
        way. Does not check the ranks of other roles, because such a role may run in a job of another size. If it runs
        in this job, its session logs which of its ranks do not exist.
        """
        coords, layout = _place(models, groups, pipeline=pipeline)
        config.selector(role).check(coords.sizes, layout, option=config.select_option(role))
        config.timeline_selector.check(coords.sizes, layout, option=config.named("timeline_select"))
        lasting = [f"{flag('target')} {TRAIN_OVERALL}"] if TRAIN_OVERALL in config.target else []
        lasting += [flag("discrete")] * config.discrete
        # A model does not show whether the host will move it between calls. If it does, an open window makes it crash.
        if lasting and config.holding and any(map(offloads_manually, models or ())):
            raise ValueError(f"{' and '.join(lasting)}: {refusal(config.holding)}")
        # A role without ranks of its own has the default ranks. A role with ranks of its own may turn up in any model.
        selectors = [config.selector(name) for name in (role, *config.roles)]
        selections = [selector.ranks(coords.sizes, layout) for selector in selectors]
        known = [selection for selection in selections if selection is not None]
        ranks = sorted({rank for selection in known for rank in selection}) if len(known) == len(selections) else None
        local = local_ranks()
        first = coords.rank - coords.rank % local
        others = set(range(first, min(first + local, coords.sizes.world))) - {coords.rank}
        here = cls(
            coords=coords,
            layout=layout,
            speaks=coords.rank in ({0 if each is None else each[0] for each in selections if each != []} or {0}),
            neighbours=len(others if ranks is None or config.listens else others.intersection(ranks)),
            windowed=config.windowed and any(selector.selects(coords) for selector in selectors),
            timed=config.timeline_selector.selects(coords),
        )
        if coords.rank == 0 or here.speaks:
            show_lines()
        if coords.rank == 0:
            _say_start(config, coords, ranks, layout)
        return here


def _place(models: tuple[Any, ...] | None, groups: Any, *, pipeline: bool) -> tuple[RankCoords, WorldLayout | None]:
    """Returns the coordinates of this rank, and the layout of all ranks. They come from Megatron's global process
    groups, or from the model's own groups if the global ones do not exist."""
    chunks = None if models is None else len(models)
    if pipeline:
        own = groups or (getattr(language_model(models[0]), "pg_collection", None) if models else None)
        return coordinates_and_layout(None if has_groups() else own, chunks)
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    layout = WorldLayout(ParallelSizes(dp=world))
    return layout.coords(rank), layout


def _say_start(config: ProfileConfig, coords: RankCoords, ranks: list[int] | None, layout: WorldLayout | None) -> None:
    """Logs what is captured, where the files go, and how many of the job's ranks and stages are captured."""
    parts, planned = [], config.windowed and not config.steps_are_none
    if planned:
        which = f"steps {config.steps}"
        if config.steps == BY_SCHEDULE:
            plan = parse_schedule(config.schedule, flag("schedule"))
            before = plan.skip_first + plan.wait + plan.warmup
            which = f"{plan.active} call{'s' * (plan.active > 1)}" + (f" after the first {before}" if before else "")
            which += {0: ", again and again", 1: ""}.get(plan.repeat, f", {plan.repeat} times")
        if ranks is None:
            where = f"on ranks {config.select or 0} of {coords.sizes.world}"
        elif len(ranks) == 1:
            where = f"on rank {ranks[0]} of {coords.sizes.world}"
        else:
            where = f"on {len(ranks)} of {coords.sizes.world} ranks"
        by_role = "" if config.role_select is None else f", by role: {config.role_select}"
        parts.append(f"captures {', '.join(config.target)} ({which}) {where}{by_role}")
    if TRAIN_OVERALL in config.target and len(config.target) > 1 and planned:
        others = " and ".join(target for target in config.target if target != TRAIN_OVERALL)
        parts.append(f"writes no file of {others} for what is in a window of {TRAIN_OVERALL}")
    if config.timed:
        kept_on = "every rank" if config.timeline_select == "all" else f"ranks {config.timeline_select}"
        parts.append(f"keeps a timeline of every step on {kept_on}")
    if config.on_demand:
        parts.append("captures when 'megaprof trigger' asks for it")
    if config.around_windows:
        parts.append(f"keeps the times of up to {BEFORE} calls before each window and of {BEHIND} behind it")
    if ranks is not None and layout is not None and planned:
        stages = len({layout.coords(rank).pp for rank in ranks})
        if stages < coords.sizes.pp:
            seen = f"sees {stages} of {coords.sizes.pp} stages"
            parts.append(f"{seen}: add {flag('select')} per-stage for the stage report")
    logger.info("megaprof %s", "; ".join([*parts, f"writes to {config.dir}"]))


def moved(before: RankCoords) -> bool:
    """Returns whether Megatron's global process groups give this process other coordinates than ``before``, as happens
    after an in-process restart. How many chunks its models have does not matter."""
    if not has_groups():
        return False
    now, _ = coordinates()
    return replace(now, sizes=replace(now.sizes, vpp=before.sizes.vpp)) != before


def refusal(held: tuple[str, ...]) -> str:
    """Returns why a window whose profiler holds tensors by the options ``held`` must not be open between calls of a
    model that is offloaded manually."""
    options = ", ".join(map(flag, held))
    return (
        f"with {options} on an FSDP2 model its window would be open between calls, and moving the model to "
        "the CPU meanwhile would fail ('Couldn't swap ...'). Use CPUOffloadPolicy (cpu_offload=true), or Megatron, "
        f"or another target, or drop {options}"
    )


def offloads_manually(model: Any) -> bool:
    """Returns whether FSDP2 (``fully_shard``) shards ``model``, or a part of it, without ``CPUOffloadPolicy``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, it shards nothing
    sharded, policy = getattr(fsdp, "FSDPModule", None), getattr(fsdp, "CPUOffloadPolicy", None)
    if sharded is None or policy is None or not hasattr(model, "modules"):
        return False
    return any(isinstance(module, sharded) and not _has_policy(module, policy) for module in model.modules())


def _has_policy(module: Any, policy: type) -> bool:
    """Returns whether the private state of ``module`` says that it offloads by ``policy`` (torch 2.6 to 2.13)."""
    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    except AttributeError:
        return False
    return all(group is None or isinstance(getattr(group, "offload_policy", None), policy) for group in groups)
