"""The steps of a trainer without a pipeline: one model, whole, and a forward and a backward per microbatch.

What the schedule's hooks find out by themselves is told here by whoever knows the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats import codes
from megaprof.hooks.dispatch import ranged
from megaprof.recorders.call import CallFacts, RecordedCall


class PlainSteps:
    """``begin`` and ``end`` of each training step; in between, the functions that ``forward`` and ``backward`` wrapped
    are the passes of its microbatches, in turns."""

    def __init__(self, dispatcher: Dispatcher, model: Any, microbatches: int) -> None:
        """``microbatches``: how many a step has, which are accumulated before the optimizer's step."""
        self._dispatcher = dispatcher
        self._facts = CallFacts(
            schedule="no_pipelining",
            forward_only=False,
            evaluation=False,
            microbatches=microbatches,
            seq_length=None,
            micro_batch_size=None,
            chunks=(model,),
        )
        self._recorded = False
        self._microbatch = 0

    def begin(self) -> None:
        """A step starts. One that was not ended had failed."""
        self.end(failed=True)
        self._microbatch = 0
        self._recorded = self._dispatcher.begin(self._facts)

    def end(self, *, failed: bool = False) -> None:
        """All passes of the step are done. A no-op outside a step."""
        if self._recorded:
            self._recorded = False
            self._dispatcher.end(failed=failed)

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, which runs one microbatch forward, in a range."""
        return ranged(original, self._dispatcher, lambda call, args, kwargs: codes.FORWARD | self._position())

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, which runs that microbatch backward, in a range."""
        return ranged(
            original, self._dispatcher, lambda call, args, kwargs: codes.BACKWARD | self._position(), self._next
        )

    def _position(self) -> int:
        return codes.of_chunk(0) | codes.of_microbatch(self._microbatch)

    def _next(self, call: RecordedCall, kwargs: dict[str, Any], result: Any) -> Any:
        self._microbatch += 1
        return result
