"""Which calls get a window: a function of the configuration and of the calls so far. No recorder, no clock, no log.

At a call the session asks three things: whether the open window goes on (`Agenda.goes_on`), which windows are wanted
(`Agenda.wanted`), and, when the call ends, whether its window ends with it (`Agenda.is_complete`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megaprof.config.options import ProfileConfig
from megaprof.config.windows import (
    ANNOTATED,
    TRAIN_ACTOR,
    TRAIN_LOG_PROBS,
    TRAIN_OVERALL,
    Plan,
    Schedule,
)
from megaprof.parallel.topology import RankCoords

if TYPE_CHECKING:
    from megaprof.recorders import Recorder

TargetRole = tuple[str, "str | None"]
"""Target and role: what calls are counted by."""

StepNumber = Callable[[], "int | None"]
"""Returns the host's number of the running step, None where the host has none."""

#: Steps that may wait for a free call; beyond that the oldest is given up, and said at the end.
_MOST_OWED = 1000


@dataclass(frozen=True)
class HostNumbers:
    """How the host numbers its steps."""

    iteration: StepNumber
    """Numbers training steps and annotated work."""
    pass_iteration: StepNumber
    """Numbers log-prob passes. A host numbers its iterations, not its forward-only passes: several share a number, and
    the first of them is the one that can be captured."""
    host_step: StepNumber
    """Numbers the step of the host's own loop, which all of them share; without an answer it is that of `iteration`."""

    def of(self, target: str) -> tuple[int | None, int | None]:
        """Returns the number of a call of ``target`` that begins, and that of the host's step that it is in."""
        trains = target in (TRAIN_ACTOR, ANNOTATED)
        numbered = self.iteration if trains else self.pass_iteration if target == TRAIN_LOG_PROBS else None
        number = None if numbered is None else numbered()
        shared = self.host_step()
        if shared is None and number is not None and number >= 0:
            shared = number
        elif shared is None and not trains:
            shared = self.iteration()
        return number, shared


class Call(NamedTuple):
    """A schedule call, or annotated work, that begins."""

    target: str
    """What it is: a target of a call, or ``annotated``."""
    role: str | None = None
    """Whose it is; None: no role was said."""
    number: int | None = None
    """The host's number of it; None, or negative: it has none."""
    host_step: int | None = None
    """The number of the host's step that it is in; None: unknown. Negative: the host counts, and is in no step."""


@dataclass(slots=True)  # frozen ones take longer to make, and every call makes two
class CountedStep:
    """A step that begins with a call: the call's own, or the host's."""

    target: str
    """Whose step: a target of a call, ``train_overall`` for the host's step, or ``annotated``."""
    role: str | None
    """Whose call it is; None: no role was said."""
    number: int
    """The host's number of the step where it has one, else its `index`."""
    index: int
    """How many steps of this target and role were before it."""
    hosts: bool
    """True: `number` is the host's own."""


class Begun(NamedTuple):
    """The steps that begin with a call."""

    step: CountedStep
    """The call's own."""
    host_step: CountedStep | None
    """The host's; None: the call is in the middle of one."""

    @property
    def steps(self) -> tuple[CountedStep, ...]:
        """Both, the host's first: a window of it holds the other."""
        return (self.step,) if self.host_step is None else (self.host_step, self.step)


@dataclass(eq=False)
class Demand:
    """A capture that was asked for while the job runs: ``steps`` windows of ``target``, from call number ``first`` on
    (counted from 0 since the hooks went in).

    All ranks of a job make the same calls in the same order, so the same number is the same step everywhere. A rank
    that learns of it too late takes no window at all rather than another step. Made by the background thread, which
    then only reads it and may set ``cancelled``; the training thread does the rest.
    """

    target: str
    """What is captured."""
    role: str | None
    """Whose calls are counted."""
    first: int
    """The number of the first call that is captured, from 0 on."""
    steps: int
    """How many windows."""
    recorders: Sequence[Recorder]
    """What records them."""
    holding: tuple[str, ...] = ()
    """Options of its tools with which the profiler holds tensors (`megaprof.capture.compat`)."""
    cancelled: bool = False
    """True: nobody wants it any more. Set by the background thread."""
    seen: bool = False
    """True once the training thread knew of it when call ``first`` began."""
    taken: list[int] = field(default_factory=list)
    """The step numbers of the windows so far."""
    closed: int = 0
    """How many of them have ended."""
    saved: int = 0
    """How many of them have files to be finished."""
    written: list[list[str]] = field(default_factory=list)
    """The names of each one's files, once they are finished. Filled by the writer's thread."""
    over: bool = False
    """True: it opens no further window."""
    reason: str | None = None
    """Why there is no window, or no further one."""

    @property
    def counted(self) -> str:
        """The target whose calls are counted: a train_overall window begins with a training step."""
        return TRAIN_ACTOR if self.target == TRAIN_OVERALL else self.target

    def due(self, upcoming: int, *, own: bool, begins: bool) -> bool:
        """Returns whether a window opens with the call that begins.

        ``upcoming``: the number of the counted call that begins (``own``), or else of the next one. ``begins``: a step
        of the host's begins with this call; a window of train_overall opens only then.
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

    def comes(self, target: str, role: str | None, index: int) -> bool:
        """Returns whether the call of this target and role with this number is to be captured."""
        counted = (target, role) == (self.counted, self.role)
        return counted and not (self.over or self.cancelled) and self.first <= index < self.first + self.steps

    def closes(self) -> None:
        """A window of it ended."""
        self.closed += 1
        self.over = self.over or len(self.taken) >= self.steps

    def give_up(self, reason: str) -> None:
        """There will be no further window, because of ``reason``."""
        self.reason = reason
        self.over = True


@dataclass
class PlannedWindow:
    """A window: which steps are in it, and how it ends."""

    first: CountedStep
    """Its first step."""
    last: CountedStep
    """Its last step so far."""
    merges: bool = False
    """True: wanted steps that follow go into it, too."""
    asked: int | None = None
    """The wanted step that `last` is captured instead of; None: itself."""
    demand: Demand | None = None
    """What asked for it while the job ran; None: the configuration."""

    @property
    def target(self) -> str:
        """What is captured."""
        return self.first.target

    @property
    def outlasts_call(self) -> bool:
        """True: it ends with the host's step, or with annotated work, and not with a call."""
        return self.target in (TRAIN_OVERALL, ANNOTATED)


@dataclass
class Wish:
    """What is wanted of one target and role, and what came of it."""

    plan: Plan | None
    """The steps that this rank captures; None: it captures none of them."""
    seen: list[int] = field(default_factory=list)
    """The first and the last step number that ran; empty before the first."""
    ran: int = 0
    """How often it ran."""
    handled: int | None = None
    """The step that was captured, or put off, last: a step that runs again is not captured again."""
    captured: set[int] = field(default_factory=set)
    """Wanted steps that have their file."""
    lost: dict[int, str] = field(default_factory=dict)
    """Wanted steps whose window failed, and why."""
    owed: deque[int] = field(default_factory=deque)
    """Wanted steps in which another window was open, oldest first: each takes the next free call instead."""

    def wants(self, step: CountedStep) -> bool:
        """Returns whether ``step`` is to be captured. A host may run one iteration twice (Megatron's rerun machinery);
        its first run is the one that is kept."""
        return self.plan is not None and self.handled != step.number and self.plan.captures(step.number, step.index)

    def owes(self, step: CountedStep) -> int | None:
        """The step that ``step`` is captured instead of, None for none. Not another call of the same number."""
        return self.owed[0] if self.owed and self.handled != step.number else None


class Agenda:
    """Numbers the calls of one session, and says which of them begin or end a window."""

    def __init__(self, config: ProfileConfig, coords: RankCoords, role: str | None = None) -> None:
        """``role``: whose model it is."""
        self._config = config
        self._coords = coords
        self.role = role
        #: By target and role, of those that ran or that something was asked of.
        self.wishes: dict[TargetRole, Wish] = {}
        #: By target and role: how many calls have begun. Read by the background thread.
        self.calls: dict[TargetRole, int] = {}
        self._host_step: int | None = None
        self._host_steps = 0
        self._begun: CountedStep | None = None  # the host's last step

    def begins(self, call: Call) -> Begun:
        """Counts a call, or annotated work, that begins."""
        target, role, number, _ = call
        index = self.calls.get((target, role), 0)
        self.calls[target, role] = index + 1
        hosts = number is not None and number >= 0
        step = CountedStep(target, role, int(number) if hosts and number is not None else index, index, hosts)
        self._note(step)
        host_step = self._host_step_of(step, call.host_step)
        if host_step is not None:
            self._note(host_step)
        return Begun(step, host_step)

    def _host_step_of(self, step: CountedStep, number: int | None) -> CountedStep | None:
        """A step of the host's is all calls with the same number, from the first one of a role that this rank captures
        on. Where the host numbers nothing, it begins with each grad-accumulation step of a role."""
        if step.target == ANNOTATED:
            return None
        if number is not None and number >= 0:
            before = self._begun
            if number != self._host_step or before is None:
                self._host_step, index = int(number), self._host_steps
                self._host_steps += 1
            elif self._captures_host_steps(before.role) or not self._captures_host_steps(step.role):
                return None
            else:
                index = before.index
            self._begun = CountedStep(TRAIN_OVERALL, step.role, int(number), index, True)
            return self._begun
        if step.target == TRAIN_ACTOR and (self._host_step is None or number is not None):
            return CountedStep(TRAIN_OVERALL, step.role, step.number, step.index, False)
        return None

    def goes_on(self, window: PlannedWindow, begun: Begun) -> bool:
        """Returns whether ``window``, which is open, stays open when ``begun`` begins. A wanted step that follows goes
        into a merged window: it is its last one then."""
        if window.target == ANNOTATED:
            return True
        last, step = window.last, begun.host_step if window.target == TRAIN_OVERALL else begun.step
        if step is None or step.number == last.number:
            return True
        # Counted steps are a role's own: another role's are part of the window. So is every call of another kind.
        if (step.target, step.role) != (last.target, last.role) and not (step.target == TRAIN_OVERALL and step.hosts):
            return True
        if not window.merges:
            return False
        if window.asked is None:
            asked, joins = None, self._follows(step, last)
        else:
            asked = self.wish(step).owes(step)
            joins = asked is not None
        if joins:
            self.has_file(window)
            self._take(step, asked)
            window.last, window.asked = step, asked
        return joins

    def is_complete(self, window: PlannedWindow) -> bool:
        """Returns whether ``window`` ends with its last step so far, and no wanted step goes into it any more."""
        last, wish = window.last, self.wish(window.last)
        if not window.merges or wish.plan is None:
            return True
        return not (wish.plan.continues(last.number, last.index) if window.asked is None else wish.owed)

    def wanted(self, begun: Begun, demand: Demand | None = None) -> list[PlannedWindow]:
        """The windows that are to open when ``begun`` begins, the first of them that can. What is wanted and cannot
        open is to be `put_off`, but for a window that takes a free call in the place of such a one."""
        wanted: list[PlannedWindow] = []
        owed: list[PlannedWindow] = []
        if demand is not None and (step := self._demanded(demand, begun)) is not None:
            wanted.append(PlannedWindow(step, step, demand=demand))
        for step in begun.steps:
            wish = self.wish(step)
            if wish.plan is None:
                continue
            merges = self._config.merge_steps and step.target != ANNOTATED
            if wish.wants(step):
                wanted.append(PlannedWindow(step, step, merges))
            elif (asked := wish.owes(step)) is not None:
                owed.append(PlannedWindow(step, step, merges, asked))
        return wanted + owed

    def _demanded(self, demand: Demand, begun: Begun) -> CountedStep | None:
        step, counted = begun.step, (demand.counted, demand.role)
        own = (step.target, step.role) == counted
        upcoming = step.index if own else self.calls.get(counted, 0)
        if not demand.due(upcoming, own=own, begins=begun.host_step is not None):
            return None
        return begun.host_step if demand.target == TRAIN_OVERALL else step

    def opens(self, window: PlannedWindow) -> None:
        """``window`` is about to be opened."""
        if window.demand is None:
            self._take(window.first, window.asked)

    def put_off(self, window: PlannedWindow, inside: str | None) -> bool:
        """``window`` is wanted, and a window of target ``inside`` is open (None: no window can be opened): the next
        free call is captured instead. False: nothing is missed, since that window holds all the work inside it, or
        since what ``window`` was to replace still waits."""
        target = window.target
        if window.asked is not None or inside == ANNOTATED or inside == target == TRAIN_OVERALL:
            return False
        wish = self.wish(window.first)
        wish.handled = window.first.number
        wish.owed.append(window.first.number)
        if len(wish.owed) > _MOST_OWED:
            wish.owed.popleft()
        return True

    def has_file(self, window: PlannedWindow) -> None:
        """``window`` has closed with a file, or its last step so far is complete."""
        if window.demand is None:
            self.wish(window.last).captured.add(window.last.number if window.asked is None else window.asked)

    def lose(self, window: PlannedWindow, reason: str) -> None:
        """``window`` failed, because of ``reason``: it has no file."""
        self.wish(window.last).lost[window.last.number if window.asked is None else window.asked] = reason

    def repeats(self, target: str, role: str | None, number: int) -> bool:
        """The last call of a target and role failed, and runs again: whether it was step ``number``, captured alone. It
        is captured again then."""
        wish = self._wish(target, role)
        if not wish.seen or wish.seen[1] != number or number not in wish.captured:
            return False
        wish.captured.discard(number)
        wish.handled = None
        return True

    def comes(self, step: CountedStep) -> bool:
        """Returns whether the step behind ``step`` is to be captured."""
        plan = self.wish(step).plan
        return plan is not None and plan.captures(step.number + 1, step.index + 1)

    def wish(self, step: CountedStep) -> Wish:
        """Returns what is wanted of the target and role of ``step``."""
        return self._wish(step.target, step.role)

    def plan_of(self, target: str, role: str | None) -> Plan | None:
        """The captured steps of a target and role; None when this rank captures none of them."""
        config = self._config
        if not config.windowed or (target != ANNOTATED and target not in config.target):
            return None
        selector = config.selector(role)
        if selector is None or not selector.selects(self._coords):
            return None
        return config.plan(target, role)

    def _follows(self, step: CountedStep, before: CountedStep) -> bool:
        """Returns whether ``step`` goes into the same merged window as ``before``."""
        plan = self.wish(before).plan
        if plan is None or not (isinstance(plan, Schedule) or step.number == before.number + 1):
            return False
        return plan.continues(before.number, before.index)

    def _take(self, step: CountedStep, asked: int | None) -> None:
        """A window captures ``step``, in the place of the step ``asked`` where that is given."""
        wish = self.wish(step)
        wish.handled = step.number
        if asked is not None and asked in wish.owed:
            wish.owed.remove(asked)

    def _note(self, step: CountedStep) -> None:
        wish = self.wish(step)
        if wish.seen:
            wish.seen[1] = step.number
        else:
            wish.seen = [step.number, step.number]
        wish.ran += 1

    def _captures_host_steps(self, role: str | None) -> bool:
        """Returns whether a step of the host's that begins with a call of ``role`` may be captured on this rank."""
        return self._wish(TRAIN_OVERALL, role).plan is not None

    def _wish(self, target: str, role: str | None) -> Wish:
        wish = self.wishes.get((target, role))
        if wish is None:
            wish = self.wishes[target, role] = Wish(self.plan_of(target, role))
        return wish
