"""Computes files from a finished raw trace: the kernel summary and collapsed stacks.

A child process does the work, because a thread of this process would hold the interpreter lock, which the training
thread needs. The child runs at a lower priority. It reads the trace from a file that is already open, so the trace may
be compressed and its raw file removed at any time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from megaprof.artifacts.writer import Writer
from megaprof.formats.names import KERNELS_SUFFIX, raw_path
from megaprof.runtime.isolation import Suppressed, logger

#: The most windows whose files may wait for their turn. Each keeps a raw trace on disk, and nothing in memory.
_QUEUE = 8
#: With -I -S, the user's PYTHON* variables and site-packages cannot slow down the start of the interpreter. Training
#: itself never imports the analysis.
_CHILD = (
    "import json, sys; order = json.loads(sys.argv[1]); sys.path += order['places']; "
    "from megaprof.analysis.trace.summary import main; main(order)"
)
#: The packages that the child needs.
_PACKAGES = ("megaprof", "numpy", "msgspec", "isal")


class DerivedFiles:
    """Derives files from raw traces in the writer's thread, which waits for the child."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._unfinished: list[Future[bytes | None]] = []
        self._role: str | None = None  # the role of the last window
        self._summaries: dict[str | None, Future[bytes | None]] = {}  # by role: that of its last window

    def prepare(self, raw: Path, files: Mapping[str, Path], identity: Mapping[str, Any]) -> Callable[[], None] | None:
        """Returns a task for the writer that derives ``files`` (suffix -> final path) from the trace ``raw``; None if
        there is no trace, or if too many windows are waiting.

        Opens ``raw`` now, so it may be renamed or removed before the task runs. The kernel summary includes
        ``identity``, which must be plain data.
        """
        names = ", ".join(path.name for path in files.values())
        self._role = identity.get("role")
        self._summaries.pop(self._role, None)
        self._unfinished = [summary for summary in self._unfinished if not summary.done()]
        if len(self._unfinished) >= _QUEUE:
            logger.warning("megaprof: the writer is behind by %d windows; no %s", _QUEUE, names)
            return None
        with Suppressed(OSError, says=f"no {names}: there is no trace to make it from"):
            trace = open(raw, "rb")  # noqa: SIM115 - closed when the task is done
            self._summaries[self._role] = summary = Future[bytes | None]()
            self._unfinished.append(summary)
            return partial(self._do, summary, trace, files, identity)
        return None

    def kernel_summary(self, timeout: float, role: str | None = None) -> dict[str, Any] | None:
        """Returns the summary of the last window, or of the last window of ``role``. Returns None if there is no
        summary, if it is not ready within ``timeout`` seconds, or if it could not be made."""
        summary, text = self._summaries.get(self._role if role is None else role), None
        with Suppressed(TimeoutError):
            text = None if summary is None else summary.result(timeout)
        return None if text is None else dict(json.loads(text))

    def _do(
        self, summary: Future[bytes | None], trace: IO[bytes], files: Mapping[str, Path], identity: Mapping[str, Any]
    ) -> None:
        text, raw_paths = None, dict[str, Path]()
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
            if KERNELS_SUFFIX in raw_paths:
                text = raw_paths[KERNELS_SUFFIX].read_bytes()
            for suffix, raw in raw_paths.items():
                if raw.exists():
                    self._writer.finish(raw, files[suffix])
        except BaseException as fault:
            for raw in raw_paths.values():
                raw.unlink(missing_ok=True)
            if not isinstance(fault, Exception):
                raise
            why: object = fault
            if isinstance(fault, subprocess.CalledProcessError):
                last_line = fault.stderr.decode(errors="replace").strip().splitlines()[-1:]
                why = f"exit {fault.returncode}: {' '.join(last_line)}"
            logger.error("megaprof: %s could not be made: %s", ", ".join(map(str, files.values())), why)
        finally:
            summary.set_result(text)
