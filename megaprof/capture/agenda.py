"""Plans which calls get a window, from the configuration and the calls so far. Uses no recorder, clock or log.

`Agenda.begins` counts each call, and says what it means for the windows. All that is ever reported back is a window
that has no files (`Agenda.lose`). At the end, `Agenda.never_came` says what was requested in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megaprof.config.options import ProfileConfig
from megaprof.config.values import ANNOTATED, NO_STEPS, TRAIN_ACTOR, TRAIN_OVERALL, Plan, Schedule, StepList
from megaprof.formats.phrases import counted
from megaprof.parallel.selectors import join_spans, spans_of
from megaprof.parallel.topology import RankCoords

if TYPE_CHECKING:
    from megaprof.recorders import Recorder

#: The most steps that a sentence lists.
_LISTED = 5


@dataclass(slots=True)  # not frozen, which would take longer to make: every call makes two
class CountedStep:
    """A step that begins with a call: the call's own, or the host's."""

    target: str
    """A target of a call, ``annotated``, or ``train_overall`` for the host's step."""
    role: str | None
    """The role of the call that it begins with; None if no role was given."""
    number: int
    """The host's number for the step if there is one, else its `index`."""
    index: int
    """The number of steps of this target and role before it."""
    hosts: bool
    """True if `number` is the host's own."""
    call: int = 0
    """The number of steps of this target, role and number right before it: the host's mini-batches may share one."""

    def __str__(self) -> str:
        role = None if self.target == TRAIN_OVERALL else self.role  # a whole step is of all roles
        return f"{self.target}{'' if role is None else f' of {role}'} step {self.number}"

    @property
    def outlasts_call(self) -> bool:
        """True if its window ends with the host's step, or with annotated work, and not with a call."""
        return self.target in (TRAIN_OVERALL, ANNOTATED)

    def goes_on(self, steps: tuple[CountedStep, ...]) -> bool:
        """Returns whether it goes on when ``steps`` begin (`Agenda.begins`), so that its window stays open."""
        step = steps[0] if self.target == TRAIN_OVERALL else steps[-1]
        if self.target == ANNOTATED or step.target != self.target or step.number == self.number:
            return True
        # A role counts its own steps, so another role's step is part of the window. A step with a host's number is not.
        return step.role != self.role and not (step.target == TRAIN_OVERALL and step.hosts)


@dataclass(eq=False)
class Demand:
    """A capture that was requested while the job runs: ``steps`` windows of ``target``, from call number ``first`` on
    (counted from 0 since the hooks were installed; -1 until it is chosen).

    All ranks of a job make the same calls in the same order, so the same number is the same step everywhere. A rank
    that hears of the request too late captures nothing, rather than a different step. The background thread makes the
    demand, and then only reads it. To withdraw it, that thread takes it away from the session.
    """

    target: str
    role: str | None
    """The role whose calls are counted."""
    first: int
    steps: int
    recorders: Sequence[Recorder]
    holding: tuple[str, ...] = ()
    """Options of its tools that make the profiler hold tensors (`ProfileConfig.holding`)."""
    seen: bool = False
    """True once the training thread knew of it when call ``first`` began."""
    taken: list[int] = field(default_factory=list)
    """The step numbers of the windows so far."""
    closed: int = 0
    """The number of windows that have ended."""
    saved: int = 0
    """The number of windows whose files were handed to the writer."""
    written: list[list[str]] = field(default_factory=list)
    """The names of each window's files, once they are finished. Filled by the writer's thread."""
    over: bool = False
    """True if it opens no further window."""
    reason: str | None = None
    """Why it opened no window, or no further one; None if nothing went wrong."""
    request: str = ""
    """The id of the request."""

    @property
    def records(self) -> bool:
        """True while one of its windows is open or will open."""
        return self.closed < len(self.taken) or not self.over

    @property
    def counted(self) -> tuple[str, str | None]:
        """The target and role whose calls are counted. A train_overall window begins with a training step."""
        return (TRAIN_ACTOR if self.target == TRAIN_OVERALL else self.target), self.role


Planned = tuple[CountedStep, "Demand | None"]
"""A step that gets a window, and the request for it; None if the configuration wants it."""


@dataclass
class Wish:
    """The plan of one target and role, with what has been captured so far. ``ran`` counts its steps; the ``first`` and
    the ``last`` of them are -1 if none ran, and ``call`` is that of the last."""

    plan: Plan
    ran: int = 0
    graphs: int = 0
    """The number of these that captured a CUDA graph."""
    first: int = -1
    last: int = -1
    call: int = 0
    wanted: dict[tuple[int, int], str | None] = field(default_factory=dict)
    """The steps that were wanted so far, by number and index, each with the reason why it has no window; None if it has
    one."""

    def counts(self, step: CountedStep, *, graph: bool) -> bool:
        """Counts ``step``, which begins, and returns whether it is to be captured. ``graph``: whether it captures a
        CUDA graph, so that a schedule takes the next one.

        A host may run one step twice (Megatron's rerun machinery), or give several mini-batches one number. Then the
        first run is captured; of a schedule, which counts calls, each.
        """
        again = step.number == next(reversed(self.wanted), (-1,))[0]
        passed_over = graph if isinstance(self.plan, Schedule) else again
        wanted = not passed_over and self.plan.captures(step.number, step.index - self.graphs)
        if wanted:
            self.wanted[step.number, step.index] = None
        self.first = self.first if self.ran else step.number
        self.last, self.call = step.number, step.call
        self.ran += 1
        self.graphs += graph
        return wanted


class Agenda:
    """Numbers the calls of one session, and decides which windows they open and close."""

    def __init__(self, config: ProfileConfig, coords: RankCoords, role: str | None = None) -> None:
        """``role``: the role whose model the session is for."""
        self._config = config
        self._coords = coords
        self.role = role
        #: The wishes by target and role. There is one once such a step ran, or once somebody asked for the wish.
        self.wishes: dict[tuple[str, str | None], Wish] = {}
        self._host_step: CountedStep | None = None  # the last one that the host numbered
        # The steps that began with the last call, and with the call before it.
        self._begun: tuple[CountedStep, ...] = ()
        self._before: tuple[CountedStep, ...] = ()

    def begins(
        self,
        target: str,
        role: str | None = None,
        number: int | None = None,
        host_step: int | None = None,
        *,
        graph: bool = False,
        demand: Demand | None = None,
    ) -> tuple[tuple[CountedStep, ...], list[Planned]]:
        """Counts a call, or annotated work, that begins. Returns the steps that begin with it: the host's step, if one
        does, and then the call's own; and the windows that are wanted. The first that can open does so, and the others
        are lost (`lose`).

        ``number``: the host's number for it; None or negative if the host has none. ``host_step``: the number of the
        host's step that it is in; None if unknown, negative if the host counts but is in no step. ``graph``: whether it
        captures a CUDA graph. Then it can have no window, and a schedule does not count it. ``demand``: the capture on
        demand, if any.
        """
        of_target = self.wish(target, role)
        index = of_target.ran
        hosts = number is not None and number >= 0
        step = CountedStep(target, role, int(number or 0) if hosts else index, index, hosts)
        if step.number == of_target.last:
            step.call = of_target.call + 1
        around = self._host_step_of(step, host_step)
        steps = (step,) if around is None else (around, step)
        wishes = [self.wish(step.target, step.role) for step in steps]
        opens: list[Planned] = []
        if demand is not None and (wanted := self._demanded(demand, steps)) is not None:
            opens.append((wanted, demand))
        for wish, step in zip(wishes, steps, strict=True):
            if wish.counts(step, graph=graph):
                opens.append((step, None))
        self._before, self._begun = self._begun, steps
        return steps, opens

    @property
    def calls(self) -> dict[tuple[str, str | None], int]:
        """The number of calls that have begun, by target and role. Any thread may read it."""
        wishes = list(self.wishes.items())
        return {key: wish.ran for key, wish in wishes if wish.ran and key[0] != TRAIN_OVERALL}

    def _host_step_of(self, step: CountedStep, number: int | None) -> CountedStep | None:
        """Returns the host's step that begins with ``step``; None if none does.

        A host's step consists of all calls with the same number, from the first call of a role that this rank
        captures. If the host numbers nothing, it begins with each grad-accumulation step of a role.
        """
        if step.target == ANNOTATED:
            return None
        before = self._host_step
        if number is not None and number >= 0:
            if before is None or number != before.number:
                index = 0 if before is None else before.index + 1
            elif (  # this rank captures the step from its first call on, or nothing of this role
                self.wish(TRAIN_OVERALL, before.role).plan != NO_STEPS
                or self.wish(TRAIN_OVERALL, step.role).plan == NO_STEPS
            ):
                return None
            else:
                index = before.index
            self._host_step = CountedStep(TRAIN_OVERALL, step.role, int(number), index, True)
            return self._host_step
        if step.target == TRAIN_ACTOR and (before is None or number is not None):
            return CountedStep(TRAIN_OVERALL, step.role, step.number, step.index, False)
        return None

    def _demanded(self, demand: Demand, steps: tuple[CountedStep, ...]) -> CountedStep | None:
        """Returns which of ``steps``, which begin now, gets a window of ``demand``; None if none does."""
        step, overall, hosts_begins = steps[-1], demand.target == TRAIN_OVERALL, len(steps) > 1
        is_counted = (step.target, step.role) == demand.counted
        upcoming = step.index if is_counted else self.calls.get(demand.counted, 0)
        if demand.over or not 0 <= demand.first <= upcoming or not (is_counted or (overall and hosts_begins)):
            return None
        if upcoming > demand.first and not demand.seen:
            demand.reason, demand.over = "the call came too early", True
            return None
        demand.seen = True
        if overall:
            return steps[0] if hosts_begins else None
        demand.over = upcoming >= demand.first + demand.steps
        return None if demand.over else step

    def lose(self, step: CountedStep, demand: Demand | None, reason: str) -> None:
        """Notes that a window of ``step`` has no files because of ``reason``."""
        if demand is not None:
            demand.reason, demand.over = reason, True
        else:
            self.wish(step.target, step.role).wanted[step.number, step.index] = reason

    def before_wanted(self, demand: Demand | None) -> Planned | None:
        """Returns the first of the steps that began with the last call after which the next call probably begins a step
        that is wanted, by the configuration or for ``demand``: its predecessor began with the call before, as in a job
        that only trains. If calls share a number, as RL's mini-batches do, nobody knows which is the last."""
        before = [(step.target, step.role, step.number + 1) for step in self._before]
        for step in self._begun:
            if (step.target, step.role, step.number) not in before:
                continue
            wish, following = self.wish(step.target, step.role), step.index + 1
            if wish.plan.captures(step.number + 1, following - wish.graphs):
                return step, None
            if demand is None or demand.over or demand.first < 0 or (step.target, step.role) != demand.counted:
                continue
            if demand.first <= following < demand.first + demand.steps:
                return step, demand
        return None

    @property
    def goes_on(self) -> bool:
        """True if the configuration wants a further window, of a target that ran or of one that may still run."""
        ran = {target for target, _ in self.wishes}
        may_run = (self.wish(target, self.role) for target in self._config.target if target not in ran)
        return any(
            wish.plan.goes_on(wish.last, wish.ran - wish.graphs - 1) for wish in (*self.wishes.values(), *may_run)
        )

    def wish(self, target: str, role: str | None) -> Wish:
        """Returns the wish for ``target`` when ``role`` runs it."""
        wish = self.wishes.get((target, role))
        if wish is None:
            wish = self.wishes[target, role] = Wish(self.plan_of(target, role))
        return wish

    def plan_of(self, target: str, role: str | None) -> Plan:
        """Returns the steps of ``target`` that this rank captures when ``role`` runs it."""
        config, asked = self._config, target in (ANNOTATED, *self._config.target)
        if not config.windowed or not asked or not config.selector(role).selects(self._coords):
            return NO_STEPS
        return config.plan(target)

    def never_came(self) -> Iterator[str]:
        """Yields a sentence, without a full stop, for each thing that was requested and not captured."""
        config, ran = self._config, {role for _, role in self.wishes if role is not None}
        for target in (*config.target, *[ANNOTATED] * config.discrete):
            wishes = {role: wish for (of, role), wish in self.wishes.items() if of == target and wish.ran}
            if not wishes:
                plans = (self.plan_of(target, role) for role in {self.role, *ran})
                if any(plan != NO_STEPS for plan in plans):
                    yield f"{target} never ran"
            together = [wish for wish in wishes.values() if wish.plan != NO_STEPS]
            # One window of a whole step holds the work of all roles.
            by_role = {None: together} if target == TRAIN_OVERALL else {role: [wish] for role, wish in wishes.items()}
            for role, of_role in sorted(by_role.items(), key=lambda item: item[0] or ""):
                whose = target if role is None else f"{target} of {role}"
                yield from (f"{whose}: {missing}" for missing in _missing(of_role))
        # These roles have options of their own but did not run here. Another process of the job may run them.
        unknown = [name for name in config.roles if name not in ran]
        if unknown and self.role is None:
            there = f"roles that ran: {', '.join(sorted(ran))}" if ran else "no role ran"
            yield f"{', '.join(unknown)} never ran in this process ({there})"


def _missing(wishes: list[Wish]) -> Iterator[str]:
    """Yields a sentence for each reason why steps were not captured that ``wishes`` wanted, which are for the same
    windows. Some step of each must have run."""
    if not wishes:
        return
    plan, first, last = wishes[0].plan, min(wish.first for wish in wishes), max(wish.last for wish in wishes)
    ran = f"step {first} ran" if first == last else f"steps {first}-{last} ran"
    wanted = {step: reason for wish in wishes for step, reason in wish.wanted.items()}
    if isinstance(plan, StepList):
        if left := plan.left({number for number, _ in wanted}, _LISTED + 1):
            yield f"{_listed(left)} never came: {ran}"
    elif isinstance(plan, Schedule) and (windows := plan.windows) and len(wanted) < windows:
        needed = plan.skip_first + plan.cycle * plan.repeat + max(wish.graphs for wish in wishes)
        why = f"it needs {counted(needed, 'call')}, and {max(wish.ran for wish in wishes)} ran"
        yield f"{len(wanted)} of {counted(windows, 'step')} of the schedule came: {why}"
    if lost := {number: reason for (number, _), reason in wanted.items() if reason is not None}:
        were = "was" if len(lost) == 1 else "were"
        yield f"{_listed(lost)} {were} not captured: {[*lost.values()][-1]}"


def _listed(steps: Collection[int]) -> str:
    """Returns ``steps`` in words, or the first few of them if there are many."""
    more = ", ..." if len(steps) > _LISTED else ""
    return f"step{'s' * (len(steps) > 1)} {join_spans(spans_of(list(steps)[:_LISTED]), ', ')}{more}"
