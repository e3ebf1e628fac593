"""Waits for the GPU when a window closes. The GPU may be waiting for peers that are gone, so there is always a limit.
While a CUDA graph is captured, nothing may wait at all."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from megaprof.runtime.interruption import Suppressed
from megaprof.runtime.logs import logger

#: How many seconds a closing window waits for the device while other ranks may be waiting for this one.
GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.1


def capturing() -> bool:
    """Returns whether this thread's current stream is being captured into a CUDA graph. Then nobody may wait for
    the device: that would end the capture with an error in the host."""
    torch = sys.modules.get("torch")  # every step asks this, so it does not go through `_cuda`
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


class DeviceWait:
    """Waits for all streams of the device on a thread of its own, so that the caller can stop waiting.

    ``torch.cuda.synchronize`` is the one call that knows all streams (NCCL's and other libraries', too), and it has no
    time limit. The thread is there from the beginning, because Python starts none while the process ends. A process
    that does not use CUDA has no device to wait for, and no such thread.
    """

    def __init__(self) -> None:
        self._cuda = _cuda()
        self._wait_requested = threading.Event()
        self._done = threading.Event()
        if self._cuda is not None:
            device = self._cuda.current_device()
            threading.Thread(target=self._synchronize, args=(device,), name="megaprof-device", daemon=True).start()

    def wait(self, seconds: float, ending: Callable[[], bool] = lambda: False) -> str | None:
        """Returns None as soon as the device is idle. If it is not idle after ``seconds``, returns the reason. Once
        ``ending()`` is true, because the process has to end, waits at most `GRACE_SECONDS` more."""
        reason = None if self._cuda is None else self._why_busy(seconds, ending)
        if reason is not None:
            logger.warning("megaprof: a window closes without what the device has yet to do: %s", reason)
        return reason

    def _why_busy(self, seconds: float, ending: Callable[[], bool]) -> str | None:
        if capturing():
            return "a CUDA graph is being captured"
        self._wait_requested.set()
        deadline = time.monotonic() + seconds
        while not self._done.wait(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
            if ending():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                return "the device did not finish what it was given in time, as where another rank is gone"
        return None

    def end(self) -> None:
        """Ends the thread, unless it is waiting for the device. Nobody calls `wait` afterwards."""
        self._done.set()
        self._wait_requested.set()

    def _synchronize(self, device: int) -> None:
        self._wait_requested.wait()
        if not self._done.is_set():
            with Suppressed(Exception):  # a broken device is not busy; the host's next call reports it
                self._cuda.synchronize(device)
            self._done.set()


def _cuda() -> Any:
    """Returns torch.cuda if this process uses it, else None. Asking must not initialise it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
