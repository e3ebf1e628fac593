"""What the user is told: one line at the start, one for each finished window, one at the end.

Rank 0 says the first one, and the lowest rank that captures says the others, so that a large job says each once.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megaprof.capture.agenda import Agenda, Wish
from megaprof.capture.window_files import names_of
from megaprof.config.options import BY_SCHEDULE, ProfileConfig, flag
from megaprof.config.windows import TRAIN_OVERALL, Schedule, StepList
from megaprof.formats.names import shard
from megaprof.formats.phrases import counted
from megaprof.parallel.selectors import Selector, join_spans, spans_of
from megaprof.parallel.topology import RankCoords, WorldLayout
from megaprof.recorders import Window
from megaprof.runtime.interruption import Suppressed
from megaprof.runtime.logs import logger
from megaprof.runtime.ray import in_ray_worker

#: How many steps a message lists.
_LISTED = 5


def selected(selectors: Iterable[Selector], coords: RankCoords, layout: WorldLayout | None) -> list[int] | None:
    """The ranks that ``selectors`` select together, ascending; None where coordinates cannot be turned into ranks."""
    ranks: set[int] = set()
    for selector in selectors:
        if layout is not None:
            ranks.update(selector.ranks(layout))
        elif selector.rank_spans is None:
            return None
        else:
            ends = ((first, min(last, coords.sizes.world - 1)) for first, last in selector.rank_spans)
            ranks.update(rank for first, last in ends for rank in range(first, last + 1))
    return sorted(ranks)


def say_start(config: ProfileConfig, coords: RankCoords, ranks: list[int] | None, layout: WorldLayout | None) -> None:
    """Say what is captured, where, and on how many of the job's ranks and stages."""
    parts = []
    if config.windowed and not config.steps_are_none:
        parts.append(f"captures {', '.join(config.target)} ({_steps(config)}) {_ranks(config, coords, ranks)}")
    if config.timed:
        kept_on = "every rank" if config.timeline_select == "all" else f"ranks {config.timeline_select}"
        parts.append(f"keeps a timeline of every step on {kept_on}")
    if config.on_demand:
        parts.append("captures when 'megaprof trigger' asks for it")
    stages = _stages(ranks, layout)
    if stages is not None and stages < coords.sizes.pp and config.windowed:
        parts.append(f"sees {stages} of {coords.sizes.pp} stages: add {flag('select')} per-stage for the stage report")
    logger.info("megaprof %s", "; ".join([*parts, f"writes to {config.dir}"]))
    if config.on_finish is not None and config.on_finish_when == "end" and in_ray_worker():
        logger.warning(
            "megaprof: %s end: Ray may kill this worker when the job ends, and then the command does not run, unless "
            "verl says which profiled step is the last one; %s window runs it for each window",
            *(flag("on_finish_when"),) * 2,
        )


def _steps(config: ProfileConfig) -> str:
    if config.steps != BY_SCHEDULE:
        return f"steps {config.steps}"
    before = config.skip_first + config.wait + config.warmup
    calls = f"{config.active} call{'s' * (config.active > 1)}" + (f" after the first {before}" if before else "")
    return calls + {0: ", again and again", 1: ""}.get(config.repeat, f", {config.repeat} times")


def _ranks(config: ProfileConfig, coords: RankCoords, ranks: list[int] | None) -> str:
    world = coords.sizes.world
    if ranks is None:
        text = f"on ranks {config.select or 0} of {world}"
    elif len(ranks) == 1:
        text = f"on rank {ranks[0]} of {world}"
    else:
        text = f"on {len(ranks)} of {world} ranks"
    return text if config.role_select is None else f"{text}, by role: {config.role_select}"


def _stages(ranks: list[int] | None, layout: WorldLayout | None) -> int | None:
    if ranks is None or layout is None:
        return None
    return len({rank // layout.strides["pp"] % layout.sizes.pp for rank in ranks})


class Lines:
    """The lines of one session about its windows and its end."""

    def __init__(self, config: ProfileConfig, directory: str, *, speaks: bool) -> None:
        """``directory``: where files grow, which is another place than ``config.dir`` if that is remote. ``speaks``:
        False for a rank that says nothing."""
        self._config = config
        self._directory = directory
        self._speaks = speaks
        self._windows = 0
        self._ended = False

    def window(self, window: Window, later: Callable[[Callable[[], None]], None]) -> None:
        """``window`` has closed; ``later(task)`` runs a task when its files are complete."""
        self._windows += 1
        _note(window)
        if self._speaks:
            later(lambda: self._say_window(window))

    def _say_window(self, window: Window) -> None:
        folder = Path(self._directory, shard(window.coords))
        files = names_of(str(folder), window)
        remote = self._directory != self._config.dir
        if not files and not remote:
            return  # why not stands in the log already
        steps = f"step {window.step}" if window.last in (None, window.step) else f"steps {window.step}-{window.last}"
        instead = "" if window.asked is None else f" (instead of step {window.asked}, in which another window was open)"
        where = f"{self._config.dir}/{window.stem}*" if remote else ", ".join(str(folder / name) for name in files)
        whose = window.target if window.role is None else f"{window.target} of {window.role}"
        logger.info("megaprof captured %s %s%s: %s", whose, steps, instead, where)

    def end(self, agenda: Agenda) -> None:
        """Say at the end of the run what there is, and what was asked for and never came."""
        if self._ended or not self._speaks or not self._config.windowed or self._config.steps_are_none:
            return
        self._ended = True
        unmet = list(never_came(self._config, agenda))
        done = f"{self._windows or 'no'} window{'s' * (self._windows != 1)} captured into {self._config.dir}"
        if unmet:
            logger.warning("megaprof ends: %s; %s", done, "; ".join(unmet))
        else:
            logger.info("megaprof ends: %s", done)


def _note(window: Window) -> None:
    """Add an event ``megaprof.capture`` to the host's own OpenTelemetry span that is open on this thread, with what the
    names of the capture's files begin with: one leads to the other. Does nothing where nobody traces; nothing of
    OpenTelemetry is imported."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    facts = {"target": window.target, "role": window.role, "step": window.step, "file": window.stem.rstrip(".")}
    known = {f"megaprof.{name}": value for name, value in facts.items() if value is not None}
    with Suppressed(Exception):  # the capture is whole, whatever becomes of the event
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event("megaprof.capture", known)


def never_came(config: ProfileConfig, agenda: Agenda) -> Iterator[str]:
    """Yields what was asked for and has not come, a sentence each, without a full stop."""
    ran = {role for _, role in agenda.wishes if role is not None}
    for target in config.target:
        wishes = {role: wish for (of, role), wish in agenda.wishes.items() if of == target and wish.seen}
        if not wishes:
            plans = (agenda.plan_of(target, role) for role in {agenda.role, *ran})
            if any(plan not in (None, StepList(())) for plan in plans):
                yield f"{target} never ran"
        elif target == TRAIN_OVERALL:  # one window holds the work of all roles
            wishes = {None: _together([wish for wish in wishes.values() if wish.plan is not None])}
        for role, wish in sorted(wishes.items(), key=lambda item: item[0] or ""):
            whose = target if role is None else f"{target} of {role}"
            yield from (f"{whose}: {missing}" for missing in _missing(wish))
    # Roles with options of their own that did not run here. Another process of the job may run them.
    unknown = [name for name in config.roles if name not in ran]
    if unknown and agenda.role is None:
        there = f"roles that ran: {', '.join(sorted(ran))}" if ran else "no role ran"
        yield f"{', '.join(unknown)} never ran in this process ({there})"


def _together(wishes: list[Wish]) -> Wish:
    """Several roles' wishes for one target as one."""
    seen = [number for wish in wishes for number in wish.seen]
    return Wish(
        plan=wishes[0].plan if wishes else None,
        seen=[min(seen), max(seen)] if seen else [],
        captured=set().union(*(wish.captured for wish in wishes)),
        lost={number: reason for wish in wishes for number, reason in wish.lost.items()},
        owed=deque(number for wish in wishes for number in wish.owed),
        ran=max((wish.ran for wish in wishes), default=0),
    )


def _missing(wish: Wish) -> Iterator[str]:
    if not wish.seen:
        return
    first, last = wish.seen
    ran = f"step {first} ran" if first == last else f"steps {first}-{last} ran"
    if isinstance(wish.plan, StepList):
        left = wish.plan.left(wish.captured | wish.lost.keys() | set(wish.owed), _LISTED)
        if left:
            more = ", ..." if len(left) == _LISTED else ""
            steps = "step" if len(left) == 1 else "steps"
            yield f"{steps} {join_spans(spans_of(left), ', ')}{more} never came: {ran}"
    elif isinstance(wish.plan, Schedule) and wish.plan.repeat:
        windows = wish.plan.active * wish.plan.repeat
        there = len(wish.captured | wish.lost.keys()) + len(wish.owed)
        if there < windows:
            needed = wish.plan.skip_first + wish.plan.cycle * wish.plan.repeat
            came = f"{there} of {counted(windows, 'step')} of the schedule came"
            yield f"{came}: it needs {counted(needed, 'call')}, and {wish.ran} ran"
    if wish.lost:
        listed = join_spans(spans_of(list(wish.lost)[:_LISTED]), ", ")
        more = ", ..." if len(wish.lost) > _LISTED else ""
        yield f"step {listed}{more} was not captured: {list(wish.lost.values())[-1]}"
    if wish.owed:
        listed = join_spans(spans_of(list(wish.owed)[:_LISTED]), ", ")
        yield f"step {listed} was not captured: another window was open, and no free call came after it"
