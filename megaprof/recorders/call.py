"""One call of ``forward_backward_func``: what its arguments say, and which backward belongs to which forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from megaprof.config.windows import EVALUATE, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.formats import codes
from megaprof.recorders.line import Line


@dataclass(frozen=True)
class CallFacts:
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
    graph: str | None = None
    """``capture`` or ``replay`` when the step is a full-iteration CUDA graph."""

    @property
    def target(self) -> str:
        """``train_actor``, ``train_log_probs`` or ``evaluate``."""
        if not self.forward_only:
            return TRAIN_ACTOR
        return EVALUATE if self.evaluation else TRAIN_LOG_PROBS


@dataclass(slots=True)
class RecordedCall:
    """A recorded call while it runs: matches each backward to its forward, by the identity of the output tensor.

    Identities are meaningful only while the schedule holds the tensor, so the map dies with the call, and a
    forward-only call keeps none. The map never holds the tensor itself.
    """

    facts: CallFacts
    """What its arguments say."""
    outermost: AbstractContextManager[object]
    """Closes the ranges around the whole call."""
    ranged: bool = False
    """True: a window is open that wants ranges of what the schedule calls."""
    line: Line | None = None
    """Where the timeline keeps this call; None: nowhere."""
    chunks: dict[int, int] = field(init=False)
    """By the identity of a model chunk: the part of a code that says which one it is."""
    forward: int | None = None
    """The position of the forward that runs or ran last: the part of a code that says of which microbatch and chunk
    it is. None: the pass has no forward."""
    ran_forward: bool = False
    """True once a forward has returned."""
    _positions: dict[int, int] = field(default_factory=dict)
    """By the identity of an output tensor that was not differentiated yet: the position of its forward."""

    def __post_init__(self) -> None:
        self.chunks = {id(chunk): codes.of_chunk(index) for index, chunk in enumerate(self.facts.chunks)}

    def produced(self, result: Any) -> Any:
        """``result`` came out of `forward`; returned unchanged."""
        if self.forward is not None:
            self.ran_forward = True
            if not self.facts.forward_only:
                self._positions[_identity(result)] = self.forward
        return result

    def consumed(self, output: object) -> int:
        """The position of the forward that produced ``output``, which is now being differentiated; 0: not known."""
        return self._positions.pop(_identity(output), 0)


def no_call() -> RecordedCall:
    """Stands for the call of a window in which no schedule ran."""
    return RecordedCall(CallFacts(None, False, False, None, None, None, ()), ExitStack())


_CONTAINERS = (list, tuple, dict)


def _identity(output: object) -> int:
    """Identity of the first tensor in what ``forward_step`` returned: a tensor, a list or dict of them, or either with
    the number of tokens behind it. The backward gets the same tensor, alone or in a list or dict."""
    while isinstance(output, _CONTAINERS) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return id(output)
