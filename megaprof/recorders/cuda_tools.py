"""The tools of CUDA beside the torch profiler.

Nsight Systems runs around the process (`megaprof.nsys`) and records while a capture range is open. It writes its
own files. A ``.nsys.json`` per window carries the metadata that those cannot hold.

CUDA's memory history is a snapshot per window, also of one that ends because the device runs out of memory. The files
open in PyTorch's memory viewer (pytorch.org/memory_viz). They contain the metadata as JSON text under the key
``megaprof``, because the viewer's own unpickler cannot read other new types.
"""

from __future__ import annotations

import json
import os
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megaprof.artifacts.writer import Writer
from megaprof.config.options import ProfileConfig, flag
from megaprof.formats.metadata import NSYS_SUFFIX, NSYS_WINDOW, SESSION_VARIABLE
from megaprof.formats.ranges import DOMAIN
from megaprof.recorders import Window, emit
from megaprof.runtime.isolation import from_host, logger

#: Either shows that nsys waits for an NVTX range: nsys sets one itself, the other because `megaprof nsys` asks for it.
NVTX_VARIABLES = ("NSYS_NVTX_PROFILER_RANGE", "NSYS_NVTX_PROFILER_REGISTER_ONLY")
MEMORY_SUFFIX = ".memory.pickle"
#: The size of a ring buffer: a longer window loses its oldest events. An event with its stack takes ~1 KB of host
#: memory.
MAX_ENTRIES = 100_000


class NsysRecorder:
    """Opens one capture range per window. Ranges reach nsys as NVTX ranges in the domain ``megaprof``.

    nsys waits for cudaProfilerStart or, if its command line says so, for the range `formats.metadata.NSYS_WINDOW`.
    Raises ValueError if this process does not use CUDA and nsys does not wait for the range: cudaProfilerStart would
    have no effect, and would initialise CUDA although the host did not.
    """

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        self._by_range = any(name in os.environ for name in NVTX_VARIABLES)
        if not self._by_range and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ValueError(
                f"{flag('tool')} nsys: there is no CUDA device here, or this process does not use it yet; drop "
                "it, install the hooks where and when the model is on its GPU, or start nsys as "
                "'megaprof nsys --capture nvtx' prints it"
            )
        if SESSION_VARIABLE not in os.environ:
            logger.warning(
                "megaprof: %s nsys, but this process does not seem to run under nsys, and then nothing is captured; "
                "'megaprof nsys' prints the command to put before yours",
                flag("tool"),
            )
        # nvtx 0.2.12 and later do not see an older nsys, and drop every range. Otherwise the only sign would be a
        # report without ranges.
        elif emit.nvtx is None or type(emit.nvtx.get_domain(DOMAIN)).__name__ == "DummyDomain":
            logger.error(
                "megaprof: nsys will record no ranges: nvtx %s does not recognise this version of nsys. Install "
                "'nvtx<0.2.12', or a newer nsys (docs/nsys.md lists the pairs)",
                "(none installed)" if emit.nvtx is None else version("nvtx"),
            )
        self._directory = Path(str(config.dir))
        self._writer = writer
        self._running = False

    def start(self, window: Window) -> None:
        self._running = True  # first: an exception from here on ends in `discard`
        try:
            if not self._by_range:
                _call("cudaProfilerStart")
            # Always: if the process is killed, this range and those inside it have no end, which tells the reader.
            if emit.nvtx is not None:
                emit.nvtx.push_range(NSYS_WINDOW, domain=DOMAIN)
        except RuntimeError as fault:
            self._running = from_host(fault)  # otherwise the start was refused, and there is nothing to stop
            raise

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        if not self._running:
            return
        self.discard()
        final = window.path(self._directory, NSYS_SUFFIX)
        raw = self._writer.raw_path(final)
        raw.write_text(json.dumps({"megaprof": metadata}), encoding="utf-8")
        self._writer.submit(raw, final)

    def discard(self) -> None:
        if not self._running:
            return
        if emit.nvtx is not None:
            emit.nvtx.pop_range(domain=DOMAIN)
        if not self._by_range:
            _call("cudaProfilerStop")
        self._running = False


def _call(function: str) -> None:
    result = getattr(torch.cuda.cudart(), function)()  # type: ignore[no-untyped-call]
    if int(result) != 0:
        raise RuntimeError(f"{function} answered {result}")


class MemoryRecorder:
    """Records allocations with Python stacks while a window is open, and switches history off afterwards.

    Raises ValueError if this process does not use CUDA: recording would initialise it, for example in a driver or a CPU
    actor on a machine with GPUs. Raises ValueError, too, if memory history is already being recorded: a process has
    only one, and ending ours would end the other.
    """

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ValueError(
                f"{flag('tool')} memory: there is no CUDA device here, or this process does not use it yet; drop "
                "it, or install the hooks where and when the model is on its GPU"
            )
        is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if is_on is not None and is_on():
            raise ValueError(
                f"{flag('tool')} memory: memory history is already recorded in this process; switch that off "
                "(--record-memory-history in Megatron-LM), or drop the tool"
            )
        self._directory = Path(str(config.dir))
        self._writer = writer
        self._running = False

    def start(self, window: Window) -> None:
        self._running = True  # first: an exception from here on ends in `discard`
        torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES)

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        if not self._running:
            return
        final = window.path(self._directory, MEMORY_SUFFIX)
        raw = self._writer.raw_path(final)
        try:
            snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
            snapshot["megaprof"] = json.dumps(metadata)
            with open(raw, "wb") as file:
                pickle.dump(snapshot, file)
        except BaseException:
            raw.unlink(missing_ok=True)
            raise
        finally:
            self.discard()
        self._writer.submit(raw, final)

    def discard(self) -> None:
        if self._running:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._running = False
