"""Nsight Systems: opens a capture range of an ``nsys profile`` that runs around this process (see `nsys_command`).

nsys writes its own files, numbered by capture range. A ``.nsys.json`` per window says which number it has, and carries
the metadata that nsys cannot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megaprof.artifacts.writer import Artifact, Writer
from megaprof.config.options import ProfileConfig, flag
from megaprof.formats.nsys import SUFFIX, sidecar
from megaprof.recorders import Window
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

#: nsys sets it in the processes that it profiles.
SESSION_VARIABLE = "NSYS_PROFILING_SESSION_ID"


class NsysRecorder:
    """One capture range per window. Ranges reach nsys as NVTX, domain ``megaprof``, like all our ranges.

    Raises ValueError in a process that does not use CUDA: cudaProfilerStart would reach nobody, and would initialise
    CUDA where the host did not.
    """

    _captures = 0  # capture ranges of this process so far: what nsys numbers its files by

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        if config.dir is None:
            raise ValueError("the nsys recorder needs a directory")
        if not _cuda().is_initialized():
            raise ValueError(
                f"{flag('tool')} nsys: there is no CUDA device here, or this process does not use it yet; drop "
                "it, or install the hooks where and when the model is on its GPU"
            )
        if SESSION_VARIABLE not in os.environ:
            logger.warning(
                "megaprof: %s nsys, but this process does not seem to run under nsys, and then nothing is captured; "
                "'megaprof nsys' prints the command to put before yours",
                flag("tool"),
            )
        self._directory = Path(config.dir)
        self._writer = writer
        self._running = False

    def start(self, window: Window) -> None:
        if window.warmup:  # nsys would write a file for it
            return
        self._running = True  # first: an exception from here on ends in `discard`
        try:
            _call("cudaProfilerStart")
        except RuntimeError as fault:
            self._running = from_host(fault)  # else it was refused, and there is nothing to stop
            raise
        NsysRecorder._captures += 1

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        if not self._running:
            return
        self.discard()
        final = window.path(self._directory, SUFFIX)
        raw = self._writer.raw_path(final)
        raw.write_text(sidecar(NsysRecorder._captures, metadata), encoding="utf-8")
        self._writer.submit(Artifact(raw, final))

    def discard(self) -> None:
        if not self._running:
            return
        _cuda().synchronize()  # kernels that still run would be cut off the end of the window
        _call("cudaProfilerStop")
        self._running = False


def _call(function: str) -> None:
    result = getattr(_cuda().cudart(), function)()
    if int(result) != 0:
        raise RuntimeError(f"{function} answered {result}")


def _cuda() -> Any:
    import torch

    return torch.cuda
