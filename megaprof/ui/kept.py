"""Keeps the last result of a slow function, for pages that ask again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

Found = TypeVar("Found")


class Kept(Generic[Found]):
    """Calls ``look`` on a thread and keeps its result for a while. Pages that ask at the same time share one call."""

    def __init__(self, look: Callable[[], Found], seconds: Callable[[Found], float]) -> None:
        self._look, self._seconds = look, seconds
        self._found: Found | None = None
        self._until = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def get(self, patience: float | None) -> Found | None:
        """Returns the result of a look. If looking takes longer than `patience` (seconds; None: no limit), returns the
        previous result, or None if there is none. Raises what the look raised."""
        if self._found is None or monotonic() > self._until:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._renew())
            await asyncio.wait({self._looking}, timeout=patience)
            if self._looking.done():
                self._looking.result()  # raises what the look raised
        return self._found

    async def _renew(self) -> None:
        self._found = await run_in_threadpool(self._look)
        self._until = monotonic() + self._seconds(self._found)
