"""Records CUDA memory history: a snapshot per window, also of one that ends because the device runs out of memory.

The files open in PyTorch's memory viewer (pytorch.org/memory_viz). They contain the metadata as JSON text under the key
``megaprof``, because the viewer's own unpickler cannot read other new types.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from megaprof.artifacts.writer import Writer
from megaprof.config.options import ProfileConfig, flag
from megaprof.recorders import Window

SUFFIX = ".memory.pickle"
#: The size of a ring buffer: a longer window loses its oldest events. An event with its stack takes ~1 KB of host
#: memory.
MAX_ENTRIES = 100_000


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
        final = window.path(self._directory, SUFFIX)
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
