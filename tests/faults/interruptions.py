"""A host's signal handler raises while megaprof's code runs: at every line of it in turn, in a real training step.

`program` prints one JSON object. ``kind`` names the exception that the handler raises. Every ``stride``-th line that
megaprof executes in a step, or in ``remove()``, gets an interruption of its own; ``tool`` is the configuration
(`CONFIGURATIONS`).
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import megaprof
from megaprof import ProfileConfig, annotate, install_hooks
from megaprof.capture.process import process
from megaprof.recorders import emit
from megaprof.testing import BuiltGPT, GPTWorkload, build, cpu_megatron

ROOT = str(Path(megaprof.__file__).parent)
WORKLOAD = GPTWorkload(layers=1, microbatches=2, hidden=16, seq_length=8, heads=2)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "torch": {"schedule": "0", "ranges": "module", "kernels": True},
    "overall": {"target": ("train_overall",), "schedule": "0"},
    "timeline": {"tool": ("timeline",)},
    "annotated": {"discrete": True, "schedule": "0"},
}


class HostTimeout(TimeoutError):
    """What a host's SIGALRM handler raises: an OSError, of all things."""


class HostStop(BaseException):
    """What no ``except Exception`` catches."""


class Injector:
    """Sends this thread a signal when megaprof executes its ``number``-th line; Python handles it right there."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind
        self._number = 0
        self._seen = 0
        self.place = ""
        self._kill = ctypes.CDLL(None)["raise"]
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise self._kind("the host's own")

    def __enter__(self) -> Injector:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def at(self, number: int) -> Injector:
        self._number, self._seen, self.place = number, 0, ""
        return self

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "/testing/" not in name and threading.current_thread() is threading.main_thread():
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self._seen += 1
            if self._seen == self._number:
                self.place = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                frame.f_trace = None
                # Without a call in this frame, at whose end Python would handle the signal here.
                for _ in map(self._kill, (signal.SIGUSR1,)):
                    return None
        return self._line


def state(gpt: BuiltGPT) -> list[str]:
    """What an interruption has left behind, after the hooks were removed."""
    from megatron.core.pipeline_parallel import schedules

    left = []
    if torch._C._autograd._profiler_enabled():
        left.append("Kineto records")
    if emit.log is not None:
        left.append("ranges are logged")
    if process.window is not None:
        left.append("a session holds the window")
    if any("forward" in vars(module) for chunk in gpt.chunks for module in chunk.modules()):
        left.append("a module is shadowed")
    if hasattr(schedules.forward_step, "__wrapped__") or hasattr(
        schedules.forward_backward_no_pipelining, "__wrapped__"
    ):
        left.append("a function is wrapped")
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        left.append("the SIGTERM handler is in")
    return left


def main(directory: str, kind: str, tool: str, stride: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    gc.disable()  # what is raised in a callback of a collection is printed and lost, whosever the callback is
    logging.getLogger("megaprof").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    swallowed, dirty, count, number = [], {}, 0, 1
    fields = {"target": ("train_actor",), "select": "all", **CONFIGURATIONS[tool]}
    injector = Injector({"timeout": HostTimeout, "stop": HostStop, "interrupt": KeyboardInterrupt}[kind])
    with cpu_megatron():
        gpt = build(WORKLOAD)

        @annotate(role="actor")
        def work() -> None:
            gpt.train_step()

        while True:
            place = Path(directory, str(number))
            handle = install_hooks(gpt.chunks, ProfileConfig(**fields, dir=str(place)))
            reached = False
            try:
                with injector.at(number):
                    work()
                    handle.remove()
            except (HostTimeout, HostStop, KeyboardInterrupt):
                reached = True
            handle.remove()
            if not injector.place:
                break
            count += 1
            if not reached:
                swallowed.append(injector.place)
            if left := state(gpt):
                dirty[injector.place] = left
                torch._C._autograd._profiler_enabled() and torch.autograd._disable_profiler()
                break
            number += stride
    return {"count": count, "swallowed": swallowed, "dirty": dirty}


def program(directory: str, kind: str, tool: str, stride: str) -> None:
    print(json.dumps(main(directory, kind, tool, int(stride))), flush=True)
    os._exit(0)
