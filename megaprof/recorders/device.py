"""Takes times on the GPU with CUDA events from a pool. It reads them when they are finished, and never waits for them.

ROCm's runtime has the same functions under its own names, and torch calls both ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaprof.formats.timeline import Memory
from megaprof.recorders.tape import Marker
from megaprof.runtime.isolation import Suppressed

#: Clocks of host and GPU drift apart: for so long, by less than `recorders.timeline.AT_ONCE_US`.
_SOONEST_NS = 10 * 10**9
_RELAXED = 2  # cuda.h, CUstreamCaptureMode: nothing that this thread does breaks a capture
#: The library in which torch's calls end, and the functions used from it. For CUDA it is the driver: a process has only
#: one, and a call that fails leaves no error behind for torch to find.
_CUDA = "libcuda.so", "cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing", "cuEventRecord"
_HIP = "libamdhip64.so", "hipThreadExchangeStreamCaptureMode", "hipStreamIsCapturing", "hipEventRecord"


def device_clock() -> DeviceClock | str | None:
    """Returns the clock of this process's GPU; the reason, if a GPU is in use but cannot be asked for the time; None if
    torch uses no GPU. A build without CUDA and ROCm has none, even if a host on a CPU pretends to have a GPU."""
    import torch

    names = _HIP if torch.version.hip else _CUDA if torch.version.cuda else None
    if names is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    library, *functions = names
    path = _loaded(library)
    if path is None:
        return f"{library} is not loaded in this process"
    runtime = ctypes.CDLL(path)
    missing = [name for name in functions if not hasattr(runtime, name)]
    if missing:
        return f"{path} has no {missing[0]}"
    return DeviceClock(*(getattr(runtime, name) for name in functions))


def device_memory() -> Callable[[], Memory] | None:
    """Returns a function that asks torch's allocator for the memory of this process's GPU. None if torch uses no GPU,
    or an allocator that does not count. The function resets nothing, because the host may read the same figures.

    It copies the allocator's counters (15 us), and touches neither the GPU nor its driver."""
    import torch

    cuda: Any = torch.cuda
    if not (torch.version.cuda or torch.version.hip) or not cuda.is_initialized():
        return None
    device = cuda.current_device()

    def read() -> Memory:
        allocated = cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        return Memory(allocated["current"], allocated["peak"], capacity)

    try:
        capacity = cuda.get_device_properties(device).total_memory
        read()
    except (AttributeError, KeyError, RuntimeError, AssertionError):
        return None
    return read


def _loaded(library: str) -> str | None:
    """Returns the path of the shared library that this process has loaded under this name, whatever its version. None
    if there is none, or the system does not say."""
    with Suppressed(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.rpartition(" ")[2]
            name = path.rpartition("/")[2]
            if name == library or name.startswith(library + "."):
                return path
    return None


class DeviceClock:
    """The clock of a GPU. The training thread calls ``mark()``; threads that read call the rest."""

    def __init__(self, exchange_mode: Any, is_capturing: Any, record: Any) -> None:
        """Takes functions of the runtime, as `ctypes` has them. ``exchange_mode`` swaps the capture mode of its thread,
        ``is_capturing`` says whether a stream is being captured, and ``record`` records an event on a stream."""
        import torch

        self._cuda: Any = torch.cuda
        self._device = self._cuda.current_device()
        self._exchange_mode = exchange_mode
        self._pool: list[Any] = []
        self._copies: Any = None
        self._soonest: Any = None
        self.mark: Callable[..., Any] = self._mark
        """Records an event on the current stream and returns it; its ``asked`` is when the host called, in nanoseconds
        of the monotonic clock. If called with the mark that it made last, it returns that one, unless the stream is
        another one now. Returns None while a CUDA graph is captured on that stream, because the event would become part
        of the graph. A step takes as many events as it has boundaries, and later steps reuse them.

        It asks for the current stream every time, because Megatron works on several. That takes 0.1 us, whereas
        `torch.cuda.current_stream` would make a new object every time."""
        current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if Marker is not None and current_stream is not None:
            addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in (is_capturing, record))
            self.mark = Marker(self._pool, self._new, current_stream, self._device, *addresses)

    def _mark(self, last: Any = None) -> Any:
        """Returns a mark in Python, where megaprof was built without a compiler: always another one than ``last``."""
        if self._cuda.is_current_stream_capturing():
            return None
        asked = time.monotonic_ns()
        if self._pool:  # only this thread takes events out
            event = self._pool.pop()
            event.record()
        else:
            event = self._new()
        event.asked = asked
        return event

    def _new(self) -> Any:
        """Returns a new event, already recorded: torch creates an event when it is recorded."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Prepares a thread to query events in this block. Otherwise a query would break a CUDA graph that another
        thread is capturing, and a thread's first call would open a context on device 0. Raises RuntimeError if the
        thread cannot be prepared."""
        mode = ctypes.c_int(_RELAXED)
        status = self._exchange_mode(ctypes.byref(mode))
        if status != 0:
            raise RuntimeError(f"{self._exchange_mode.__name__} answered {status}; no event can be read safely")
        try:
            with self._cuda.device(self._device):
                yield
        finally:
            self._exchange_mode(ctypes.byref(mode))

    def microseconds(self, first: Any, event: Any) -> int:
        """Returns the microseconds between two finished events. To be called inside `reading`."""
        return round(1000 * float(first.elapsed_time(event)))

    def late_us(self, marks: Sequence[Any]) -> list[int]:
        """Returns how many microseconds after the host asked for it the GPU came to each mark of a step; all have
        finished. To be called inside `reading`.

        The clocks of host and GPU differ by an unknown time. But the GPU never comes before it is asked, so this is
        relative to the mark of the last seconds to which it came soonest."""
        first = self._soonest
        if first is None or marks[0].asked - first.asked > _SOONEST_NS:
            first = self._soonest = marks[0]
        late_us = [self.microseconds(first, mark) - (mark.asked - first.asked) // 1000 for mark in marks]
        least = min(late_us)
        if least < 0:
            self._soonest = marks[late_us.index(least)]
        return [each - min(least, 0) for each in late_us]

    def numbers(self, tensor: Any) -> list[Any]:
        """Returns the numbers in a tensor whose step is finished. Copies them on a stream of our own, which no one else
        waits for. To be called inside `reading`."""
        if self._copies is None:
            self._copies = self._cuda.Stream()
        with self._cuda.stream(self._copies):
            return list(tensor.tolist())

    def take_back(self, events: list[Any]) -> None:
        """Takes back events that nobody else needs any more; an event may be there twice."""
        self._pool.extend({id(event): event for event in events if event is not self._soonest}.values())
