"""A GPU for the timeline on a machine without one: the runtime's functions in a library compiled here, and torch's
events on top of them. Its streams run behind the host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaprof.recorders import device

SOURCE = Path(__file__).with_name("fake_gpu.c")


def compiled(directory: Path, name: str = "libcuda.so.1") -> Path:
    """The library, under a name that the runtime's own has."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    path = directory / name
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE)], check=True)
    return path


class _Event(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("host", "device", "stream", "times")]


class FakeGpu:
    """``stream``: the number of the current stream. ``python``: how many events were recorded through torch's class.
    ``ahead``: nanoseconds from now for which it has done what was to happen, so that no test waits for it."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.driver = ctypes.CDLL(str(library))
        self.driver.fake_recorded.restype = ctypes.c_int64
        self.stream = 7
        self.python = self.ahead = 0
        self.events: list[Any] = []
        gpu = self

        class Event:
            """A CUDA event; torch makes its handle when it is first recorded."""

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.own = _Event()
                self.cuda_event = 0
                gpu.events.append(self)

            def record(self) -> None:
                self.cuda_event = ctypes.addressof(self.own)
                gpu.python += 1
                status = gpu.driver.cuEventRecord(ctypes.c_void_p(self.cuda_event), ctypes.c_void_p(gpu.stream))
                assert status == 0

            def query(self) -> bool:
                return time.monotonic_ns() + gpu.ahead >= self.own.device

            def elapsed_time(self, end: Any) -> float:
                if not (self.query() and end.query()):
                    raise RuntimeError("device not ready")
                return float(end.own.device - self.own.device) / 1e6

        self.event = Event

    @property
    def recorded(self) -> int:
        return int(self.driver.fake_recorded())

    def behind(self, seconds: float) -> None:
        self.driver.fake_behind(ctypes.c_int64(round(seconds * 1e9)))

    def capture(self, stream: int) -> None:
        """A CUDA graph is captured on this stream from now on; 0: on none."""
        self.driver.fake_capturing(stream)

    def install(self, patches: pytest.MonkeyPatch, version: str = "cuda") -> None:
        """Torch uses it from now on. Inside `cpu_megatron`, which has replacements of its own."""
        patches.setattr(torch.version, "cuda", "13.0" if version == "cuda" else None)
        patches.setattr(torch.version, "hip", "7.0" if version == "hip" else None)
        patches.setattr(torch.cuda, "is_initialized", lambda: True)
        patches.setattr(torch.cuda, "current_device", lambda: 0)
        patches.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        patches.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the timeline synchronised"))
        patches.setattr(torch.cuda, "Event", self.event)
        counted = {"allocated_bytes": {"all": {"current": 3, "peak": 5, "allocated": 99, "freed": 96}}}
        patches.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: counted)
        patches.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=7))
        patches.setattr(torch.cuda, "is_current_stream_capturing", self._capturing)
        patches.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)
        patches.setattr(device, "_loaded", functools.partial(_only, self.path, device._loaded))

    def _capturing(self) -> bool:
        status = ctypes.c_int()
        self.driver.cuStreamIsCapturing(ctypes.c_void_p(self.stream), ctypes.byref(status))
        return bool(status.value)


def _only(path: Path, loaded: Any, library: str) -> str | None:
    """Other tests may have loaded a library of that name, too."""
    found = loaded(library)
    return str(path) if found is not None and path.name.startswith(library) else found
