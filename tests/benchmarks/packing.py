"""Does a run whose sequences lie as `megaprof report` advises gain what it predicted?

Real megatron-core on this CPU, with sequences of drawn lengths in microbatches in the order in which they came. Every
job is captured, the best packing of the report is taken, and then both run in alternation in the same processes, as in
`tests.benchmarks.whatif`, which says how the truth is measured. Every capture gives a prediction.

Paced layers are the truth: real schedules, exchanges and packed sequences of a tiny model, whose layers take a fixed
time, one by tokens and one by squares of lengths in each pass, and wait for most of it. The jobs have two stages, and
every other one two replicas beside. Real compute, whose attention is quadratic in a sequence as on a GPU, says less,
because stages that share cores disturb each other; its figures have names of their own.

    python -m tests.benchmarks.packing [--only paced compute] [--jobs N] [--repeats N] [--out DIR]

The last line is JSON. ``median_error``: the median of |predicted / measured speedup - 1| (wanted: at most 0.03);
``within_uncertainty``: the part of the predictions whose error is within their interval (wanted: at least 0.9);
``within_both``: the same, where the scatter of the measured speedup counts, too. With ``_compute`` at the end: the same
of real compute; null where it did not run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaprof.analysis.report.report import analyze
from megaprof.analysis.what_if.changes import PLANS, Microbatch, Sequences, plan, repacked
from megaprof.testing import GPTWorkload, faults, run_ranks
from tests.benchmarks.cores import awake
from tests.benchmarks.whatif import TIME_LIMIT, Outcome, figures, measured_speedup, name, only_first, run_rank, show
from tests.built import VARIABLE, Packs

#: Sequences of a replica, and its microbatches.
SEQUENCES, MICROBATCHES = 24, 8
KINDS = PACED, COMPUTE = ("paced", "compute")
#: Tokens of the longest sequence, and of a usual one.
LONGEST = {PACED: (192, 25), COMPUTE: (1536, 200)}
WORKLOADS = {
    PACED: GPTWorkload(pp=2, layers=4, hidden=32, seq_length=3 * LONGEST[PACED][0], options=VARIABLE),
    COMPUTE: GPTWorkload(pp=2, layers=4, hidden=128, seq_length=LONGEST[COMPUTE][0], options=VARIABLE),
}
#: Milliseconds of a paced layer's forward, half of its backward's: of a microbatch, of a token, of the square of one.
FIXED_MS, TOKEN_MS, SQUARE_MS = 4.0, 0.04, 0.0004
ENV = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}


def drawn(kind: str, job: int, replicas: int) -> tuple[Microbatch, ...]:
    """Lengths as those of answers are: most short, some very long. As many sequences in every microbatch."""
    longest, usual = LONGEST[kind]
    count = SEQUENCES * replicas
    random = np.random.default_rng(job)
    lengths = np.exp(random.normal(np.log(usual), 0.9, count)).astype(int).clip(2, longest).tolist()
    each = SEQUENCES // MICROBATCHES
    return tuple(tuple(lengths[n : n + each]) for n in range(0, count, each))


def pace(chunks: Sequence[Any]) -> None:
    """Let layers take what the sequences of their microbatch say."""
    forward_ms = 0.0

    def noted(chunk: Any, inputs: Any, named: Any) -> None:
        nonlocal forward_ms
        lengths = np.diff(named["packed_seq_params"].cu_seqlens_q.numpy())
        forward_ms = float(FIXED_MS + TOKEN_MS * lengths.sum() + SQUARE_MS * (lengths**2).sum())

    for chunk in chunks:
        chunk.register_forward_pre_hook(noted, with_kwargs=True)
    faults.pace(faults.layers(chunks), lambda: (forward_ms, 2 * forward_ms))


def known_of(directory: Path) -> Sequences:
    """What a capture tells of a job's sequences. Raises LookupError."""
    (known,) = (each.sequences for each in analyze(directory).by_hand if each is not None)
    if known is None:
        raise LookupError(f"{directory}: the lengths are not known")
    return known


def outcomes_of(kind: str, job: int, repeats: int, out: Path) -> list[Outcome]:
    """Every capture of a job with its prediction, and what came of it."""
    replicas = 1 + (kind == PACED and job % 2)
    before = replace(WORKLOADS[kind], dp=replicas, microbatches=MICROBATCHES), drawn(kind, job, replicas)
    _run(kind, [("captured", *before)], out / "first", 1)
    known = known_of(out / "first" / name(0, "captured"))
    plans = {each: found for each in PLANS if (found := plan(known, each)) is not None}
    best = max(plans, key=lambda each: repacked(known, plans[each])[0].speedup.value)
    laid = plans[best][0]
    after = replace(before[0], microbatches=len(laid[0])), tuple(own for replica in laid for own in replica)
    _run(kind, [("captured", *before), (best, *after)], out / "pairs", repeats)
    measured, scatter = measured_speedup(out / "pairs", repeats, "captured", best)
    places = [out / "first" / name(0, "captured"), *(out / "pairs" / name(n, "captured") for n in range(repeats))]
    outcomes = []
    for number, place in enumerate(places):
        own = known_of(place)
        # The one that ran: another capture may lay them otherwise.
        said, *_ = repacked(own, [laid] * len(own.steps))
        outcomes.append(
            Outcome(
                captured=f"job {job}, {number}",
                layout=best,
                advised=said.speedup.low > 1.0,
                replay_error=float(own.run.view.step_ms.mean()) / own.run.step_ms - 1.0,
                captured_ms=own.run.step_ms,
                predicted=said.speedup.value,
                low=said.speedup.low,
                high=said.speedup.high,
                measured=measured,
                scatter=scatter,
            )
        )
    return outcomes


def _run(kind: str, turns: list[tuple[str, GPTWorkload, Packs]], out: Path, rounds: int) -> None:
    world, paced = turns[0][1].world_size, pace if kind == PACED else None
    run_ranks(run_rank, world, turns, out, rounds, paced, timeout=TIME_LIMIT, env=ENV, on_line=only_first)


def main() -> None:
    """Run the jobs and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, nargs="*", default=[PACED], help="only these (default: paced)")
    parser.add_argument("--jobs", type=int, nargs="*", default=[0, 1, 2], help="jobs of other lengths (default: 0 1 2)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each packing (default: 3)")
    parser.add_argument("--out", type=Path, default=None, help="keep the traces there")
    options = parser.parse_args()
    load, begin = os.getloadavg()[0], time.monotonic()
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, job in itertools.product(options.only, options.jobs):
            with awake() if kind == PACED else nullcontext():
                outcomes[kind] += outcomes_of(
                    kind, job, options.repeats, (options.out or Path(scratch)) / kind / str(job)
                )
    for kind, each in outcomes.items():
        show(f"{kind}:", each)
    took = {"minutes": round((time.monotonic() - begin) / 60, 1), "load": load}
    every = {kind: [asdict(each) for each in own] for kind, own in outcomes.items()}
    print(json.dumps({"benchmark": "packing", **figures(outcomes), **took, "outcomes": every}))


if __name__ == "__main__":
    main()
