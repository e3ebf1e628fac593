"""What an always-on timeline costs: on the training thread, in the background, and in bytes.

    python -m tests.benchmarks.timeline [--microbatches 32] [--blocks 12] [--steps 6]

Two parts. *Counts times unit cost*: a schedule with nothing in it goes through the real hooks, with and without a
timeline; the difference is what the training thread pays for a step of a middle stage (a forward, a backward and two
exchanges per microbatch), and the background thread's CPU time is counted beside it; the quietest of 60 blocks of 20
steps counts, since other work on the machine only ever adds. *Real steps*: a real Megatron-Core GPT at PP=2 over gloo,
in blocks of steps with and without the timeline in turns, so that a machine that slows down does so for both. Its ratio
is only as good as the machine is quiet.

The last line is JSON. ``overhead``: of a step of 100 ms, what the training thread pays, by which the step gets longer;
``background``: the same of the background thread, on another core. Both add up where it finds no other core, and in the
few moments in which it holds the interpreter's lock when training wants it. ``bytes_per_rank_step``: what a real step
wrote, the busiest rank's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megaprof import ProfileConfig, install_hooks
from megaprof.hooks.dispatch import Dispatcher
from megaprof.hooks.microbatches import IdleStep, idle_step
from megaprof.hooks.schedules import _hooked
from megaprof.install import _process
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

STEP_MS = 100.0
WAYS = ("off", "timeline")


def _config(directory: str) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory)


def unit_costs(microbatches: int, blocks: int, steps: int) -> dict[str, float]:
    """Microseconds per step of a schedule with nothing in it, in the quietest of ``blocks``; one rank."""
    init_distributed()
    with cpu_megatron(), tempfile.TemporaryDirectory() as folder:
        gpt = build(GPTWorkload(layers=1, microbatches=2, hidden=32, seq_length=16, heads=2))

        def per_step(dispatcher: Dispatcher) -> tuple[float, float]:
            idle = idle_step(dispatcher)
            chunk = gpt.chunks[0]
            step = IdleStep(idle.forward, idle.backward, idle.exchange, chunk)
            schedule = _hooked("1f1b", dispatcher, lambda: False, lambda **_: step.run(microbatches))
            found = []
            for _ in range(blocks):
                times, began = [], _process.background.seconds
                for _ in range(steps):
                    start = time.perf_counter()
                    schedule(model=gpt.chunks, num_microbatches=microbatches, forward_only=False)
                    times.append(time.perf_counter() - start)
                    time.sleep(0.002)  # as long as the background thread takes
                time.sleep(0.02)
                found.append((1e6 * statistics.median(times), 1e6 * (_process.background.seconds - began) / steps))
            training, background = zip(*found, strict=True)
            return min(training), min(background)

        bare, _ = per_step(Dispatcher())
        with install_hooks(gpt.chunks, _config(folder)) as handle:
            timed, background = per_step(_process._dispatcher)
            cost = handle._timeline.cost() if handle._timeline is not None else None
    assert cost is not None
    return {"bare": bare, "timed": timed, "background": background, "own": cost.step_us}


def real_steps(workload: GPTWorkload, blocks: int, steps: int, directory: str) -> dict[str, Any]:
    """Milliseconds of every step by way, and the bytes of one step."""
    rank, _ = init_distributed()
    milliseconds: dict[str, list[float]] = {way: [] for way in WAYS}
    written = counted = 0
    background = 0.0
    with cpu_megatron():
        gpt = build(workload)
        for _ in range(3):
            gpt.train_step()
        for block in range(2 * blocks):
            way = "timeline" if block % 2 else "off"
            handle = install_hooks(gpt.chunks, _config(f"{directory}/{block}")) if way == "timeline" else None
            gpt.train_step()
            before = handle._timeline.bytes_written if handle is not None and handle._timeline is not None else 0
            thread = _process.background.seconds
            for _ in range(steps):
                start = time.perf_counter()
                gpt.train_step()
                milliseconds[way].append(1e3 * (time.perf_counter() - start))
            if handle is not None and handle._timeline is not None:
                background += _process.background.seconds - thread
                timeline = handle._timeline
                handle.remove()
                written += timeline.bytes_written - before
                counted += steps
    return {"rank": rank, "ms": milliseconds, "bytes": written / counted, "background_us": 1e6 * background / counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a block")
    args = parser.parse_args()
    quiet = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}
    (unit,) = run_ranks(unit_costs, 1, args.microbatches, 60, 20, timeout=300, env=quiet)
    phases = 4 * args.microbatches
    training = unit["timed"] - unit["bare"]
    print(f"an empty step of {phases} phases: idle hooks {unit['bare']:.0f} us, timeline {unit['timed']:.0f} us")
    print(f"training thread {training:.0f} us a step, {training / phases:.2f} us a phase")
    print(f"its own estimate of the same in the job: {unit['own']:.0f} us a step")
    print(f"background thread {unit['background']:.0f} us a step")
    workload = GPTWorkload(pp=2, layers=2, microbatches=args.microbatches, hidden=64, seq_length=64)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(real_steps, 2, workload, args.blocks, args.steps, str(Path(folder)), timeout=900, env=quiet)
    # A step is as long as its last rank; a block is compared with the one before it.
    off, on = ([max(step) for step in zip(*(rank["ms"][way] for rank in ranks), strict=True)] for way in WAYS)
    blocks = [slice(first, first + args.steps) for first in range(0, len(off), args.steps)]
    ratio = statistics.median(statistics.median(on[b]) / statistics.median(off[b]) for b in blocks)
    size = max(rank["bytes"] for rank in ranks)
    medians = [statistics.median(way) for way in (off, on)]
    print(f"real steps at PP=2: off {medians[0]:.2f} ms, timeline {medians[1]:.2f} ms; block by block {ratio:.4f}")
    print(f"{size:.0f} bytes a rank and step, background thread {max(r['background_us'] for r in ranks):.0f} us a step")
    print(
        json.dumps(
            {
                "overhead": round(training / (1e3 * STEP_MS), 5),
                "us_per_phase": round(training / phases, 2),
                "background": round(unit["background"] / (1e3 * STEP_MS), 5),
                "bytes_per_rank_step": round(size),
                "real_step_ratio": round(ratio, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
