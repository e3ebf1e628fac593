"""Lets a host describe its own function that trains without Megatron's schedule.

Does not import torch, because hosts are described in every process of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
