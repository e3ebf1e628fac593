"""What a rank is to capture and what it has captured, by target and role: numbers only, no recorder, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megaprof.config.options import ProfileConfig
from megaprof.config.windows import (
    ANNOTATED,
    TRAIN_ACTOR,
    TRAIN_LOG_PROBS,
    TRAIN_OVERALL,
    Plan,
    Schedule,
    StepList,
)
from megaprof.formats.checks import counted
from megaprof.parallel.selectors import join_spans, spans_of
from megaprof.parallel.topology import RankCoords
from megaprof.runtime.logs import logger

Key = tuple[str, "str | None"]
"""Target and role: what calls are counted by."""

Number = Callable[[], "int | None"]
"""Returns the host's number of the running step, None where the host has none."""

#: Steps that may wait for a free call; beyond that the oldest is given up, and said at the end.
_MOST_OWED = 1000
#: How many steps a message lists.
_LISTED = 5


@dataclass(slots=True)  # frozen ones take longer to make, and every call makes two
class Step:
    """Which step a call belongs to, or begins."""

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


@dataclass
class _Entry:
    """One target and role."""

    plan: Plan | None
    """The steps that this rank captures; None: it captures none of them."""
    seen: list[int] = field(default_factory=list)
    """The first and the last step number that ran; empty before the first."""
    ran: int = 0
    """How often it ran."""
    settled: int | None = None
    """The step that was captured, or put off, last: a step that runs again is not captured again."""
    captured: set[int] = field(default_factory=set)
    """Wanted steps that have their file."""
    lost: dict[int, str] = field(default_factory=dict)
    """Wanted steps whose window failed, and why."""
    owed: deque[int] = field(default_factory=deque)
    """Wanted steps in which another window was open, oldest first: each takes the next free call instead."""


class Agenda:
    """Numbers the calls of one session and says which of them are captured."""

    def __init__(
        self,
        config: ProfileConfig,
        coords: RankCoords,
        role: str | None = None,
        *,
        iteration: Number | None = None,
        pass_iteration: Number | None = None,
        host_step: Number | None = None,
    ) -> None:
        """``iteration`` numbers training steps and annotated work, ``pass_iteration`` log-prob passes, ``host_step``
        the step of the host's own loop, which all of them share; without an answer it is that of ``iteration``."""
        self._config = config
        self._coords = coords
        self._role = role
        self._iteration = iteration
        self._pass_iteration = pass_iteration
        self._entries: dict[Key, _Entry] = {}
        self._number_of_host = host_step
        self._host_step: int | None = None
        self._begun: Step | None = None  # with the call that began it
        self._host_steps = 0
        #: By target and role: how many calls have begun. Read by the background thread.
        self.calls: dict[Key, int] = {}

    def begin(self, target: str, role: str | None) -> Step:
        """Count a call, or annotated work, that begins.

        A host numbers its iterations, not its forward-only passes: several log-prob passes share a number. Where it
        says of the pass itself which iteration it belongs to, the first of them is the one that can be captured.
        """
        index = self.calls.get((target, role), 0)
        self.calls[target, role] = index + 1
        if target == TRAIN_LOG_PROBS:
            numbered = self._pass_iteration
        else:
            numbered = self._iteration if target in (TRAIN_ACTOR, ANNOTATED) else None
        iteration = None if numbered is None else numbered()
        hosts = iteration is not None and iteration >= 0
        step = Step(target, role, int(iteration) if hosts and iteration is not None else index, index, hosts)
        self._ran(step)
        return step

    def host_step(self, step: Step) -> Step | None:
        """The step of the host's that begins with the call of ``step``; None: that call is in the middle of one.

        A step of the host's is all calls with the same number, from the first one of a role that this rank captures on.
        Where the host numbers nothing, it begins with each grad-accumulation step of a role.
        """
        number = None if self._number_of_host is None else self._number_of_host()
        if number is None and step.hosts:
            number = step.number
        elif number is None and step.target not in (TRAIN_ACTOR, ANNOTATED) and self._iteration is not None:
            number = self._iteration()  # of those two it has been asked, and had no answer
        if number is not None and number >= 0:
            before = self._begun
            if number != self._host_step or before is None:
                self._host_step, index = int(number), self._host_steps
                self._host_steps += 1
            elif self._wants_step(before.role) or not self._wants_step(step.role):
                return None
            else:
                index = before.index
            begun = self._begun = Step(TRAIN_OVERALL, step.role, int(number), index, True)
        elif step.target == TRAIN_ACTOR and (self._host_step is None or number is not None):
            begun = Step(TRAIN_OVERALL, step.role, step.number, step.index, False)
        else:
            return None
        self._ran(begun)
        return begun

    def concerns(self, step: Step) -> bool:
        """Whether anything is to be done with ``step``: with most of them nothing is, and that is known at once."""
        entry = self._entry(step.target, step.role)
        if entry.plan is None:
            return False
        return bool(entry.owed) or entry.plan.captures(step.number, step.index)

    def due(self, step: Step) -> bool:
        """Whether ``step`` is to be captured."""
        entry = self._entry(step.target, step.role)
        if entry.plan is None or not entry.plan.captures(step.number, step.index):
            return False
        # A host may run one iteration twice (Megatron's rerun machinery); its first run is the one that is kept.
        return entry.settled != step.number

    def comes(self, step: Step) -> bool:
        """Whether the step behind ``step`` is to be captured."""
        plan = self._entry(step.target, step.role).plan
        return plan is not None and plan.captures(step.number + 1, step.index + 1)

    def joins(self, step: Step, before: Step) -> bool:
        """Whether ``step`` goes into the same merged window as ``before``, the last one of the same target and role."""
        plan = self._entry(before.target, before.role).plan
        if plan is None or not (isinstance(plan, Schedule) or step.number == before.number + 1):
            return False
        return plan.continues(before.number, before.index)

    def goes_on(self, step: Step) -> bool:
        """Whether the step behind ``step`` is wanted in the same merged window."""
        plan = self._entry(step.target, step.role).plan
        return plan is not None and plan.continues(step.number, step.index)

    def put_off(self, step: Step) -> None:
        """``step`` is wanted and another window is open in it: the next free call is captured instead."""
        entry = self._entry(step.target, step.role)
        entry.settled = step.number
        entry.owed.append(step.number)
        if len(entry.owed) > _MOST_OWED:
            entry.owed.popleft()

    def owed(self, step: Step) -> int | None:
        """The step that the call of ``step`` is captured for instead, None for none. Not another call of the same."""
        entry = self._entry(step.target, step.role)
        return entry.owed[0] if entry.owed and entry.settled != step.number else None

    def owes(self, step: Step) -> bool:
        """Whether a wanted step of the same target and role still waits for a free call."""
        return bool(self._entry(step.target, step.role).owed)

    def take(self, step: Step, asked: int | None = None) -> None:
        """A window captures ``step``, in the place of the step ``asked`` where that is given."""
        entry = self._entry(step.target, step.role)
        entry.settled = step.number
        if asked is not None and asked in entry.owed:
            entry.owed.remove(asked)

    def has_file(self, step: Step, asked: int | None = None) -> None:
        """The window of ``step`` has closed with a file."""
        self._entry(step.target, step.role).captured.add(step.number if asked is None else asked)

    def lose(self, step: Step, asked: int | None, reason: str) -> None:
        """The window of ``step`` failed, because of ``reason``: it has no file."""
        self._entry(step.target, step.role).lost[step.number if asked is None else asked] = reason

    def repeats(self, target: str, role: str | None, number: int) -> bool:
        """The last call of a target and role failed, and runs again: whether it was step ``number``, captured alone. It
        is captured again then."""
        entry = self._entry(target, role)
        if not entry.seen or entry.seen[1] != number or number not in entry.captured:
            return False
        entry.captured.discard(number)
        entry.settled = None
        return True

    def captures(self, target: str) -> bool:
        """Whether ``target`` is asked for at all."""
        return target == ANNOTATED or target in self._config.target

    @property
    def roles(self) -> set[str]:
        """The roles that ran."""
        return {role for _, role in self._entries if role is not None}

    def unmet(self) -> Iterator[str]:
        """What was asked for and has not come, a sentence each, without a full stop."""
        for target in self._config.target:
            entries = {role: entry for (of, role), entry in self._entries.items() if of == target and entry.seen}
            if not entries:
                plans = (self._plan(target, role) for role in {self._role, *self.roles})
                if any(plan not in (None, StepList(())) for plan in plans):
                    yield f"{target} never ran"
            elif target == TRAIN_OVERALL:  # one window holds the work of all roles
                entries = {None: _together([entry for entry in entries.values() if entry.plan is not None])}
            for role, entry in sorted(entries.items(), key=lambda each: each[0] or ""):
                whose = target if role is None else f"{target} of {role}"
                yield from (f"{whose}: {missing}" for missing in _missing(entry))

    def _ran(self, step: Step) -> None:
        entry = self._entry(step.target, step.role)
        if entry.seen:
            entry.seen[1] = step.number
        else:
            entry.seen = [step.number, step.number]
        entry.ran += 1

    def _wants_step(self, role: str | None) -> bool:
        """Whether a step of the host's that begins with a call of ``role`` may be captured on this rank."""
        return self._entry(TRAIN_OVERALL, role).plan is not None

    def _entry(self, target: str, role: str | None) -> _Entry:
        entry = self._entries.get((target, role))
        if entry is None:
            entry = self._entries[target, role] = _Entry(self._plan(target, role))
        return entry

    def _plan(self, target: str, role: str | None) -> Plan | None:
        """The captured steps of a target and role; None when this rank captures none of them."""
        config = self._config
        if not config.windowed or not self.captures(target):
            return None
        selector = config.selector(role)
        if selector is None or not selector.selects(self._coords):
            return None
        return config.plan(target, role)


def _together(entries: list[_Entry]) -> _Entry:
    """Several roles' entries of one target as one."""
    seen = [number for entry in entries for number in entry.seen]
    return _Entry(
        plan=entries[0].plan if entries else None,
        seen=[min(seen), max(seen)] if seen else [],
        captured=set().union(*(entry.captured for entry in entries)),
        lost={number: reason for entry in entries for number, reason in entry.lost.items()},
        owed=deque(number for entry in entries for number in entry.owed),
        ran=max((entry.ran for entry in entries), default=0),
    )


def _missing(entry: _Entry) -> Iterator[str]:
    if not entry.seen:
        return
    first, last = entry.seen
    ran = f"step {first} ran" if first == last else f"steps {first}-{last} ran"
    if isinstance(entry.plan, StepList):
        left = entry.plan.left(entry.captured | entry.lost.keys() | set(entry.owed), _LISTED)
        if left:
            more = ", ..." if len(left) == _LISTED else ""
            steps = "step" if len(left) == 1 else "steps"
            yield f"{steps} {join_spans(spans_of(left), ', ')}{more} never came: {ran}"
    elif isinstance(entry.plan, Schedule) and entry.plan.repeat:
        windows = entry.plan.active * entry.plan.repeat
        there = len(entry.captured | entry.lost.keys()) + len(entry.owed)
        if there < windows:
            needed = entry.plan.skip_first + entry.plan.cycle * entry.plan.repeat
            came = f"{there} of {counted(windows, 'step')} of the schedule came"
            yield f"{came}: it needs {counted(needed, 'call')}, and {entry.ran} ran"
    if entry.lost:
        listed = join_spans(spans_of(list(entry.lost)[:_LISTED]), ", ")
        more = ", ..." if len(entry.lost) > _LISTED else ""
        yield f"step {listed}{more} was not captured: {list(entry.lost.values())[-1]}"
    if entry.owed:
        listed = join_spans(spans_of(list(entry.owed)[:_LISTED]), ", ")
        yield f"step {listed} was not captured: another window was open, and no free call came after it"


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
