"""Opens and closes ranges: the same name in the torch trace and in NVTX (domain ``megaprof``)."""

from __future__ import annotations

from types import TracebackType

import nvtx
from torch.profiler import record_function

from megaprof.ranges import DOMAIN


class Range:
    """``with Range("megaprof/forward mb=3 chunk=0"): ...``. Created only while a window is open."""

    __slots__ = ("_name", "_recorded")

    def __init__(self, name: str) -> None:
        self._name = name
        # A user annotation rather than the cheaper fast record: Kineto mirrors it on the GPU's timeline.
        self._recorded = record_function(name)

    def __enter__(self) -> None:
        nvtx.push_range(self._name, domain=DOMAIN)
        self._recorded.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self._recorded.__exit__(kind, fault, tb)
        nvtx.pop_range(domain=DOMAIN)
