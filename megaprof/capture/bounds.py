"""What bounds a window: the GPU, which has to finish what it was given, and the memory of the host.

The GPU may be waiting for peers that are gone, so there is always a limit. While a CUDA graph is captured, nothing may
wait at all.

A profiler keeps everything it records in host memory until the window closes, and closing takes several times as much
again. If that does not fit, the window must end before the kernel's out-of-memory killer ends the training. So a thread
watches how much memory is left while a window is open. It only leaves a note. The training thread looks at it before
each microbatch, and closes the window itself. ``--profile-max-host-memory`` sets one of two bounds:

* a size (``64GiB``), for the resident memory of this process;
* a share (``80%``), for the memory in use in the tightest control group above this process (v1 and v2), and in the
  machine. Page cache counts as free, because the kernel gives it back. The default is 95 %.

Both bounds include the memory that closing the window will take. The share also includes as much again
for each other rank of this host that captures: ranks capture the same step, so they close together.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from megaprof.parallel.machine import find_bounds, resident_bytes
from megaprof.runtime.isolation import Suppressed, logger

#: How many seconds a closing window waits for the device while other ranks may be waiting for this one.
GRACE_SECONDS = 5.0
#: The time between two looks, each of which holds the interpreter lock for ~0.1 ms.
INTERVAL_SECONDS = 0.1


def capturing() -> bool:
    """Returns whether this thread's current stream is being captured into a CUDA graph. Then nobody may wait for
    the device: that would end the capture with an error in the host."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def compiling() -> bool:
    """Returns whether torch.compile traces the caller, which must not see what it cannot trace."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def in_backward() -> bool:
    """Returns whether this thread is inside the autograd engine, as in a backward on the CPU. A profiler that stops
    there counts as running again once the engine has put the thread's state back."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1


#: Stopping and exporting a Kineto trace takes at most this many times the memory that recording it took. We measured
#: 3.6 to 6.7, depending on options, with torch 2.13 and CPU activity (``python -m tests.benchmarks.closing``;
#: docs/architecture.md has the figures).
CLOSING_FACTOR = 7


class Guard:
    """Bounds a window, on a thread of its own: watches the host's memory while it is open, and waits for all streams of
    the device when it closes, so that the caller can stop waiting.

    ``torch.cuda.synchronize`` is the one call that knows all streams (NCCL's and other libraries', too), and it has no
    time limit. The thread is there from the beginning, because Python starts none while the process ends. A process
    that does not use CUDA has no device to wait for.
    """

    def __init__(self) -> None:
        torch = sys.modules.get("torch")  # asking must not initialise CUDA
        self._cuda: Any = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        self._closing = threading.Event()
        self._idle = threading.Event()

    def start(self, limit: tuple[int | None, float], others: int, on_limit: Callable[[str], None]) -> None:
        """Starts to watch. If the window has to close, the thread calls ``on_limit(reason)`` once. ``limit``: see
        `config.values.parse_limit`. A bound that cannot be read is not watched. ``others``: the number of other
        processes of this host that may close a window at the same time; each is taken to need as much as this one."""
        device = None if self._cuda is None else self._cuda.current_device()

        def run() -> None:
            try:
                self._watch(limit, others, on_limit)
            except Exception:  # a file of the kernel's in an unknown format must do no harm
                logger.warning("megaprof: host memory cannot be watched on this machine", exc_info=True)
            self._closing.wait()
            if self._cuda is not None and not self._idle.is_set():
                with Suppressed(Exception):  # a broken device is not busy; the host's next call reports it
                    self._cuda.synchronize(device)
                self._idle.set()

        threading.Thread(target=run, name="megaprof-window", daemon=True).start()

    def wait(self, seconds: float, ending: Callable[[], bool] = lambda: False) -> str | None:
        """Watches no more. Returns None as soon as the device is idle. If it is not idle after ``seconds``, returns the
        reason. Once ``ending()`` is true, because the process has to end, waits at most `GRACE_SECONDS` more."""
        reason = None
        if self._cuda is not None and capturing():
            reason, self._cuda = "a CUDA graph is being captured", None
        self._closing.set()
        if self._cuda is not None:
            deadline = time.monotonic() + seconds
            while reason is None and not self._idle.wait(max(0.0, min(INTERVAL_SECONDS, deadline - time.monotonic()))):
                if ending():
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() >= deadline:
                    reason = "the device did not finish what it was given in time, as where another rank is gone"
        if reason is not None:
            logger.warning("megaprof: a window closes without what the device has yet to do: %s", reason)
        return reason

    def end(self) -> None:
        """Ends the thread, unless it is waiting for the device. Nobody calls `wait` afterwards."""
        self._idle.set()
        self._closing.set()

    def _watch(self, limit: tuple[int | None, float], others: int, on_limit: Callable[[str], None]) -> None:
        (size, share), gib = limit, 1 << 30
        bounds, before = find_bounds(), resident_bytes()
        while not self._closing.is_set():
            resident = resident_bytes()
            needed = CLOSING_FACTOR * max(0, resident - before)
            uses = [] if size is None else [("this process", resident, size, size, 0)]
            for name, read in bounds.items():
                used, there_is = read()
                uses.append((name, used, there_is, int(there_is * share), others * needed))
            for name, used, there_is, allowed, theirs in uses:
                if used + needed + theirs > allowed and not self._closing.is_set():
                    total = "" if there_is == allowed else f" (of {there_is / gib:.2f})"
                    too = f", those of other processes here {theirs / gib:.2f} GiB" if theirs else ""
                    on_limit(
                        f"host memory: {name} uses {used / gib:.2f} GiB, closing the window may take "
                        f"{needed / gib:.2f} GiB more{too}, and --profile-max-host-memory allows "
                        f"{allowed / gib:.2f} GiB{total}"
                    )
                    return
            self._closing.wait(INTERVAL_SECONDS)
