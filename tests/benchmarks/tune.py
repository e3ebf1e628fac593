"""Does `megaprof tune` find the fastest layout, and do its predictions hold? Real schedules over gloo, paced layers.

    python -m tests.benchmarks.tune [--only NAME ...] [--steps N] [--out DIR]

Each case is a command (`tests/tune/job.py` under torchrun) that is tuned to the end, in four trials at most. Then the
``--others`` layouts run, too, that should be fastest by the costs that the layers were given; with a limit of memory of
those that keep it. What is compared is the average step of each run.

The last line is JSON, by case: ``trials``; ``speedup`` of the tuned command over the given one, ``best`` of
the fastest layout of all, and ``part``, the one as a part of the other (wanted: at least 0.95); ``inside``: how many
predictions held, and of how many (wanted: 9 of 10). ``load`` is the machine's at the start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megaprof import simulate
from megaprof.analysis.what_if.contents import in_flight_layers
from megaprof.analysis.what_if.layouts import Layout, format_layout
from megaprof.analysis.words import within
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.tune import show, trial, tuning
from tests.benchmarks.cores import awake
from tests.tune import job

RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
LAYERS, MICROBATCHES = 8, 8


@dataclass(frozen=True)
class Case:
    """A layout to begin with, and what the output layer waits, in milliseconds."""

    layers: tuple[int, ...]
    loss: tuple[float, float] = (0.0, 0.0)
    memory: float | None = None
    """GiB that a stage may have, of 2 for a layer and 1 for its activations of a microbatch."""

    def command(self, layout: str) -> list[str]:
        words = [*RANKS, str(len(self.layers)), job.__file__, "--num-layers", str(LAYERS)]
        words += ["--pipeline-model-parallel-size", str(len(self.layers)), "--global-batch-size", str(MICROBATCHES)]
        words += [] if self.memory is None else ["--memory", "2", "1"]
        return [*words, "--loss-ms", *map(str, self.loss), "--pipeline-model-parallel-layout", layout]

    def keeps(self, split: tuple[int, ...]) -> bool:
        """Whether no stage has more than it may."""
        pieces = _pieces(split)
        in_flight = in_flight_layers(pieces, PipelineSchedule.checked(len(split), 1, MICROBATCHES))
        return self.memory is None or all(2 * n + m <= self.memory for n, m in zip(split, in_flight, strict=True))


CASES = {
    "6+2": Case((6, 2)),
    "5+1+1+1, heavy loss": Case((5, 1, 1, 1), (25.0, 17.0)),
    "4+4, the best": Case((4, 4)),
    "2+6 within 15.5 GiB": Case((2, 6), memory=15.5),  # 4+4 has 16, two chunks of it have 18, and 3+5 has 15
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), nargs="*", default=tuple(CASES))
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run (default: 20)")
    parser.add_argument("--others", type=int, default=5, help="layouts that run beside (default: 5)")
    parser.add_argument("--out", type=Path, default=None, help="keep the files there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    os.environ.update(ENV)
    load, begin = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, awake():
        out = options.out or Path(temporary)
        found = {name: _case(name, out / str(at), options) for at, name in enumerate(CASES) if name in options.only}
    held, of = (sum(each["inside"][end] for each in found.values()) for end in (0, 1))
    together = {
        "part": min((each["part"] for each in found.values()), default=None),
        "inside": [held, of],
        "load": round(load, 2),
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }
    print(json.dumps({"cases": found} | together))


def _case(name: str, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    given = format_layout(_pieces(case.layers))
    limit = None if case.memory is None else round(case.memory * (1 << 30))
    tuned = tuning.Tuning((*case.command(given),), options.steps, 4, memory_limit=limit)
    (out / "tuned").mkdir(parents=True)
    tuned = tuning.run(tuned, out / "tuned", 300.0, lambda _: None, lambda _: None, _say)
    show(tuned, Console(stderr=True))
    if tuned.result is None:
        raise SystemExit(f"{name}: {tuned.reason}")
    limited = {each.layout for each in tuned.trials if each.outcome == "above_limit"}
    times = {each.layout: each.step_ms.value for each in tuned.measured if each.step_ms is not None}
    for number, pieces in enumerate(_others(case, options.others)):
        layout = format_layout(pieces)
        if layout not in times:
            times[layout] = _measured(case, layout, out / f"other-{number}", options.steps)
            print(f"{name}: {layout} {times[layout]:.0f} ms", file=sys.stderr, flush=True)
    first, best = times[given], min(ms for ran, ms in times.items() if ran not in limited)
    own = times[tuned.trials[tuned.result.trial - 1].layout]
    return {
        "trials": len(tuned.trials),
        "speedup": round(first / own, 4),
        "best": round(first / best, 4),
        "part": round(best / own, 4),
        "inside": list(tuned.result.as_predicted),
    }


def _say(tried: tuning.Trial) -> None:
    print(f"{tried.what}: {within(tried.step_ms)} ms {tried.why or ''}", file=sys.stderr, flush=True)


def _measured(case: Case, layout: str, place: Path, steps: int) -> float:
    place.mkdir(parents=True)
    trial.run(case.command(layout), place.absolute(), steps, 300.0)
    found = tuning.as_measured(tuning.Trial(1, (), str(place)), place)
    if found.step_ms is None:
        raise SystemExit(f"{layout}: {found.why}")
    return found.step_ms.value


def _others(case: Case, most: int) -> Iterator[Layout]:
    """Splits of the layers, by the step that their given costs come to."""
    stages = len(case.layers)
    splits = [each for each in itertools.product(range(LAYERS + 1), repeat=stages) if sum(each) == LAYERS]
    kept = [each for each in splits if min(each) > 0 and case.keeps(each)]
    ordered = sorted(kept, key=lambda each: _step_ms(case, each))
    return map(_pieces, ordered[:most])


def _step_ms(case: Case, split: tuple[int, ...]) -> float:
    forward, backward = (
        [[count * job.LAYER[kind] + case.loss[kind] * (stage == len(split) - 1)] for stage, count in enumerate(split)]
        for kind in (0, 1)
    )
    return simulate(forward, backward, MICROBATCHES).step_ms


def _pieces(split: tuple[int, ...]) -> Layout:
    pieces = ["t" * count for count in split]
    return ("E" + pieces[0], *pieces[1:-1], pieces[-1] + "L")


if __name__ == "__main__":
    main()
