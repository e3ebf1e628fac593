"""All adapters in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaprof.integrations import contract as adapter
from megaprof.integrations import megatron_bridge, megatron_lm, ms_swift, skyrl, slime, verl

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig
    from megaprof.hooks.patching import Patches

_HOSTS = (megatron_lm, slime, verl, skyrl, ms_swift, megatron_bridge)
HOOKS = tuple(hook for host in _HOSTS for hook in host.HOOKS)
MODULES = frozenset(hook.module for hook in HOOKS)


def adapt(patches: Patches, module: str | None = None) -> None:
    """Wrap what is loaded of all hosts, or of one module of theirs."""
    adapter.apply(tuple(hook for hook in HOOKS if module in (None, hook.module)), patches)


def iteration() -> int | None:
    """The host's current iteration number, whichever host it is, or None."""
    number = adapter.iteration()
    return megatron_lm.iteration() if number is None else number


def config() -> ProfileConfig | None:
    """What a host's own settings ask of megaprof by its name, or None. Raises ValueError for what is not valid."""
    return verl.config()
