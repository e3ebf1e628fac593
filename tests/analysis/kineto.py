"""What Kineto writes for one launch, as torch 2.4 to 2.9 do on NVIDIA's GPUs (`real_traces` says how that is known).

Times are milliseconds, and are written in Kineto's microseconds. Left out are the CPU's operators around launches of
computation; the external id that a launch and its kernel share names one all the same.
"""

from __future__ import annotations

import json
from typing import Any

from megaprof.formats.ranges import graph_names as written

MS = 1000.0
PID, DEVICE = 7, 0
_EXTERNAL = 1 << 32  # added to a correlation: numbers of their own, as an operator's are
_LAUNCHES = {"kernel": ("cudaLaunchKernel", 211), "gpu_memcpy": ("cudaMemcpyAsync", 41)}
_GRAPH_LAUNCH = ("cudaGraphLaunch", 311)
_NCCL_LAUNCH = ("cudaLaunchKernelExC", 430)
_OF_KERNEL = {
    "registers per thread": 32,
    "shared memory": 0,
    "blocks per SM": 0.5,
    "warps per SM": 2.0,
    "grid": [64, 1, 1],
    "block": [128, 1, 1],
    "est. achieved occupancy %": 3,
}
#: The executable graph of a rank.
GRAPH = 101
_OF_COPY = {"bytes": 4096, "memory bandwidth (GB/s)": 1.5}


def launched(
    events: list[dict[str, Any]],
    correlation: int,
    name: str,
    start: float,
    duration: float,
    launch: float,
    thread: int,
    stream: int,
    *,
    group: str | None = None,
    operators: bool = True,
    named: bool = True,
    category: str = "kernel",
) -> None:
    """Append an activity of the GPU and the call that launched it, in this order the last ones: both bear the same
    ``correlation``, and an arrow goes from one to the other.

    ``group``: the description of the process group whose collective it is; operators of the CPU tell that.
    ``operators``: whether these were recorded. ``named``: False for RCCL, whose kernels bring no metadata.
    """
    external = {"External id": _EXTERNAL + correlation} if operators else {}
    collective = _collective(group) if group is not None and operators else {}
    if collective:
        args = collective | external | {"Record function id": 0, "Ev Idx": correlation}
        args |= {"Global rank start": 0, "Global rank stride": 1}
        events.append(_complete("cpu_op", "record_param_comms", PID, thread, launch - 0.001, 0.004, args))
    arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation}
    events.append({"ph": "s", **arrow, "pid": PID, "tid": thread, "ts": launch * MS})
    events.append({"ph": "f", **arrow, "pid": DEVICE, "tid": stream, "ts": start * MS, "bp": "e"})
    call, cbid = _NCCL_LAUNCH if name.startswith("nccl") else _LAUNCHES[category]
    args = {**external, "cbid": cbid, "correlation": correlation}
    events.append(_complete("cuda_runtime", call, PID, thread, launch, 0.002, args))
    args = {**external, "device": DEVICE, "context": 1, "stream": stream, "correlation": correlation}
    args |= {"queued": 0, **_OF_KERNEL} if category == "kernel" else _OF_COPY
    if category == "kernel" and named:
        args |= collective
    events.append(_complete(category, name, DEVICE, stream, start, duration, args))


def annotated(
    name: str, start: float, duration: float, *, category: str = "user_annotation", thread: int = 1, number: int = 0
) -> dict[str, Any]:
    """A range or an operator of the host."""
    args = {"External id": number + 1, "Record function id": 0, "Ev Idx": number}
    return _complete(category, name, PID, thread, start, duration, args)


def replayed(events: list[dict[str, Any]], correlation: int) -> dict[str, Any]:
    """Turn one call with its ranges and launches, in place, into the replay of a graph that captured all of it: the
    outermost range is left, one launch at its start, and all activities with that launch's ``correlation`` and a node
    each, in the order in which they were launched. Returns the names of the nodes, as `graph_names` writes
    them. NCCL's kernels bear no process group: no operator runs in a replay.
    """
    complete = [event for event in events if event["ph"] == "X"]
    named = [event for event in complete if event["name"].startswith("megaprof/")]
    (outer,) = (event for event in named if "step=" in event["name"])
    launches = {e["args"]["correlation"]: e["ts"] for e in complete if e["cat"] == "cuda_runtime"}
    activities = [event for event in complete if event["pid"] == DEVICE]
    activities.sort(key=lambda event: launches[event["args"]["correlation"]])
    opened = sorted((e for e in named if e is not outer), key=lambda event: (event["ts"], -event["dur"]))
    nodes = {}
    at = outer["ts"] / MS + 0.01
    events[:] = [
        outer,
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": correlation, "pid": PID, "tid": 1, "ts": at * MS},
    ]
    args = {"cbid": _GRAPH_LAUNCH[1], "correlation": correlation}
    events.append(_complete("cuda_runtime", _GRAPH_LAUNCH[0], PID, 1, at, 0.3, args))
    for number, event in enumerate(activities, 1):
        when = launches[event["args"]["correlation"]]
        stack = tuple(e["name"] for e in opened if e["ts"] <= when <= e["ts"] + e["dur"])
        node = GRAPH << 32 | number
        if stack:
            nodes[node] = stack
        without = {*_collective(""), "External id", "Record function id", "Ev Idx", "Global rank start"}
        args = {key: value for key, value in event["args"].items() if key not in without}
        args |= {"correlation": correlation, "graph id": GRAPH, "graph node id": node}
        events.append(event | {"args": args})
    found: dict[str, Any] = json.loads(written(nodes))
    return found


def _complete(
    category: str, name: str, pid: int, tid: int, start: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    place = {"pid": pid, "tid": tid, "ts": start * MS, "dur": duration * MS}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}


def _collective(description: str) -> dict[str, Any]:
    return {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Out msg nelems": 1024,
        "Group size": 2,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": "12",
        "Process Group Description": description,
        "Process Group Ranks": "[0, 1]",
    }
