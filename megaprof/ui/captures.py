"""Captures that were read, each once as long as its files stay what they are. Processes of their own read them, so that
no page waits for another one's traces, and no trace can end the server."""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megaprof.analysis.report.document import Report
from megaprof.analysis.report.drawn import boxes
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text import words
from megaprof.formats import inputs
from megaprof.formats.faults import Unanswerable
from megaprof.formats.job.standstill import Standstill
from megaprof.formats.remote import Unreachable
from megaprof.metrics.look import last_stand
from megaprof.ui.places import Place

#: Captures that are kept.
MOST_KEPT = 16
_PROCESSES = 2

_Key = tuple[str, str | None]


class Unreadable(Exception):
    """There is nothing to show of a capture; the message says why."""


@dataclass(frozen=True)
class Brief:
    """A target at a glance."""

    title: str
    """Target and role."""
    severity: str
    """``slow``, ``open`` or ``fine``."""
    verdict: str
    """In a few words."""
    step_ms: float | None
    """Milliseconds of a step; None where it is not known."""
    imbalance: float | None
    """The slowest stage's compute over the average stage's; None where it is not known."""
    stages: int
    """Pipeline stages."""
    ranks: int
    """Ranks of the job."""


@dataclass(frozen=True)
class Capture:
    """What pages show of a directory."""

    report: Report
    """The report, without what draws its steps."""
    page: str
    """The HTML report."""
    drawn: dict[_Key, dict[str, Any]]
    """The drawn step of every target that has one, for the script."""
    briefs: tuple[Brief, ...]
    """Every target at a glance."""


def read(path: Path, links: tuple[tuple[str, str], ...], standstill: Standstill | None) -> Capture:
    """Returns what pages show of a directory. Raises Unreadable. Runs in a process of its own."""
    try:
        report = replace(analyze(path), standstill=standstill)
    except (Unanswerable, Unreachable) as fault:
        raise Unreadable(str(fault)) from None
    except (OSError, MemoryError) as fault:
        raise Unreadable(f"{path} cannot be read: {fault}") from None
    steps = report.steps()
    drawn = {key: boxes(step) for key, step in steps.items()}
    shown = page(report, steps, links)
    briefs = tuple(_brief(target, standstill) for target in report.targets)
    return Capture(replace(report, drawn={}), shown, drawn, briefs)


def _begin(most_bytes: int | None) -> None:
    """What a process does first. Ctrl-C in a terminal reaches it, too; the server is who ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inputs.allow(most_bytes)


def _brief(target: Any, standstill: Standstill | None) -> Brief:
    said = target.in_brief(standstill)
    step = target.measured.step_time_ms
    return Brief(
        words.title(*target.key),
        said.severity,
        said.text,
        step.mean if step else None,
        target.measured.imbalance,
        target.measured.sizes.pp,
        target.measured.sizes.world,
    )


class KeptCaptures:
    """The captures that were asked for last."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._kept: OrderedDict[str, Capture] = OrderedDict()
        self._briefs: dict[str, tuple[Brief, ...] | str] = {}
        self._under_way: dict[str, asyncio.Task[Capture]] = {}

    def brief(self, place: Place) -> tuple[Brief, ...] | str | None:
        """A capture at a glance, or why there is nothing to see; None while nobody has read it, and for a job, whose
        state changes without its files."""
        return None if place.job else self._briefs.get(place.identity)

    async def get(self, place: Place, links: tuple[tuple[str, str], ...]) -> Capture:
        """Read it, or take what was read. Raises Unreadable. One that is being read is not read again."""
        if place.outside is not None:
            raise Unreadable(f"it holds a link that leads out of the directory that is served: {place.outside}")
        standstill = await asyncio.to_thread(last_stand, place.path) if place.job else None
        identity = place.identity if standstill is None else f"{place.identity} {replace(standstill, seconds=0.0)}"
        if (kept := self._kept.get(identity)) is not None:
            self._kept.move_to_end(identity)
            return kept
        if isinstance(why := self._briefs.get(identity), str):
            raise Unreadable(why)
        task = self._under_way.get(identity)
        if task is None:
            task = self._under_way[identity] = asyncio.create_task(self._read(identity, place.path, links, standstill))
            task.add_done_callback(lambda done: self._under_way.pop(identity, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # not only those that wait see it
        return await asyncio.shield(task)

    async def _read(
        self, identity: str, path: Path, links: tuple[tuple[str, str], ...], standstill: Standstill | None
    ) -> Capture:
        try:
            capture = await asyncio.wrap_future(self._submit(path, links, standstill))
        except Unreadable as fault:
            self._briefs[identity] = str(fault)
            raise
        except BrokenProcessPool:
            self._pool = None
            raise Unreadable("the process that read it was killed, most likely for its memory") from None
        self._briefs[identity] = capture.briefs
        self._kept[identity] = capture
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return capture

    def _submit(self, path: Path, links: tuple[tuple[str, str], ...], standstill: Standstill | None) -> Future[Capture]:
        if self._pool is None:
            alike = partial(_begin, inputs.allowed())
            self._pool = ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn"), initializer=alike)
        return self._pool.submit(read, path, links, standstill)

    def close(self) -> None:
        """End the processes; what they read is not waited for."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                process.terminate()
            self._pool.shutdown(cancel_futures=True)  # waited for, since its semaphores go with its threads
            self._pool = None
