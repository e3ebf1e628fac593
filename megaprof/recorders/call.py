"""One call of ``forward_backward_func``: what its arguments say, and which backward belongs to which forward."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaprof.config.windows import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.formats.metadata import WithoutRange


class CallFacts(NamedTuple):
    """What the arguments of one ``forward_backward_func`` call say about it."""

    schedule: str | None
    """``no_pipelining``, ``1f1b`` or ``interleaved``; None: no schedule ran."""
    forward_only: bool
    """True: the call has no backward."""
    evaluation: bool
    """True for a forward-only call that evaluates the model."""
    microbatches: int | None
    """How many there are; None: not given as a number."""
    seq_length: int | None
    """Tokens of a sequence; None: not given as a number."""
    micro_batch_size: int | None
    """Sequences of a microbatch; None: not given as a number."""
    chunks: tuple[Any, ...]
    """The model chunks of this rank, in the order of the call."""
    training: bool = False
    """True for a forward-only call that is a training step all the same: of a model whose layers are all frozen."""
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
    """What its arguments say."""
    tape: Any
    """Matches backwards to forwards, and takes the events of the timeline: a `recorders.tape.Tape`."""
    timed: bool = False
    """True: the call is in the timeline; its tape is a `recorders.timeline.step.RecordedStep`."""
    ranged: bool = False
    """True: a window is open that wants ranges of what the schedule calls."""
    outermost: ExitStack | None = None
    """Closes the ranges around the whole call; None without a window."""
    forwards: int = 0
    """How many forwards have begun, while a window is open."""
    backwards: int = 0
    """How many backwards have begun."""
    backward: int = 0
    """The part of a code that says of which microbatch and chunk the last backward is; 0: not known."""
    experts: list[Any] = field(default_factory=list)
    """Tokens that each local expert got, of every pass through a MoE layer, while a window is open: small tensors."""
    without: tuple[WithoutRange, ...] = ()
    """Modules that were to have ranges and have none; known when the call is over."""


#: Stands for the call of a window in which no schedule ran.
NO_CALL = CallFacts(None, False, False, None, None, None, ())
