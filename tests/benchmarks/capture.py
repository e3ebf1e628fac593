"""How long closing a window blocks training: torch's tensorboard_trace_handler(use_gzip=True) against megaprof.

    python -m tests.benchmarks.capture [--pairs 5] [--microbatches 32] [--layers 8]

One window is one training step of a real megatron-core GPT on the CPU, recorded with CPU activity. Each measurement is
a process of its own, so that its peak memory is its own; the two alternate, and ratios are taken pair by pair, because
a shared machine changes its speed from minute to minute. Ratios are torch's figure divided by megaprof's: above 1 is
in our favour.

    blocked   from the end of the step until the training thread goes on: stopping the profiler and writing the trace
              ("of which running": what the thread would be blocked for on a machine with no other load)
    total     from the end of the step until the file is complete
    size      bytes of the compressed trace
    peak RSS  largest resident memory of the whole process

The floor of "blocked" is Kineto's own: ``stop`` and ``export`` show how much of ours that was. ``step while writing``
is a training step while the writer compresses, over a step before; there it is the second core that counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS_BEFORE = 3


class Stopwatch:
    """Seconds spent in functions that it was put around, and how many of them this thread was running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.started: dict[str, float] = {}

    def around(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.started[name], cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] = time.perf_counter() - self.started[name]
                self.cpu[name] = time.thread_time() - cpu

        setattr(owner, name, timed)


def theirs(gpt: Any, directory: Path) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    with profile(
        activities=[ProfilerActivity.CPU],
        on_trace_ready=tensorboard_trace_handler(str(directory), use_gzip=True),
    ):
        gpt.train_step()
        begun, cpu = time.perf_counter(), time.thread_time()
    blocked = time.perf_counter() - begun
    return {"blocked": blocked, "blocked_cpu": time.thread_time() - cpu, "total": blocked}


def ours(gpt: Any, directory: Path) -> dict[str, float]:
    from torch.profiler import profile

    from megaprof import ProfileConfig, install_hooks
    from megaprof.capture.session import Session

    watch = Stopwatch()
    watch.around(Session, "end")
    watch.around(profile, "stop")
    watch.around(profile, "export_chrome_trace")
    config = ProfileConfig(
        target=("train_actor",), dir=str(directory), schedule=str(STEPS_BEFORE), activities=("cpu",), ranges="step"
    )
    with install_hooks(gpt.chunks, config) as handle:
        before = [timed(gpt.train_step) for _ in range(STEPS_BEFORE)]
        gpt.train_step()
        # Later steps end, too: a capture keeps a timeline of some steps behind it.
        begun, blocked, blocked_cpu = watch.started["end"], watch.seconds["end"], watch.cpu["end"]
        during = []
        while not handle.flush(0):
            during.append(timed(gpt.train_step))
        total = time.perf_counter() - begun if not during else None
    measured = {
        "blocked": blocked,
        "blocked_cpu": blocked_cpu,
        "stop": watch.cpu["stop"],
        "export": watch.cpu["export_chrome_trace"],
        "step_while_writing": statistics.median(during) / statistics.median(before) if during else float("nan"),
    }
    (file,) = directory.glob("*.pt.trace.json.gz")
    # A step may end long after the file does, so the file says itself when it was complete.
    complete = file.stat().st_ctime - time.time() + time.perf_counter()
    return {**measured, "total": total if total is not None else complete - begun}


def timed(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def measure(side: str, layers: int, microbatches: int) -> dict[str, float]:
    """One window in this process; seconds and bytes."""
    import logging

    import torch
    import torch.distributed as dist

    from megaprof.testing import GPTWorkload, build, cpu_megatron

    logging.getLogger("megaprof").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, cpu_megatron():
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        gpt = build(GPTWorkload(layers=layers, microbatches=microbatches, hidden=64, seq_length=32))
        gpt.train_step()
        directory = Path(place, "traces")
        directory.mkdir()
        result = {"ours": ours, "theirs": theirs}[side](gpt, directory)
        (file,) = directory.glob("*.pt.trace.json.gz")
        result["size"] = file.stat().st_size
        dist.destroy_process_group()
    result["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return result


def in_a_process(side: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", side]
    command += ["--layers", str(options.layers), "--microbatches", str(options.microbatches)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True, text=True)
    result: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--measure", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.layers, options.microbatches)))
        return

    pairs = []
    for number in range(options.pairs):
        sides = ("theirs", "ours") if number % 2 == 0 else ("ours", "theirs")
        pairs.append({side: in_a_process(side, options) for side in sides})
        shown = "   ".join(
            f"{side}: blocked {m['blocked']:.3f} s, total {m['total']:.3f} s" for side, m in sorted(pairs[-1].items())
        )
        print(f"pair {number + 1}: {shown}", flush=True)

    def middle(side: str, name: str) -> float:
        return statistics.median(pair[side][name] for pair in pairs)

    def ratio(name: str) -> float:
        return statistics.median(pair["theirs"][name] / pair["ours"][name] for pair in pairs)

    print(
        f"\n{'median of ' + str(len(pairs)) + ' pairs':22}{'torch, gzip':>14}{'megaprof':>14}{'torch / megaprof':>20}"
    )
    for name, label, unit in (
        ("blocked", "blocked", 1e-3),
        ("blocked_cpu", "  of which running", 1e-3),
        ("total", "total", 1e-3),
        ("size", "size", 1e6),
        ("peak_rss", "peak RSS", 1e6),
    ):
        word = "ms" if unit < 1 else "MB"
        values = "".join(f"{middle(side, name) / unit:>11.1f} {word}" for side in ("theirs", "ours"))
        print(f"{label:22}{values}{ratio(name):>20.2f}")
    floor = statistics.median((p["ours"]["stop"] + p["ours"]["export"]) / p["ours"]["blocked_cpu"] for p in pairs)
    stop, export = middle("ours", "stop") * 1e3, middle("ours", "export") * 1e3
    print(f"Kineto's own part of ours, running: {floor:.1%} (stop {stop:.1f} ms, export {export:.1f} ms)")
    while_writing = middle("ours", "step_while_writing")
    print(f"a step while writing / a step before: {while_writing:.2f}")
    summary = {
        "blocked_ratio": ratio("blocked"),
        "blocked_cpu_ratio": ratio("blocked_cpu"),
        "total_ratio": ratio("total"),
        "size_ratio": ratio("size"),
        "peak_rss_ratio": ratio("peak_rss"),
        "kineto_share_of_blocked_cpu": floor,
        "step_while_writing_ratio": while_writing,
        "pairs": len(pairs),
    }
    print(json.dumps({name: round(value, 3) for name, value in summary.items()}))


if __name__ == "__main__":
    main()
