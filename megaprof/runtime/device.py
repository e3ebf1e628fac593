"""Waiting for the GPU when a window closes. It may be waiting for peers that are gone, so we never wait for it without
a limit; and while a CUDA graph is captured, not at all."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from megaprof.runtime.interruption import Suppressed
from megaprof.runtime.logs import logger

#: The seconds that a window which closes waits for the device while other ranks may be waiting for this one.
GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.1


def capturing() -> bool:
    """Returns whether this thread's current stream is being captured into a CUDA graph. Then the device must not be
    waited for: that would end the capture with an error of the host's."""
    cuda = _cuda()
    return cuda is not None and bool(cuda.is_current_stream_capturing())


class DeviceWait:
    """Waits for all streams of the device on a thread of its own, so that the caller can stop waiting.

    ``torch.cuda.synchronize`` is the one call that knows all streams (NCCL's and other libraries', too), and it has no
    time limit. The thread is there from the beginning, because Python starts none while the process ends. A process
    that does not use CUDA has no device to wait for, and no such thread.
    """

    def __init__(self) -> None:
        self._cuda = _cuda()
        self._asked = threading.Event()
        self._done = threading.Event()
        if self._cuda is not None:
            device = self._cuda.current_device()
            threading.Thread(target=self._synchronize, args=(device,), name="megaprof-device", daemon=True).start()

    def wait(self, seconds: float, ending: Callable[[], bool] = lambda: False) -> str | None:
        """Returns None as soon as the device is idle, or, after ``seconds`` at most, why it is not. From the moment
        at which ``ending()`` says that the process has to end, after `GRACE_SECONDS` at most."""
        late = None if self._cuda is None else self._late(seconds, ending)
        if late is not None:
            logger.warning("megaprof: a window closes without what the device has yet to do: %s", late)
        return late

    def _late(self, seconds: float, ending: Callable[[], bool]) -> str | None:
        if capturing():
            return "a CUDA graph is being captured"
        self._asked.set()
        deadline = time.monotonic() + seconds
        while not self._done.wait(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
            if ending():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                return "the device did not finish what it was given in time, as where another rank is gone"
        return None

    def end(self) -> None:
        """Nobody will wait any more: the thread ends, unless it is waiting for the device."""
        self._done.set()
        self._asked.set()

    def _synchronize(self, device: int) -> None:
        self._asked.wait()
        if not self._done.is_set():
            with Suppressed(Exception):  # a device that is broken is not busy: the next call of the host's says so
                self._cuda.synchronize(device)
            self._done.set()


def _cuda() -> Any:
    """Returns torch.cuda if this process uses it, else None. Asking must not initialise it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
