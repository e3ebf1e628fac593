"""How a host describes a function of its own that trains without Megatron's schedule.

Brings no torch: hosts are described in every process of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Batch:
    """A method that runs the microbatches of one call, one after the other, without Megatron's schedule: a forward
    each, and in training a backward, by ``Tensor.backward``."""

    model: Callable[[Any], Any]
    """Gets the object that has the method, and returns its model."""
    forward: str | None = None
    """The name of the object's own method that runs one microbatch forward; None: the model does, when it is called."""
    forward_only: Callable[[Mapping[str, Any]], bool] = lambda arguments: False
    """Gets the call's arguments by name, and returns whether it has no backward."""
