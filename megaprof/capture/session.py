"""The conductor: hook events -> windows -> recorders. One session per ``install_hooks`` call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from megaprof.artifacts.neighbours import Neighbours
from megaprof.capture.agenda import Agenda, Number, Step, check_role
from megaprof.capture.ahead import Pace, Prepared
from megaprof.capture.compat import Offloading
from megaprof.capture.demand import Demand
from megaprof.capture.opened import OpenWindow
from megaprof.capture.scope import current
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
        iteration: Number | None = None,
        pass_iteration: Number | None = None,
        host_step: Number | None = None,
        timeline: TimelineRecorder | None = None,
        window_ended: Callable[[Window], None] = lambda window: None,
        repeat: Callable[[Window], int] = lambda window: 1,
        framework: str | None = None,
        termination: Termination | None = None,
    ) -> None:
        """``iteration``, ``pass_iteration``, ``host_step``: see `Agenda`. ``window_ended`` is called once every file of
        a window is with the writer; ``repeat`` says the how-manieth window of its names one is that opens;
        ``framework`` names the host; ``termination`` keeps a SIGTERM from ending a window half-way."""
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
        self.agenda = Agenda(
            config, coords, role, iteration=iteration, pass_iteration=pass_iteration, host_step=host_step
        )
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
            agenda = self.agenda
            step = agenda.begin(facts.target, role)
            begun = agenda.host_step(step)
            if self._recorders or self.demand is not None:
                self._coming = self._needed_next([step] if begun is None else [begun, step])
            if (
                self._open_window is not None
                or Session._ahead is not None
                or self.demand is not None
                or agenda.concerns(step)
                or (begun is not None and agenda.concerns(begun))
            ):
                with self._held:
                    self._change_windows(facts, step, begun)
                    if facts.graph != "capture":  # nothing may be synchronised while it is captured
                        self._leave_prepared()
            elif self._termination is not None and self._termination.armed:
                self._termination.settle()  # the last window's files may be written by now
            return self._record(facts, step)
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
                elif opened is not None and opened.overall is None and not (opened.merges and self._goes_on(opened)):
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
                opened = self._begin_work(self.agenda.begin(ANNOTATED, role))
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
                if not (opened.merges and self._goes_on(opened)):
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

    def _needed_next(self, steps: list[Step]) -> Sequence[Recorder]:
        """What records the next call, if that is the step behind one of ``steps`` and to be captured; else nothing."""
        demand = self.demand
        for each in self._pace.begins(steps):
            if self.agenda.comes(each):
                return self._recorders
            if demand is not None and (each.target, each.role) == (demand.counted, demand.role):
                return demand.recorders if demand.comes(each.index + 1) else ()
        return ()

    def _leave_prepared(self) -> None:
        """A call has begun: what was prepared for it is in use now, or is not wanted after all."""
        ahead, Session._ahead = Session._ahead, None
        if ahead is not None:
            ahead.leave(() if self._open_window is None else self._recorders_of(self._open_window))

    def _recorders_of(self, opened: OpenWindow) -> Sequence[Recorder]:
        return self._recorders if opened.demand is None else opened.demand.recorders

    def _meet(self, role: str | None) -> None:
        if role not in self._roles:
            self._roles.add(role)
            check_role(self.config, str(role), self.coords)

    def _change_windows(self, facts: CallFacts, step: Step, begun: Step | None) -> None:
        """Close the window that ends with this call, and open the one that is due."""
        if self._open_window is not None and not capturing():
            self._settle_open_window(self._open_window, facts, step, begun)
        if self.demand is None or not self._open_demanded(self.demand, facts, step, begun):
            self._open_due(facts, step, begun)

    def _settle_open_window(self, opened: OpenWindow, facts: CallFacts, step: Step, begun: Step | None) -> None:
        """Close the window that is open, where this call ends it, or take the step that begins into it."""
        if opened.window.target == ANNOTATED:
            if opened.call is None and (refusal := self._offloading.refusal(facts.chunks)) is not None:
                logger.error("megaprof: annotated work of %s is not captured: %s", opened.last.role, refusal)
                in_full(*(recorder.discard for recorder in self._recorders), self._release)
        elif opened.window.target == TRAIN_OVERALL:
            # Counted steps are a role's own: another role's are part of the window.
            another = begun is not None and begun.number != opened.last.number
            if begun is not None and another and (begun.hosts or begun.role == opened.last.role):
                self._extend_or_close(opened, begun)
        elif opened.merges and opened.is_of(step) and step.number != opened.last.number:
            self._extend_or_close(opened, step)

    def _extend_or_close(self, opened: OpenWindow, step: Step) -> None:
        if not opened.merges:
            self._close(None)
        elif opened.asked is None and self.agenda.joins(step, opened.last):
            self._extend(opened, step, None)
        elif opened.asked is not None and (owed := self.agenda.owed(step)) is not None:
            self._extend(opened, step, owed)
        else:
            self._close(None)

    def _extend(self, opened: OpenWindow, step: Step, asked: int | None) -> None:
        self.agenda.has_file(opened.last, opened.asked)
        self.agenda.take(step, asked)
        opened.last, opened.asked = step, asked
        if opened.overall is not None:
            opened.overall.close()
            opened.overall = self._whole_step(step)

    def _goes_on(self, opened: OpenWindow) -> bool:
        return self.agenda.goes_on(opened.last) if opened.asked is None else self.agenda.owes(opened.last)

    def _open_demanded(self, demand: Demand, facts: CallFacts, step: Step, begun: Step | None) -> bool:
        """Open the window that was asked for while the job runs, if it is this call's. A tool that fails ends the
        demand and nothing else: whoever asked is told, and can ask again."""
        own = (step.target, step.role) == (demand.counted, demand.role)
        upcoming = step.index if own else self.calls.get((demand.counted, demand.role), 0)
        if not demand.due(upcoming, own=own, begins=begun is not None):
            return False
        captured = begun if demand.target == TRAIN_OVERALL and begun is not None else step
        refusal = self._offloading.refusal(facts.chunks, demand.holding) if demand.target == TRAIN_OVERALL else None
        if Session._holder is not None:
            refusal = "another window was open"
        elif facts.graph == "capture":
            refusal = "a CUDA graph was captured"
        if refusal is not None:
            demand.give_up(refusal)
            return False
        opens = self._open(captured, demand=demand)
        if opens:
            demand.taken.append(captured.number)
        return opens

    def _open_due(self, facts: CallFacts, step: Step, begun: Step | None) -> None:
        """Open the window that is due with this call, if any. What cannot be opened now takes a later call."""
        steps = [step] if begun is None else [begun, step]
        if not any(map(self.agenda.concerns, steps)):
            return
        due = [each for each in steps if self.agenda.due(each)]
        opened = Session._holder._open_window if Session._holder is not None else None
        # Nothing may be synchronised while a CUDA graph is captured.
        if opened is None and facts.graph != "capture":
            self._open_first(facts, steps, due)
        for each in due:
            self._put_off(each, opened)

    def _open_first(self, facts: CallFacts, steps: list[Step], due: list[Step]) -> None:
        """Open the first window of ``due``, which it leaves; or one that is owed."""
        while due:
            chosen = due.pop(0)
            self.agenda.take(chosen)
            refusal = self._refusal_of(facts, chosen)
            if refusal is not None:
                logger.error("megaprof: %s step %d is not captured: %s", chosen.target, chosen.number, refusal)
            elif self._open(chosen):
                return
        for each in steps:
            asked = self.agenda.owed(each)
            if asked is not None and self._refusal_of(facts, each) is None:
                self.agenda.take(each, asked)
                if self._open(each, asked=asked):
                    return

    def _put_off(self, step: Step, opened: OpenWindow | None) -> None:
        """``step`` is wanted, and a window is open, which ``opened`` was before this call."""
        inside = Session._holder._open_window if Session._holder is not None else opened
        target = inside.window.target if inside is not None else None
        if target == ANNOTATED or target == step.target == TRAIN_OVERALL:
            return  # such a window holds all the work inside it
        self.agenda.put_off(step)
        reason = "a CUDA graph is captured in it" if inside is None else f"a window of {target} is open in it"
        logger.info("megaprof: %s step %d: %s, so the next free call is captured", step.target, step.number, reason)

    def _refusal_of(self, facts: CallFacts, step: Step) -> str | None:
        """Why no window may open for ``step``, None where it may."""
        outlasts = step.target == TRAIN_OVERALL or self.config.merge_steps
        return self._offloading.refusal(facts.chunks) if outlasts else None

    def _record(self, facts: CallFacts, step: Step) -> RecordedCall | None:
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

    def _begin_work(self, step: Step) -> bool:
        if self._offloading.refusal(()) is not None or capturing():
            return False
        free = Session._holder is None
        self._open_due(NO_CALL, step, None)
        return free and self._open_window is not None

    def _memory_ran_out(self, reason: str) -> None:
        if Session._holder is self:
            Session.memory_full = reason
            Session.urgent = True

    def _open(self, step: Step, *, asked: int | None = None, demand: Demand | None = None) -> bool:
        """False: it could not start."""
        # A train_overall window holds the work of all roles, so it has the role of its session.
        role = self.role if step.target == TRAIN_OVERALL else step.role
        window = Window(step.target, role, step.number, self.coords, asked=asked)
        window = replace(window, repeat=self._repeat(window))
        Session._holder = self
        merges = self.config.merge_steps and demand is None and step.target != ANNOTATED
        self._open_window = opened = OpenWindow(window, step, merges, asked, demand=demand)
        try:
            self._guard.start()
            for recorder in reversed(self._recorders if demand is None else demand.recorders):
                recorder.start(window)
        except Exception as fault:
            if from_host(fault):
                raise
            self._lose(opened, "it could not start", fault)
            return False
        if step.target in (ANNOTATED, TRAIN_OVERALL):
            opened.overall = self._whole_step(step)
        return True

    def _whole_step(self, step: Step) -> Range:
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
        if opened.demand is not None:
            opened.demand.closes()

    def _save(self, opened: OpenWindow, recorders: Sequence[Recorder], truncated: str | None) -> None:
        """Have the files of a window written."""
        self._guard.closes()
        window = replace(opened.window, last=opened.last.number)
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
            if opened.demand is None:
                self.agenda.has_file(opened.last, opened.asked)

    def _lose(self, opened: OpenWindow, why: str, fault: Exception) -> None:
        """A tool failed: there is no file of this window. Later ones are tried again, and the timeline goes on."""
        in_full(*(recorder.discard for recorder in self._recorders_of(opened)), self._release)
        reason, kind = f"{why}: {fault}", f"{why}: {type(fault).__name__}"
        if opened.demand is not None:
            opened.demand.give_up(reason)
        else:
            self.agenda.lose(opened.last, opened.asked, reason)
        if kind not in self._losses:  # each kind is said once: every window may fail
            step = f"{opened.window.target} step {opened.last.number}"
            logger.error("megaprof: %s is not captured, and all else goes on: %s: %r", step, why, fault)
        self._losses.add(kind)

    def _release(self) -> None:
        self._guard.stop()
        if self._open_window is not None:
            self._open_window.device.end()
        self._open_window = None
        if Session._holder is self:
            Session._holder = None
