"""A training job whose device never becomes idle again, since a collective on it waits for a rank that is gone. It ends
in the way that its first argument names. Run by test_stuck_device.py.

Only the device is made up: ``torch.cuda`` says that CUDA is in use, synchronising takes for ever, and the torch
profiler believes that it recorded CUDA activity.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprof.runtime import ending
from megaprof.testing import BuiltGPT, build, cpu_megatron
from megaprof.testing.faults import before_forward
from tests.runtime.ending_job import WORKLOAD, install, ready

on_cpu = cpu_megatron()
gone = threading.Event()
"""Set once a peer is gone: from then on the device is never idle."""


def made_up_device() -> None:
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.synchronize = lambda device=None: gone.is_set() and threading.Event().wait()
    start = torch.autograd.profiler.profile._start_trace

    def on_cuda(self: Any) -> None:
        start(self)
        self.use_device = "cuda"  # which torch itself synchronises then, when the profiler stops

    torch.autograd.profiler.profile._start_trace = on_cuda  # type: ignore[method-assign]


def waits_in_a_window(gpt: BuiltGPT, directory: str) -> None:
    install(gpt, directory, schedule="0")
    before_forward(gpt.chunks[0], lambda: (gone.set(), ready()))
    gpt.train_step()


def has_files_of_an_earlier_window(gpt: BuiltGPT, directory: str) -> None:
    """The writer has not finished a window when the next one cannot be closed."""
    handle = install(gpt, directory, schedule="0:0:0:1:2", flush_seconds=4)
    assert handle._session is not None
    handle._session.writer.run(lambda: time.sleep(1))  # what the file of the first window waits for
    gpt.train_step()
    before_forward(gpt.chunks[0], lambda: (gone.set(), ready()))
    gpt.train_step()


def is_closing_a_window(gpt: BuiltGPT, directory: str) -> None:
    """The signal comes while the end of a step already waits for the device."""
    install(gpt, directory, schedule="0", flush_seconds=600)
    torch.cuda.synchronize = lambda device=None: print("ready", flush=True) or threading.Event().wait()
    gpt.train_step()


def cannot_stop(gpt: BuiltGPT, directory: str) -> None:
    """Where Kineto itself waits for ever, in C."""
    ending.TERM_SECONDS = 1.0
    install(gpt, directory, schedule="0", flush_seconds=1)
    libc = ctypes.CDLL(None)
    torch.autograd.profiler._disable_profiler = lambda: [libc.sleep(1000) for _ in range(1000)]
    before_forward(gpt.chunks[0], lambda: (gone.set(), ready()))
    gpt.train_step()


def raises_in_a_window(gpt: BuiltGPT, directory: str) -> None:
    def fail() -> None:
        gone.set()
        raise RuntimeError("of the host")

    install(gpt, directory, schedule="0", flush_seconds=1)
    before_forward(gpt.chunks[0], fail)
    gpt.train_step()


def raises_between_steps(gpt: BuiltGPT, directory: str) -> None:
    """What is open is closed while the interpreter ends."""
    install(gpt, directory, target=("train_overall",), schedule="0", flush_seconds=2)
    before_forward(gpt.chunks[0], gone.set)
    gpt.train_step()
    raise RuntimeError("of the host")


def removes_and_trains_on(gpt: BuiltGPT, directory: str) -> None:
    handle = install(gpt, directory, schedule="0", flush_seconds=2)
    before_forward(gpt.chunks[0], lambda: (gone.set(), handle.remove()))
    gpt.train_step()
    gpt.train_step()
    print(f"active {handle.active}, recording {torch._C._autograd._profiler_enabled()}")
    sys.exit(3)


def runs_out_of_memory(gpt: BuiltGPT, directory: str) -> None:
    """The guard wants the window closed in the middle of a step."""
    from megaprof.capture.process import process

    def full() -> None:
        gone.set()
        if process.window is not None:
            process.memory_ran_out(process.window.owner, "host memory: none left")

    handle = install(gpt, directory, schedule="0", flush_seconds=1)
    before_forward(gpt.chunks[0], full)
    gpt.train_step()
    print(f"active {handle.active}, recording {torch._C._autograd._profiler_enabled()}")
    sys.exit(3)


def job(what: str, directory: str) -> None:
    signal.alarm(240)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(directory)}.store", rank=0, world_size=1)
    on_cpu.__enter__()  # for good: what ends the process asks the device as well
    made_up_device()
    globals()[what](build(WORKLOAD), directory)
    os._exit(99)  # no job gets here
