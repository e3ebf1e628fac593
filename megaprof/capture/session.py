"""The conductor: hook events -> windows -> recorders. One session per ``install_hooks`` call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megaprof.capture.demand import Demand
from megaprof.capture.scope import current
from megaprof.config.options import ProfileConfig
from megaprof.config.windows import ANNOTATED, TRAIN_ACTOR, TRAIN_LOG_PROBS, TRAIN_OVERALL, Action, Plan
from megaprof.formats import ranges
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import Recorder, Window
from megaprof.recorders.call import CallFacts, RecordedCall, no_call
from megaprof.recorders.describe import describe
from megaprof.recorders.emit import Range
from megaprof.runtime.hostmemory import HostMemoryGuard, parse_limit
from megaprof.runtime.interruption import from_host
from megaprof.runtime.isolation import Contained, in_full
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.recorders.timeline.recorder import TimelineRecorder


_NOTHING: AbstractContextManager[object] = nullcontext()


@dataclass
class _OpenWindow:
    window: Window
    keep: bool  # False for a warm-up, which is recorded and thrown away
    opener: str | None  # the role whose call, or annotated work, opened it
    overall: Range | None = None  # the range of a window that outlives the call that opened it, or had none
    call: RecordedCall | None = None  # the window's first call: what the metadata describes
    demand: Demand | None = None  # what asked for it while the job ran
    thread: int = field(default_factory=threading.get_ident)  # which alone can close it


class Session:
    """Decides, call by call, whether a window opens, and drives the recorders. Runs on the training thread.

    A fault in here disables the session for the rest of the run; it never reaches the caller.
    """

    #: The session whose window is open. A process holds one Kineto session, so it has one open window at most; what
    #: other sessions do meanwhile is recorded in it.
    _holder: Session | None = None
    #: Why the open window must close before the next microbatch: the host memory guard sets it, in its own thread.
    memory_full: str | None = None
    #: Another thread wants something of the training thread, which looks at this before each microbatch.
    urgent = False

    def __init__(
        self,
        config: ProfileConfig,
        coords: RankCoords,
        recorders: Sequence[Recorder],
        *,
        role: str | None = None,
        iteration: Callable[[], int | None] | None = None,
        pass_iteration: Callable[[], int | None] | None = None,
        timeline: TimelineRecorder | None = None,
        window_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``window_ended`` is called once every file of a window is with the writer."""
        self.disabled = False
        self._window_ended = window_ended
        self.timeline = timeline
        self.config = config
        self.coords = coords
        self.role = role
        self._recorders = tuple(recorders)
        self._timed = frozenset((*config.target, TRAIN_ACTOR) if TRAIN_OVERALL in config.target else config.target)
        self._iteration = iteration
        self._pass_iteration = pass_iteration
        self._plans: dict[tuple[str, str | None], Plan | None] = {}
        #: By target and role: how many calls have begun. Read by the background thread.
        self.calls: dict[tuple[str, str | None], int] = {}
        #: A capture that was asked for while the job runs; set and cleared by the background thread.
        self.demand: Demand | None = None
        self._captured: dict[tuple[str, str | None], int] = {}
        self._thread = threading.get_ident()
        self._open_window: _OpenWindow | None = None
        self._guard = HostMemoryGuard(parse_limit("max_host_memory", config.max_host_memory), self._memory_ran_out)

    def begin(self, facts: CallFacts) -> RecordedCall | None:
        """A ``forward_backward_func`` call starts. Returns what ``end`` needs, or None: nothing is recorded."""
        call: RecordedCall | None = None
        if not self.disabled:
            with Contained("opening a window", self.abandon):
                call = self._begin(facts)
        return call

    def end(self, call: RecordedCall, *, failed: bool) -> None:
        """The call that ``begin`` answered with ``call`` returned, or raised an exception of the host's."""
        with Contained("closing a window", self.abandon):
            if call.line is not None and self.timeline is not None:
                self.timeline.end(call.line, failed=failed)
            call.outermost.__exit__(None, None, None)
            opened = self._open_window
            if opened is not None and failed:
                self._close("the host raised an exception")
            elif opened is not None and opened.overall is None:
                self._close(None)

    def begin_work(self, role: str) -> bool:
        """Annotated work of ``role`` starts, outside any other of that role. True: it has a window of its own, and
        ``end_work`` must follow. Only on the thread that installed the hooks: recorders follow one thread's work."""
        opened = False
        if not self.disabled and self.config.discrete and threading.get_ident() == self._thread:
            with Contained("opening a window", self.abandon):
                opened = self._begin_work(role)
        return opened

    def end_work(self, *, failed: bool) -> None:
        """The work that ``begin_work`` answered with True is over, or raised an exception of the host's."""
        with Contained("closing a window", self.abandon):
            if self._open_window is not None and self._open_window.window.target == ANNOTATED:
                self._close("the host raised an exception" if failed else None)

    @staticmethod
    def open_window() -> object:
        """The window that is open in this process, None when there is none. Only its identity means something."""
        return Session._holder._open_window if Session._holder is not None else None

    @property
    def thread(self) -> int | None:
        """The thread that opened this session's window, and alone can close it; None: no window is open."""
        return None if self._open_window is None else self._open_window.thread

    def finish(self, reason: str) -> None:
        """Close an open window early; what it has is kept and marked truncated. A no-op without one."""
        with Contained("closing the last window", self.abandon):
            self._close(reason)

    def step_ended(self) -> None:
        """The host's step is over: the window of all its work is complete. A no-op without one."""
        if self._open_window is not None and self._open_window.window.target == TRAIN_OVERALL:
            with Contained("closing the window of a step", self.abandon):
                self._close(None)

    def interrupt(self, call: RecordedCall, reason: str) -> None:
        """Close the process's open window in the middle of ``call``, for which ``end`` must not be called any more."""
        with Contained("closing a window early", self.abandon):
            if call.line is not None and self.timeline is not None:
                self.timeline.end(call.line, failed=False)
            call.outermost.__exit__(None, None, None)
            if Session._holder is not None:
                Session._holder.finish(reason)

    def abandon(self) -> None:
        """After a fault: record nothing more in this run and leave no recorder running. Can be run twice."""
        self.disabled = True
        opened, demand = self._open_window, self.demand
        overall = None if opened is None else opened.overall
        in_full(
            *([] if self.timeline is None else [self.timeline.abandon]),
            *([] if overall is None else [overall.close]),
            *(recorder.discard for recorder in (*self._recorders, *(() if demand is None else demand.recorders))),
            self._release,
        )
        self.demand = None

    def _begin(self, facts: CallFacts) -> RecordedCall | None:
        target, scope = facts.target, current()
        role = self.role if scope.role is None else scope.role
        index = self._count(target, role)
        step = self._number(target, index)
        last = self._open_window
        if last is not None and (last.window.target, last.opener, target) == (TRAIN_OVERALL, role, TRAIN_ACTOR):
            self._close(None)  # such a window lasts until the next step of its role starts
        demand = self.demand
        asked = demand is not None and self._asked(demand, facts, target, role, step, index)
        due = None
        # Nothing may be synchronised while a CUDA graph is captured.
        if not asked and Session._holder is None and facts.graph != "capture":
            due = next(
                (
                    (candidate, phase)
                    for candidate in ((TRAIN_OVERALL, target) if target == TRAIN_ACTOR else (target,))
                    if (phase := self._phase(candidate, role, step, index)) is not Action.NOTHING
                ),
                None,
            )
        if due is not None:
            warmup = due[1] is Action.WARMUP
            # A train_overall window holds the work of all roles, so it has the role of its session.
            named = self.role if due[0] == TRAIN_OVERALL else role
            self._open(Window(due[0], named, step, self.coords, warmup), role, keep=not warmup)
        holder = Session._holder
        window = holder._open_window if holder is not None else None
        call = RecordedCall(facts, _NOTHING, clock=None if self.timeline is None else self.timeline.clock)
        if window is not None:
            call.outermost = outermost = ExitStack()
            call.ranged = self.config.ranges != "step"
            if role not in (None, window.window.role) and scope.window is not window:
                outermost.enter_context(Range(ranges.role_range(str(role))))
            outermost.enter_context(Range(ranges.step_range(target, step, self.coords)))
            if self._open_window is not None and self._open_window.call is None:
                self._open_window.call = call
        # Nothing may be timed while a CUDA graph is captured.
        if self.timeline is not None and target in self._timed and facts.graph != "capture":
            call.line = self.timeline.begin(call, target, role, step, captured=window is not None)
        return call if window is not None or call.line is not None else None

    def _begin_work(self, role: str) -> bool:
        index = self._count(ANNOTATED, role)
        step = self._number(ANNOTATED, index)
        phase = self._phase(ANNOTATED, role, step, index)
        if phase is Action.NOTHING or Session._holder is not None:
            return False
        warmup = phase is Action.WARMUP
        self._open(Window(ANNOTATED, role, step, self.coords, warmup), role, keep=not warmup)
        return True

    def _asked(self, demand: Demand, facts: CallFacts, target: str, role: str | None, step: int, index: int) -> bool:
        """Open the window that ``demand`` wants of this call, if any. A tool that fails ends the demand and nothing
        else: whoever asked is told, and can ask again."""
        if not demand.due(target, role, index):
            return False
        if Session._holder is not None or facts.graph == "capture":
            demand.give_up("another window was open" if facts.graph != "capture" else "a CUDA graph was captured")
            return False
        window = Window(demand.target, self.role if demand.target == TRAIN_OVERALL else role, step, self.coords)
        try:
            self._open(window, role, keep=True, demand=demand)
        except Exception as fault:
            if from_host(fault):
                raise
            logger.warning("megaprof: a capture on demand could not start: %r", fault)
            demand.give_up(f"it could not start: {fault}")
            in_full(*(recorder.discard for recorder in demand.recorders), self._release)
            return False
        demand.taken.append(step)
        return True

    def _count(self, target: str, role: str | None) -> int:
        """The number of a call that begins, from 0 on."""
        index = self.calls.get((target, role), 0)
        self.calls[target, role] = index + 1
        return index

    def _number(self, target: str, index: int) -> int:
        """The step's number: the host's iteration for training steps and annotated work where it has one, else counted
        per target and role.

        A host numbers its iterations, not its forward-only passes: several log-prob passes share one. Where it says
        of the pass itself which iteration it belongs to, the first of them is the one that can be captured.
        """
        if target == TRAIN_LOG_PROBS:
            numbered = self._pass_iteration
        else:
            numbered = self._iteration if target in (TRAIN_ACTOR, ANNOTATED) else None
        iteration = None if numbered is None else numbered()
        return index if iteration is None or iteration < 0 else int(iteration)

    def _phase(self, target: str, role: str | None, step: int, index: int) -> Action:
        plan = self._plan(target, role)
        phase = Action.NOTHING if plan is None else plan.action(step, index)
        # A host may run one iteration twice (Megatron's rerun machinery); its first run is the one that is kept.
        if phase is Action.CAPTURE and self._captured.get((target, role)) == step:
            return Action.NOTHING
        return phase

    def _plan(self, target: str, role: str | None) -> Plan | None:
        """The captured steps of a target and role; None when this rank captures none of them. Looked up once."""
        if (target, role) not in self._plans:
            selector = self.config.selector(role)
            wanted = self.config.windowed and (target == ANNOTATED or target in self.config.target)
            chosen = wanted and selector is not None and selector.selects(self.coords)
            self._plans[target, role] = self.config.plan(target, role) if chosen else None
        return self._plans[target, role]

    def _memory_ran_out(self, reason: str) -> None:
        if Session._holder is self:
            Session.memory_full = reason
            Session.urgent = True

    def _open(self, window: Window, opener: str | None, *, keep: bool, demand: Demand | None = None) -> None:
        Session._holder = self
        spans_calls = window.target == ANNOTATED or (window.target == TRAIN_OVERALL and keep)
        self._open_window = opened = _OpenWindow(window, keep, opener, demand=demand)
        self._guard.start()
        for recorder in reversed(self._recorders if demand is None else demand.recorders):
            recorder.start(window)
        if spans_calls:
            opened.overall = Range(ranges.step_range(window.target, window.step, self.coords))
            opened.overall.__enter__()

    def _close(self, truncated: str | None) -> None:
        opened = self._open_window
        if opened is None:
            return
        if opened.overall is not None:
            opened.overall.close()
        demand = opened.demand
        recorders = self._recorders if demand is None else demand.recorders
        if not opened.keep:
            for recorder in recorders:
                recorder.discard()
        elif opened.call is not None or opened.window.target == ANNOTATED:
            if demand is None:
                self._captured[opened.window.target, opened.opener] = opened.window.step
            metadata = describe(opened.window, opened.call or no_call(), self.config, truncated)
            try:
                for recorder in recorders:
                    recorder.stop(opened.window, metadata)
                self._window_ended()
            except Exception as fault:
                if demand is None or from_host(fault):
                    raise
                logger.warning("megaprof: a capture on demand could not be written: %r", fault)
                demand.give_up(f"it could not be written: {fault}")
                in_full(*(recorder.discard for recorder in recorders))
        self._release()
        if demand is not None:
            demand.closes()

    def _release(self) -> None:
        self._guard.stop()
        self._open_window = None
        if Session._holder is self:
            Session._holder = None
