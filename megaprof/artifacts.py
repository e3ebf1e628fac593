"""Artifacts: their names, and a background writer that makes them appear whole or not at all."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaprof.topology import RankCoords

logger = logging.getLogger("megaprof")

TRACE_SUFFIX = ".pt.trace.json.gz"
#: How long the end of the process waits for files that are still being written, in seconds.
FLUSH_SECONDS = 60.0
_LONGEST_PART = 40
_CHUNK = 1 << 20


def artifact_name(target: str, role: str | None, step: int, coords: RankCoords, suffix: str) -> str:
    """``{target}[.{role}].step{step:06d}.pp{p}-tp{t}-cp{c}-ep{e}-dp{d}.rank{r:05d}{suffix}``.

    Every part is sanitised: whatever a role is called, the name is one component of a path.
    """
    c = coords
    parts = [sanitise(target)]
    if role:
        parts.append(sanitise(role))
    parts.append(f"step{step:06d}")
    parts.append(f"pp{c.pp}-tp{c.tp}-cp{c.cp}-ep{c.ep}-dp{c.dp}")
    parts.append(f"rank{c.rank:05d}")
    return ".".join(parts) + suffix


def sanitise(part: str) -> str:
    """``part`` as letters, digits, ``-`` and ``_``, at most 40; a digest keeps changed names apart."""
    clean = re.sub(r"[^A-Za-z0-9_-]+", "_", part)[:_LONGEST_PART]
    if clean == part:
        return clean
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{clean[: _LONGEST_PART - 7]}_{digest}"


@dataclass(frozen=True)
class Job:
    """A finished raw file on local disk and the name under which it is to appear."""

    raw: Path
    final: Path


class Writer:
    """Compresses finished files in one background thread; the training thread only hands over two paths.

    The thread starts with the first job, so a process without a window has none. A file appears under its final name
    by a rename, complete, or not at all. ``close`` and the end of the process wait for pending files, at most
    ``FLUSH_SECONDS``. A job that fails is logged and keeps its raw file; it never stops training.
    """

    def __init__(self, on_written: Callable[[Path], None] | None = None) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._on_written = on_written

    def submit(self, job: Job) -> None:
        """Queue ``job``; returns at once. The queue holds paths, so its memory is negligible."""
        with self._idle:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="megaprof-writer", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
        self._jobs.put(job)

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait for every queued file; False, and a log line that names what is missing, after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._idle:
            while self._pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    logger.error("megaprof: %d trace files were not finished within %.0f s", self._pending, timeout)
                    return False
                self._idle.wait(left)
        return True

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                compress(job.raw, job.final)
                if self._on_written is not None:
                    self._on_written(job.final)
            except Exception as fault:
                logger.error("megaprof: writing %s failed: %s; the raw trace is %s", job.final, fault, job.raw)
            finally:
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()


def compress(raw: Path, final: Path) -> None:
    """gzip ``raw`` into ``final`` and remove ``raw``; ``final`` is replaced atomically and is never half-written."""
    from isal import igzip  # 4 times the speed of zlib's fastest level, at the same size

    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with open(raw, "rb") as source, open(temporary, "wb") as file:
            with igzip.IGzipFile(filename="", mode="wb", fileobj=file) as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    raw.unlink()


def raw_path(final: Path) -> Path:
    """Where the uncompressed file of ``final`` lies until it is finished: hidden, beside it, and this process's own."""
    return final.with_name(f".{final.name}.{os.getpid()}.raw")
