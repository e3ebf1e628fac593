"""Records CUDA memory history: a snapshot per window, and another one when the device runs out of memory.

The files open in PyTorch's memory viewer (pytorch.org/memory_viz). They contain the metadata as JSON text under the key
``megaprof``, because the viewer's own unpickler cannot read other new types.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from megaprof.artifacts.writer import Artifact, Writer
from megaprof.config.options import ProfileConfig, flag
from megaprof.recorders import Window
from megaprof.runtime.isolation import Suppressed

SUFFIX = ".memory.pickle"
OUT_OF_MEMORY_SUFFIX = ".oom.memory.pickle"
#: The size of a ring buffer: a longer window loses its oldest events. An event with its stack takes ~1 KB of host
#: memory.
MAX_ENTRIES = 100_000


class MemoryRecorder:
    """Records allocations with Python stacks while a window is open, and switches history off afterwards.

    Raises ValueError if this process does not use CUDA: recording would initialise it, for example in a driver or a CPU
    actor on a machine with GPUs. Raises ValueError, too, if memory history is already being recorded: a process has
    only one, and ending ours would end the other.
    """

    #: The recorder whose window is open. An observer cannot be detached, so a single one serves all recorders.
    _recording: MemoryRecorder | None = None
    _observing = False

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
        self._window: Window | None = None
        self._ran_out = False

    def start(self, window: Window) -> None:
        self._window, self._ran_out = window, False  # first: an exception from here on ends in `discard`
        torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES)
        MemoryRecorder._recording = self
        if not MemoryRecorder._observing:
            # A torch without CUDA lacks this function, so type checkers do not know it.
            getattr(torch._C, "_cuda_attach_out_of_memory_observer")(_out_of_memory)  # noqa: B009
            MemoryRecorder._observing = True

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        if self._window is None:
            return
        try:
            self._write(window, SUFFIX, metadata)
        finally:
            self.discard()

    def discard(self) -> None:
        if self._window is None:
            return
        MemoryRecorder._recording = None
        torch.cuda.memory._record_memory_history(enabled=None)
        self._window = None

    def ran_out(self, device: int, wanted: int, allocated: int, free: int) -> None:
        """Writes a snapshot after an allocation of ``wanted`` bytes failed. ``allocated`` and ``free``: bytes of the
        device. Writes one per window, because the host's next attempts may fail as well."""
        if self._window is None or self._ran_out:
            return
        self._ran_out = True
        facts = {"device": device, "wanted": wanted, "allocated": allocated, "free": free}
        self._write(self._window, OUT_OF_MEMORY_SUFFIX, {"out_of_memory": facts})

    def _write(self, window: Window, suffix: str, metadata: dict[str, Any]) -> None:
        final = window.path(self._directory, suffix)
        raw = self._writer.raw_path(final)
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        snapshot["megaprof"] = json.dumps(metadata)
        try:
            with open(raw, "wb") as file:
                pickle.dump(snapshot, file)
        except BaseException:
            raw.unlink(missing_ok=True)
            raise
        self._writer.submit(Artifact(raw, final))


def _out_of_memory(device: int, wanted: int, allocated: int, free: int) -> None:
    """Tells the open window's recorder that memory ran out. The allocator calls this on the allocating thread before it
    raises: a fault here would replace the host's exception."""
    recorder = MemoryRecorder._recording
    if recorder is not None:
        with Suppressed(Exception, says="no memory snapshot of the device that ran out of memory"):
            recorder.ran_out(device, wanted, allocated, free)
