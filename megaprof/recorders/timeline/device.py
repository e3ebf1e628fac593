"""Times on the GPU: CUDA events from a pool, read when they are finished, and never waited for.

ROCm's runtime has the same functions under its own names, and torch calls both ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaprof.formats.timeline import Memory
from megaprof.recorders.tape import Marker
from megaprof.runtime.interruption import Suppressed

_RELAXED = 2  # cuda.h, CUstreamCaptureMode: nothing that this thread does breaks a capture
#: The library that torch's calls end in, and its functions. CUDA's is the driver: there is one of it in a process, and
#: a call that fails leaves no error behind for torch to find.
_CUDA = "libcuda.so", "cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing", "cuEventRecord"
_HIP = "libamdhip64.so", "hipThreadExchangeStreamCaptureMode", "hipStreamIsCapturing", "hipEventRecord"


class NoDeviceClock(Exception):
    """A GPU is in use and cannot be asked for the time; the message says why."""


def device_clock() -> DeviceClock | None:
    """The clock of this process's GPU; None where torch does not use one. A build without CUDA and ROCm has none,
    whatever a host that runs on a CPU pretends. Raises NoDeviceClock."""
    import torch

    names = _HIP if torch.version.hip else _CUDA if torch.version.cuda else None
    if names is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    library, *functions = names
    path = _loaded(library)
    if path is None:
        raise NoDeviceClock(f"{library} is not loaded in this process")
    runtime = ctypes.CDLL(path)
    missing = [name for name in functions if not hasattr(runtime, name)]
    if missing:
        raise NoDeviceClock(f"{path} has no {missing[0]}")
    return DeviceClock(*(getattr(runtime, name) for name in functions))


def device_memory() -> Callable[[], Memory] | None:
    """Returns what asks torch's allocator for the memory of this process's GPU; None where torch uses no GPU, or an
    allocator that does not count. Nothing is reset: the host may read the same figures.

    Asking copies the allocator's counters (15 us), and touches neither the GPU nor its driver."""
    import torch

    cuda: Any = torch.cuda
    if not (torch.version.cuda or torch.version.hip) or not cuda.is_initialized():
        return None
    device = cuda.current_device()

    def read() -> Memory:
        found = cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        return Memory(found["current"], found["peak"], capacity)

    try:
        capacity = cuda.get_device_properties(device).total_memory
        read()
    except (AttributeError, KeyError, RuntimeError, AssertionError):
        return None
    return read


def _loaded(library: str) -> str | None:
    """The path of the shared library that this process has loaded under this name, whatever its version."""
    with Suppressed(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.rpartition(" ")[2]
            name = path.rpartition("/")[2]
            if name == library or name.startswith(library + "."):
                return path
    return None


class DeviceClock:
    """``mark()`` on the training thread, the rest on threads that read."""

    def __init__(self, exchange_mode: Any, is_capturing: Any, record: Any) -> None:
        """The runtime's functions, of `ctypes`: one that swaps the capture mode of its thread, one that says whether a
        stream captures, one that records an event on a stream."""
        import torch

        self._cuda: Any = torch.cuda
        self._device = self._cuda.current_device()
        self._exchange_mode = exchange_mode
        self._pool: list[Any] = []
        self._copies: Any = None
        self.mark: Callable[[], Any] = self._mark
        """An event on the stream that is current, or None: a CUDA graph is captured on it, and the event would become
        part of that. A step takes as many events as it has boundaries, and later steps reuse them.

        The stream is asked for every time, because Megatron works on several: that takes 0.1 us where the caller of
        `torch.cuda.current_stream` pays for a new object."""
        current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if Marker is not None and current_stream is not None:
            addresses = (ctypes.cast(each, ctypes.c_void_p).value for each in (is_capturing, record))
            self.mark = Marker(self._pool, self._new, current_stream, self._device, *addresses)

    def _mark(self) -> Any:
        """Returns what `recorders.tape.Marker` does, in Python."""
        if self._cuda.is_current_stream_capturing():
            return None
        try:
            event = self._pool.pop()  # atomic, so no lock: who reads only appends
        except IndexError:
            return self._new()
        event.record()
        return event

    def _new(self) -> Any:
        """An event that was recorded: torch makes it then."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What a thread needs in which events are asked: a query while another thread captures a CUDA graph would break
        that capture, and a thread's first call would open a context on device 0."""
        mode = ctypes.c_int(_RELAXED)
        status = self._exchange_mode(ctypes.byref(mode))
        if status != 0:
            raise RuntimeError(f"{self._exchange_mode.__name__} answered {status}; no event can be read safely")
        try:
            with self._cuda.device(self._device):
                yield
        finally:
            self._exchange_mode(ctypes.byref(mode))

    def finished(self, event: Any) -> bool:
        """Inside `reading`."""
        return bool(event.query())

    def microseconds(self, first: Any, event: Any) -> int:
        """Between two finished events; inside `reading`."""
        return round(1000 * float(first.elapsed_time(event)))

    def numbers(self, tensor: Any) -> list[Any]:
        """Returns what a tensor holds whose step is finished: copied on a stream of our own, which nobody else waits
        for. Inside `reading`."""
        if self._copies is None:
            self._copies = self._cuda.Stream()
        with self._cuda.stream(self._copies):
            return list(tensor.tolist())

    def take_back(self, events: list[Any]) -> None:
        self._pool.extend(events)
