"""One call of ``forward_backward_func``: the facts in its arguments, and its state while it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaprof.config.windows import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.formats.metadata import WithoutRange


class CallFacts(NamedTuple):
    """The facts that the arguments of one ``forward_backward_func`` call state. A number is None if it is not given as
    one. Lengths are tokens in a sequence, and the size of a microbatch is sequences."""

    schedule: str | None
    """``no_pipelining``, ``1f1b`` or ``interleaved``; None: no schedule ran."""
    forward_only: bool
    evaluation: bool
    microbatches: int | None
    seq_length: int | None
    micro_batch_size: int | None
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
    tape: Any
    """The `recorders.tape.Tape` that matches backwards to forwards and takes the events of the timeline."""
    timed: bool = False
    """True: the call is in the timeline; its tape is a `recorders.timeline.step.RecordedStep`."""
    ranged: bool = False
    """True: an open window wants ranges around the functions that the schedule calls."""
    outermost: ExitStack = field(default_factory=ExitStack)
    """Closes the ranges around the whole call. A window has some."""
    forwards: int = 0
    backwards: int = 0
    backward: int = 0
    """The microbatch and chunk of the last backward, as the position part of a code; 0: not known."""
    experts: list[Any] = field(default_factory=list)
    """The tokens that each local expert got: one small tensor per pass through a MoE layer while a window is open."""
    without: tuple[WithoutRange, ...] = ()
    """The modules that should have had ranges but got none. Known when the call is over."""


#: Stands in for the call in a window in which no schedule ran.
NO_CALL = CallFacts(None, False, False, None, None, None, ())


@dataclass(frozen=True)
class Batch:
    """A method that runs the microbatches of one call, one after the other, without Megatron's schedule. Each has a
    forward, and in training a backward by ``Tensor.backward``."""

    model: Callable[[Any], Any]
    """Gets the object that has the method, and returns the object's model."""
    forward: str | None = None
    """The name of the object's method that runs one microbatch forward; None if calling the model does that."""
    forward_only: Callable[[Mapping[str, Any]], bool] = lambda arguments: False
    """Gets the call's arguments by name, and returns whether the call has no backward."""
