"""The finish hook: a shell command of the user's for files that are complete, run in the writer's thread."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from megaprof.runtime.logs import logger

#: How long one run of the command may take, in seconds.
COMMAND_SECONDS = 300.0
_OUTPUT = 2000


@dataclass
class FinishHook:
    """``command`` for the files of each window, or once for all files at the end of the process.

    The command finds in its environment ``PROFILED_FILES`` (complete files or their remote addresses, one a line),
    ``PROFILED_DIR`` (the save path) and ``PROFILED_WHEN`` (``window`` or ``end``). Not ``MEGAPROF_*``: those are
    options. Every rank that captures runs it for its own files, in the working directory in which the hook was made, as
    long as that exists. Its output goes to the log, its failure too.
    """

    command: str
    directory: str
    when: str = "window"
    seconds: float = COMMAND_SECONDS
    _place: str = field(default="", init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _stopped: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # it was removed
            self._place = os.getcwd()

    def run(self, files: Sequence[str]) -> None:
        """Run the command for ``files`` and wait for it, ``seconds`` at most. Raises OSError if it cannot start."""
        environment = {
            **os.environ,
            "PROFILED_FILES": "\n".join(files),
            "PROFILED_DIR": self.directory,
            "PROFILED_WHEN": self.when,
        }
        # A file, not a pipe: something that the command leaves running would keep a pipe open, and us waiting.
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
            said = output.read().decode(errors="replace").strip()
        level = logging.INFO if status == "0" else logging.ERROR
        logger.log(
            level, "megaprof: --profile-on-finish %r: exit status %s%s", self.command, status, f": {said}" * bool(said)
        )

    def stop(self) -> None:
        """Kill a command that still runs, and start no other: the process is about to end."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it started: it leads a session, and so a process group, of its own."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            process.kill()
        process.wait()
