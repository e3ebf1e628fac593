"""Gives the kernels of CUDA graphs our range names, with torch's own annotations (torch 2.13, CUDA 13.1).

A replay runs no Python, so there can be no range around a part of it. But torch can note, while it captures a graph,
which nodes are captured within a block, and Kineto writes the node of every kernel into the trace. The notes stay in
this process. Every window writes them when it closes (`megaprof.formats.graphs`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from megaprof.formats import graphs, ranges
from megaprof.recorders.ranges import emit
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger

_MODULE = "torch.cuda._graph_annotations"
_PREFIX = "megaprof:"


class GraphNames:
    """Notes the ranges that are open while a graph is captured. One per process. A fault ends only the naming."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._nodes: dict[int, tuple[str, ...]] = {}
        self._text: str | None = None
        self._enabled_before = False
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
            self._try(self._begin)

    def ends(self) -> None:
        """Prepares for the end of the capture, which the next CUDA call ends."""
        if self._noting:
            self._try(self._resolve)

    def ended(self, graph: Any, *, failed: bool) -> None:
        """Keeps the names after the capture, when the graph can be launched. ``failed``: drops them."""
        if self._noting:
            self._noting, emit.mark = False, None
            self._try(self._close, graph.cuda_graph, failed or self._off)

    def _load(self) -> None:
        if importlib.util.find_spec(_MODULE) is None:
            return
        module = importlib.import_module(_MODULE)
        if not module._is_tools_id_unavailable():
            self._torch, self._off = module, False

    def _begin(self) -> None:
        self._enabled_before = self._torch._annotations_enabled
        self._torch.enable_annotations()
        self._noting, emit.mark = True, self._mark

    def _mark(self, name: str) -> AbstractContextManager[object]:
        # One key for each kind of range: of nested ranges with the same key, torch keeps only the innermost.
        read = ranges.parse(name)
        return _Marked(self, self._torch.mark_kernels({f"{_PREFIX}{'' if read is None else read.label}": name}))

    def _resolve(self) -> None:
        self._torch.resolve_pending_annotations()

    def _close(self, graph: Any, failed: bool) -> None:
        annotations = self._torch.get_kernel_annotations()
        try:
            if not failed:
                self._torch.remap_to_exec_graph(graph)
                self._take(annotations)
        finally:
            for node in [node for node, notes in annotations.items() if any(map(_ours, notes))]:
                del annotations[node]  # we keep them in less memory, or their graph does not exist
            if not self._enabled_before:
                self._torch.disable_annotations()

    def _take(self, annotations: dict[int, list[Any]]) -> None:
        for node, notes in annotations.items():
            if stack := [name for note in notes if _ours(note) for name in note.values()]:
                self._nodes[node] = tuple(reversed(stack))  # torch lists the inner ranges first
        self._text = None

    def _try(self, step: Callable[..., object], *arguments: Any) -> None:
        try:
            step(*arguments)
        except Exception as fault:
            if from_host(fault):
                raise
            self._off, emit.mark = True, None
            logger.warning("megaprof: kernels of CUDA graphs have no names: %r", fault)


class _Marked:
    """Wraps one of torch's blocks, so that its faults end only the naming."""

    __slots__ = ("_block", "_names")

    def __init__(self, names: GraphNames, block: AbstractContextManager[object]) -> None:
        self._names = names
        self._block = block

    def __enter__(self) -> None:
        self._names._try(self._block.__enter__)

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        if not self._names._off:
            self._names._try(self._block.__exit__, None, None, None)


def _ours(note: Any) -> bool:
    return isinstance(note, dict) and any(str(key).startswith(_PREFIX) for key in note)


names = GraphNames()
