"""Range names for the kernels of CUDA graphs. A replay runs no Python, so a trace has only the graph and the node of
each kernel. The ranges in which each node was captured are in the trace once, under a key of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

KEY = "megaprof_graphs"


@dataclass(frozen=True)
class GraphNames:
    """The ranges in which the nodes of CUDA graphs were captured."""

    stacks: tuple[tuple[str, ...], ...]
    """Range names around a node, the outermost first; each combination once."""
    runs: tuple[tuple[int, int, int], ...]
    """First node, last node, and the index of their stack, in order. A node's number is Kineto's ``graph node id``: the
    graph in the upper 32 bits, the node in the lower ones, in the order of capture."""


def written(nodes: Mapping[int, tuple[str, ...]]) -> str:
    """Returns ``nodes``, the ranges around each node by its number, as JSON. Consecutive nodes with the same ranges are
    one run, so the JSON grows with the ranges of a graph and not with its kernels."""
    stacks: dict[tuple[str, ...], int] = {}
    runs: list[list[int]] = []
    for node in sorted(nodes):
        stack = stacks.setdefault(nodes[node], len(stacks))
        if runs and runs[-1][2] == stack and runs[-1][1] >> 32 == node >> 32:
            runs[-1][1] = node
        else:
            runs.append([node, node, stack])
    return json.dumps({"stacks": list(stacks), "runs": runs}, separators=(",", ":"))


def read_names(text: bytes) -> GraphNames:
    """Reads what `written` returned. Raises ValueError for anything else."""
    try:
        names = msgspec.json.decode(text, type=GraphNames)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ValueError(str(fault)) from None
    previous_last = -1
    for first_node, last_node, stack in names.runs:
        if not (previous_last < first_node <= last_node < 1 << 63 and 0 <= stack < len(names.stacks)):
            raise ValueError("its runs of nodes are not in order")
        previous_last = last_node
    return names
