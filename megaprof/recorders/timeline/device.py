"""Times on the GPU: CUDA events from a pool, read when they are finished, and never waited for."""

from __future__ import annotations

import ctypes
from typing import Any

_THREAD_LOCAL_CAPTURE = 1  # cuda.h, CUstreamCaptureMode


def device_clock() -> DeviceClock | None:
    """The clock of this process's GPU; None where CUDA is not in use. A build without CUDA has none whatever a host
    that runs on a CPU pretends."""
    import torch

    used = torch.version.cuda is not None and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return DeviceClock() if used else None


class DeviceClock:
    """``mark()`` on the training thread, the rest on the background thread."""

    def __init__(self) -> None:
        self._pool: list[Any] = []
        import torch

        self._cuda: Any = torch.cuda
        self._device = self._cuda.current_device()
        self._ready = False

    def mark(self) -> Any:
        """An event on the current stream. A step takes as many as it has boundaries, and later steps reuse them."""
        try:
            event = self._pool.pop()  # atomic, so no lock: the background thread only appends
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def finished(self, event: Any) -> bool:
        self._prepare()
        return bool(event.query())

    def microseconds(self, first: Any, event: Any) -> int:
        """Between two finished events."""
        return round(1000 * float(first.elapsed_time(event)))

    def take_back(self, events: list[Any]) -> None:
        self._pool.extend(events)

    def _prepare(self) -> None:
        """Once, on the thread that queries.

        A query while another thread captures a CUDA graph would break that capture, unless this thread says that
        captures elsewhere are none of its business; torch's NCCL watchdog does the same. And a thread's first call
        would open a context on device 0, if it did not choose its own.
        """
        if self._ready:
            return
        self._ready = True
        mode = ctypes.c_int(_THREAD_LOCAL_CAPTURE)
        status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if status != 0:
            raise RuntimeError(f"cuThreadExchangeStreamCaptureMode answered {status}; no event can be read safely")
        self._cuda.set_device(self._device)
