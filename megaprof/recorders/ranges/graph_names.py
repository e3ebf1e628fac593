"""Gives the kernels of CUDA graphs our range names, with torch's own annotations (torch 2.13 on, CUDA 13.1).

A replay runs no Python, so there can be no range around a part of it. But torch can find, while it captures a graph,
which nodes are captured within a block, and Kineto writes the node of every kernel into the trace. What torch found is
taken from it when the block ends: what it does with it later differs (2.13 to 2.15), and may fail the host's capture.
The notes stay in this process. Every window writes them when it closes (`megaprof.formats.graphs`).
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from megaprof.formats import graphs, ranges
from megaprof.recorders.ranges import emit
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

_MODULE = "torch.cuda._graph_annotations"


class GraphNames:
    """Notes the ranges that are open while a graph is captured. One per process. A fault ends only the naming."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._options: dict[str, bool] = {}
        self._nodes: dict[int, tuple[str, ...]] = {}
        self._captured: dict[int, dict[str, str]] = {}
        self._text: str | None = None
        self._noting = False  # True while a graph is captured
        self._off = False

    @property
    def available(self) -> bool:
        """True if this torch, its cuda-bindings and the driver can name kernels. To be asked once CUDA is in use."""
        if self._torch is None and not self._off:
            self._off = True
            self._try(self._load)
        return not self._off

    def text(self) -> str | None:
        """Returns the names of all graphs so far as JSON; None if there are none."""
        if self._text is None and self._nodes:
            self._text = graphs.written(self._nodes)
        return self._text

    def begun(self, graph: Any) -> None:
        """Begins to note ranges: ``graph``, a ``torch.cuda.graph``, has begun to capture. A graph that its owner
        annotates keeps the owner's names."""
        if self.available and not graph._enable_annotations:
            self._noting, emit.mark = True, self._mark

    def ended(self, graph: Any, *, failed: bool) -> None:
        """Keeps the names after the capture, when the graph can be launched. ``failed``: drops them."""
        if self._noting:
            self._noting, emit.mark = False, None
            captured, self._captured = self._captured, {}
            if captured and not failed and not self._off:
                self._try(self._keep, captured, graph.cuda_graph)

    def _load(self) -> None:
        if importlib.util.find_spec(_MODULE) is None:
            return
        module = importlib.import_module(_MODULE)
        if not module._is_tools_id_unavailable():
            self._torch, self._off = module, False
            if "backward" in inspect.signature(module.mark_kernels).parameters:
                self._options = {"backward": False}  # 2.14 on: a backward has ranges of its own

    def _mark(self, name: str) -> AbstractContextManager[object]:
        return _Marked(self, name)

    def _block(self, note: dict[str, str]) -> AbstractContextManager[object]:
        """Returns one of torch's blocks, entered. Torch is told to record only for that moment: with a graph that does
        not record, it would do so for a whole capture, and number the nodes anew at its end."""
        block: AbstractContextManager[object] = self._torch.mark_kernels(note, **self._options)
        before, self._torch._annotations_enabled = self._torch._annotations_enabled, True
        try:
            block.__enter__()
        finally:
            self._torch._annotations_enabled = before
        return block

    def _take(self, block: AbstractContextManager[object], note: dict[str, str]) -> None:
        """Leaves a block, and takes its nodes from torch."""
        block.__exit__(None, None, None)
        found = self._torch._pending_scopes
        for scope in [scope for scope in found if scope[0] is note]:
            found.remove(scope)
            read = ranges.parse(note["name"])
            for node in scope[1]:  # of nested ranges of one kind, the innermost, which ends first, counts
                self._captured.setdefault(node, {}).setdefault("" if read is None else read.label, note["name"])

    def _keep(self, captured: dict[int, dict[str, str]], graph: Any) -> None:
        """Keeps the nodes under the numbers of the graph that is launched, which the upper half of a number says."""
        runtime = self._torch._cuda_runtime
        handle = runtime.cudaGraphExec_t(init_value=graph.raw_cuda_graph_exec())
        launched = self._torch._check_cuda_bindings(runtime.cudaGraphExecGetId(handle))
        for node, stack in captured.items():
            self._nodes[launched << 32 | node & 0xFFFFFFFF] = tuple(reversed(stack.values()))
        self._text = None

    def _try(self, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Exception as fault:
            if from_host(fault):
                raise
            self._off, emit.mark = True, None
            logger.warning("megaprof: kernels of CUDA graphs have no names: %r", fault)


class _Marked:
    """One range while a graph is captured. A fault in it ends only the naming."""

    __slots__ = ("_block", "_names", "_note")

    def __init__(self, names: GraphNames, name: str) -> None:
        self._names = names
        self._note = {"name": name}

    def __enter__(self) -> None:
        self._block = self._names._try(self._names._block, self._note)

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        if not self._names._off:
            self._names._try(self._names._take, self._block, self._note)


names = GraphNames()
