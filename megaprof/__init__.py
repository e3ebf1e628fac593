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
    from megaprof.analysis.simulation.simulate import Simulation, simulate
    from megaprof.autoload.install import Handle, install_hooks, start, step, stop
    from megaprof.capture.compat import check_offload
    from megaprof.capture.profiler import kernel_summary
    from megaprof.capture.roles import annotate, evaluation, role
    from megaprof.config.arguments import add_profile_args, config_from_args
    from megaprof.config.options import ProfileConfig
    from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout

_HOME = {
    "Handle": "megaprof.autoload.install",
    "ParallelSizes": "megaprof.parallel.topology",
    "ProfileConfig": "megaprof.config.options",
    "RankCoords": "megaprof.parallel.topology",
    "Simulation": "megaprof.analysis.simulation.simulate",
    "WorldLayout": "megaprof.parallel.topology",
    "add_profile_args": "megaprof.config.arguments",
    "analyze": "megaprof.analysis.report.report",
    "annotate": "megaprof.capture.roles",
    "check_offload": "megaprof.capture.compat",
    "config_from_args": "megaprof.config.arguments",
    "evaluation": "megaprof.capture.roles",
    "install_hooks": "megaprof.autoload.install",
    "kernel_summary": "megaprof.capture.profiler",
    "role": "megaprof.capture.roles",
    "simulate": "megaprof.analysis.simulation.simulate",
    "start": "megaprof.autoload.install",
    "step": "megaprof.autoload.install",
    "stop": "megaprof.autoload.install",
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
    "check_offload",
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
    if name not in _HOME:
        raise AttributeError(f"module 'megaprof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
