"""Reads captures in separate processes: no page waits for the traces of another page, and no trace ends the server."""

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

from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.report.drawn import boxes
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text import words
from megaprof.analysis.report.text.sentences import standstill_findings
from megaprof.formats import inputs
from megaprof.formats.faults import Unanswerable
from megaprof.formats.job import Standstill
from megaprof.formats.remote import Unreachable
from megaprof.metrics.look import last_stand
from megaprof.ui.places import Place

#: The most captures that are kept.
MOST_KEPT = 16
_PROCESSES = 2

_Key = tuple[str, str | None]


class Unreadable(Exception):
    """A capture cannot be shown; the message says why."""


@dataclass(frozen=True)
class Brief:
    """A target at a glance."""

    title: str
    severity: str
    """``slow``, ``open`` or ``fine``."""
    verdict: str
    step_ms: float | None
    """Milliseconds of an average step that the verdict is about; None if unknown."""
    imbalance: float | None
    stood_still: tuple[str, ...]


@dataclass(frozen=True)
class Capture:
    """The data that the pages about a directory show."""

    report: Report
    """The report, without the data that draws its steps."""
    page: str
    drawn: dict[_Key, dict[str, Any]]
    briefs: tuple[Brief, ...]


def read(path: Path, links: tuple[tuple[str, str], ...], last: tuple[Standstill, float] | None) -> Capture:
    """Reads a directory; this runs in a separate process. Raises Unreadable."""
    try:
        report = analyze(path)
        report = report if last is None else report.with_standstill(*last)
    except (Unanswerable, Unreachable) as fault:
        raise Unreadable(str(fault)) from None
    except (OSError, MemoryError) as fault:
        raise Unreadable(f"{path} cannot be read: {fault}") from None
    steps = report.steps()
    drawn = {key: boxes(step) for key, step in steps.items()}
    shown = page(report, steps, links)
    briefs = tuple(_brief(target, report.standstill) for target in report.targets)
    return Capture(replace(report, drawn={}), shown, drawn, briefs)


def _begin(most_bytes: int | None) -> None:
    """Sets up a reading process. It ignores Ctrl-C, which a terminal sends to it as well: only the server ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    inputs.allow(most_bytes)


def _brief(target: TargetReport, standstill: Standstill | None) -> Brief:
    verdict = target.in_brief(standstill)
    stood_still = standstill_findings(target.fleet.standstills if target.fleet is not None else ())
    return Brief(
        words.title(*target.key),
        verdict.severity,
        verdict.text,
        target.step_ms or None,
        target.imbalance,
        tuple(finding.text for finding in stood_still),
    )


class KeptCaptures:
    """The captures that were asked for most recently. Each is read once, and again only if its files change."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._reads: OrderedDict[str, asyncio.Task[Capture]] = OrderedDict()
        #: Reads that nobody has been shown yet, by directory. The files of a running job may change faster than they
        #: are read, so what was read is shown once even if they have changed since.
        self._awaited: dict[Path, asyncio.Task[Capture]] = {}
        self._briefs: dict[str, tuple[Brief, ...] | str] = {}

    def brief(self, place: Place) -> tuple[Brief, ...] | str | None:
        """Returns the targets of a capture at a glance, or why it cannot be shown. None if it has not been read yet,
        and for a job, whose state changes even if its files do not."""
        return None if place.job else self._briefs.get(place.identity)

    async def get(self, place: Place, links: tuple[tuple[str, str], ...]) -> Capture:
        """Returns a capture. If it has not been read yet, or is being read, waits for that. Raises Unreadable."""
        if place.outside is not None:
            raise Unreadable(f"it holds a link that leads out of the directory that is served: {place.outside}")
        last = await asyncio.to_thread(last_stand, place.path) if place.job else None
        identity = place.identity
        if last is not None:  # the page says for how long: it is a minute old at most
            identity += f" {replace(last[0], seconds=last[0].seconds // 60)}"
        if isinstance(why := self._briefs.get(identity), str):
            raise Unreadable(why)
        read = self._reads.get(identity) or self._awaited.get(place.path)
        if read is None:
            read = self._reads[identity] = asyncio.create_task(self._read(identity, place.path, links, last))
            read.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen even if no one waits
        if identity in self._reads:
            self._reads.move_to_end(identity)
        for old in [key for key, task in self._reads.items() if task.done()][:-MOST_KEPT]:
            del self._reads[old]
        self._awaited[place.path] = read
        await asyncio.wait({read})  # a request that gives up leaves it to the next one
        self._awaited.pop(place.path, None)
        return read.result()

    async def _read(
        self, identity: str, path: Path, links: tuple[tuple[str, str], ...], last: tuple[Standstill, float] | None
    ) -> Capture:
        try:
            capture = await asyncio.wrap_future(self._submit(path, links, last))
        except Unreadable as fault:
            self._briefs[identity] = str(fault)
            raise
        except BrokenProcessPool:
            self._pool = None
            del self._reads[identity]  # the next request reads it again
            raise Unreadable("the process that read it was killed, most likely for its memory") from None
        self._briefs[identity] = capture.briefs
        return capture

    def _submit(
        self, path: Path, links: tuple[tuple[str, str], ...], last: tuple[Standstill, float] | None
    ) -> Future[Capture]:
        if self._pool is None:
            alike = partial(_begin, inputs.allowed())
            self._pool = ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn"), initializer=alike)
        # A process that starts takes over what is blocked here, and begins to ignore Ctrl-C only when it has started.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(read, path, links, last)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def close(self) -> None:
        """Ends the processes, whatever they are reading."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                process.terminate()
            self._pool.shutdown(cancel_futures=True)  # waits: its semaphores are freed with its threads
            self._pool = None
