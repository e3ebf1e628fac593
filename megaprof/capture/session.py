"""The conductor: hook events -> windows -> recorders. One session per ``install_hooks`` call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from megaprof.artifacts.neighbours import Neighbours
from megaprof.capture.agenda import Agenda, Begun, Call, CountedStep, HostNumbers, PlannedWindow
from megaprof.capture.ahead import Pace, Prepared
from megaprof.capture.compat import Offloading
from megaprof.capture.demand import Demand
from megaprof.capture.opened import OpenWindow
from megaprof.capture.scope import current
from megaprof.capture.this_rank import check_role
from megaprof.config.options import ProfileConfig
from megaprof.config.windows import ANNOTATED, TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.formats import ranges
from megaprof.parallel.topology import RankCoords
from megaprof.recorders import Recorder, Window
from megaprof.recorders.call import NO_CALL, CallFacts, RecordedCall
from megaprof.recorders.describe import describe
from megaprof.recorders.emit import Range
from megaprof.recorders.graph_names import names
from megaprof.recorders.tape import Tape
from megaprof.runtime.device import GRACE_SECONDS, capturing
from megaprof.runtime.hostmemory import HostMemoryGuard, parse_limit
from megaprof.runtime.interruption import from_host
from megaprof.runtime.isolation import Contained, contained, fault_now, in_full
from megaprof.runtime.logs import logger

if TYPE_CHECKING:
    from megaprof.recorders.timeline.recorder import TimelineRecorder
    from megaprof.runtime.ending import Termination


_NOTHING: AbstractContextManager[object] = nullcontext()


class Session:
    """Decides, call by call, whether a window opens, and drives the recorders. Runs on the training thread.

    A window whose recorder fails is lost, and nothing else is. Any other fault in here turns the session off for the
    rest of the run. Neither reaches the caller.
    """

    #: The session whose window is open. A process holds one Kineto session, so it has one open window at most; what
    #: other sessions do meanwhile is recorded in it.
    _holder: Session | None = None
    #: What was prepared behind the call before, for this one.
    _ahead: Prepared | None = None
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
        numbers: HostNumbers,
        timeline: TimelineRecorder | None = None,
        window_ended: Callable[[Window], None] = lambda window: None,
        repeat: Callable[[Window], int] = lambda window: 1,
        framework: str | None = None,
        termination: Termination | None = None,
    ) -> None:
        """``numbers``: of the host's steps. ``window_ended`` is called once every file of a window is with the writer;
        ``repeat`` says the how-manieth window of its names one is that opens; ``framework`` names the host;
        ``termination`` keeps a SIGTERM from ending a window half-way."""
        self.off: str | None = None
        """Why nothing more is recorded in this run, after a fault; None: it is."""
        self._termination = termination
        self._held: AbstractContextManager[object] = _NOTHING if termination is None else termination
        self._window_ended = window_ended
        self._repeat = repeat
        self._framework = framework
        self.timeline = timeline
        self.config = config
        self.coords = coords
        self.role = role
        self._recorders = tuple(recorders)
        self._timed = frozenset((*config.target, TRAIN_ACTOR) if TRAIN_OVERALL in config.target else config.target)
        self.agenda = Agenda(config, coords, role)
        self._numbers = numbers
        #: A capture that was asked for while the job runs; set and cleared by the background thread.
        self.demand: Demand | None = None
        self._roles = {role}
        self._losses: set[str] = set()
        self._offloading = Offloading(config)
        self._pace = Pace()
        #: What is prepared behind the call that runs, because the next one is captured.
        self._coming: Sequence[Recorder] = ()
        self._thread = threading.get_ident()
        self._open_window: OpenWindow | None = None
        limit = parse_limit("max_host_memory", config.max_host_memory)
        self._guard = HostMemoryGuard(limit, self._memory_ran_out, Neighbours)

    @property
    def disabled(self) -> bool:
        """True after a fault: nothing more is recorded in this run."""
        return self.off is not None

    @property
    def calls(self) -> dict[tuple[str, str | None], int]:
        """By target and role: how many calls have begun. Read by the background thread."""
        return self.agenda.calls

    def begin(self, facts: CallFacts) -> RecordedCall | None:
        """A ``forward_backward_func`` call starts. Returns what ``end`` needs, or None: nothing is recorded."""
        if self.disabled:
            return None
        try:
            if facts.graph is None and capturing():  # by something else than Megatron's own wrapper
                facts = facts._replace(graph="capture")
            role = self.role if (own := current().role) is None else own
            if role not in self._roles:
                self._meet(role)
            begun = self._begins(facts.target, role)
            if self._recorders or self.demand is not None:
                self._coming = self._needed_next(begun.steps)
            if self._open_window is not None and not capturing():
                with self._held:
                    self._end_or_extend(self._open_window, facts, begun)
            wanted = self.agenda.wanted(begun, self.demand)
            if wanted or Session._ahead is not None:
                with self._held:
                    self._open_first(wanted, facts)
                    if facts.graph != "capture":  # nothing may be synchronised while it is captured
                        self._leave_prepared()
            elif self._termination is not None and self._termination.armed:
                self._termination.settle()  # the last window's files may be written by now
            return self._record(facts, begun.step)
        except BaseException as fault:
            if not contained("opening a window", self.abandon, fault):
                raise
        return None

    def end(self, call: RecordedCall, *, failed: bool) -> None:
        """The call that ``begin`` answered with ``call`` returned, or raised an exception of the host's."""
        try:
            if call.line is not None and self.timeline is not None:
                self.timeline.end(call.line, failed=failed)
            call.outermost.__exit__(None, None, None)
            opened, coming = self._open_window, self._coming
            if opened is None and not coming:
                return
            with self._held:
                if opened is not None and failed:
                    self._close("the host raised an exception")
                elif (
                    opened is not None and not opened.planned.outlasts_call and self.agenda.is_complete(opened.planned)
                ):
                    self._close(None)
                if coming and not failed and Session._holder is None and not capturing() and self._pace.ends():
                    Session._ahead = Prepared(self, coming)
                    Session._ahead.prepare()
        except BaseException as fault:
            if not contained("closing a window", self.abandon, fault):
                raise

    def begin_work(self, role: str) -> bool:
        """Annotated work of ``role`` starts, outside any other of that role. True: it has a window of its own, and
        ``end_work`` must follow. Only on the thread that installed the hooks: recorders follow one thread's work."""
        opened = False
        if not self.disabled and self.config.discrete and threading.get_ident() == self._thread:
            with Contained("opening a window", self.abandon), self._held:
                self._meet(role)
                begun = self._begins(ANNOTATED, role)
                free = Session._holder is None and not capturing()
                if free and self._offloading.refusal(()) is None:
                    self._open_first(self.agenda.wanted(begun), NO_CALL)
                    opened = self._open_window is not None
        return opened

    def end_work(self, *, failed: bool) -> None:
        """The work that ``begin_work`` answered with True is over, or raised an exception of the host's."""
        with Contained("closing a window", self.abandon), self._held:
            if self._open_window is not None and self._open_window.window.target == ANNOTATED:
                self._close("the host raised an exception" if failed else None)

    @staticmethod
    def open_window() -> object:
        """The window that is open in this process, None when there is none. Only its identity means something."""
        return Session._holder._open_window if Session._holder is not None else None

    @property
    def thread(self) -> int | None:
        """The thread that opened this session's window, or prepared its recorders, and alone can end that; None: there
        is nothing to end."""
        if self._open_window is not None:
            return self._open_window.thread
        return Session._ahead.thread if Session._ahead is not None and Session._ahead.owner is self else None

    def finish(self, reason: str, seconds: float | None = None) -> None:
        """Close an open window early; what it has is kept and marked truncated. A no-op without one.

        What the device has not finished within ``seconds`` (None: ``--profile-flush-seconds``) is not in it.
        """
        with Contained("closing the last window", self.abandon), self._held:
            self._close(reason, seconds, last=True)
            if Session._ahead is not None and Session._ahead.owner is self:
                self._leave_prepared()

    def step_ended(self) -> None:
        """The host's step is over: the window of all its work is complete. A no-op without one."""
        opened = self._open_window
        if opened is not None and opened.window.target == TRAIN_OVERALL:
            with Contained("closing the window of a step", self.abandon), self._held:
                if self.agenda.is_complete(opened.planned):
                    self._close(None)

    def interrupt(self, call: RecordedCall, reason: str) -> None:
        """`cut`, and end the timeline's step: ``end`` must not be called any more."""
        with Contained("closing a window early", self.abandon):
            if call.line is not None and self.timeline is not None:
                self.timeline.end(call.line, failed=False)
        self.cut(call, reason)

    def cut(self, call: RecordedCall, reason: str) -> None:
        """Close the process's open window in the middle of ``call``, which the timeline goes on with."""
        with Contained("closing a window early", self.abandon), self._held:
            call.ranged = False
            call.outermost.__exit__(None, None, None)
            if Session._holder is not None:
                Session._holder.finish(reason, GRACE_SECONDS)

    def abandon(self) -> None:
        """After a fault: record nothing more in this run and leave no recorder running. Can be run twice."""
        self.off = self.off or fault_now()
        opened, demand = self._open_window, self.demand
        overall = None if opened is None else opened.overall
        with self._held:
            in_full(
                *([] if self.timeline is None else [self.timeline.abandon]),
                *([] if overall is None else [overall.close]),
                *(recorder.discard for recorder in (*self._recorders, *(() if demand is None else demand.recorders))),
                self._release,
            )
        self.demand = None
        self._coming = ()
        if Session._ahead is not None and Session._ahead.owner is self:
            Session._ahead = None

    def _begins(self, target: str, role: str | None) -> Begun:
        return self.agenda.begins(Call(target, role, *self._numbers.of(target)))

    def _needed_next(self, steps: Sequence[CountedStep]) -> Sequence[Recorder]:
        """What records the next call, if that is the step behind one of ``steps`` and to be captured; else nothing."""
        demand = self.demand
        for step in self._pace.begins(steps):
            if self.agenda.comes(step):
                return self._recorders
            if demand is not None and demand.comes(step.target, step.role, step.index + 1):
                return demand.recorders
        return ()

    def _leave_prepared(self) -> None:
        """A call has begun: what was prepared for it is in use now, or is not wanted after all."""
        ahead, Session._ahead = Session._ahead, None
        if ahead is not None:
            ahead.leave(() if self._open_window is None else self._recorders_of(self._open_window))

    def _recorders_of(self, opened: OpenWindow) -> Sequence[Recorder]:
        demand = opened.planned.demand
        return self._recorders if demand is None else demand.recorders

    def _meet(self, role: str | None) -> None:
        if role not in self._roles:
            self._roles.add(role)
            check_role(self.config, str(role), self.coords)

    def _end_or_extend(self, opened: OpenWindow, facts: CallFacts, begun: Begun) -> None:
        """A call begins while ``opened`` is open: it ends there, takes a further step, or nothing changes."""
        planned, last = opened.planned, opened.planned.last
        if not self.agenda.goes_on(planned, begun):
            self._close(None)
        elif planned.last is not last and opened.overall is not None:
            opened.overall.close()
            opened.overall = self._whole_step(planned.last)
        elif planned.target == ANNOTATED and opened.call is None:
            refusal = self._offloading.refusal(facts.chunks)
            if refusal is not None:
                logger.error("megaprof: annotated work of %s is not captured: %s", planned.last.role, refusal)
                in_full(*(recorder.discard for recorder in self._recorders), self._release)

    def _open_first(self, wanted: Sequence[PlannedWindow], facts: CallFacts) -> None:
        """Open the first of ``wanted`` that can be. What cannot be opened now takes a later call, if it is to be."""
        for planned in wanted:
            holder = Session._holder
            inside = None if holder is None or holder._open_window is None else holder._open_window.planned.target
            if holder is not None or facts.graph == "capture":  # nothing may be synchronised while it is captured
                self._wait(planned, inside)
            elif (refusal := self._refusal_of(facts, planned)) is not None:
                self._refuse(planned, refusal)
            else:
                self._open(planned)

    def _wait(self, planned: PlannedWindow, inside: str | None) -> None:
        """``planned`` cannot be opened, because a window of target ``inside`` is open, or for None, because a CUDA
        graph is captured."""
        if planned.demand is not None:
            planned.demand.give_up("a CUDA graph was captured" if inside is None else "another window was open")
        elif self.agenda.put_off(planned, inside):
            reason = "a CUDA graph is captured in it" if inside is None else f"a window of {inside} is open in it"
            step = f"{planned.target} step {planned.first.number}"
            logger.info("megaprof: %s: %s, so the next free call is captured", step, reason)

    def _refuse(self, planned: PlannedWindow, refusal: str) -> None:
        if planned.demand is not None:
            planned.demand.give_up(refusal)
        elif planned.asked is None:
            self.agenda.opens(planned)
            self.agenda.lose(planned, refusal)
            step = f"{planned.target} step {planned.first.number}"
            logger.error("megaprof: %s is not captured: %s", step, refusal)

    def _refusal_of(self, facts: CallFacts, planned: PlannedWindow) -> str | None:
        """Why no window may open for ``planned``, None where it may."""
        if planned.target != TRAIN_OVERALL and not planned.merges:
            return None
        return self._offloading.refusal(facts.chunks, None if planned.demand is None else planned.demand.holding)

    def _record(self, facts: CallFacts, step: CountedStep) -> RecordedCall | None:
        """What is recorded of the call, in the open window and in the timeline; None: nothing."""
        holder = Session._holder
        window = holder._open_window if holder is not None else None
        timeline = self.timeline
        tape = Tape(facts.chunks, facts.forward_only, None if timeline is None else timeline.clock)
        call = RecordedCall(facts, _NOTHING, tape)
        if window is not None or (facts.graph == "capture" and names.available):
            call.ranged = self.config.ranges != "step"
        if window is not None:
            call.outermost = outermost = ExitStack()
            scope = current()
            if step.role not in (None, window.window.role) and scope.window is not window:
                outermost.enter_context(Range(ranges.role_range(str(step.role))))
            outermost.enter_context(Range(ranges.step_range(step.target, step.number, self.coords)))
            if self._open_window is not None and self._open_window.call is None:
                self._open_window.call = call
        # Nothing may be timed while a CUDA graph is captured.
        if timeline is not None and step.target in self._timed and facts.graph != "capture":
            captured = window is not None
            call.line = timeline.begin(call, step.target, step.role, step.number, captured=captured)
        return call if window is not None or call.line is not None or call.ranged or self._coming else None

    def _memory_ran_out(self, reason: str) -> None:
        if Session._holder is self:
            Session.memory_full = reason
            Session.urgent = True

    def _open(self, planned: PlannedWindow) -> None:
        """Open ``planned``; where its recorders cannot start, it is lost."""
        step = planned.first
        self.agenda.opens(planned)
        # A train_overall window holds the work of all roles, so it has the role of its session.
        role = self.role if step.target == TRAIN_OVERALL else step.role
        window = Window(step.target, role, step.number, self.coords, asked=planned.asked)
        window = replace(window, repeat=self._repeat(window))
        Session._holder = self
        self._open_window = opened = OpenWindow(window, planned)
        try:
            self._guard.start()
            for recorder in reversed(self._recorders_of(opened)):
                recorder.start(window)
        except Exception as fault:
            if from_host(fault):
                raise
            self._lose(opened, "it could not start", fault)
            return
        if planned.demand is not None:
            planned.demand.taken.append(step.number)
        if planned.outlasts_call:
            opened.overall = self._whole_step(step)

    def _whole_step(self, step: CountedStep) -> Range:
        (entering := Range(ranges.step_range(step.target, step.number, self.coords))).__enter__()
        return entering

    def _close(self, truncated: str | None, seconds: float | None = None, *, last: bool = False) -> None:
        """``last``: no later call can close the window."""
        opened = self._open_window
        if opened is None or (capturing() and not last):
            return
        if opened.overall is not None:
            opened.overall.close()
        recorders = self._recorders_of(opened)
        if opened.call is not None or opened.window.target == ANNOTATED:
            limit = self.config.flush_seconds if seconds is None else seconds
            late = opened.device.wait(limit, lambda: self._termination is not None and self._termination.due)
            self._save(opened, recorders, "; ".join(filter(None, (truncated, late))) or None)
        else:
            for recorder in recorders:
                recorder.discard()
        self._release()
        if opened.planned.demand is not None:
            opened.planned.demand.closes()

    def _save(self, opened: OpenWindow, recorders: Sequence[Recorder], truncated: str | None) -> None:
        """Have the files of a window written."""
        self._guard.closes()
        window = replace(opened.window, last=opened.planned.last.number)
        call = opened.call or RecordedCall(NO_CALL, _NOTHING, Tape())
        try:
            metadata = describe(window, call, self.config, truncated, self._framework)
            for recorder in recorders:
                recorder.stop(window, metadata)
            self._window_ended(window)
        except Exception as fault:
            if from_host(fault):
                raise
            self._lose(opened, "it could not be written", fault)
        else:
            self.agenda.has_file(opened.planned)

    def _lose(self, opened: OpenWindow, why: str, fault: Exception) -> None:
        """A tool failed: there is no file of this window. Later ones are tried again, and the timeline goes on."""
        in_full(*(recorder.discard for recorder in self._recorders_of(opened)), self._release)
        reason, kind = f"{why}: {fault}", f"{why}: {type(fault).__name__}"
        planned = opened.planned
        if planned.demand is not None:
            planned.demand.give_up(reason)
        else:
            self.agenda.lose(planned, reason)
        if kind not in self._losses:  # each kind is said once: every window may fail
            step = f"{planned.target} step {planned.last.number}"
            logger.error("megaprof: %s is not captured, and all else goes on: %s: %r", step, why, fault)
        self._losses.add(kind)

    def _release(self) -> None:
        self._guard.stop()
        if self._open_window is not None:
            self._open_window.device.end()
        self._open_window = None
        if Session._holder is self:
            Session._holder = None
