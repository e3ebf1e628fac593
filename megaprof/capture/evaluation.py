"""Evaluation passes, which are forward-only like log-prob passes and must not be counted as those."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_depth = 0


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Forward-only passes inside are evaluation, not log-probs. Not needed inside a function named ``evaluate``."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def evaluating() -> bool:
    """True inside an `evaluation` block of this process."""
    return _depth > 0
