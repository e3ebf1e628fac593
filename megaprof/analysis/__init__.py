"""Reading what was captured: traces to stage metrics, advice and reports. Nothing here is imported in training.

Submodules load on first use: `simulation` needs nothing but Python, the report needs the extra ``megaprof[report]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaprof.analysis.report import NothingToReport as NothingToReport
    from megaprof.analysis.report import Report as Report
    from megaprof.analysis.report import TargetReport as TargetReport
    from megaprof.analysis.report import analyze as analyze

__all__ = ["NothingToReport", "Report", "TargetReport", "analyze"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("megaprof.analysis.report"), name)
