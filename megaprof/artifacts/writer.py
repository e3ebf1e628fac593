"""The background writer, to which the training thread hands over a path before it goes on, and the user's command
that it runs once files are complete. It also has files made from a trace: the kernel summary and collapsed stacks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypeVar

from megaprof.artifacts.places import Remote, Scratch, carry, is_remote, publish, remove_leftovers, rename
from megaprof.formats.names import KERNELS_SUFFIX, kineto_temporary, raw_path, repeats, temporary_path
from megaprof.runtime.isolation import Suppressed, logger

#: How long the end of the process waits for files that are still being written, in seconds.
FLUSH_SECONDS = 60.0
#: At the end of the process, how long copying an unfinished file out of scratch may take, in seconds.
KEEP_SECONDS = 5.0
#: How long one run of the command may take, in seconds.
COMMAND_SECONDS = 300.0
_OUTPUT = 2000
#: With -I -S, the user's PYTHON* variables and site-packages cannot slow down the start of the interpreter. Training
#: itself never imports the analysis.
_CHILD = (
    "import json, sys; order = json.loads(sys.argv[1]); sys.path += order['places']; "
    "from megaprof.analysis.trace.summary import main; main(order)"
)
#: The packages that the child needs.
_PACKAGES = ("megaprof", "numpy", "msgspec", "isal")

_Task = Callable[[], None]
_T = TypeVar("_T")


class Writer:
    """Finishes files in one background thread: compresses, renames and uploads them, and runs the user's finish hook.

    The thread starts with the first file, so a process without a window has no such thread. The queue holds only paths;
    the files wait on disk. A file appears under its final name by a rename, so it is complete or not there at all.
    Failures are logged, and existing files are kept. Nothing here raises.

    A child of ``os.fork`` starts with an empty queue, because the parent finishes its own files (`forget`).

    ``remote``: where finished files are uploaded to; None if they stay here. ``hook``: the user's command for finished
    files.
    """

    def __init__(
        self, *, remote: Remote | None = None, hook: FinishHook | None = None, scratch: Scratch | None = None
    ) -> None:
        self._remote = remote
        self._hook = hook
        self._scratch = scratch
        self._start_afresh()

    def forget(self) -> None:
        """Drops the queue in a forked child, which must not finish its parent's files. Also replaces the lock: if the
        parent's writer held it at the moment of the fork, nobody would ever release it."""
        self._start_afresh()
        self._scratch = None
        self._closed = True

    def _start_afresh(self) -> None:
        self._tasks: deque[_Task] = deque()  # the first one is running
        self._idle = threading.Condition()  # has an RLock: a signal handler may flush in the middle of submit
        self._waiting: dict[Path, Path] = {}  # final by raw, in the order of submission
        self._thread: threading.Thread | None = None
        self._cleaned: set[Path] = set()
        self._written: list[str] = []  # files that no window has announced yet; added to on the writer's thread only
        self._closed = False
        self._busy: Path | None = None  # a marker file, which shows other processes that this one is not done

    @property
    def pending(self) -> bool:
        """True while a file or task is not finished."""
        return bool(self._tasks)

    def raw_path(self, final: Path) -> Path:
        """Returns where to write the raw file of ``final``: in local scratch if there is room, and else hidden beside
        ``final``; where none waits that will have the same name. Raises OSError if the directory cannot be made."""
        for name in repeats(final):
            scratch_path = None if self._scratch is None else self._scratch.place(name)
            raw = raw_path(name) if scratch_path is None else scratch_path
            if not raw.exists():
                break
        return raw

    def submit(self, raw: Path, final: Path) -> None:
        """Queues a file that a recorder has written, and returns at once. ``raw``: the complete file as it was written,
        uncompressed, hidden, on a disk of this host. ``final``: the name under which it will appear, compressed if that
        ends in ``.gz``."""
        if not os.path.exists(raw):
            _remove(kineto_temporary(raw))
            logger.error(
                "megaprof: %s is lost: its raw file was not written; is the disk full, or its directory gone?", final
            )
            return
        with self._idle:
            self._waiting[raw] = final
        self.run(lambda: self._write(raw, final))

    def run(self, task: Callable[[], _T]) -> Future[_T]:
        """Runs ``task`` in the writer's thread, after everything that was submitted before. Logs what it raises.
        Returns what will have its result."""
        result = Future[_T]()
        with self._idle:
            self._tasks.append(lambda: result.set_result(task()))  # in one step: the host may raise after any line
            self._start()
        return result

    def hand_over(self, final: Path) -> None:
        """Uploads a file that is complete under its final name, and has the finish hook run for it with the next
        files."""
        self.run(lambda: self._finished(final))

    def end_window(self, written: Callable[[list[str]], object] | None = None) -> None:
        """Notes that every file of a window was submitted. Once they are complete, ``written`` gets their paths, or
        their remote addresses, and the finish hook runs."""
        self.run(lambda: self._announce(written))

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Waits for every queued file. Returns False after ``timeout`` seconds, and logs what is missing."""
        deadline = time.monotonic() + timeout
        with self._idle:
            if self._tasks:
                self._start()  # an exception of the host may have interrupted `run` before it did
            while self._tasks:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    missing = ", ".join(map(str, self._waiting.values()))
                    logger.error("megaprof: not finished within %.0f s: %s", timeout, missing or "the finish hook")
                    return False
                self._idle.wait(remaining)
        return True

    def close(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Flushes, and runs the finish hook for what is left, within ``timeout`` seconds altogether. Idempotent.

        After that time it kills a running finish hook, and renames files that still wait to their uncompressed names.
        """
        if self._closed:
            return self.flush(timeout)
        self._closed = True
        if self._hook is not None and (self._written or self._tasks):
            self.run(self._announce)
        finished = self.flush(timeout)
        if not finished:
            if self._hook is not None:
                self._hook.stop()
            self._remove_marker()
            with self._idle:
                waiting, self._waiting = self._waiting, {}
            for raw, final in waiting.items():
                if raw.exists() and (plain := _keep(raw, final)) is not None:
                    logger.warning("megaprof: kept %s, uncompressed", plain)
        if self._scratch is not None:
            self._scratch.close()
        if self._remote is not None:
            self._remote.close()
        with self._idle:
            self._idle.notify_all()  # the thread ends
        return finished

    def _start(self) -> None:
        """Has the thread run the queued tasks. The caller holds the lock."""
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
        """Waits for a task and returns it; None if this thread's work is over."""
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
            # When no thread can start any more, a task runs in the host's thread.
            with Suppressed(Exception, says="the writer failed, and training goes on"):
                task()
        finally:
            marker = self._busy
            try:
                if len(self._tasks) == 1:
                    self._remove_marker()
            finally:
                with self._idle:
                    self._tasks.popleft()
                    has_more = bool(self._tasks)
                    self._idle.notify_all()
            if has_more and marker is not None:  # another task came meanwhile
                self._make_marker(marker)

    def _make_marker(self, marker: Path) -> None:
        """Makes the file ``marker``, which shows other processes that this one is not done, unless there is one."""
        if self._busy is None:
            with Suppressed(OSError):
                marker.touch()
                self._busy = marker

    def _remove_marker(self) -> None:
        """Removes the file that `_make_marker` made. The caller must not hold the lock: a disk may hang, and training
        needs the lock."""
        marker, self._busy = self._busy, None
        if marker is not None:
            _remove(marker)

    def _write(self, raw: Path, final: Path) -> None:
        if raw not in self._waiting:  # given up meanwhile, and kept uncompressed
            return
        try:
            final.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it during the run
            if final.parent not in self._cleaned:
                self._cleaned.add(final.parent)
                for directory in (final.parent, *(() if self._scratch is None else self._scratch.bases)):
                    remove_leftovers(directory)
            self._make_marker(temporary_path(final.with_name("writer")))
            if (name := publish(raw, final)) is not None:
                self._finished(name)
        except Exception as fault:
            plain = _keep(raw, final)
            kept_note = f"; kept {plain}, uncompressed" if plain is not None else ""
            logger.error("megaprof: writing %s failed: %s: %s%s", final, type(fault).__name__, fault, kept_note)
            if plain is not None:
                self._finished(plain)
        finally:
            with self._idle:
                self._waiting.pop(raw, None)

    def derive(self, trace: IO[bytes], files: Mapping[str, Path], identity: Mapping[str, Any]) -> bytes | None:
        """Makes ``files`` (suffix -> final path) from ``trace``, which is open, so that it may be compressed and its
        raw file removed meanwhile; closes it. Only a task of ``run`` may call it. Returns the kernel summary, which
        includes ``identity``, plain data; None if it is not among the files, or if they could not be made, which is
        logged.

        A child process does the work, because a thread of this process would hold the interpreter lock, which the
        training thread needs. The child runs at a lower priority.
        """
        raw_paths = dict[str, Path]()
        try:
            with trace:
                raw_paths |= {suffix: raw_path(final) for suffix, final in files.items()}
                specs = filter(None, map(find_spec, _PACKAGES))
                places = dict.fromkeys(str(Path(spec.origin).resolve().parents[1]) for spec in specs if spec.origin)
                order = {
                    "identity": identity,
                    "files": {suffix: str(raw) for suffix, raw in raw_paths.items()},
                    "places": [*places],
                }
                subprocess.run(
                    [sys.executable, "-I", "-S", "-c", _CHILD, json.dumps(order)],
                    stdin=trace,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    check=True,
                )
            summary = raw_paths[KERNELS_SUFFIX].read_bytes() if KERNELS_SUFFIX in raw_paths else None
            for suffix, raw in raw_paths.items():
                if raw.exists():
                    self._waiting[raw] = files[suffix]
                    self._write(raw, files[suffix])
            return summary
        except BaseException as fault:
            for raw in raw_paths.values():
                _remove(raw)  # unless it is on a read-only disk
            if not isinstance(fault, Exception):
                raise
            why: object = fault
            if isinstance(fault, subprocess.CalledProcessError):
                last_line = fault.stderr.decode(errors="replace").strip().splitlines()[-1:]
                why = f"exit {fault.returncode}: {' '.join(last_line)}"
            logger.error("megaprof: %s could not be made: %s", ", ".join(map(str, files.values())), why)
            return None

    def _finished(self, final: Path) -> None:
        address = str(final)
        if self._remote is not None:
            try:
                address = self._remote.upload(final)
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
        self._written.append(address)

    def _announce(self, written: Callable[[list[str]], object] | None = None) -> None:
        files, self._written = self._written, []
        if written is not None:
            written(files)
        if files and self._hook is not None:
            self._hook.run(files)


class FinishHook:
    """Runs ``command`` for the files of each window.

    The command's environment has ``PROFILED_FILES`` (complete files or their remote addresses, one per line) and
    ``PROFILED_DIR`` (the save path, ``directory``). The names do not begin with ``MEGAPROF_``, because such variables
    are options. Every rank that captures runs the command for its own files. The working directory is the one in which
    the hook was made, as long as that exists. The log gets the command's output, and says if it failed.
    """

    def __init__(self, command: str, directory: str, seconds: float = COMMAND_SECONDS) -> None:
        self.command, self.directory, self.seconds = command, directory, seconds
        self._place = ""
        with contextlib.suppress(OSError):  # the working directory was removed
            self._place = os.getcwd()
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, files: Sequence[str]) -> None:
        """Runs the command for ``files`` and waits for it, at most ``seconds``. Raises OSError if it cannot start."""
        environment = {**os.environ, "PROFILED_FILES": "\n".join(files), "PROFILED_DIR": self.directory}
        # A file rather than a pipe: a process that the command leaves running would keep a pipe open, and block us.
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._stopped:
                    return
                self._running = process = subprocess.Popen(
                    self.command,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self._place if os.path.isdir(self._place) else None,
                    start_new_session=True,
                )
            try:
                status = str(process.wait(self.seconds))
            except subprocess.TimeoutExpired:
                _kill(process)
                status = f"killed after {self.seconds:.0f} s"
            with self._lock:
                self._running = None
            output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT))
            output_text = output.read().decode(errors="replace").strip()
        level = logging.INFO if status == "0" else logging.ERROR
        logger.log(
            level,
            "megaprof: --profile-on-finish %r: exit status %s%s",
            self.command,
            status,
            f": {output_text}" * bool(output_text),
        )

    def stop(self) -> None:
        """Kills a command that still runs, and starts no other one, because the process is about to end."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the command and everything that it started: it leads a session of its own, and so a process group."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            process.kill()
        process.wait()


def open_writer(place: str, hook: FinishHook | None) -> tuple[str, Writer] | None:
    """Returns the local directory that stands for ``place``, the save directory or a remote address, and a writer for
    files in it. Logs an error and returns None if the directory cannot be made."""
    # A bad disk on one selected rank must not end the job: its other ranks are about to enter a collective.
    with Suppressed(OSError, says=f"profiling is off on this rank: {place} cannot be created"):
        remote = Remote(place) if is_remote(place) else None
        local = place if remote is None else str(remote.staging)
        os.makedirs(local, exist_ok=True)
        return local, Writer(remote=remote, hook=hook, scratch=Scratch(Path(local)))
    return None


def _remove(path: Path) -> None:
    with Suppressed(OSError):
        path.unlink()


def _keep(raw: Path, final: Path) -> Path | None:
    """Renames the raw file to its uncompressed final name, and returns that path; None if the file stays where it is.
    This takes space and time only if the file is in scratch."""
    plain = final.with_suffix("") if final.suffix == ".gz" else final
    in_scratch = raw.parent != plain.parent
    until = " until megaprof runs on this host again" if in_scratch else ""  # it takes memory there
    with Suppressed(OSError, says=f"{raw} stays there{until}, it cannot be moved to {plain.name}"):
        return carry(raw, plain, KEEP_SECONDS) if in_scratch else rename(raw, plain)
    return None
