"""What real GPU traces by the torch profiler look like, and how a trace differs from that.

Read off public recordings: torch 1.13 to 2.9 on V100, A100, B200 (CUPTI) and MI300X (Roctracer), some 18,000 activities
of the GPU, one and several ranks. On A100 with torch 2.4 and B200 with torch 2.9 everything here holds without an
exception; these two have Kineto's own categories beside (``Trace``, ``overhead``, ``python_function``), and Triton's
arguments at operators. Elsewhere: Roctracer writes ``cid`` for ``cbid``, ``kind`` for most of a kernel's arguments, and
arrows from some calls only. Before torch 2.4 times are whole microseconds since the epoch without a
``baseTimeNanoseconds``, and nothing names a process group; torch 1.13 calls the arrows ``async_cpu_to_gpu``. In all of
them each activity has one launch, of its correlation, which began before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_COLLECTIVE = frozenset(
    {
        *("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "In split size"),
        *("Out split size", "Process Group Name", "Process Group Description", "Process Group Ranks"),
    }
)
_KERNEL = frozenset(
    {
        *("queued", "device", "context", "stream", "correlation", "registers per thread", "shared memory"),
        *("blocks per SM", "warps per SM", "grid", "block", "est. achieved occupancy %"),
    }
)
_COPY = frozenset({"device", "context", "stream", "correlation", "bytes", "memory bandwidth (GB/s)"})
_CALL = frozenset({"cbid", "correlation"})
_OF_OPERATOR = frozenset({"External id", "Record function id", "Ev Idx"})
_SHAPES = frozenset({"Input Dims", "Input Strides", "Input type", "Concrete Inputs"})
_LINKED = frozenset({"External id"})  # where an operator was recorded around the launch
_BACKWARD = frozenset({"Sequence number", "Fwd thread id"})

#: On NVIDIA's GPUs: ``always`` and ``sometimes`` by the kind of event.
ARGUMENTS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "kernel": (_KERNEL, _LINKED | _COLLECTIVE),
    "gpu_memcpy": (_COPY, _LINKED),
    "gpu_memset": (_COPY, _LINKED),
    "cuda_runtime": (_CALL, _LINKED),
    "cuda_driver": (_CALL, _LINKED),
    "user_annotation": (_OF_OPERATOR, _SHAPES),
    "cpu_op": (_OF_OPERATOR, _SHAPES | _BACKWARD | _COLLECTIVE | {"Rank", "Global rank start", "Global rank stride"}),
    "gpu_user_annotation": (_LINKED, frozenset()),
}
#: Megaprof's own ranges where only the GPU was recorded (`megaprof.recorders.torch_profiler`).
_ADDED = frozenset({"clock"})
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_KEYS = frozenset({"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"})
_ARROW = frozenset({"ph", "cat", "name", "id", "pid", "tid", "ts"})
_TOP = frozenset({"schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "traceEvents", "traceName"})


def differences(document: dict[str, Any]) -> set[str]:
    """Everything in which a trace is not as real ones are; each kind of difference once."""
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    found = {f"no {name} beside the events" for name in _TOP - set(document)}
    for event in complete:
        found.update(_of_event(event))
    found.update(_of_launches(complete))
    found.update(_of_collectives(complete))
    found.update(_of_arrows(events, complete))
    return found


def _of_event(event: dict[str, Any]) -> Iterator[str]:
    category, args = event["cat"], set(event.get("args", ()))
    if category not in ARGUMENTS:
        yield f"category {category}"
        return
    if set(event) != _KEYS:
        yield f"{category}: keys {sorted(set(event) ^ _KEYS)}"
    always, sometimes = ARGUMENTS[category]
    if category == "user_annotation" and args == _ADDED:
        return
    if lacking := always - args:
        yield f"{category} without {sorted(lacking)}"
    if more := args - always - sometimes:
        yield f"{category} with {sorted(more)}"
    if args & _COLLECTIVE and event["name"] != "record_param_comms" and not args >= _COLLECTIVE:
        yield f"{category} with a part of a collective's arguments"
    if category in _ON_GPU and (event["tid"], event["pid"]) != (event["args"]["stream"], event["args"]["device"]):
        yield f"{category}: its thread is not its stream, or its process not its device"


def _of_launches(complete: list[dict[str, Any]]) -> Iterator[str]:
    """Each activity has one launch, of the same correlation and operator, which began before it."""
    calls: dict[int, dict[str, Any]] = {}
    for event in complete:
        if event["cat"] in _CALLS and calls.setdefault(event["args"]["correlation"], event) is not event:
            yield "two calls of one correlation"
    for event in complete:
        if event["cat"] not in _ON_GPU:
            continue
        call = calls.get(event["args"]["correlation"])
        if call is None:
            yield f"{event['cat']} without its call"
        elif call["ts"] > event["ts"]:
            yield f"{event['cat']} before its call"
        elif call["args"].get("External id") != event["args"].get("External id"):
            yield f"{event['cat']} and its call are of different operators"
        elif event["cat"] == "kernel" and "Launch" not in call["name"]:
            yield f"kernel launched by {call['name']}"


def _of_collectives(complete: list[dict[str, Any]]) -> Iterator[str]:
    """A kernel has a collective's arguments from the operator of the same external id, and no copy has any."""
    operators = {e["args"]["External id"]: e["args"] for e in complete if e["name"] == "record_param_comms"}
    for event in complete:
        args = event.get("args", {})
        if event["cat"] != "kernel" or "Collective name" not in args:
            continue
        operator = operators.get(args.get("External id"))
        if operator is None or any(operator[name] != args[name] for name in _COLLECTIVE):
            yield "a collective's kernel without its operator"


def _of_arrows(events: list[dict[str, Any]], complete: list[dict[str, Any]]) -> Iterator[str]:
    """From each launch an arrow to its activity, both with the correlation as their id."""
    ends: dict[tuple[str, int], tuple[Any, ...]] = {}
    for event in events:
        if event.get("cat") != "ac2g":
            continue
        if set(event) != (_ARROW | {"bp"} if event["ph"] == "f" else _ARROW):
            yield f"arrow with keys {sorted(event)}"
        ends[event["ph"], event["id"]] = event["pid"], event["tid"], event["ts"]
    calls = {event["args"]["correlation"]: event for event in complete if event["cat"] in _CALLS}
    for event in complete:
        if event["cat"] not in _ON_GPU or (number := event["args"]["correlation"]) not in calls:
            continue
        place = calls[number]
        if ends.get(("s", number)) != (place["pid"], place["tid"], place["ts"]):
            yield "no arrow from the call"
        if ends.get(("f", number)) != (event["pid"], event["tid"], event["ts"]):
            yield f"no arrow to the {event['cat']}"
