"""How many steps a second are replayed at once, against one call of `megaprof.simulate` for each of them.

    python -m tests.benchmarks.replay [--draws 40] [--steps 20] [--stages 8] [--microbatches 64]

The last line is JSON: for 1F1B and for two model chunks a stage, buffered and as a rendezvous, the milliseconds of all
draws and steps at once (``many_ms``, the median of 5), of one call of `simulate` (``one_ms``, likewise), ``ratio``, the
throughput of the first over that of the second, and ``difference_ms``, the most that their step times differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from megaprof import simulate
from megaprof.analysis.simulation import compiled
from megaprof.parallel.schedules import PipelineSchedule

TRANSFER_MS = 0.3


def measure(schedule: PipelineSchedule, rendezvous: bool, draws: int, steps: int) -> dict[str, float]:
    replay = compiled(schedule, rendezvous)
    passes = np.random.default_rng(0).uniform(5.0, 15.0, (draws, steps, *replay.shape))

    def one(times: Any) -> float:
        forward, backward = times.swapaxes(1, 2).swapaxes(0, 1)
        count = schedule.microbatches
        return simulate(forward, backward, count, p2p_ms=TRANSFER_MS, rendezvous=rendezvous).step_ms

    together = replay.step_ms(passes, link=TRANSFER_MS)
    many_ms = _median_ms(lambda: replay.step_ms(passes, link=TRANSFER_MS))
    one_ms = _median_ms(lambda: one(passes[0, 0]))
    some = [(0, 0), (draws - 1, steps - 1), (draws // 2, steps // 2)]
    return {
        "many_ms": round(many_ms, 2),
        "one_ms": round(one_ms, 3),
        "ratio": round(one_ms * draws * steps / many_ms, 1),
        "difference_ms": max(abs(together[place] - one(passes[place])) for place in some),
    }


def _median_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("draws", 40), ("steps", 20), ("stages", 8), ("microbatches", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    found = {}
    for chunks in (1, 2):
        schedule = PipelineSchedule.checked(options.stages, chunks, options.microbatches)
        for rendezvous in (False, True):
            name = f"{schedule.name}, {'rendezvous' if rendezvous else 'buffered'}"
            found[name] = measure(schedule, rendezvous, options.draws, options.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
