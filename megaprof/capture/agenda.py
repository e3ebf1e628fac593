"""Plans which calls get a window, from the configuration and the calls so far. Uses no recorder, clock or log.

`Agenda.begins` counts each call, and says what it means for the windows. All that is ever reported back is what went
wrong: a window that has no files (`Agenda.lose`), and a step that failed and runs again (`Agenda.repeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megaprof.config.options import ProfileConfig
from megaprof.config.windows import ANNOTATED, TRAIN_ACTOR, TRAIN_OVERALL, Plan, Schedule
from megaprof.parallel.topology import RankCoords

if TYPE_CHECKING:
    from megaprof.recorders import Recorder


class Call(NamedTuple):
    """A schedule call, or annotated work, that begins now."""

    target: str
    """A target of a call, or ``annotated``."""
    role: str | None = None
    """The role whose work it is; None if no role was given."""
    number: int | None = None
    """The host's number for it; None or negative if the host has none."""
    host_step: int | None = None
    """The number of the host's step that it is in; None if unknown, negative if the host counts but is in no step."""
    graph: bool = False
    """True if it captures a CUDA graph. Then it can have no window, and a schedule does not count it."""


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


@dataclass(eq=False)
class Demand:
    """A capture that was requested while the job runs: ``steps`` windows of ``target``, from call number ``first`` on
    (counted from 0 since the hooks were installed).

    All ranks of a job make the same calls in the same order, so the same number is the same step everywhere. A rank
    that hears of the request too late captures nothing, rather than a different step. The background thread makes the
    demand; afterwards it only reads it and may set ``cancelled``. The training thread does the rest.
    """

    target: str
    """The target that is captured."""
    role: str | None
    """The role whose calls are counted."""
    first: int
    """The number of the first call that is captured, from 0 on."""
    steps: int
    """The number of windows."""
    recorders: Sequence[Recorder]
    """The recorders of its windows."""
    holding: tuple[str, ...] = ()
    """Options of its tools that make the profiler hold tensors (`megaprof.capture.compat`)."""
    cancelled: bool = False
    """True if nobody wants it any more. Set by the background thread."""
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

    @property
    def counted(self) -> str:
        """The target whose calls are counted: a train_overall window begins with a training step."""
        return TRAIN_ACTOR if self.target == TRAIN_OVERALL else self.target

    @property
    def goes_on(self) -> bool:
        """True if it opens a further window."""
        return not (self.over or self.cancelled) and len(self.taken) < self.steps

    def due(self, upcoming: int, *, own: bool, begins: bool) -> bool:
        """Returns whether a window opens with the call that begins.

        ``upcoming``: the number of the counted call that begins (``own``), or else of the next one. ``begins``: whether
        a step of the host's begins with this call. A window of train_overall opens only then.
        """
        overall = self.target == TRAIN_OVERALL
        if self.over or upcoming < self.first or not (own or (overall and begins)):
            return False
        if not self.taken and (self.cancelled or (upcoming > self.first and not self.seen)):
            self.give_up("cancelled" if self.cancelled else "the call came too early")
            return False
        self.seen = True
        if overall:
            return begins and len(self.taken) < self.steps
        self.over = upcoming >= self.first + self.steps
        return not self.over

    def comes(self, step: CountedStep) -> bool:
        """Returns whether the call after ``step`` should be captured."""
        counted = (step.target, step.role) == (self.counted, self.role)
        wanted = self.first <= step.index + 1 < self.first + self.steps
        return counted and wanted and not (self.over or self.cancelled)

    def closes(self) -> None:
        """Notes that one of its windows has ended."""
        self.closed += 1
        self.over = self.over or len(self.taken) >= self.steps

    def give_up(self, reason: str) -> None:
        """Ends the demand, so that no further window opens, because of ``reason``."""
        self.reason = reason
        self.over = True


class PlannedWindow(NamedTuple):
    """A window that is wanted."""

    step: CountedStep
    """The step that it captures."""
    demand: Demand | None = None
    """The request that it is opened for; None if the configuration wants it."""

    @property
    def outlasts_call(self) -> bool:
        """True if it ends with the host's step, or with annotated work, and not with a call."""
        return self.step.target in (TRAIN_OVERALL, ANNOTATED)


class Decision(NamedTuple):
    """What a call that begins means for the windows."""

    steps: tuple[CountedStep, ...]
    """The steps that begin with the call: the host's step, if one does, and then the call's own."""
    closes: bool
    """True if the open window ended before this call."""
    opens: list[PlannedWindow]
    """The windows that are wanted. The first that can open does so, and the others are lost (`Agenda.lose`)."""


@dataclass
class Wish:
    """The plan of one target and role, with what has been captured so far."""

    plan: Plan | None
    """The steps that this rank captures; None if it captures none of them."""
    ran: int = 0
    """The number of steps that ran."""
    graphs: int = 0
    """The number of these that captured a CUDA graph."""
    first: int = -1
    """The step that ran first; -1 if none has."""
    last: int = -1
    """The step that ran last; -1 if none has."""
    handled: int | None = None
    """The step that was last wanted; None if none was. If it runs again, it is not wanted again."""
    captured: set[int] = field(default_factory=set)
    """Wanted steps that have a window."""
    lost: dict[int, str] = field(default_factory=dict)
    """Wanted steps that have none, and why."""

    def runs(self, number: int, *, graph: bool) -> None:
        """Counts a step, whose number is ``number``. ``graph``: whether it captures a CUDA graph."""
        if self.ran == 0:
            self.first = number
        self.last = number
        self.ran += 1
        self.graphs += graph

    @property
    def goes_on(self) -> bool:
        """True if any further step is captured."""
        return self.plan is not None and self.plan.goes_on(self.last, self.ran - self.graphs - 1)

    def wants(self, step: CountedStep, *, graph: bool) -> bool:
        """Returns whether ``step`` is to be captured. ``graph``: whether it captures a CUDA graph, so that a schedule
        takes the next one.

        A host may run one step twice (Megatron's rerun machinery), or give several mini-batches one number. Then the
        first run is captured.
        """
        if self.plan is None or self.handled == step.number or (graph and isinstance(self.plan, Schedule)):
            return False
        return self.plan.captures(step.number, step.index - self.graphs)


class Agenda:
    """Numbers the calls of one session, and decides which windows they open and close."""

    def __init__(self, config: ProfileConfig, coords: RankCoords, role: str | None = None) -> None:
        """``role``: the role whose model the session is for."""
        self._config = config
        self._coords = coords
        self.role = role
        #: The wishes by target and role. There is one once such a step ran, or once somebody asked for the wish.
        self.wishes: dict[tuple[str, str | None], Wish] = {}
        self._planned = False  # whether any of them has a plan
        self._host_step: CountedStep | None = None  # the last one that the host numbered

    def begins(self, call: Call, opened: CountedStep | None = None, demand: Demand | None = None) -> Decision:
        """Counts ``call``, which begins, and plans.

        ``opened``: the step of the session's open window, if it can be closed now. ``demand``: the capture on demand,
        if any.
        """
        steps = self._number(call)
        wishes = [self.wish(step.target, step.role) for step in steps]
        closes = opened is not None and not _stays_open(opened, steps)
        opens = self._wanted(steps, demand, graph=call.graph) if self._planned or demand is not None else []
        for wish, step in zip(wishes, steps, strict=True):
            wish.runs(step.number, graph=call.graph)
        return Decision(steps, closes, opens)

    def _number(self, call: Call) -> tuple[CountedStep, ...]:
        target, role, number, host_number, _ = call
        index = self.wish(target, role).ran
        hosts = number is not None and number >= 0
        step = CountedStep(target, role, int(number or 0) if hosts else index, index, hosts)
        host_step = self._host_step_of(step, host_number)
        return (step,) if host_step is None else (host_step, step)

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
            elif self._captures_host_steps(before.role) or not self._captures_host_steps(step.role):
                return None
            else:
                index = before.index
            self._host_step = CountedStep(TRAIN_OVERALL, step.role, int(number), index, True)
            return self._host_step
        if step.target == TRAIN_ACTOR and (before is None or number is not None):
            return CountedStep(TRAIN_OVERALL, step.role, step.number, step.index, False)
        return None

    def _captures_host_steps(self, role: str | None) -> bool:
        """Returns whether a step of the host's that begins with a call of ``role`` may be captured on this rank."""
        return self.wish(TRAIN_OVERALL, role).plan is not None

    def _wanted(self, steps: tuple[CountedStep, ...], demand: Demand | None, *, graph: bool) -> list[PlannedWindow]:
        """Returns the windows that ``steps`` should get, the one on demand first."""
        windows: list[PlannedWindow] = []
        if demand is not None and (step := self._demanded(demand, steps)) is not None:
            windows.append(PlannedWindow(step, demand))
        for step in steps:
            wish = self.wish(step.target, step.role)
            if wish.wants(step, graph=graph):
                wish.handled = step.number
                wish.captured.add(step.number)
                windows.append(PlannedWindow(step))
        return windows

    def _demanded(self, demand: Demand, steps: tuple[CountedStep, ...]) -> CountedStep | None:
        step, counted = steps[-1], (demand.counted, demand.role)
        is_counted = (step.target, step.role) == counted
        upcoming = step.index if is_counted else self.calls.get(counted, 0)
        if not demand.due(upcoming, own=is_counted, begins=len(steps) > 1):
            return None
        return steps[0] if demand.target == TRAIN_OVERALL else step

    def lose(self, window: PlannedWindow, reason: str) -> None:
        """Notes that ``window`` has no files because of ``reason``."""
        step = window.step
        if window.demand is not None:
            window.demand.give_up(reason)
        else:
            wish = self.wish(step.target, step.role)
            wish.captured.discard(step.number)
            wish.lost[step.number] = reason

    def repeats(self, target: str, role: str | None, number: int) -> bool:
        """Notes that the last call of ``target`` and ``role`` failed and runs again. Returns whether it was step
        ``number`` and was captured; then it is captured again."""
        wish = self.wish(target, role)
        if wish.last != number or number not in wish.captured:
            return False
        wish.captured.discard(number)
        wish.handled = None
        return True

    def comes(self, step: CountedStep) -> bool:
        """Returns whether the step after ``step`` should be captured."""
        wish = self.wish(step.target, step.role)
        return wish.plan is not None and wish.plan.captures(step.number + 1, step.index + 1 - wish.graphs)

    @property
    def goes_on(self) -> bool:
        """True if the configuration wants a further window, of a target that ran or of one that may still run."""
        ran = {target for target, _ in self.wishes}
        may_run = (self.wish(target, self.role) for target in self._config.target if target not in ran)
        return any(wish.goes_on for wish in (*self.wishes.values(), *may_run))

    def wish(self, target: str, role: str | None) -> Wish:
        """Returns the wish for ``target`` when ``role`` runs it."""
        wish = self.wishes.get((target, role))
        if wish is None:
            wish = self.wishes[target, role] = Wish(self.plan_of(target, role))
            self._planned = self._planned or wish.plan is not None
        return wish

    def plan_of(self, target: str, role: str | None) -> Plan | None:
        """Returns the steps of ``target`` that this rank captures when ``role`` runs it; None if it captures none."""
        config = self._config
        if not config.windowed or (target != ANNOTATED and target not in config.target):
            return None
        selector = config.selector(role)
        if selector is None or not selector.selects(self._coords):
            return None
        return config.plan(target, role)


def _stays_open(opened: CountedStep, steps: tuple[CountedStep, ...]) -> bool:
    """Returns whether the window of ``opened`` stays open when ``steps`` begin, because that step goes on."""
    step = steps[0] if opened.target == TRAIN_OVERALL else steps[-1]
    if opened.target == ANNOTATED or step.target != opened.target or step.number == opened.number:
        return True
    # A role counts its own steps, so another role's step is part of the window. A step with a host's number is not.
    return step.role != opened.role and not (step.target == TRAIN_OVERALL and step.hosts)
