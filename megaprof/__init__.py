"""megaprof: which pipeline stage of a Megatron run is slow, why, and what to change.

    from megaprof import add_profile_args, install_hooks

    pretrain(..., extra_args_provider=add_profile_args)     # --profile-target and friends
    install_hooks(model)                                     # before the training loop

Importing this package imports neither torch nor Megatron-Core: every name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megaprof.version import __version__

if TYPE_CHECKING:
    from megaprof.analysis import analyze
    from megaprof.analysis.simulation import Simulation, simulate
    from megaprof.annotations import annotate
    from megaprof.arguments import add_profile_args, config_from_args
    from megaprof.config import ProfileConfig
    from megaprof.hooks.install import Handle, evaluation, install_hooks
    from megaprof.roles import role
    from megaprof.topology import ParallelSizes, RankCoords, WorldLayout

_HOME = {
    "Handle": "megaprof.hooks.install",
    "ParallelSizes": "megaprof.topology",
    "ProfileConfig": "megaprof.config",
    "RankCoords": "megaprof.topology",
    "Simulation": "megaprof.analysis.simulation",
    "WorldLayout": "megaprof.topology",
    "add_profile_args": "megaprof.arguments",
    "analyze": "megaprof.analysis",
    "annotate": "megaprof.annotations",
    "config_from_args": "megaprof.arguments",
    "evaluation": "megaprof.hooks.install",
    "install_hooks": "megaprof.hooks.install",
    "role": "megaprof.roles",
    "simulate": "megaprof.analysis.simulation",
}

__all__ = [
    "Handle",
    "ParallelSizes",
    "ProfileConfig",
    "RankCoords",
    "Simulation",
    "WorldLayout",
    "__version__",
    "add_profile_args",
    "analyze",
    "annotate",
    "config_from_args",
    "evaluation",
    "install_hooks",
    "role",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megaprof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
