"""Decides which calls get a window, from the configuration and the calls so far. Uses no recorder, clock or log.

For each call that begins, `Agenda.begins` decides whether the open window closes or takes the step in, and which
windows should open. Later the session reports back whether a window was saved, has failed, or could not open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megaprof.config.options import ProfileConfig
from megaprof.config.windows import ANNOTATED, TRAIN_ACTOR, TRAIN_OVERALL, Plan, StepList
from megaprof.parallel.topology import RankCoords

if TYPE_CHECKING:
    from megaprof.recorders import Recorder

#: The most steps that may wait for a free call. If there are more, the oldest is given up, and logged as not captured
#: at the end of the run.
_MOST_OWED = 1000


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


@dataclass
class PlannedWindow:
    """The steps of a window, and how it ends."""

    first: CountedStep
    """Its first step."""
    last: CountedStep
    """Its last step so far."""
    asked: int
    """The wanted step that `last` is captured for: itself, or an earlier step in which another window was open."""
    complete: bool = True
    """False if it also takes in the wanted step that follows, because of ``--profile-merge-steps``."""
    demand: Demand | None = None
    """The request that it was opened for; None if the configuration wants it."""

    @property
    def target(self) -> str:
        """The target that is captured."""
        return self.first.target

    @property
    def outlasts_call(self) -> bool:
        """True if it ends with the host's step, or with annotated work, and not with a call."""
        return self.target in (TRAIN_OVERALL, ANNOTATED)


class Decision(NamedTuple):
    """The decision about the windows when a call begins."""

    steps: tuple[CountedStep, ...]
    """The steps that begin with the call: the host's step, if one does, and then the call's own."""
    closes: bool
    """True if the open window ended before this call."""
    joins: CountedStep | None
    """The step that was merged into the open window; None if none was."""
    opens: list[PlannedWindow]
    """The windows that are wanted. The first that can open does so, and the others are put off (`Agenda.put_off`)."""


@dataclass
class Wish:
    """The plan of one target and role, with what has been captured so far."""

    plan: Plan | None
    """The steps that this rank captures; None if it captures none of them."""
    ran: int = 0
    """The number of steps that ran."""
    first: int = -1
    """The step that ran first; -1 if none has."""
    last: int = -1
    """The step that ran last; -1 if none has."""
    handled: int | None = None
    """The step that was last captured or put off; None if there is none. If it runs again, it is not captured again."""
    captured: set[int] = field(default_factory=set)
    """Wanted steps that have their files."""
    lost: dict[int, str] = field(default_factory=dict)
    """Wanted steps whose window failed, and why."""
    owed: deque[int] = field(default_factory=deque)
    """Wanted steps in which another window was open, oldest first: each takes the next free call instead."""

    def runs(self, number: int) -> None:
        """Counts a step, whose number is ``number``."""
        if self.ran == 0:
            self.first = number
        self.last = number
        self.ran += 1

    @property
    def goes_on(self) -> bool:
        """True if any further step is captured."""
        return self.plan is not None and (bool(self.owed) or self.plan.goes_on(self.last, self.ran - 1))

    def asks(self, step: CountedStep) -> int | None:
        """Returns the wanted step that ``step`` can be captured for: itself, or else one that is owed. Returns None if
        there is neither.

        A host may run one step twice (Megatron's rerun machinery), or give several mini-batches one number. Then the
        first run is captured.
        """
        if self.plan is None or self.handled == step.number:
            return None
        if self.plan.captures(step.number, step.index):
            return step.number
        return self.owed[0] if self.owed else None


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

    def begins(self, call: Call, opened: PlannedWindow | None = None, demand: Demand | None = None) -> Decision:
        """Counts ``call``, which begins, and decides what it changes.

        ``opened``: the session's open window, if it can be closed now. ``demand``: the capture on demand, if any.
        """
        steps = self._count(call)
        closes, joins = False, None
        if opened is not None:
            last = opened.last
            closes = not self._stays_open(opened, steps)
            joins = opened.last if opened.last is not last else None
        opens = self._wanted(steps, demand) if self._planned or demand is not None else []
        return Decision(steps, closes, joins, opens)

    def _count(self, call: Call) -> tuple[CountedStep, ...]:
        target, role, number, host_number = call
        wish = self.wish(target, role)
        index = wish.ran
        if number is not None and number >= 0:
            step = CountedStep(target, role, int(number), index, True)
        else:
            step = CountedStep(target, role, index, index, False)
        host_step = self._host_step_of(step, host_number)
        wish.runs(step.number)
        if host_step is None:
            return (step,)
        self.wish(TRAIN_OVERALL, role).runs(host_step.number)
        return host_step, step

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

    def _stays_open(self, window: PlannedWindow, steps: tuple[CountedStep, ...]) -> bool:
        """Returns whether ``window`` stays open when ``steps`` begin, because its last step goes on, or because the
        next step goes into it as well."""
        last = window.last
        step = steps[0] if window.target == TRAIN_OVERALL else steps[-1]
        if window.target == ANNOTATED or step.target != last.target or step.number == last.number:
            return True
        # A role counts its own steps, so another role's step is part of the window. A step with a host's number is not.
        if step.role != last.role and not (step.target == TRAIN_OVERALL and step.hosts):
            return True
        return not window.complete and self._joins(window, step)

    def _joins(self, window: PlannedWindow, step: CountedStep) -> bool:
        """Takes ``step`` into the merged ``window`` and returns True, if it belongs there. Wanted steps that follow
        each other share a window, and so do steps that are captured instead of owed ones."""
        wish, last = self.wish(step.target, step.role), window.last
        asked = wish.asks(step)
        itself = asked == step.number
        if asked is None or itself != (window.asked == last.number):
            return False
        if itself and isinstance(wish.plan, StepList) and step.number != last.number + 1:
            return False
        self.saved(window)
        window.last, window.asked = step, asked
        self.opens(window)
        return True

    def _wanted(self, steps: tuple[CountedStep, ...], demand: Demand | None) -> list[PlannedWindow]:
        """Returns the windows that may open with ``steps``: first the one on demand, last those for owed steps."""
        windows: list[PlannedWindow] = []
        owed: list[PlannedWindow] = []
        if demand is not None and (step := self._demanded(demand, steps)) is not None:
            windows.append(PlannedWindow(step, step, step.number, demand=demand))
        for step in steps:
            asked = self.wish(step.target, step.role).asks(step)
            if asked is not None:
                (windows if asked == step.number else owed).append(PlannedWindow(step, step, asked))
        return windows + owed

    def _demanded(self, demand: Demand, steps: tuple[CountedStep, ...]) -> CountedStep | None:
        step, counted = steps[-1], (demand.counted, demand.role)
        is_counted = (step.target, step.role) == counted
        upcoming = step.index if is_counted else self.calls.get(counted, 0)
        if not demand.due(upcoming, own=is_counted, begins=len(steps) > 1):
            return None
        return steps[0] if demand.target == TRAIN_OVERALL else step

    def opens(self, window: PlannedWindow) -> None:
        """Notes that ``window`` opens or goes on with another step, so its last step is dealt with."""
        if window.demand is not None:
            return
        last = window.last
        wish = self.wish(last.target, last.role)
        wish.handled = last.number
        if window.asked in wish.owed:
            wish.owed.remove(window.asked)
        if window.asked == last.number:
            follows = wish.plan is not None and wish.plan.continues(last.number, last.index)
        else:
            follows = bool(wish.owed)
        window.complete = not (follows and self._config.merge_steps)

    def put_off(self, window: PlannedWindow, inside: str | None) -> bool:
        """Notes that ``window`` cannot open, because a window of target ``inside`` is open, or because a CUDA graph is
        captured (None).

        Returns whether the next free call is captured instead. That is not so if nothing is missed, because the open
        window holds the same work, or because ``window`` was for an owed step, which still waits. It is never so for a
        window on demand.
        """
        target = window.target
        if window.demand is not None:
            window.demand.give_up("a CUDA graph was captured" if inside is None else "another window was open")
        if window.demand is not None or window.asked != window.first.number:
            return False
        if inside == ANNOTATED or inside == target == TRAIN_OVERALL:
            return False
        wish = self.wish(target, window.first.role)
        wish.handled = window.first.number
        wish.owed.append(window.first.number)
        if len(wish.owed) > _MOST_OWED:
            wish.owed.popleft()
        return True

    def saved(self, window: PlannedWindow) -> None:
        """Notes that ``window`` was saved, or that its last step so far is complete."""
        if window.demand is None:
            self.wish(window.target, window.last.role).captured.add(window.asked)

    def lose(self, window: PlannedWindow, reason: str) -> None:
        """Notes that ``window``, which opened or was about to, has no files because of ``reason``."""
        if window.demand is not None:
            window.demand.give_up(reason)
        else:
            self.wish(window.target, window.last.role).lost[window.asked] = reason

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
        plan = self.wish(step.target, step.role).plan
        return plan is not None and plan.captures(step.number + 1, step.index + 1)

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
