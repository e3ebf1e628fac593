"""The background writer: the training thread hands over a path and goes on."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaprof.artifacts.finish import FinishHook
from megaprof.artifacts.publish import Incomplete, carry, publish, remove_leftovers, rename
from megaprof.artifacts.remote import Remote, is_remote
from megaprof.artifacts.scratch import Scratch
from megaprof.formats.names import busy_path, kineto_temporary, plain_path, raw_path
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

#: How long the end of the process waits for files that are still being written, in seconds.
FLUSH_SECONDS = 60.0
#: How long the end of the process may copy one more file out of scratch that could not be finished in time, in seconds.
KEEP_SECONDS = 5.0


@dataclass(frozen=True)
class Artifact:
    """A file that a recorder has written, with the name that it is to get."""

    raw: Path
    """The file as it was written, complete: uncompressed, hidden, on a disk of this host."""
    final: Path
    """The name under which it is to appear, compressed if that ends in ``.gz``."""


_Task = Callable[[], None]


class Writer:
    """Finishes files in one background thread: compression, rename, upload, the user's finish hook.

    The thread starts with the first of them, so a process without a window has none. The queue holds paths: what waits,
    waits on the disk. A file appears under its final name by a rename, complete, or not at all. Whatever fails is
    logged and keeps what there is; nothing here raises.

    A child of ``os.fork`` starts with nothing: its parent's files are its parent's (`forget`).

    ``remote``: where finished files are uploaded to, None: they stay. ``hook``: the user's command for finished files.
    """

    def __init__(
        self,
        *,
        remote: Remote | None = None,
        hook: FinishHook | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self._remote = remote
        self._hook = hook
        self._scratch = scratch
        self._start_afresh()

    def forget(self) -> None:
        """In a forked child: nothing of the parent's is this process's to finish, and a lock that its writer held at
        the moment of the fork would stay locked for ever."""
        self._start_afresh()
        self._scratch = None
        self._closed = True

    def _start_afresh(self) -> None:
        self._tasks: deque[_Task] = deque()  # the first one is being done
        self._idle = threading.Condition()  # over an RLock: a signal handler may flush in the middle of submit
        self._waiting: dict[Artifact, None] = {}  # in the order in which they came
        self._thread: threading.Thread | None = None
        self._cleaned: set[Path] = set()
        self._written: list[str] = []  # what the finish hook was not told yet; the writer's thread only
        self._any_written = False
        self._closed = False
        self._busy: Path | None = None  # says to other processes that this one is not done

    @property
    def pending(self) -> bool:
        """True while something that was handed over is not finished."""
        return bool(self._tasks)

    def raw_path(self, final: Path) -> Path:
        """Returns where the raw file of ``final`` is to be written: in local scratch, where there is one with room,
        else hidden beside ``final``. Raises OSError where the directory cannot be made."""
        placed = None if self._scratch is None else self._scratch.place(final)
        return raw_path(final) if placed is None else placed

    def submit(self, artifact: Artifact) -> None:
        """Queue ``artifact``; returns at once."""
        if not os.path.exists(artifact.raw):
            _remove(kineto_temporary(artifact.raw))
            logger.error(
                "megaprof: %s is lost: its raw file was not written; is the disk full, or its directory gone?",
                artifact.final,
            )
            return
        with self._idle:
            self._waiting[artifact] = None
        self._put(lambda: self._write(artifact))

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` in the writer's thread, after everything that was submitted before it. What it raises is logged.

        A task that makes files from a finished one hands them to ``finish``.
        """
        self._put(task)

    def finish(self, artifact: Artifact) -> None:
        """Finish ``artifact`` at once. Only for a task of ``run``."""
        self._waiting[artifact] = None
        self._write(artifact)

    def end_window(self) -> None:
        """Every file of a window was submitted: its finish hook may run once they are complete."""
        if self._hook is not None and self._hook.when == "window":
            self._put(self._announce)

    def end_capture(self) -> None:
        """Nothing more is going to be captured: the finish hook of the end may run once every file is complete. Files
        that are captured after all are announced by ``close``."""
        if self._hook is not None and self._hook.when == "end":
            self._put(self._announce)

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait for every queued file; False, and a log line that names what is missing, after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._idle:
            if self._tasks:
                self._start()  # the host may have interrupted the one who should have
            while self._tasks:
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = ", ".join(str(artifact.final) for artifact in self._waiting)
                    logger.error("megaprof: not finished within %.0f s: %s", timeout, missing or "the finish hook")
                    return False
                self._idle.wait(left)
        return True

    def close(self, timeout: float = FLUSH_SECONDS) -> bool:
        """``flush``, and run the finish hook of the end, within ``timeout`` seconds altogether. Idempotent.

        After that time a finish hook is killed, and a file that still waits is renamed to its uncompressed name.
        """
        if self._closed:
            return self.flush(timeout)
        self._closed = True
        if self._hook is not None and (self._any_written or self._tasks):
            self._put(self._announce)
        done = self.flush(timeout)
        if not done:
            self._give_up()
        if self._scratch is not None:
            self._scratch.close()
        if self._remote is not None:
            self._remote.close()
        with self._idle:
            self._idle.notify_all()  # the thread ends
        return done

    def _give_up(self) -> None:
        if self._hook is not None:
            self._hook.stop()
        self._rest()
        with self._idle:
            artifacts = list(self._waiting)
            self._waiting.clear()
        for artifact in artifacts:
            if artifact.raw.exists() and (plain := _keep(artifact)) is not None:
                logger.warning("megaprof: kept %s, uncompressed", plain)

    def _put(self, task: _Task) -> None:
        with self._idle:
            self._tasks.append(task)  # queued and counted at once: the host may raise an exception behind any line
            self._start()

    def _start(self) -> None:
        """Have the thread do what is queued. With the lock held."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="megaprof-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # Python 3.12 starts no thread while the interpreter shuts down
                while self._tasks:
                    self._do(self._tasks[0])
        self._idle.notify_all()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._do(task)

    def _next(self) -> _Task | None:
        """Wait for a task and return it; None: this thread's work is over."""
        with self._idle:
            while self._thread is threading.current_thread():
                if self._tasks:
                    return self._tasks[0]
                if self._closed:
                    self._thread = None
                else:
                    self._idle.wait()
        return None

    def _do(self, task: _Task) -> None:
        try:
            task()
        except Exception as fault:  # where no thread can start any more, a task runs in the host's
            if from_host(fault):
                raise
            logger.exception("megaprof: the writer failed; training goes on")
        finally:
            busy = self._busy
            try:
                if len(self._tasks) == 1:
                    self._rest()
            finally:
                with self._idle:
                    self._tasks.popleft()
                    more = bool(self._tasks)
                    self._idle.notify_all()
            if more and busy is not None:  # something came meanwhile
                self._work_in(busy)

    def _work_in(self, busy: Path) -> None:
        """Mark for other processes that this one is not done, if no mark is there yet."""
        if self._busy is None:
            try:
                busy.touch()
                self._busy = busy
            except OSError as fault:
                if from_host(fault):
                    raise

    def _rest(self) -> None:
        """Remove that mark. Not under the lock, which the training thread needs: a disk may not answer."""
        busy, self._busy = self._busy, None
        if busy is not None:
            _remove(busy)

    def _write(self, artifact: Artifact) -> None:
        if artifact not in self._waiting:  # given up meanwhile, and kept as it is
            return
        try:
            artifact.final.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it in the run
            if artifact.final.parent not in self._cleaned:
                self._cleaned.add(artifact.final.parent)
                remove_leftovers(artifact.final.parent)
                if self._scratch is not None:
                    self._scratch.remove_leftovers()
            self._work_in(busy_path(artifact.final.parent))
            self._finished(publish(artifact.raw, artifact.final))
        except Incomplete as fault:
            _remove(artifact.raw)
            logger.error("megaprof: %s is lost: %s; is the disk full?", artifact.final, fault)
        except Exception as fault:
            plain = _keep(artifact)
            kept = f"; kept {plain}, uncompressed" if plain is not None else ""
            logger.error("megaprof: writing %s failed: %s: %s%s", artifact.final, type(fault).__name__, fault, kept)
            if plain is not None:
                self._finished(plain)
        finally:
            with self._idle:
                self._waiting.pop(artifact, None)

    def _finished(self, final: Path) -> None:
        place = str(final)
        if self._remote is not None:
            try:
                place = self._remote.upload(final)
            except Exception as fault:
                logger.error(
                    "megaprof: uploading to %s failed: %s: %s; the file is %s",
                    self._remote.uri,
                    type(fault).__name__,
                    fault,
                    final,
                )
            else:
                _remove(final)
        self._any_written = True
        if self._hook is not None:
            self._written.append(place)

    def _announce(self) -> None:
        files, self._written = self._written, []
        if files and self._hook is not None:
            self._hook.run(files)


def open_writer(place: str, folder: str, hook: FinishHook | None) -> tuple[str, Writer] | None:
    """Makes ``folder``, the rank's directory in ``place``, which is the save directory or a remote address. Returns the
    local directory that stands for ``place``, and a writer for files in it; None, and an error in the log, where they
    cannot be made."""
    try:
        remote = Remote(place) if is_remote(place) else None
        local = place if remote is None else str(remote.staging)
        os.makedirs(os.path.join(local, folder), exist_ok=True)
    except OSError as fault:
        if from_host(fault):
            raise
        # One selected rank with a bad disk must not end a job whose other ranks are about to enter a collective.
        logger.error("megaprof: %s cannot be created: %s; profiling is off on this rank", place, fault)
        return None
    return local, Writer(remote=remote, hook=hook, scratch=Scratch(Path(local)))


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as fault:
        if from_host(fault):
            raise
        logger.debug("megaprof: %s cannot be removed", path, exc_info=True)


def _keep(artifact: Artifact) -> Path | None:
    """Gives the raw file its uncompressed name, which takes neither space nor time unless it lies in scratch, and
    returns the path. None: it stays where it is."""
    plain = plain_path(artifact.final)
    try:
        if artifact.raw.parent != plain.parent:
            return carry(artifact.raw, plain, KEEP_SECONDS)
        return rename(artifact.raw, plain)
    except OSError as fault:
        if from_host(fault):
            raise
        logger.error("megaprof: %s stays there, it cannot be moved to %s: %s", artifact.raw, plain.name, fault)
        return None
