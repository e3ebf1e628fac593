"""The hooks of all hosts, and what the hosts know together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from megaprof.autoload import HOSTS, contract, megatron_lm
from megaprof.autoload.contract import Hook
from megaprof.config.values import ANNOTATED, TRAIN_ACTOR, TRAIN_LOG_PROBS
from megaprof.runtime.patching import Patches

#: Megatron-Core's optimizers, whoever the host is. A chained one calls others.
_OPTIMIZERS = tuple(
    Hook("megatron.core.optimizer.optimizer", f"{name}.step", part="optimizer")
    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
)
HOOKS: tuple[Hook, ...] = (
    *_OPTIMIZERS,
    *(hook for _, module in HOSTS.values() for hook in import_module(f"megaprof.{module}").HOOKS),
)
MODULES = frozenset(hook.module for hook in HOOKS)


def adapt(patches: Patches, module: str | None = None) -> None:
    """Wraps the functions of all hosts that are loaded, or those of one module."""
    contract.apply(tuple(hook for hook in HOOKS if module in (None, hook.module)), patches)


def framework() -> str | None:
    """Returns the name of the host that runs in this process; None for a trainer of somebody's own."""
    return next((name for name, (package, _) in HOSTS.items() if package in sys.modules), None)


def iteration() -> int | None:
    """Returns the number of the training step that the caller is in, whichever host it is, or None."""
    number = contract.iteration()
    return megatron_lm.iteration() if number is None else number


def numbers(target: str, given: Callable[[], int | None] | None = None) -> tuple[int | None, int | None]:
    """Returns the host's number of a call of ``target`` that begins, and its number of the step that the call is in. A
    number is None if it is unknown, and negative if the host has none.

    ``given`` returns the number of the running step; without it, the hosts are asked. A host numbers its iterations,
    but not its forward-only passes: several log-prob passes share a number, and only the first of them can be captured.
    """
    step_number = given or iteration
    trains = target in (TRAIN_ACTOR, ANNOTATED)
    number = step_number() if trains else contract.iteration() if target == TRAIN_LOG_PROBS else None
    host_step = given() if given is not None else contract.host_step()
    if host_step is None and number is not None and number >= 0:
        host_step = number
    elif host_step is None and not trains:
        host_step = step_number()
    return number, host_step
