"""What the cores of the machine do besides a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_IDLE = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
#: Until the benchmark is gone, however it ended.
_COMPUTE = "while os.getppid() == parent:\n    for _ in range(1_000_000): pass"


def real_time(wanted: bool = True) -> bool:
    """Returns whether this process is at real-time priority now, or back at the ordinary one, as threads are that start
    later: ordinary processes do not hold it up. Not for a rank that computes and never waits: Linux takes 50 ms of each
    second from it (sched_rt_runtime_us)."""
    try:
        policy, priority = (os.SCHED_FIFO, 10) if wanted else (os.SCHED_OTHER, 0)
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except (AttributeError, OSError):
        return False
    return True


@contextmanager
def awake() -> Iterator[None]:
    """A process on every core that computes whenever nothing else wants to: ranks that sleep most of the time wake up
    late and slow on cores that doze off between, a virtual machine's above all, and not alike from run to run. Nothing
    where the system has no such priority."""
    count = os.cpu_count() or 1
    with _running(count if hasattr(os, "SCHED_IDLE") else 0, _IDLE):
        yield


@contextmanager
def one_busy(wanted: bool = True) -> Iterator[None]:
    """Another process that computes all the time, at ordinary priority."""
    with _running(int(wanted)):
        yield


@contextmanager
def _running(count: int, first: str = "") -> Iterator[None]:
    code = "\n".join(("import os", "parent = os.getppid()", first, _COMPUTE))
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
