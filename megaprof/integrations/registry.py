"""All hosts, and what they know together. A new host is a file of this room and a name in ``HOSTS``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from megaprof.integrations import contract, megatron_bridge, megatron_lm, ms_swift, skyrl, slime, verl
from megaprof.integrations.contract import Host, Writers

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig
    from megaprof.runtime.patching import Patches

#: A host that is built on another comes before it.
HOSTS: tuple[Host, ...] = (
    slime.HOST,
    verl.HOST,
    skyrl.HOST,
    ms_swift.HOST,
    megatron_bridge.HOST,
    megatron_lm.HOST,
)
HOOKS = tuple(hook for host in HOSTS for hook in host.hooks)
MODULES = frozenset(hook.module for hook in HOOKS)


def adapt(patches: Patches, module: str | None = None) -> None:
    """Wraps the functions of all hosts that are loaded, or those of one module."""
    contract.apply(tuple(hook for hook in HOOKS if module in (None, hook.module)), patches)


def framework() -> str | None:
    """Returns the name of the host that runs in this process; None for a trainer of somebody's own."""
    return next((host.name for host in HOSTS if host.package in sys.modules), None)


def arguments() -> Any | None:
    """Returns the parsed command line of the host that is loaded, or None."""
    return next((found for host in HOSTS if (found := host.arguments()) is not None), None)


def config() -> ProfileConfig | None:
    """Returns the configuration that a host's own settings ask for, or None. Raises ValueError for a wrong setting."""
    return next((found for host in HOSTS if (found := host.config()) is not None), None)


def iteration() -> int | None:
    """Returns the number of the training step that the caller is in, whichever host it is, or None."""
    number = contract.iteration()
    if number is not None:
        return number
    return next((found for host in HOSTS if (found := host.iteration()) is not None), None)


def writers() -> Writers:
    """Returns the writers to which the host that is loaded sends scalars on this rank."""
    found = [host.writers() for host in HOSTS]
    return Writers(
        tensorboard=next((w.tensorboard for w in found if w.tensorboard is not None), None),
        wandb=next((w.wandb for w in found if w.wandb is not None), None),
        meter=next((w.meter for w in found if w.meter is not None), None),
    )
