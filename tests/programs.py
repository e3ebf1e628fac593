"""Programs of tests that end, split or are killed: processes of their own, which begin at once as ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from megaprof.testing import launcher

#: What `tests.warm_ranks` gives its forks.
_RANK = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run(
    program: Callable[..., object] | str,
    *arguments: str | Path,
    send: signal.Signals | None = None,
    limit: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs a function of a module, or code, as a program with these arguments, with ``send`` as soon as it prints the
    line ``ready``. It is killed after ``limit`` seconds."""
    given = [str(each) for each in arguments]
    if not isinstance(program, str):
        program = f"from {program.__module__} import {program.__name__}\n{program.__name__}(*{given!r})"
    code = f"import sys\nsys.path[:] = {sys.path!r}\nsys.argv[1:] = {given!r}\n{program}"
    job = launcher.start(code, {**os.environ, **_RANK})
    assert job.stdout is not None
    assert job.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda stream: errors.append(stream.read()), args=(job.stderr,))
    watch = threading.Timer(limit, job.send_signal, (signal.SIGKILL,))
    reader.start()
    watch.start()
    try:
        out = ""
        if send is not None:
            out = job.stdout.readline()
            job.send_signal(send if out == "ready\n" else signal.SIGKILL)
        out += job.stdout.read()
        status = job.wait()
        reader.join()
    finally:
        watch.cancel()
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
    for stream in (job.stdout, job.stderr):
        stream.close()
    assert send is None or out.startswith("ready\n"), errors
    return subprocess.CompletedProcess([program, *given], status, out, errors[0])
