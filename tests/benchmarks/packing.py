"""Does a run whose sequences lie as `megaprof report` advises gain what it predicted?

Real megatron-core on this CPU, two stages, whose attention is quadratic in a sequence as on a GPU. Sequences of drawn
lengths lie in microbatches in the order in which they came. Every job is captured, the best packing of the report is
taken, and then both run in alternation in the same processes, as in `tests.benchmarks.whatif`, which says how the
truth is measured. Every capture gives a prediction.

    python -m tests.benchmarks.packing [--jobs N] [--repeats N] [--out DIR]

The last line is JSON. ``median_error``: the median of |predicted / measured speedup - 1| (wanted: at most 0.03);
``within_uncertainty``: the part of the predictions whose error is within their interval (wanted: at least 0.9);
``within_both``: the same, where the scatter of the measured speedup counts, too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megaprof.analysis.report.report import analyze
from megaprof.analysis.what_if.packing import PLANS, Microbatch, Packed, plan
from megaprof.testing import GPTWorkload, run_ranks
from tests.benchmarks.whatif import (
    TIME_LIMIT,
    Outcome,
    measured_speedup,
    median_error,
    name,
    only_first,
    run_rank,
    share,
    show,
)

#: Sequences of a job, and its microbatches.
SEQUENCES, MICROBATCHES = 24, 8
LONGEST = 1536
WORKLOAD = GPTWorkload(pp=2, layers=4, hidden=128, heads=4, microbatches=MICROBATCHES, seq_length=LONGEST)
ENV = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}


def drawn(job: int) -> tuple[Microbatch, ...]:
    """Lengths as those of answers are: most short, some very long. As many sequences in every microbatch."""
    lengths = np.exp(np.random.default_rng(job).normal(5.3, 0.9, SEQUENCES)).astype(int).clip(16, LONGEST).tolist()
    each = SEQUENCES // MICROBATCHES
    return tuple(tuple(lengths[n : n + each]) for n in range(0, SEQUENCES, each))


def known_of(directory: Path) -> Packed:
    """What a capture tells of a job's sequences. Raises LookupError."""
    (known,) = (each.sequences for each in analyze(directory).by_hand if each is not None)
    if known is None:
        raise LookupError(f"{directory}: the lengths are not known")
    return known


def outcomes_of(job: int, repeats: int, out: Path) -> list[Outcome]:
    """Every capture of a job with its prediction, and what came of it."""
    before = replace(WORKLOAD, packs=drawn(job))
    _run([("captured", before)], out / "first", 1)
    known = known_of(out / "first" / name(0, "captured"))
    plans = {each: found for each in PLANS if (found := plan(known, each)) is not None}
    best = max(plans, key=lambda each: plans[each].prediction.speedup)
    packs = tuple(plans[best].steps[0][0])
    _run([("captured", before), (best, replace(before, packs=packs, microbatches=len(packs)))], out / "pairs", repeats)
    measured, scatter = measured_speedup(out / "pairs", repeats, "captured", best)
    places = [out / "first" / name(0, "captured"), *(out / "pairs" / name(n, "captured") for n in range(repeats))]
    outcomes = []
    for number, place in enumerate(places):
        own = known_of(place)
        found = plan(own, best)
        if found is None:
            continue
        said = found.prediction
        outcomes.append(
            Outcome(
                captured=f"job {job}, {number}",
                layout=best,
                advised=said.low > 1.0,
                replay_error=own.run.replayed_ms / own.run.step_ms - 1.0,
                captured_ms=own.run.step_ms,
                predicted=said.speedup,
                low=said.low,
                high=said.high,
                measured=measured,
                scatter=scatter,
            )
        )
    return outcomes


def _run(turns: list[tuple[str, GPTWorkload]], out: Path, rounds: int) -> None:
    run_ranks(run_rank, WORKLOAD.pp, turns, out, rounds, False, timeout=TIME_LIMIT, env=ENV, on_line=only_first)


def main() -> None:
    """Run the jobs and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="jobs of other lengths (default: 3)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each packing (default: 3)")
    parser.add_argument("--out", type=Path, default=None, help="keep the traces there")
    options = parser.parse_args()
    load, begin = os.getloadavg()[0], time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        for job in range(options.jobs):
            outcomes += outcomes_of(job, options.repeats, (options.out or Path(scratch)) / str(job))
    show("packings:", outcomes)
    result = {
        "benchmark": "packing",
        "median_error": median_error(outcomes),
        "within_uncertainty": share([each.inside for each in outcomes]),
        "within_both": share([each.inside_both for each in outcomes]),
        "predictions": len(outcomes),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "load": load,
        "outcomes": [asdict(each) for each in outcomes],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
