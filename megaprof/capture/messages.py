"""Logs what a job captures: one line at its start, one for each finished window, one at its end.

Rank 0 writes the first line. The lowest rank that captures windows writes the others. So a large job logs each line
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megaprof.capture.agenda import Agenda, Wish
from megaprof.config.options import BY_SCHEDULE, ProfileConfig, flag
from megaprof.config.values import ANNOTATED, TRAIN_OVERALL, Schedule, StepList, parse_schedule
from megaprof.formats.phrases import counted
from megaprof.parallel.selectors import join_spans, spans_of
from megaprof.parallel.topology import RankCoords, WorldLayout
from megaprof.recorders import Window
from megaprof.recorders.timeline_steps import BEFORE, BEHIND
from megaprof.runtime.isolation import logger

#: The most steps that a message lists.
_LISTED = 5
#: Why a window that was saved is lost: the disk took nothing, as the log says.
NO_FILE = "no file of it was written"


def say_start(config: ProfileConfig, coords: RankCoords, ranks: list[int] | None, layout: WorldLayout | None) -> None:
    """Logs what is captured, where the files go, and how many of the job's ranks and stages are captured."""
    parts = []
    if config.windowed and not config.steps_are_none:
        parts.append(f"captures {', '.join(config.target)} ({_steps(config)}) {_ranks(config, coords, ranks)}")
    if TRAIN_OVERALL in config.target and len(config.target) > 1 and config.windowed:
        others = " and ".join(target for target in config.target if target != TRAIN_OVERALL)
        parts.append(f"writes no file of {others} for what is in a window of {TRAIN_OVERALL}")
    if config.timed:
        kept_on = "every rank" if config.timeline_select == "all" else f"ranks {config.timeline_select}"
        parts.append(f"keeps a timeline of every step on {kept_on}")
    if config.on_demand:
        parts.append("captures when 'megaprof trigger' asks for it")
    if config.around_windows:
        parts.append(f"keeps the times of up to {BEFORE} calls before each window and of {BEHIND} behind it")
    if ranks is not None and layout is not None and config.windowed:
        stages = len({rank // layout.strides["pp"] % layout.sizes.pp for rank in ranks})
        if stages < coords.sizes.pp:
            seen = f"sees {stages} of {coords.sizes.pp} stages"
            parts.append(f"{seen}: add {flag('select')} per-stage for the stage report")
    logger.info("megaprof %s", "; ".join([*parts, f"writes to {config.dir}"]))


def _steps(config: ProfileConfig) -> str:
    if config.steps != BY_SCHEDULE:
        return f"steps {config.steps}"
    plan = parse_schedule(config.schedule, flag("schedule"))
    before = plan.skip_first + plan.wait + plan.warmup
    calls = f"{plan.active} call{'s' * (plan.active > 1)}" + (f" after the first {before}" if before else "")
    return calls + {0: ", again and again", 1: ""}.get(plan.repeat, f", {plan.repeat} times")


def _ranks(config: ProfileConfig, coords: RankCoords, ranks: list[int] | None) -> str:
    world = coords.sizes.world
    if ranks is None:
        text = f"on ranks {config.select or 0} of {world}"
    elif len(ranks) == 1:
        text = f"on rank {ranks[0]} of {world}"
    else:
        text = f"on {len(ranks)} of {world} ranks"
    return text if config.role_select is None else f"{text}, by role: {config.role_select}"


def say_window(window: Window, files: list[str]) -> None:
    """Logs that the files of ``window``, which are among ``files``, are complete. Logs nothing if there are none,
    because the log already says why."""
    if own := window.among(files):
        whose = window.target if window.role is None else f"{window.target} of {window.role}"
        logger.info("megaprof captured %s step %d: %s", whose, window.step, ", ".join(own))


def say_end(config: ProfileConfig, windows: int, agenda: Agenda, *, off: bool) -> None:
    """Logs at the end of the run how many ``windows`` were captured, and what never ran. ``off``: a fault ended it."""
    if not config.windowed or config.steps_are_none:
        return
    unmet = ["profiling was off after a fault"] if off else list(never_came(config, agenda))
    windows -= sum(reason == NO_FILE for wish in agenda.wishes.values() for reason in wish.wanted.values())
    done = f"{windows or 'no'} window{'s' * (windows != 1)} captured into {config.dir}"
    say = logger.warning if unmet else logger.info
    say("megaprof ends: %s", "; ".join([done, *unmet]))


def never_came(config: ProfileConfig, agenda: Agenda) -> Iterator[str]:
    """Yields a sentence, without a full stop, for each thing that was requested and not captured."""
    ran = {role for _, role in agenda.wishes if role is not None}
    for target in (*config.target, *[ANNOTATED] * config.discrete):
        wishes = {role: wish for (of, role), wish in agenda.wishes.items() if of == target and wish.ran}
        if not wishes:
            plans = (agenda.plan_of(target, role) for role in {agenda.role, *ran})
            if any(plan not in (None, StepList(())) for plan in plans):
                yield f"{target} never ran"
        together = [wish for wish in wishes.values() if wish.plan is not None]
        # One window of a whole step holds the work of all roles.
        by_role = {None: together} if target == TRAIN_OVERALL else {role: [wish] for role, wish in wishes.items()}
        for role, of_role in sorted(by_role.items(), key=lambda item: item[0] or ""):
            whose = target if role is None else f"{target} of {role}"
            yield from (f"{whose}: {missing}" for missing in _missing(of_role))
    # These roles have options of their own but did not run here. Another process of the job may run them.
    unknown = [name for name in config.roles if name not in ran]
    if unknown and agenda.role is None:
        there = f"roles that ran: {', '.join(sorted(ran))}" if ran else "no role ran"
        yield f"{', '.join(unknown)} never ran in this process ({there})"


def _missing(wishes: list[Wish]) -> Iterator[str]:
    """Yields a sentence for each reason why steps were not captured that ``wishes`` wanted, which are for the same
    windows. Some step of each must have run."""
    if not wishes:
        return
    plan, first, last = wishes[0].plan, min(wish.first for wish in wishes), max(wish.last for wish in wishes)
    ran = f"step {first} ran" if first == last else f"steps {first}-{last} ran"
    wanted = {number: reason for wish in wishes for number, reason in wish.wanted.items()}
    if isinstance(plan, StepList):
        if left := plan.left(wanted, _LISTED + 1):
            yield f"{_listed(left)} never came: {ran}"
    elif isinstance(plan, Schedule) and (windows := plan.windows) and len(wanted) < windows:
        needed = plan.skip_first + plan.cycle * plan.repeat + max(wish.graphs for wish in wishes)
        calls, why = max(wish.ran for wish in wishes), "further calls had the number of a captured step"
        why = f"it needs {counted(needed, 'call')}, and {calls} ran" if calls < needed else why
        yield f"{len(wanted)} of {counted(windows, 'step')} of the schedule came: {why}"
    if lost := [number for number, reason in wanted.items() if reason is not None]:
        were = "was" if len(lost) == 1 else "were"
        yield f"{_listed(lost)} {were} not captured: {wanted[lost[-1]]}"


def _listed(steps: Collection[int]) -> str:
    """Returns ``steps`` in words, or the first few of them if there are many."""
    more = ", ..." if len(steps) > _LISTED else ""
    return f"step{'s' * (len(steps) > 1)} {join_spans(spans_of(list(steps)[:_LISTED]), ', ')}{more}"
