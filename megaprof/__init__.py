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
    from megaprof.analysis.report.report import analyze
    from megaprof.analysis.simulation import Simulation, simulate
    from megaprof.autoload.install import Handle, install_hooks, start, step, stop
    from megaprof.capture.profiler import kernel_summary
    from megaprof.capture.roles import annotate, evaluation, role
    from megaprof.config.arguments import add_profile_args, config_from_args
    from megaprof.config.options import ProfileConfig

#: The module of each name.
_HOME = {
    "megaprof.analysis.report.report": ("analyze",),
    "megaprof.analysis.simulation": ("Simulation", "simulate"),
    "megaprof.autoload.install": ("Handle", "install_hooks", "start", "step", "stop"),
    "megaprof.capture.profiler": ("kernel_summary",),
    "megaprof.capture.roles": ("annotate", "evaluation", "role"),
    "megaprof.config.arguments": ("add_profile_args", "config_from_args"),
    "megaprof.config.options": ("ProfileConfig",),
}

__all__ = [
    "Handle",
    "ProfileConfig",
    "Simulation",
    "__version__",
    "add_profile_args",
    "analyze",
    "annotate",
    "config_from_args",
    "evaluation",
    "install_hooks",
    "kernel_summary",
    "role",
    "simulate",
    "start",
    "step",
    "stop",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'megaprof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
