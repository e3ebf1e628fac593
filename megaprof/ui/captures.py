"""Captures, read in processes of their own: no page waits for the traces of another, and no trace ends the server."""

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
    """A capture cannot be shown; the message says why."""


@dataclass(frozen=True)
class Brief:
    """A target at a glance."""

    title: str
    """Target and role."""
    severity: str
    """``slow``, ``open`` or ``fine``."""
    verdict: str
    """The verdict, in a few words."""
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
    """What the pages about a directory show."""

    report: Report
    """The report, without what draws its steps."""
    page: str
    """The HTML report."""
    drawn: dict[_Key, dict[str, Any]]
    """For every target that has a drawn step, that step for the script."""
    briefs: tuple[Brief, ...]
    """Every target at a glance."""


def read(path: Path, links: tuple[tuple[str, str], ...], standstill: Standstill | None) -> Capture:
    """Reads a directory, in a process of its own. Raises Unreadable."""
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
    """Sets a process up. Ctrl-C in a terminal reaches it as well, but only the server ends it."""
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
    """The captures that were asked for last. Each is read once, as long as its files stay what they are."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._reads: OrderedDict[str, asyncio.Task[Capture]] = OrderedDict()
        self._briefs: dict[str, tuple[Brief, ...] | str] = {}

    def brief(self, place: Place) -> tuple[Brief, ...] | str | None:
        """Returns a capture at a glance, or why there is nothing to see; None while nobody has read it, and for a job,
        whose state changes without its files."""
        return None if place.job else self._briefs.get(place.identity)

    async def get(self, place: Place, links: tuple[tuple[str, str], ...]) -> Capture:
        """Returns what was read, or will be when the reading that is under way has ended. Raises Unreadable."""
        if place.outside is not None:
            raise Unreadable(f"it holds a link that leads out of the directory that is served: {place.outside}")
        standstill = await asyncio.to_thread(last_stand, place.path) if place.job else None
        identity = place.identity if standstill is None else f"{place.identity} {replace(standstill, seconds=0.0)}"
        if isinstance(why := self._briefs.get(identity), str):
            raise Unreadable(why)
        read = self._reads.get(identity)
        if read is None:
            read = self._reads[identity] = asyncio.create_task(self._read(identity, place.path, links, standstill))
            read.add_done_callback(lambda done: done.cancelled() or done.exception())  # not only those that wait see it
        self._reads.move_to_end(identity)
        for old in [key for key, each in self._reads.items() if each.done()][:-MOST_KEPT]:
            del self._reads[old]
        return await asyncio.shield(read)

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
            del self._reads[identity]  # whoever asks again has it read again
            raise Unreadable("the process that read it was killed, most likely for its memory") from None
        self._briefs[identity] = capture.briefs
        return capture

    def _submit(self, path: Path, links: tuple[tuple[str, str], ...], standstill: Standstill | None) -> Future[Capture]:
        if self._pool is None:
            alike = partial(_begin, inputs.allowed())
            self._pool = ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn"), initializer=alike)
        return self._pool.submit(read, path, links, standstill)

    def close(self) -> None:
        """Ends the processes, whatever they are reading."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                process.terminate()
            self._pool.shutdown(cancel_futures=True)  # waited for, since its semaphores go with its threads
            self._pool = None
