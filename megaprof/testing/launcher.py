"""Runs a function on n ranks of this machine, and reports everything that went wrong.

Each rank is a fresh interpreter in a session of its own. The parent holds the rendezvous store on a port that it has
bound, so any number of launchers can run at once. A rank that fails is reported with its traceback or its signal, a
rank that hangs with its stack, and nothing that a rank started outlives `run_ranks`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import multiprocessing.spawn
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

from megaprof.parallel.machine import processes_with

T = TypeVar("T")

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves after one has failed."""

_STDERR_LINES = 40
_POLL = 0.02
_DUMP_SIGNAL = signal.SIGUSR1
_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from megaprof.testing.launcher import _rank_main; _rank_main({job!r})"


@dataclass(frozen=True)
class RankReport:
    """How one rank ended."""

    rank: int
    """Number of the rank, from 0."""
    outcome: str
    """``returned``, ``raised``, ``exited`` (without returning, or with a non-zero ``exit_status`` after it),
    ``signalled``, ``hung`` (still running at the time limit) or ``killed`` (still running ``GRACE`` seconds after
    another rank had failed)."""
    exit_status: int | None = None
    """Exit status of a process that ended by itself."""
    signal: str | None = None
    """Name of the signal that ended it."""
    traceback: str = ""
    """Traceback of the exception that it raised."""
    stack: str = ""
    """The stacks of its threads, if it had to be killed."""
    stderr: str = ""
    """Its last lines on stderr."""
    failed_rank: int | None = None
    """The rank that had failed, if this one was killed for it."""

    def __str__(self) -> str:
        headline = {
            "returned": "returned",
            "raised": "raised",
            "exited": f"did not return: exited with status {self.exit_status}",
            "signalled": f"was killed by {self.signal}",
            "hung": "hung, killed at the time limit",
            "killed": f"killed after rank {self.failed_rank} failed",
        }[self.outcome]
        details = [self.traceback, self.stack and f"stack when killed:\n{self.stack}"]
        if self.outcome in ("exited", "signalled"):
            details.append(self.stderr and f"last lines of stderr:\n{self.stderr}")
        return "\n".join([f"rank {self.rank} {headline}", *(text.rstrip() for text in details if text)])


class RanksFailed(RuntimeError):
    """At least one rank did not return. ``reports`` holds one `RankReport` per rank, in rank order."""

    def __init__(self, reports: tuple[RankReport, ...], timeout: float) -> None:
        super().__init__(reports, timeout)
        self.reports = reports
        self.timeout = timeout

    def __str__(self) -> str:
        failed = [str(report.rank) for report in self.reports if report.outcome != "returned"]
        limit = f" (time limit {self.timeout:g} s)" if math.isfinite(self.timeout) else ""
        headline = f"ranks {', '.join(failed)} of {len(self.reports)} failed{limit}"
        return "\n\n".join([headline, *(str(report) for report in self.reports)])


def run_ranks(
    fn: Callable[..., T],
    world: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    check: Callable[[], None] = lambda: None,
    **kwargs: Any,
) -> list[T]:
    """Calls ``fn(*args, **kwargs)`` in ``world`` fresh processes, and returns their results in rank order.

    ``fn`` must be importable by name; arguments and results are pickled. Each process has RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, one OMP thread, and ``env`` on top; inside,
    `init_distributed` or ``torch.distributed.init_process_group`` joins the ranks. What ranks print reaches this
    process's stdout and stderr unchanged; with ``on_line(rank, line)`` their stdout goes there, line by line, instead
    (called from a reader thread per rank). ``check()`` is called many times a second; what it raises ends the ranks.

    Raises:
        RanksFailed: a rank raised, exited, was killed, or was still running after ``timeout`` seconds. Ranks still
            running are given ``GRACE`` seconds after the first failure; then they, and every process that a rank
            started, are killed.
        ValueError: ``world`` or ``timeout`` is not positive.
        RuntimeError: in a rank, if the script that calls this has no ``if __name__ == "__main__":`` around the call.
            Every rank imports the script, and would start ranks of its own.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive seconds, got {timeout}")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    preparation = multiprocessing.spawn.get_preparation_data("rank")
    preparation.pop("authkey", None)  # cannot be pickled, and ranks are not multiprocessing children
    call = pickle.dumps((fn, args, kwargs))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    token = f"_MEGAPROF_RANKS_{uuid.uuid4().hex}"
    common_env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # torch's own switch for "the launcher holds the store": rank 0 does not try to bind the port again.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # All ranks are here: no need for gloo to resolve a host name that may not resolve.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # Inherited by everything a rank starts, so that it can be found again (see _kill).
        token: "1",
    }
    with tempfile.TemporaryDirectory(prefix="megaprof-ranks-", ignore_cleanup_errors=True) as directory:
        job = Path(directory)
        (job / "preparation").write_bytes(pickle.dumps(preparation))
        (job / "call").write_bytes(call)
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                own_env = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(_Rank(rank, job, {**common_env, **own_env, **(env or {})}, on_line))
            failed_rank = _wait(ranks, timeout, check)
            running = [rank for rank in ranks if rank.process.poll() is None]
            stacks = _dump_stacks(running)
        finally:
            _kill(ranks, token)
        reports = tuple(rank.report(stacks.get(rank.rank), failed_rank) for rank in ranks)
        if any(report.outcome != "returned" for report in reports):
            raise RanksFailed(reports, timeout)
        return [pickle.loads(rank.result.read_bytes()) for rank in ranks]


def init_distributed(timeout: float = 60.0) -> tuple[int, int]:
    """Joins the ranks of `run_ranks` (or of torchrun) over gloo; returns (rank, world size).

    ``timeout``: seconds until a collective that some rank does not reach raises. If the default process group exists
    already, it is kept.
    """
    import torch

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def start(code: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts ``code`` in a fresh interpreter and a session of its own, with ``env`` as its whole environment."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


class _Rank:
    """The process of one rank, as the parent sees it."""

    def __init__(self, rank: int, job: Path, env: dict[str, str], on_line: Callable[[int, str], None] | None) -> None:
        self.rank = rank
        self.result = job / f"{rank}.result"
        self.error = job / f"{rank}.error"
        self.stack = job / f"{rank}.stack"
        self.stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self.process = start(_BOOTSTRAP.format(path=sys.path, job=str(job)), env)
        out: Callable[[str], object] = sys.stdout.write if on_line is None else (lambda line: on_line(rank, line))
        self.readers = [
            threading.Thread(target=_forward, args=(self.process.stdout, out, deque[str](maxlen=0)), daemon=True),
            threading.Thread(target=_forward, args=(self.process.stderr, sys.stderr.write, self.stderr), daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def report(self, stack: str | None, failed_rank: int | None) -> RankReport:
        """Returns how the rank ended; ``stack`` is None if it ended by itself."""
        stderr = "".join(self.stderr)
        if stack is not None:
            outcome = "hung" if failed_rank is None else "killed"
            return RankReport(self.rank, outcome, stack=stack, stderr=stderr, failed_rank=failed_rank)
        status = self.process.returncode
        if self.error.exists():
            return RankReport(self.rank, "raised", status, traceback=self.error.read_text(), stderr=stderr)
        if status < 0:
            return RankReport(self.rank, "signalled", signal=signal.Signals(-status).name, stderr=stderr)
        outcome = "returned" if self.result.exists() and status == 0 else "exited"
        return RankReport(self.rank, outcome, status, stderr=stderr)


def _forward(stream: IO[str], write: Callable[[str], object], last: deque[str]) -> None:
    with stream, contextlib.suppress(ValueError):  # ValueError: our own stdout was closed meanwhile
        for line in stream:
            last.append(line)
            write(line)


def _wait(ranks: list[_Rank], timeout: float, check: Callable[[], None]) -> int | None:
    """Waits until all ranks have ended or their time is up; returns the first rank that was seen to have failed."""
    deadline = time.monotonic() + timeout
    failed_rank: int | None = None
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        check()
        if failed_rank is None:
            ended = (rank for rank in ranks if rank.process.poll() is not None)
            failed_rank = next((rank.rank for rank in ended if not rank.result.exists()), None)
            if failed_rank is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(_POLL)
    return failed_rank


def _dump_stacks(ranks: list[_Rank]) -> dict[int, str]:
    """Returns the Python stacks of ranks that still run. faulthandler writes them even during a blocked C call."""
    for rank in ranks:
        if rank.stack.exists():  # without its handler the signal would kill the rank
            rank.process.send_signal(_DUMP_SIGNAL)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(rank.stack.exists() and not rank.stack.stat().st_size for rank in ranks):
        time.sleep(_POLL)
    time.sleep(_POLL * 5 if ranks else 0)  # let a dump that has begun come to its end
    missing = "(none: stopped, or not yet started)"
    return {rank.rank: (rank.stack.read_text() if rank.stack.exists() else "") or missing for rank in ranks}


def _kill(ranks: list[_Rank], token: str) -> None:
    """Kills the ranks and everything that they started, even in sessions of its own."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for pid in processes_with(token):  # on Linux; elsewhere only process groups are followed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        for reader in rank.readers:
            reader.join(timeout=2.0)


def _rank_main(job_directory: str) -> None:
    """Runs in a rank: restores the parent's imports, calls the function, and leaves its result or traceback behind."""
    job = Path(job_directory)
    rank = os.environ["RANK"]
    # Named .stack only once the handler is in, because the parent signals no earlier than it sees that name.
    early = job / f"{rank}.stack.early"
    stack = early.open("w")
    faulthandler.register(_DUMP_SIGNAL, file=stack, all_threads=True)
    faulthandler.enable()
    if sys.platform == "linux":
        # A parent that was killed kills nothing itself: PR_SET_PDEATHSIG, see prctl(2).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    reader = select.poll()
    reader.register(sys.stdout, 0)
    if reader.poll(0):  # of our stdout has gone: the parent was killed before we asked for that
        os._exit(1)
    early.rename(job / f"{rank}.stack")
    try:
        process = multiprocessing.current_process()
        process._inheriting = True  # type: ignore[attr-defined]  # multiprocessing refuses ranks that begin in an import
        multiprocessing.spawn.prepare(pickle.loads((job / "preparation").read_bytes()))
        del process._inheriting  # type: ignore[attr-defined]
        fn, args, kwargs = pickle.loads((job / "call").read_bytes())
        result = pickle.dumps(fn(*args, **kwargs))
    except Exception:
        (job / f"{rank}.error").write_text(traceback.format_exc())
        sys.exit(1)
    partial = job / f"{rank}.result.partial"
    partial.write_bytes(result)
    partial.rename(job / f"{rank}.result")
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
