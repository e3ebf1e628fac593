"""Collapsed stacks from a trace with Python functions and kernels."""

from __future__ import annotations

from typing import Any

from megaprof.artifacts.stacks import CollapsedStacks


def event(category: str, name: str, start: float, duration: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def collapsed(*events: dict[str, Any]) -> tuple[list[str], list[str]]:
    stacks = CollapsedStacks()
    for e in events:
        stacks.add(e)
    return list(stacks.host()), list(stacks.device())


def test_stacks_of_host_and_device() -> None:
    host, device = collapsed(
        event("kernel", "gemm", 900, 40, thread=7, correlation=5),
        event("python_function", "train.py(3): step; x", 0, 100),
        event("cpu_op", "aten::mm", 10, 50),
        event("cuda_runtime", "cudaLaunchKernel", 20, 5.5, correlation=5),
        event("cpu_op", "aten::mm", 70, 10),
        event("kernel", "gemm", 950, 2, thread=8, correlation=77),
        event("cpu_op", "aten::mm", 0, 1, thread=2),
        event("fwdbwd", "fwdbwd", 0, 1),
    )
    assert host == [
        "train.py(3): step: x 40000\n",
        "train.py(3): step: x;aten::mm 54500\n",
        "train.py(3): step: x;aten::mm;cudaLaunchKernel 5500\n",
        "aten::mm 1000\n",
    ]
    assert device == [
        "train.py(3): step: x;aten::mm;cudaLaunchKernel;gemm 40000\n",
        "gemm 2000\n",  # launched before the window: its stack is not known
    ]


def test_nothing_recorded_has_no_stacks() -> None:
    assert collapsed() == ([], [])
