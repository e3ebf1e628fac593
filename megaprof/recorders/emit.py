"""Opens and closes ranges, under the same name in the torch trace and in NVTX (domain ``megaprof``). Kernels of CUDA
graphs get these names, too, with torch's own annotations (torch 2.13 on, CUDA 13.1).

A replay runs no Python, so there can be no range around a part of it. But torch can find, while it captures a graph,
which nodes are captured within a block, and Kineto writes the node of every kernel into the trace. What torch found is
taken from it when the block ends: what it does with it later differs (2.13 to 2.15), and may fail the host's capture.
The notes stay in this process. Every window writes them when it closes (`megaprof.formats.ranges`).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from megaprof.formats import ranges
from megaprof.formats.ranges import DOMAIN
from megaprof.runtime.isolation import from_host, logger

try:
    import nvtx as nvtx
except ModuleNotFoundError:  # there is no nvtx for macOS, and no tool there that would show ranges
    nvtx = None


LoggedRange = tuple[str, int, int, int]
"""A range that has ended, kept for a recorder that does not see user annotations: its name, when it began and ended in
nanoseconds since the epoch, as Kineto counts, and the system's number of its thread."""


#: Takes ended ranges while a recorder wants them; None otherwise.
log: list[LoggedRange] | None = None


_OURS: dict[str, Any] = {"domain": DOMAIN}


class Range:
    """A range around a block, made only while a window is open: ``with Range("megaprof/forward mb=3 chunk=0"): ...``.

    ``look``: the domain, color and category of the range in NVTX. ``overlapping``: the range may end before one that
    began after it, like a coroutine's. NVTX keeps such ranges apart from the threads' stacks of ranges.
    """

    __slots__ = ("_began", "_handle", "_look", "_marked", "_name", "_open", "_overlapping", "_recorded")

    def __init__(self, name: str, look: dict[str, Any] | None = None, *, overlapping: bool = False) -> None:
        self._name = name
        self._look = look or _OURS
        self._overlapping = overlapping
        self._handle: Any = None
        self._began = 0
        self._open = False
        self._marked: tuple[Any, dict[str, str]] | None = None
        # If torch has not been imported, Kineto cannot be recording. A fast record would be cheaper than this user
        # annotation, but Kineto mirrors only the annotation on the GPU's timeline.
        profiler = sys.modules.get("torch.profiler")
        self._recorded: Any = None if profiler is None else profiler.record_function(name)

    def __enter__(self) -> None:
        self._open = True
        try:
            if log is not None:
                self._began = time.time_ns()
            if nvtx is None:
                pass
            elif self._overlapping:
                self._handle = nvtx.start_range(self._name, **self._look)
            else:
                nvtx.push_range(self._name, **self._look)
            if self._recorded is not None:
                self._recorded.__enter__()
            if graph_naming.noting:
                self._marked = graph_naming.marked(self._name)
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the range. A no-op if it is not open."""
        if not self._open:
            return
        self._open = False
        marked, self._marked = self._marked, None
        if marked is not None:
            graph_naming.noted(*marked)
        try:
            if self._recorded is not None and self._recorded.record is not None:
                self._recorded.__exit__(None, None, None)
        finally:
            if nvtx is None:
                pass
            elif not self._overlapping:
                nvtx.pop_range(domain=self._look["domain"])
            elif self._handle is not None:
                nvtx.end_range(self._handle)
        if log is not None and self._began:
            log.append((self._name, self._began, time.time_ns(), threading.get_native_id()))


_MODULE = "torch.cuda._graph_annotations"


class GraphNaming:
    """Notes which ranges are open while a graph is captured, and writes them as `ranges.GraphNames`. One per process. A
    fault ends only the naming."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._options: dict[str, bool] = {}
        self._nodes: dict[int, tuple[str, ...]] = {}
        self._captured: dict[int, dict[str, str]] = {}
        self._text: str | None = None
        self.noting = False
        """True while a graph is captured whose kernels get our names."""
        self.graphs = False
        """True once the process has captured a graph."""
        self._off = False

    @property
    def available(self) -> bool:
        """True if this torch, its cuda-bindings and the driver can name kernels. To be asked once CUDA is in use."""
        if self._torch is None and not self._off:
            self._off = True
            with self._alone():
                module = None if importlib.util.find_spec(_MODULE) is None else importlib.import_module(_MODULE)
                if module is not None and not module._is_tools_id_unavailable():
                    if "backward" in inspect.signature(module.mark_kernels).parameters:
                        self._options = {"backward": False}  # 2.14 on: a backward has ranges of its own
                    self._torch, self._off = module, False
        return not self._off

    def text(self) -> str | None:
        """Returns the names of all graphs so far as JSON; None if there are none."""
        if self._text is None and self._nodes:
            self._text = ranges.graph_names(self._nodes)
        return self._text

    def begun(self, graph: Any) -> None:
        """Begins to note ranges: ``graph``, a ``torch.cuda.graph``, has begun to capture. A graph that its owner
        annotates keeps the owner's names."""
        if self.available and not graph._enable_annotations:
            self.noting = True

    def ended(self, graph: Any, *, failed: bool) -> None:
        """Keeps the names after the capture, when the graph can be launched. ``failed``: drops them."""
        if self.noting:
            self.noting = False
            captured, self._captured = self._captured, {}
            if captured and not failed and not self._off:
                with self._alone():
                    # The upper half of a node's number in a trace says the graph that is launched.
                    runtime = self._torch._cuda_runtime
                    handle = runtime.cudaGraphExec_t(init_value=graph.cuda_graph.raw_cuda_graph_exec())
                    launched = self._torch._check_cuda_bindings(runtime.cudaGraphExecGetId(handle))
                    for node, stack in captured.items():
                        self._nodes[launched << 32 | node & 0xFFFFFFFF] = tuple(reversed(stack.values()))
                    self._text = None

    def marked(self, name: str) -> tuple[Any, dict[str, str]] | None:
        """Enters one of torch's blocks, which notes nodes for a range. Returns what `noted` gets; None after a fault.

        Torch is told to record only for that moment: with a graph that does not record, it would do so for a whole
        capture, and number the nodes anew at its end."""
        note = {"name": name}
        with self._alone():
            block = self._torch.mark_kernels(note, **self._options)
            before, self._torch._annotations_enabled = self._torch._annotations_enabled, True
            try:
                block.__enter__()
            finally:
                self._torch._annotations_enabled = before
            return block, note
        return None

    def noted(self, block: Any, note: dict[str, str]) -> None:
        """Leaves the block, and takes its nodes from torch. A capture that is over in the meantime has none of them."""
        if self.noting and not self._off:
            with self._alone():
                block.__exit__(None, None, None)
                found = self._torch._pending_scopes
                for scope in [scope for scope in found if scope[0] is note]:
                    found.remove(scope)
                    read = ranges.parse(note["name"])
                    kind = "" if read is None else read.label
                    for node in scope[1]:  # of nested ranges of one kind, the innermost, which ends first, counts
                        self._captured.setdefault(node, {}).setdefault(kind, note["name"])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A fault in this block ends the naming, and nothing else."""
        try:
            yield
        except Exception as fault:
            if from_host(fault):
                raise
            self._off, self.noting = True, False
            logger.warning("megaprof: kernels of CUDA graphs have no names: %r", fault)


graph_naming = GraphNaming()
