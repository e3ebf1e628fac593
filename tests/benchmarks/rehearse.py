"""Does a rehearsal of one stage after another hold? Jobs of 2 and 4 stages, rehearsed, and then run for real.

    python -m tests.benchmarks.rehearse [--only NAME ...] [--steps N] [--others N] [--out DIR]

Each case is a command (`tests/tune/job.py`): real schedules over gloo, with layers and an output layer that wait for a
given time, or compute. What it would do on all its ranks is predicted from its stages, which run alone, and then all
its ranks run. So do the layout that the rehearsal calls best, and the ``--others`` that it predicts to be fast.

A job's ranks are to have the same machine in both. GPUs share nothing that passes need, but two cores share a cache and
memory: while a stage of layers that compute is rehearsed, so is the other one, and both begin each step together. Four
ranks share two cores: their layers wait longer, so that what the ranks compute between them is as small a part.

The last line is JSON, by case: ``error``, predicted step / real step - 1, of the layout as given and of the others
(wanted: within 0.05); ``inside``, how many of these real steps are in their intervals (wanted: 9 of 10); ``order``,
whether the layouts are as fast as each other in the predicted order, where they differ by more than 2 %; ``part``, the
fastest real step as a part of that of the rehearsal's best layout (wanted: at least 0.98); ``memory``, the largest
difference in GiB where memory is counted. Together: ``worst`` error and part, how many are ``inside``, and of how many.
``load`` is the machine's at the start and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megaprof.analysis.report.report import analyze
from megaprof.analysis.samples import Interval, errors_of_mean
from megaprof.rehearse import rehearsal
from megaprof.rehearse.pipeline import Stage, record
from megaprof.rehearse.rehearsal import Rehearsal
from megaprof.tune import trial
from megaprof.tune.command import with_layout
from tests.benchmarks.cores import awake, real_time
from tests.benchmarks.tune import ENV, RANKS
from tests.tune import job

TIME_LIMIT, GIB = 300.0, 1 << 30


@dataclass(frozen=True)
class Case:
    """A command of `job`, by its layout and its other words."""

    layout: str
    words: tuple[str, ...] = ()
    stages: int = 2
    tp: int = 1

    @property
    def command(self) -> list[str]:
        layers = self.layout.count("t")
        return [
            *(job.__file__, "--num-layers", str(layers), "--pipeline-model-parallel-size", str(self.stages)),
            *("--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-layout", self.layout),
            *self.words,
        ]


_LONG = ("--layer-ms", "30", "60")
CASES = {
    "2 stages, uneven": Case("Etttttt|ttL", ("--memory", "2", "1")),
    "2 stages, 2 chunks": Case("Ett|tt|tt|ttL"),
    "2 stages, tp=2": Case("Ettttt|tttL", tp=2),
    "4 stages, heavy loss": Case("Ett|tt|tt|ttL", (*_LONG, "--loss-ms", "75", "51"), stages=4),
    "4 stages, uneven": Case("Ettttt|t|t|tL", (*_LONG, "--memory", "2", "1"), stages=4),
    "2 stages, computing": Case("Etttt|ttL", ("--compute", "--hidden-size", "512")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), nargs="*", default=tuple(CASES))
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run (default: 8)")
    parser.add_argument("--others", type=int, default=2, help="layouts that run beside (default: 2)")
    parser.add_argument("--out", type=Path, default=None, help="keep the files there")
    options = parser.parse_args()
    os.environ.update(ENV)
    load, begin = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, awake():
        out = options.out or Path(temporary)
        found = {name: _case(CASES[name], out / str(at), options) for at, name in enumerate(options.only)}
    cases = [*found.values()]
    together = {
        "worst": [max(abs(error) for each in cases for error in each["error"]), min(each["part"] for each in cases)],
        "inside": [sum(each["inside"] for each in cases), sum(len(each["error"]) for each in cases)],
        "order": all(each["order"] for each in cases),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }
    print(json.dumps({"cases": found} | together))


def _case(case: Case, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    words, world = case.command, case.stages * case.tp
    real_time("--compute" not in words)
    alone = _beside if "--compute" in words else record
    with patch.object(rehearsal, "record", alone):
        made, _ = rehearsal.rehearsed(
            words, [sys.executable, *words], out, world, steps=options.steps, links={}, per_host=world
        )
    real, memory = _run(words, out / "real", world, options.steps)
    print(f"{case.layout}: {made.step_ms}, really {real}", file=sys.stderr, flush=True)
    both = {"as given": (made.step_ms, real)}
    fits = [each for each in made.what_if.candidates if each.flags and each.layout and each.fits is not False]
    tried = [*filter(None, [made.best]), *(each for each in fits if each != made.best)]
    for number, each in enumerate(tried[: options.others]):
        others_words = with_layout(words, each.flags, None, None, case.stages)
        ran, _ = _run(others_words, out / f"real-{number}", world, options.steps)
        both[each.layout or ""] = each.step_ms, ran
        print(f"  {each.layout}: {each.step_ms}, really {ran}", file=sys.stderr, flush=True)
    times = {layout: ran.value for layout, (_, ran) in both.items()}
    by_prediction = [ran.value for _, ran in sorted(both.values(), key=lambda each: each[0].value)]
    return {
        "predicted": [round(number) for number in (made.step_ms.low, made.step_ms.value, made.step_ms.high)],
        "real": round(real.value),
        "error": [round(step.value / ran.value - 1, 4) for step, ran in both.values()],
        "inside": sum(step.holds(ran.value) for step, ran in both.values()),
        "order": all(one < 1.02 * other for one, other in pairwise(by_prediction)),
        "part": round(min(times.values()) / times[made.best.layout or "" if made.best else "as given"], 4),
        "memory": _memory(made, memory),
    }


def _beside(command: list[str], directory: Path, rank: int, world: int, steps: int) -> Stage:
    """`record`, while the other ranks are recorded, too."""
    in_step = directory.parent / f"{directory.name}-in-step"
    in_step.mkdir(parents=True)
    words = [*command, "--in-step", str(in_step.absolute())]
    with ThreadPoolExecutor() as pool:
        places = [
            directory if each == rank else directory.parent / f"{directory.name}-beside{each}" for each in range(world)
        ]
        stages = [pool.submit(record, words, place, each, world, steps) for each, place in enumerate(places)]
        return stages[rank].result()


def _run(words: list[str], place: Path, world: int, steps: int) -> tuple[Interval, tuple[int, ...] | None]:
    """Returns the average of the last ``steps`` steps, and the bytes that stages had allocated. Steps before these take
    longer, and not always by enough to be left out of a report."""
    place.mkdir(parents=True)
    trial.run([*RANKS, str(world), *words], place.absolute(), steps, TIME_LIMIT)
    report = analyze(place)
    (run,) = report.by_hand
    if run is None:
        raise SystemExit(f"{place}: {report.targets[0].what_if.warnings}")
    lengths = run.baseline.length[-steps:]
    return Interval.of(float(lengths.mean()), draws=errors_of_mean(lengths)), report.targets[0].what_if.allocated


def _memory(made: Rehearsal, real: tuple[int, ...] | None) -> float | None:
    if real is None:
        return None
    differences = (abs(one - other) for one, other in zip(made.what_if.allocated or (), real, strict=True))
    return max(differences) / GIB


if __name__ == "__main__":
    main()
