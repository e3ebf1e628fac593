"""The conductor: hook events -> windows -> recorders. One session per ``install_hooks`` call."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaprof import ranges
from megaprof.config import ProfileConfig
from megaprof.emit import Range
from megaprof.hostmemory import HostMemoryGuard, parse_limit
from megaprof.isolation import Contained
from megaprof.metadata import describe
from megaprof.recorders import Recorder, Window
from megaprof.topology import RankCoords
from megaprof.windows import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS, TRAIN_OVERALL, Phase

logger = logging.getLogger("megaprof")

Position = tuple[int | None, int | None]
"""Microbatch and model chunk, each None where it is not known."""


@dataclass(frozen=True)
class CallFacts:
    """What the arguments of one ``forward_backward_func`` call say about it."""

    schedule: str
    """``no_pipelining``, ``1f1b`` or ``interleaved``."""
    forward_only: bool
    evaluation: bool
    microbatches: int | None
    seq_length: int | None
    micro_batch_size: int | None
    chunks: tuple[Any, ...]
    """The model chunks, in the order of the call."""
    graph: str | None = None
    """``capture`` or ``replay`` when the step is a full-iteration CUDA graph."""

    @property
    def target(self) -> str:
        if not self.forward_only:
            return TRAIN_ACTOR
        return EVALUATE if self.evaluation else TRAIN_LOG_PROBS


@dataclass
class Call:
    """A recorded call while it runs: matches each backward to its forward, by the identity of the output tensor.

    Identities are meaningful only while the schedule holds the tensor, so the map dies with the call, and a
    forward-only call keeps none. The map never holds the tensor itself.
    """

    facts: CallFacts
    outermost: Range
    forwards: int = 0  # forward ranges written
    _positions: dict[int, Position] = field(default_factory=dict)

    def chunk_of(self, model: object) -> int | None:
        return next((i for i, chunk in enumerate(self.facts.chunks) if chunk is model), None)

    def produced(self, output: object, position: Position) -> None:
        """``output`` came out of the forward at ``position``."""
        self.forwards += 1
        if not self.facts.forward_only:
            self._positions[_identity(output)] = position

    def consumed(self, output: object) -> Position:
        """The position of the forward that produced ``output``, which is now being differentiated."""
        return self._positions.pop(_identity(output), (None, None))


def _identity(output: object) -> int:
    """Identity of the first tensor in what ``forward_step`` returned: a tensor, or a list, tuple or dict of them."""
    while isinstance(output, list | tuple | dict) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return id(output)


@dataclass
class _OpenWindow:
    window: Window
    keep: bool  # False for a warm-up, which is recorded and thrown away
    overall: Range | None  # the range of a train_overall window, which outlives the call that opened it
    call: Call | None = None  # the call that opened the window: what the metadata describes


class Session:
    """Decides, call by call, whether a window opens, and drives the recorders. Runs on the training thread.

    A fault in here disables the session for the rest of the run; it never reaches the caller.
    """

    #: The session whose window is open. A process holds one Kineto session, so it has one open window at most; what
    #: other sessions do meanwhile is recorded in it.
    _holder: Session | None = None
    #: Why the open window must close before the next microbatch: the host memory guard sets it, in its own thread.
    memory_full: str | None = None

    def __init__(
        self,
        config: ProfileConfig,
        coords: RankCoords,
        recorders: Sequence[Recorder],
        *,
        role: str | None = None,
        iteration: Callable[[], int | None] | None = None,
    ) -> None:
        self.disabled = False
        self.config = config
        self.coords = coords
        self.role = role
        self._recorders = tuple(recorders)
        self._iteration = iteration
        self._plans = {target: config.plan(target) for target in config.target}
        self._counts = {target: itertools.count() for target in (TRAIN_ACTOR, TRAIN_LOG_PROBS, EVALUATE)}
        self._captured: dict[str, int] = {}
        self._open_window: _OpenWindow | None = None
        self._guard = HostMemoryGuard(parse_limit("max_host_memory", config.max_host_memory), self._memory_ran_out)

    def begin(self, facts: CallFacts) -> Call | None:
        """A ``forward_backward_func`` call starts. Returns what ``end`` needs, or None: nothing is recorded."""
        call: Call | None = None
        if not self.disabled:
            with Contained("opening a window", self.abandon):
                call = self._begin(facts)
        return call

    def end(self, call: Call, *, failed: bool) -> None:
        """The call that ``begin`` answered with ``call`` returned, or raised an exception of the host's."""
        with Contained("closing a window", self.abandon):
            call.outermost.__exit__(None, None, None)
            opened = self._open_window
            if opened is not None and failed:
                self._close("the host raised an exception")
            elif opened is not None and opened.overall is None:
                self._close(None)

    def finish(self, reason: str) -> None:
        """Close an open window early; what it has is kept and marked truncated. A no-op without one."""
        with Contained("closing the last window", self.abandon):
            self._close(reason)

    def interrupt(self, call: Call, reason: str) -> None:
        """Close the process's open window in the middle of ``call``, for which ``end`` must not be called any more."""
        with Contained("closing a window early", self.abandon):
            call.outermost.__exit__(None, None, None)
            if Session._holder is not None:
                Session._holder.finish(reason)

    def abandon(self) -> None:
        """After a fault: record nothing more in this run and leave no recorder running."""
        self.disabled = True
        self._release()
        for recorder in self._recorders:
            recorder.discard()

    def _begin(self, facts: CallFacts) -> Call | None:
        target = facts.target
        index = next(self._counts[target])
        step = self._number(target, index)
        if target == TRAIN_ACTOR:
            self._close(None)  # a train_overall window lasts until the next step starts
        due = None
        if (
            Session._holder is None and facts.graph != "capture"
        ):  # nothing may be synchronised while a graph is captured
            due = next(
                (
                    (candidate, phase)
                    for candidate in ((TRAIN_OVERALL, target) if target == TRAIN_ACTOR else (target,))
                    if (phase := self._phase(candidate, step, index)) is not Phase.OFF
                ),
                None,
            )
        if due is not None:
            warmup = due[1] is Phase.WARMUP
            self._open(Window(due[0], self.role, step, self.coords, warmup), keep=not warmup)
        if Session._holder is None:
            return None
        outermost = Range(ranges.step_range(target, step, self.coords))
        outermost.__enter__()
        call = Call(facts, outermost)
        if due is not None and self._open_window is not None:
            self._open_window.call = call
        return call

    def _number(self, target: str, index: int) -> int:
        """The step's number: the host's iteration for training steps where it has one, else counted per target.

        A host numbers its iterations, not its forward-only passes: several log-prob passes share one.
        """
        iteration = self._iteration() if self._iteration is not None and target == TRAIN_ACTOR else None
        return index if iteration is None or iteration < 0 else int(iteration)

    def _phase(self, target: str, step: int, index: int) -> Phase:
        if target not in self._plans:
            return Phase.OFF
        phase = self._plans[target].phase(step, index)
        # A host may run one iteration twice (Megatron's rerun machinery); its first run is the one that is kept.
        if phase is Phase.ACTIVE and self._captured.get(target) == step:
            return Phase.OFF
        return phase

    def _memory_ran_out(self, reason: str) -> None:
        if Session._holder is self:
            Session.memory_full = reason

    def _open(self, window: Window, *, keep: bool) -> None:
        Session._holder = self
        spans_calls = window.target == TRAIN_OVERALL and keep
        self._open_window = opened = _OpenWindow(window, keep, None)
        self._guard.start()
        for recorder in reversed(self._recorders):
            recorder.start(window)
        if spans_calls:
            opened.overall = Range(ranges.step_range(window.target, window.step, self.coords))
            opened.overall.__enter__()

    def _close(self, truncated: str | None) -> None:
        opened = self._open_window
        if opened is None:
            return
        if opened.overall is not None:
            opened.overall.__exit__(None, None, None)
        if not opened.keep:
            for recorder in self._recorders:
                recorder.discard()
        elif opened.call is not None:
            self._captured[opened.window.target] = opened.window.step
            metadata = describe(opened.window, opened.call, self.config, truncated)
            for recorder in self._recorders:
                recorder.stop(opened.window, metadata)
        self._release()

    def _release(self) -> None:
        self._guard.stop()
        self._open_window = None
        if Session._holder is self:
            Session._holder = None
