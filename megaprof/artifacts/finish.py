"""The finish hook: the user's shell command, which the writer's thread runs once files are complete."""

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
    """Runs ``command`` for the files of each window.

    The command's environment has ``PROFILED_FILES`` (complete files or their remote addresses, one per line) and
    ``PROFILED_DIR`` (the save path). The names do not begin with ``MEGAPROF_``, because such variables are options.
    Every rank that captures runs the command for its own files. The working directory is the one in which the hook was
    made, as long as that exists. The log gets the command's output, and says if it failed.
    """

    command: str
    directory: str
    seconds: float = COMMAND_SECONDS
    _place: str = field(default="", init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _stopped: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # the working directory was removed
            self._place = os.getcwd()

    def run(self, files: Sequence[str]) -> None:
        """Runs the command for ``files`` and waits for it, at most ``seconds``. Raises OSError if it cannot start."""
        environment = {
            **os.environ,
            "PROFILED_FILES": "\n".join(files),
            "PROFILED_DIR": self.directory,
        }
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
