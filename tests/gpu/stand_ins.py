"""In a rehearsal: CUDA calls that no CPU has, which do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def faked(cpu: bool, answers: Mapping[str, Any]) -> Iterator[None]:
    """In a rehearsal ``torch`` has these attributes as well, such as ``cuda.is_initialized``."""
    with contextlib.ExitStack() as stack:
        for name, value in answers.items() if cpu else ():
            stack.enter_context(patch(f"torch.{name}", value, create=True))
        yield


class Cudart:
    """``torch.cuda.cudart``."""

    def __init__(self) -> None:
        self.opened = 0

    def cudaProfilerStart(self) -> int:
        self.opened += 1
        return 0

    def cudaProfilerStop(self) -> int:
        return 0

    def __call__(self) -> Cudart:
        return self


class Graph:
    """A CUDA graph that captures nothing."""

    replays = 0

    def register_generator_state(self, state: object) -> None: ...

    def replay(self) -> None:
        Graph.replays += 1


GRAPHS: dict[str, Any] = {
    "cuda.CUDAGraph": Graph,
    "cuda.graph": lambda *_, **__: contextlib.nullcontext(),
    "cuda.graph_pool_handle": lambda: None,
    "cuda.empty_cache": lambda: None,
}
