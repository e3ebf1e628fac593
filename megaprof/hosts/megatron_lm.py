"""Megatron-LM: its global arguments and its iteration number. Imports nothing: it only looks at what is loaded."""

from __future__ import annotations

import sys
from typing import Any


def global_args() -> Any | None:
    """Megatron-LM's parsed arguments, or None where its trainer is not loaded or has not parsed them yet."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def iteration() -> int | None:
    """The number of the running training iteration: ``train()`` keeps it in ``args.curr_iteration``.

    It continues across a resume, which is what --profile-step-start counts in, too. None outside ``train()``.
    """
    value = getattr(global_args(), "curr_iteration", None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
