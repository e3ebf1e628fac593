"""A session, which turns calls into windows and drives the recorders. Each ``install_hooks`` call makes one."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megaprof.artifacts.writer import Writer
from megaprof.capture.agenda import Agenda, CountedStep, Demand, Planned
from megaprof.capture.bounds import capturing, in_backward
from megaprof.capture.process import OpenWindow, process
from megaprof.capture.roles import current
from megaprof.capture.this_rank import ThisRank, offloads_manually, refusal
from megaprof.config.options import ProfileConfig
from megaprof.config.values import ANNOTATED, NO_STEPS, TARGETS, TRAIN_ACTOR, TRAIN_OVERALL, parse_limit
from megaprof.formats import ranges
from megaprof.recorders import Recorder, Window
from megaprof.recorders.call import NO_CALL, CallFacts, RecordedCall, describe
from megaprof.recorders.emit import Range, graph_naming
from megaprof.recorders.tape import Tape
from megaprof.runtime.isolation import Contained, fault_now, from_host, in_full, logger

if TYPE_CHECKING:
    from megaprof.recorders.timeline import TimelineRecorder

#: Why a window that was saved is lost: the disk took nothing, as the log says.
NO_FILE = "no file of it was written"

Numbers = Callable[[str], tuple["int | None", "int | None"]]
"""Gets the target of a call that begins, and returns the host's numbers of the call and of the host's step that it is
in. A number is None if unknown, and negative if the host has none."""


class Session:
    """Decides, call by call, whether a window opens, and drives the recorders. Runs on the training thread.

    If a recorder fails, only its window is lost. Any other fault in here turns the session off for the rest of the run
    (`Dispatcher.drop`).
    """

    def __init__(
        self,
        config: ProfileConfig,
        here: ThisRank,
        writer: Writer,
        *,
        role: str | None,
        numbers: Numbers,
        recorders: Sequence[Recorder],
        framework: str | None,
    ) -> None:
        """``role``: the role that the model has. ``numbers`` returns the host's numbers of a call. ``framework`` names
        the host."""
        self.config = config
        self.role = role
        self.coords, self.layout = here.coords, here.layout
        self.models: tuple[Callable[[], Any], ...] | None = None
        """Return the models that it was installed for, while they live; None for any model of no other session's."""
        self.writer = writer
        self.recorders = tuple(recorders)
        self.timeline: TimelineRecorder | None = None
        """The recorder of every step, or of those around windows; None if this rank needs neither."""
        self.agenda = Agenda(config, here.coords, role)
        self.off: str | None = None
        """The fault after which nothing more is recorded in this run; None if there was none."""
        self.removed = threading.Event()
        """Set once its hooks are removed and its files are finished."""
        self.handle: object = None
        """The `megaprof.Handle` that the host holds, and gets again if it installs the same hooks again."""
        self.at_end: list[Callable[[], object]] = []
        """Functions that are called when the session ends, once its files are finished."""
        self.demand: Demand | None = None
        """The capture that was requested while the job runs, until its files are finished and the request is gone. Set
        and cleared by the background thread."""
        self._termination = process.termination  # keeps a SIGTERM from ending a window half-way
        self._numbers = numbers
        self._framework = framework
        self._speaks = here.speaks
        self._windows = 0  # the number of windows that were saved
        # A request may name any target, and the calls before it are kept in memory only.
        targets = TARGETS if config.on_demand and config.around_windows else config.target
        self._timed = frozenset((*targets, TRAIN_ACTOR) if TRAIN_OVERALL in targets else targets)
        self._roles = {role}
        self._offloads = False  # whether a model of a call so far is offloaded manually
        #: The recorders that will be prepared when the running call ends, because the next call is captured.
        self._coming: Sequence[Recorder] = ()
        self._began = self._between = 0  # when the running call began, and how long after the one before it, in ns
        self._thread = threading.get_ident()
        self._memory_limit = parse_limit("max_host_memory", config.max_host_memory), here.neighbours

    def begin(self, facts: CallFacts) -> RecordedCall | None:
        """Handles the start of a ``forward_backward_func`` call. Returns the recorded call, which ``end`` needs, or
        None if nothing is recorded."""
        if self.off is not None:
            return None
        if facts.graph is None and capturing():  # something other than Megatron's own wrapper captures it
            facts = facts._replace(graph="capture")
        role = current().role or self.role
        if role not in self._roles:
            self._meet(role)
        target = facts.target
        opened = None if process.window is None else self._own_window
        graph, demand = facts.graph == "capture", self.demand
        steps, opens = self.agenda.begins(target, role, *self._numbers(target), graph=graph, demand=demand)
        self._coming = ()
        if self.recorders or demand is not None:
            now = time.perf_counter_ns()
            self._between, self._began = now - self._began, now
            if (coming := self.agenda.before_wanted(demand)) is not None:
                self._coming = self.recorders if coming[1] is None else coming[1].recorders
        if opened is not None or opens or process.prepared:
            with self._termination:
                if opened is not None and not (capturing() or opened.step.goes_on(steps)):
                    self._close(None)
                elif opened is not None:
                    self._check_work(opened, facts)
                self._open_first(opens, facts)
                if facts.graph != "capture":  # nothing may be synchronised while a graph is captured
                    self._leave_prepared()
        elif self._termination.handler is not None:
            self._termination.settle()  # the last window's files may be written by now
        return self._record(facts, steps[-1])

    def end(self, call: RecordedCall, *, failed: bool) -> None:
        """Handles the end of the call for which ``begin`` returned ``call``. ``failed``: whether it raised an exception
        of the host's. If a fault has turned the session off meanwhile, its recorders stop."""
        if self.off is not None:
            in_full(call.outermost.close, self.abandon)
            return
        coming = self._coming
        if coming and (
            failed or capturing() or not follows_at_once(self._between, time.perf_counter_ns() - self._began)
        ):
            coming = ()
        if call.timed and self.timeline is not None:
            # A GPU is still at work on a call that ends, so preparing the profiler disturbs it.
            self.timeline.end(call.tape, failed=failed, disturbed=bool(coming))
        call.outermost.close()
        opened = None if process.window is None else self._own_window
        if opened is None and not coming:
            return
        with self._termination:
            if opened is not None and (failed or not opened.step.outlasts_call):
                self._close("the host raised an exception" if failed else None)
            if coming and process.window is None:
                self._prepare(coming)

    def begin_work(self, role: str) -> bool:
        """Handles the start of annotated work of ``role``, outside other work of that role. Returns whether the work
        has a window of its own; then `over` must follow. A window opens only on the thread that installed the
        hooks, because recorders follow the work of one thread."""
        if self.off is not None or not self.config.discrete:
            return False
        if threading.get_ident() == self._thread:
            with self._termination:
                if role not in self._roles:
                    self._meet(role)
                graph, before = capturing(), process.window
                numbers = self._numbers(ANNOTATED)
                _, opens = self.agenda.begins(ANNOTATED, role, *numbers, graph=graph, demand=self.demand)
                self._open_first(opens, NO_CALL._replace(graph="capture" if graph else None))
                return process.window is not before
        elif self.agenda.plan_of(ANNOTATED, role) != NO_STEPS:
            logger.once("megaprof: annotated work of %s is captured only on the thread of install_hooks", role)
        return False

    def over(self, target: str, *, failed: bool = False) -> None:
        """Handles the end of work for which ``begin_work`` returned True (``annotated``), or of a step of the host
        (``train_overall``): closes its window, if it has one. ``failed``: whether it raised an exception of the
        host's."""
        with Contained("closing a window", self.abandon), self._termination:
            if (opened := self._own_window) is not None and opened.window.target == target:
                self._close("the host raised an exception" if failed else None)

    @property
    def _own_window(self) -> OpenWindow | None:
        """The open window, if this session opened it; else None."""
        opened = process.window
        return opened if opened is not None and opened.owner is self else None

    def end_window(self, reason: str, seconds: float | None = None, *, last: bool = True) -> None:
        """Closes an open window early, and marks it as truncated because of ``reason``. A no-op without a window, and
        without ``last`` where it is better left open: the session goes on.

        Work that the device has not finished within ``seconds`` (None: ``--profile-flush-seconds``) is not in it.
        """
        with Contained("closing the last window", self.abandon), self._termination:
            self._close(reason, seconds, last=last)
            self._leave_prepared()

    def close(self, reason: str, seconds: float, *, last: bool = True) -> None:
        """Closes an open window, finishes every file within ``seconds``, and logs what was captured. The window gets
        half of that time: the device may never be idle, and the files of other windows must be finished as well.
        ``last``: False if the session goes on."""
        deadline = time.monotonic() + seconds
        finish = self.writer.close if last else self.writer.flush
        in_full(
            partial(self.end_window, reason, seconds / 2, last=last),
            None if self.timeline is None or not last else self.timeline.close,
            lambda: finish(max(0.0, deadline - time.monotonic())),
            *((*self.at_end, self._say_end) if last else ()),
        )

    def _say_end(self) -> None:
        """Logs, once, how many windows the run has captured, and what never ran."""
        speaks, self._speaks = self._speaks, False
        if not speaks or not self.config.windowed or self.config.steps_are_none:
            return
        unmet = list(self.agenda.never_came()) if self.off is None else ["profiling was off after a fault"]
        reasons = (reason for wish in self.agenda.wishes.values() for reason in wish.wanted.values())
        windows = self._windows - sum(reason == NO_FILE for reason in reasons)
        if not windows and not unmet:  # the roles that ran are captured on other ranks
            return
        done = f"{windows or 'no'} window{'s' * (windows != 1)} captured into {self.config.dir}"
        logger.log(logging.WARNING if unmet else logging.INFO, "megaprof ends: %s", "; ".join([done, *unmet]))

    def abandon(self) -> None:
        """Stops all recorders after a fault, and records nothing more in this run. Can be run twice."""
        self.off = self.off or fault_now()
        opened, demand = self._own_window, self.demand
        with self._termination:
            in_full(
                None if self.timeline is None else self.timeline.abandon,
                None if opened is None or opened.overall is None else opened.overall.close,
                *(recorder.discard for recorder in (*self.recorders, *(demand.recorders if demand else ()))),
                self._release,
                self._leave_prepared,
            )
        self._coming = ()

    def _prepare(self, recorders: Sequence[Recorder]) -> None:
        """Prepares the ``recorders`` that can be prepared, for the next call. A failure is only logged: starting the
        recorder will report it again."""
        process.prepared, process.thread = recorders, threading.get_ident()
        for recorder in reversed(recorders):
            prepare = getattr(recorder, "prepare", None)
            try:
                if prepare is not None:
                    prepare()
            except Exception as fault:
                if from_host(fault):
                    raise
                logger.warning("megaprof: the profiler could not be prepared ahead of a step: %r", fault)
                recorder.discard()

    def _leave_prepared(self) -> None:
        """Discards the recorders that were prepared for the next call, unless a window uses them now."""
        prepared, process.prepared = process.prepared, ()
        if prepared:
            process.disturbed = True
            used = () if process.window is None else process.window.recorders
            in_full(*(one.discard for one in prepared if all(one is not other for other in used)))

    def _meet(self, role: str | None) -> None:
        """Logs which selected ranks of ``role`` do not exist, when the role runs in this process for the first time.

        That is not an error, and cannot be checked earlier: until a role runs, nobody knows in which process it will,
        and roles may run in jobs of different sizes.
        """
        self._roles.add(role)
        try:
            self.config.selector(role).check(self.coords.sizes, option=self.config.select_option(role))
        except ValueError as mistake:
            logger.warning("megaprof: %s; %s is captured on the ranks that exist", mistake, role)

    def _check_work(self, opened: OpenWindow, facts: CallFacts) -> None:
        """Discards an open window of annotated work whose first call shows a model that must not be in one."""
        if opened.step.target != ANNOTATED or opened.call is not None or capturing():
            return
        if (reason := self._refusal(facts, self.config.holding)) is not None:
            self.agenda.lose(opened.step, None, reason)
            logger.error("megaprof: %s is not captured: %s", opened.step, reason)
            in_full(*(recorder.discard for recorder in opened.recorders), self._release)

    def _open_first(self, wanted: Sequence[Planned], facts: CallFacts) -> None:
        """Opens the first of ``wanted`` that can be opened. The others are lost."""
        for step, demand in wanted:
            window, level = process.window, logging.INFO
            if facts.graph == "capture":  # nothing may be synchronised while a graph is captured
                reason = "a CUDA graph was captured in it"
            elif window is not None:
                reason = f"a window of {window.step.target} was open in it"
            else:
                held = self.config.holding if demand is None else demand.holding
                refused = self._refusal(facts, held) if step.outlasts_call else None
                if refused is None:
                    self._open(step, demand)
                    continue
                reason, level = refused, logging.ERROR
            self.agenda.lose(step, demand, reason)
            if demand is None:
                logger.log(level, "megaprof: %s is not captured: %s", step, reason)

    def _refusal(self, facts: CallFacts, held: tuple[str, ...]) -> str | None:
        """Returns why no window of a profiler that holds tensors by the options ``held`` may be open between calls;
        None if it may. The models of earlier calls count as well."""
        self._offloads = self._offloads or (bool(held) and any(map(offloads_manually, facts.chunks)))
        return refusal(held) if held and self._offloads else None

    def _record(self, facts: CallFacts, step: CountedStep) -> RecordedCall | None:
        """Returns the record of the call for the open window and the timeline; None if nothing is recorded."""
        window, timeline = process.window, self.timeline
        disturbed, process.disturbed = window is not None or process.disturbed, False
        ranged = window is not None or (facts.graph == "capture" and graph_naming.available)
        level = self.config.ranges if ranged and self.config.ranges != "step" else None
        if facts.graph == "capture" or step.target not in self._timed:
            timeline = None  # nothing may be timed while a CUDA graph is captured
        if timeline is not None and (
            self.config.listens or self.agenda.goes_on or disturbed or timeline.owes(step.target, step.role)
        ):
            timed = timeline.begin(facts, (step.target, step.role), step.number, step.call, disturbed=disturbed)
            call = RecordedCall(facts, timed, timed=True, level=level)
        elif window is not None or level is not None or self._coming:
            tape = Tape(facts.chunks, facts.forward_only)
            call = RecordedCall(facts, tape, level=level)
        else:
            return None
        if window is not None:
            outermost, scope = call.outermost, current()
            if step.role not in (None, window.window.role) and scope.window is not window:
                outermost.enter_context(Range(ranges.role_range(str(step.role))))
            outermost.enter_context(Range(ranges.step_range(step.target, step.number, self.coords)))
            if window.owner is self and window.call is None:
                window.call = call
        return call

    def _open(self, step: CountedStep, demand: Demand | None) -> None:
        """Opens a window of ``step``. If its recorders cannot start, the window is lost."""
        # A train_overall window holds the work of all roles, so it has the role of its session.
        role = self.role if step.target == TRAIN_OVERALL else step.role
        window = Window(step.target, role, step.number, self.coords, step.call)
        recorders = self.recorders if demand is None else demand.recorders
        process.window = opened = OpenWindow(self, window, step, demand, recorders)
        process.thread = threading.get_ident()
        if not hasattr(_this_thread, "lives"):
            _this_thread.lives = threading.Event()
            weakref.finalize(_this_thread.lives, _thread_ends).atexit = False
        try:
            opened.guard.start(*self._memory_limit, partial(process.memory_ran_out, self))
            for recorder in reversed(opened.recorders):
                recorder.start(window)
        except Exception as fault:
            if from_host(fault):
                raise
            self._lose(opened, "it could not start", fault)
            return
        if demand is not None:
            demand.taken.append(step.number)
            demand.over = len(demand.taken) >= demand.steps
        if step.outlasts_call:
            opened.overall = Range(ranges.step_range(step.target, step.number, self.coords))
            opened.overall.__enter__()

    def _close(self, truncated: str | None, seconds: float | None = None, *, last: bool = False) -> None:
        """Closes the window, if one is open. ``last``: closes it even while a CUDA graph is captured, or in the middle
        of a backward, because no later call will."""
        opened = self._own_window
        if opened is None or process.elsewhere or (not last and (capturing() or in_backward())):
            return
        if opened.overall is not None:
            opened.overall.close()
        if opened.call is not None or opened.window.target == ANNOTATED:
            limit = self.config.flush_seconds if seconds is None else seconds
            late = opened.guard.wait(limit, lambda: self._termination.due)
            self._save(opened, "; ".join(filter(None, (truncated, late))) or None)
        else:
            for recorder in opened.recorders:
                recorder.discard()
        self._release()
        if opened.demand is not None:
            opened.demand.closed += 1

    def _save(self, opened: OpenWindow, truncated: str | None) -> None:
        """Stops the recorders of a window and has its files written."""
        final = not any(s.agenda.goes_on or (s.demand is not None and not s.demand.over) for s in process.sessions)
        window = replace(opened.window, final=final)
        call = opened.call or RecordedCall(NO_CALL, Tape())
        demand, speaks = opened.demand, self._speaks

        def written(files: list[str]) -> None:  # on the writer's thread
            # The rest are timelines.
            own = sorted(file for file in files if os.path.basename(file).startswith(f"{window.target}."))
            if own and speaks:
                whose = window.target if window.role is None else f"{window.target} of {window.role}"
                logger.info("megaprof captured %s step %d: %s", whose, window.step, ", ".join(own))
            if demand is not None:
                demand.written.append(list(map(os.path.basename, own)))
            elif not own:
                self.agenda.lose(opened.step, None, NO_FILE)

        try:
            metadata = describe(window, call, self.config, truncated, self._framework)
            for recorder in opened.recorders:
                recorder.stop(window, metadata)
                if self.config.kernels and demand is None and hasattr(recorder, "summary"):
                    process.summaries.pop(window.role, None)  # the last one stands last
                    process.summaries[window.role] = recorder.summary
            self._windows += 1
            if self.timeline is not None:
                self.timeline.captured(window.target, window.role)
            if demand is not None:
                demand.saved += 1
            self.writer.end_window(written)
        except Exception as fault:
            if from_host(fault):
                raise
            self._lose(opened, "it could not be written", fault)

    def _lose(self, opened: OpenWindow, why: str, fault: Exception) -> None:
        """Gives up a window whose recorder failed, so it has no files. Later windows are tried again, and the timeline
        goes on."""
        in_full(*(recorder.discard for recorder in opened.recorders), self._release)
        self.agenda.lose(opened.step, opened.demand, f"{why}: {fault}")
        about = f"{self.role}: {why}: {type(fault).__name__}"  # every window may fail
        line = "megaprof: %s is not captured, and all else goes on: %s: %r"
        logger.once(line, opened.step, why, fault, about=about, level=logging.ERROR)

    def _release(self) -> None:
        opened = self._own_window
        if opened is not None:
            opened.guard.end()
            process.window, process.disturbed = None, True


_this_thread = threading.local()  # Python frees what is local to a thread on that thread, when it ends


def _thread_ends() -> None:
    """Closes an open window when the thread that opened it ends. Kineto cannot stop on another one: what it returns
    there is empty, and exporting it crashes the process (torch 2.13)."""
    if process.window is not None and not process.elsewhere:
        for session in process.sessions.copy():
            session.end_window("the thread that opened it has ended")
        process.dispatcher.settle()


def follows_at_once(between: int, took: int) -> bool:
    """Returns whether the call after one that took ``took`` is expected at once, if that one began ``between`` after
    the call before it: if the next gap is like the last one, it is short. Only then are recorders prepared: Kineto
    keeps every kernel from then on, and nobody can end it before the next call, so during an RL rollout it would fill
    the host's memory."""
    return between <= 2 * took
