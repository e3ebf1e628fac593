"""What hooks cost, from one run: off, armed without a window, ranges only, window open.

    python -m tests.benchmarks.overhead [--steps 20] [--microbatches 8] [--hidden 256]

One rank of a real Megatron-Core GPT (no pipelining) on the CPU. The four ways take turns step by step, so a machine
that speeds up or slows down does so for all of them; figures are medians, and the ratios are to ``off`` in the same
round. Beside the steps stand the counts and the unit costs that explain them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.autoload import install
from megaprof.capture.profiler import Dispatcher
from megaprof.formats import codes
from megaprof.hooks.dispatch import ranged
from megaprof.recorders.emit import Range
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

WAYS = ("off", "armed", "ranges", "window")


class _Nothing:
    """A recorder that records nothing: what is left of a window are its ranges."""

    def start(self, window: Any) -> None: ...

    def stop(self, window: Any, metadata: Any) -> None: ...

    def discard(self) -> None: ...


def _hooks(way: str, chunks: list[Any], directory: Path) -> Any:
    """Install hooks for ``way``; None for ``off``."""
    if way == "off":
        return None
    due = {"steps": "999999"} if way == "armed" else {"schedule": "0:0:0:1:0"}
    config = ProfileConfig(target=("train_actor",), dir=str(directory), **due)
    if way != "ranges":
        return install_hooks(chunks, config)
    with mock.patch.object(install, "build_recorders", return_value=[_Nothing()]):
        return install_hooks(chunks, config)


def measure(workload: GPTWorkload, steps: int) -> dict[str, Any]:
    """Milliseconds of every step, by way, and how often a range was opened in one."""
    init_distributed()
    milliseconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with cpu_megatron(), tempfile.TemporaryDirectory() as folder:
        gpt = build(workload)
        for _ in range(3):
            gpt.train_step()
        for _ in range(steps):
            for way in WAYS:
                handle = _hooks(way, gpt.chunks, Path(folder))
                start = time.perf_counter()
                gpt.train_step()
                milliseconds[way].append(1e3 * (time.perf_counter() - start))
                if handle is not None:
                    handle.remove()  # also waits for the file, outside the measurement
        with mock.patch("torch.profiler.record_function", wraps=torch.profiler.record_function) as recorded:
            handle = _hooks("ranges", gpt.chunks, Path(folder))
            gpt.train_step()
            handle.remove()
        opened = recorded.call_count
        units = _unit_costs()
    return {"milliseconds": milliseconds, "ranges": opened, "units": units}


def _unit_costs() -> dict[str, float]:
    """Microseconds of the pieces, with no profiler running."""

    def best(what: Callable[[], Any], number: int = 20_000) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(number):
                what()
            times.append((time.perf_counter() - start) / number * 1e6)
        return min(times)

    def nothing() -> None: ...

    hooked = ranged(nothing, Dispatcher(), codes.FINALIZE)

    def one_range() -> None:
        with Range("megaprof/forward mb=0 chunk=0"):
            pass

    return {"hooked call": best(hooked) - best(nothing), "range": best(one_range)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    workload = GPTWorkload(layers=4, microbatches=args.microbatches, hidden=args.hidden)
    quiet = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}
    (result,) = run_ranks(measure, 1, workload, args.steps, timeout=600, env=quiet)

    off = result["milliseconds"]["off"]
    hooked_calls = 2 * args.microbatches + 2  # forward and backward of each, the schedule, the gradient finalisation
    print(f"{args.steps} rounds of {args.microbatches} microbatches")
    print(f"a step has {hooked_calls} hooked calls and {result['ranges']} ranges")
    print(f"{'':10} {'ms a step':>10} {'vs off':>8} {'us a microbatch':>16}")
    figures = {}
    for way, times in result["milliseconds"].items():
        ratio = statistics.median(t / o for t, o in zip(times, off, strict=True))
        extra = 1e3 * statistics.median(t - o for t, o in zip(times, off, strict=True)) / args.microbatches
        figures[way] = round(ratio, 4)
        print(f"{way:10} {statistics.median(times):10.2f} {ratio:8.4f} {extra:16.1f}")
    units = result["units"]
    armed = hooked_calls * units["hooked call"]
    print(f"one hooked call without a window {units['hooked call']:.3f} us, one range {units['range']:.2f} us")
    print(
        f"counts times unit cost: armed {armed:.1f} us a step, ranges {result['ranges'] * units['range']:.0f} us a step"
    )
    figures |= {"armed_us_per_step": round(armed, 2), "range_us": round(units["range"], 2)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
