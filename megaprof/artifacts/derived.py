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
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from megaprof.formats.names import KERNELS_SUFFIX, raw_path
from megaprof.runtime.isolation import Suppressed, logger

#: With -I -S, the user's PYTHON* variables and site-packages cannot slow down the start of the interpreter. Training
#: itself never imports the analysis.
_CHILD = (
    "import json, sys; order = json.loads(sys.argv[1]); sys.path += order['places']; "
    "from megaprof.analysis.trace.summary import main; main(order)"
)
#: The packages that the child needs.
_PACKAGES = ("megaprof", "numpy", "msgspec", "isal")


def derive(
    trace: IO[bytes], files: Mapping[str, Path], identity: Mapping[str, Any], finish: Callable[[Path, Path], object]
) -> bytes | None:
    """Makes ``files`` (suffix -> final path) from ``trace``, which it closes, and passes each to ``finish`` with its
    raw path. Returns the kernel summary, which includes ``identity``, plain data; None if it is not among the files, or
    if they could not be made, which is logged. Runs in the writer's thread, which waits for the child."""
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
                finish(raw, files[suffix])
        return summary
    except BaseException as fault:
        for raw in raw_paths.values():
            with Suppressed(OSError):  # a read-only disk
                raw.unlink()
        if not isinstance(fault, Exception):
            raise
        why: object = fault
        if isinstance(fault, subprocess.CalledProcessError):
            last_line = fault.stderr.decode(errors="replace").strip().splitlines()[-1:]
            why = f"exit {fault.returncode}: {' '.join(last_line)}"
        logger.error("megaprof: %s could not be made: %s", ", ".join(map(str, files.values())), why)
        return None
