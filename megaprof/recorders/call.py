"""One call of ``forward_backward_func``: the facts in its arguments, and its state while it is recorded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaprof.config.windows import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.formats.metadata import WithoutRange


class CallFacts(NamedTuple):
    """The facts that the arguments of one ``forward_backward_func`` call state."""

    schedule: str | None
    """``no_pipelining``, ``1f1b`` or ``interleaved``; None: no schedule ran."""
    forward_only: bool
    """True: the call has no backward."""
    evaluation: bool
    """True for a forward-only call that evaluates the model."""
    microbatches: int | None
    """The number of microbatches; None: not given as a number."""
    seq_length: int | None
    """The tokens in a sequence; None: not given as a number."""
    micro_batch_size: int | None
    """The sequences in a microbatch; None: not given as a number."""
    chunks: tuple[Any, ...]
    """The model chunks of this rank, in the order of the call."""
    training: bool = False
    """True for a forward-only call that is still a training step, because all layers of the model are frozen."""
    graph: str | None = None
    """``capture`` or ``replay`` when the step is a full-iteration CUDA graph."""

    @property
    def target(self) -> str:
        """``train_actor``, ``train_log_probs`` or ``evaluate``."""
        if self.training or not self.forward_only:
            return TRAIN_ACTOR
        return EVALUATE if self.evaluation else TRAIN_LOG_PROBS


@dataclass(slots=True)
class RecordedCall:
    """A recorded call while it runs."""

    facts: CallFacts
    """The facts in its arguments."""
    tape: Any
    """The `recorders.tape.Tape` that matches backwards to forwards and takes the events of the timeline."""
    timed: bool = False
    """True: the call is in the timeline; its tape is a `recorders.timeline.step.RecordedStep`."""
    ranged: bool = False
    """True: an open window wants ranges around the functions that the schedule calls."""
    outermost: ExitStack | None = None
    """Closes the ranges around the whole call; None without a window."""
    forwards: int = 0
    """The number of forwards that have begun, counted while a window is open."""
    backwards: int = 0
    """The number of backwards that have begun."""
    backward: int = 0
    """The microbatch and chunk of the last backward, as the position part of a code; 0: not known."""
    experts: list[Any] = field(default_factory=list)
    """The tokens that each local expert got: one small tensor per pass through a MoE layer while a window is open."""
    without: tuple[WithoutRange, ...] = ()
    """The modules that should have had ranges but got none. Known when the call is over."""


#: Stands in for the call in a window in which no schedule ran.
NO_CALL = CallFacts(None, False, False, None, None, None, ())
