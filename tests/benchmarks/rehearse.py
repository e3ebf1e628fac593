"""Does a rehearsal of one stage after another hold? Jobs of 2 and 4 stages, rehearsed, and then run for real.

    python -m tests.benchmarks.rehearse [--only NAME ...] [--steps N] [--others N] [--out DIR]

Each case is a command (`tests/tune/job.py`): real schedules over gloo, with layers and an output layer that wait for a
given time, or compute. What it would do on all its ranks is predicted from its stages, which run alone, and then all
its ranks run. So do the layout that the rehearsal calls best, and the ``--others`` that it predicts to be fast.

A job's ranks are to have the same machine in both. GPUs share nothing that passes need, but two cores share a cache and
memory, and both have other users. So where layers compute, the stages of a layout run alone side by side, and they and
the real jobs take turns of one step, in another order each time. Nothing else runs there: what keeps cores awake
may take its part of them from ranks without real-time priority, whose sessions Linux weighs alike (autogroups). Four
ranks share two cores: their layers wait longer, so that what the ranks compute between them is as small a part.

The last line is JSON, by case: ``error``, predicted step / real step - 1, of the layout as given and of the others
(wanted: within 0.05); where they take turns, with its 90 % interval in ``between``, and in ``apart`` how far apart nine
of ten steps of each real job are, as a part of the average. ``inside``, how many of these real steps are in their
intervals (wanted: 9 of 10); ``order``, whether the layouts are as fast as each other in the predicted order, where they
differ by more than 2 %; ``part``, the fastest real step as a part of that of the rehearsal's best layout (wanted: at
least 0.98); ``memory``, the largest difference in GiB where memory is counted. Together: ``worst`` error and part, how
many are ``inside``, and of how many. ``load`` is the machine's at the start and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np

from megaprof.analysis.report.report import analyze
from megaprof.analysis.samples import CERTAIN, MANY, Floats
from megaprof.analysis.what_if.contents import Model
from megaprof.analysis.what_if.layouts import parse_layout
from megaprof.rehearse import pipeline, rehearsal
from megaprof.rehearse.pipeline import Stage, record
from megaprof.rehearse.rehearsal import Rehearsal
from megaprof.tune import trial
from megaprof.tune.command import with_layout
from tests.benchmarks.cores import awake, real_time
from tests.benchmarks.tune import ENV, RANKS
from tests.tune import job

TIME_LIMIT, GIB = 1800.0, 1 << 30
Alone: TypeAlias = Callable[[list[str], Path, int, int, int], Stage]
Run: TypeAlias = Callable[[list[str], Path, int, int], tuple[Floats, tuple[int, ...] | None]]


@dataclass(frozen=True)
class Case:
    """A command of `job`, by its layout and its other words."""

    layout: str
    words: tuple[str, ...] = ()
    stages: int = 2
    tp: int = 1
    others: tuple[str, ...] = ()
    """Layouts that take turns with this one, if its layers compute; any other that a rehearsal advises runs after
    them."""

    @property
    def command(self) -> list[str]:
        layers = self.layout.count("t")
        return [
            *(job.__file__, "--num-layers", str(layers), "--pipeline-model-parallel-size", str(self.stages)),
            *("--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-layout", self.layout),
            *self.words,
        ]

    def changed(self, flags: Sequence[str], layout: str | None) -> list[str]:
        """The command with other flags; those of no layout leave it."""
        return with_layout(self.command, flags, None, None, self.stages) if layout else [*self.command, *flags]


_LONG = ("--layer-ms", "30", "60")
CASES = {
    "2 stages, uneven": Case("Etttttt|ttL", ("--memory", "2", "1")),
    "2 stages, 2 chunks": Case("Ett|tt|tt|ttL"),
    "2 stages, tp=2": Case("Ettttt|tttL", tp=2),
    "4 stages, heavy loss": Case("Ett|tt|tt|ttL", (*_LONG, "--loss-ms", "75", "51"), stages=4),
    "4 stages, uneven": Case("Ettttt|t|t|tL", (*_LONG, "--memory", "2", "1"), stages=4),
    "2 stages, computing": Case(
        "Ettttt|tttL",
        ("--compute", "--hidden-size", "256", "--seq-length", "512", "--global-batch-size", "4"),
        others=("Etttt|ttttL", "Et|ttt|ttt|tL", "E|t|tt|tt|tt|tL", "E|t|t|t|t|t|tt|tL"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), nargs="*", default=tuple(CASES))
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run (default: 8)")
    parser.add_argument("--turns", type=int, default=40, help="measured steps, where layers compute (default: 40)")
    parser.add_argument("--others", type=int, default=2, help="layouts that run beside (default: 2)")
    parser.add_argument("--out", type=Path, default=None, help="keep the files there")
    options = parser.parse_args()
    os.environ.update(ENV)
    load, begin = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
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
    if not case.others:
        real_time()
        with awake():
            return _compared(case, out, options.steps, options.others, record, _run)
    real_time(False)
    steps = options.turns
    with _in_turns(case, out / "turns", steps) as (alone, run):
        return _compared(case, out, steps, options.others, alone, run)


def _compared(case: Case, out: Path, steps: int, others: int, alone: Alone, run: Run) -> dict[str, Any]:
    words, world = case.command, case.stages * case.tp
    with patch.object(rehearsal, "record", alone):
        made, _ = rehearsal.rehearsed(
            words, [sys.executable, *words], out, world, steps=steps, links={}, per_host=world
        )
    lengths, memory = run(words, out / "real", world, steps)
    print(f"{case.layout}: {made.step_ms}, really {lengths.mean():.0f}", file=sys.stderr, flush=True)
    both = {"as given": (made.step_ms, lengths)}
    fits = [each for each in made.what_if.candidates if each.flags and each.layout and each.fits is not False]
    tried = [*filter(None, [made.best]), *(each for each in fits if each != made.best)]
    for number, each in enumerate(tried[:others]):
        ran, _ = run(case.changed(each.flags, each.layout), out / f"real-{number}", world, steps)
        both[each.layout or each.kind] = each.step_ms, ran
        print(f"  {each.layout}: {each.step_ms}, really {ran.mean():.0f}", file=sys.stderr, flush=True)
    times = {name: float(ran.mean()) for name, (_, ran) in both.items()}
    by_prediction = [times[name] for name in sorted(both, key=lambda each: both[each][0].value)]
    best = made.best and (made.best.layout or made.best.kind)
    found = {
        "predicted": [round(number) for number in (made.step_ms.low, made.step_ms.value, made.step_ms.high)],
        "real": round(times["as given"]),
        "error": [round(step.value / times[name] - 1, 4) for name, (step, _) in both.items()],
        "inside": sum(step.holds(times[name]) for name, (step, _) in both.items()),
        "order": all(one < 1.02 * other for one, other in pairwise(by_prediction)),
        "part": round(min(times.values()) / times[best or "as given"], 4),
        "memory": _memory(made, memory),
    }
    if case.others:
        ends = ((1.0 - CERTAIN) / 2.0, (1.0 + CERTAIN) / 2.0)
        found["between"], found["apart"] = [], []
        for step, ran in both.values():
            draws = np.random.default_rng(0).choice(ran, (MANY, len(ran))).mean(axis=1)
            found["between"].append([round(end, 4) for end in np.quantile(step.value / draws - 1, ends).tolist()])
            found["apart"].append(round(float(np.ptp(np.quantile(ran, ends)) / ran.mean()), 4))
    return found


@contextmanager
def _in_turns(case: Case, out: Path, steps: int) -> Iterator[tuple[Alone, Run]]:
    """Starts the job with each of its layouts, and the stages alone of those that a rehearsal runs, which take turns.
    Yields functions that wait for them, in place of `record` and `_run`."""
    begun: dict[tuple[tuple[str, ...], int | None], Future[Any]] = {}
    world, turns = case.stages * case.tp, trial.WARM_UP + steps
    over = dict[Path, int]()  # by the place of those that take a turn together, how many turns they have

    def place_of(words: list[str], turns: int) -> tuple[list[str], Path]:
        place = (out / str(len(over))).absolute()
        place.mkdir(parents=True)
        for name in ("over", *map(str, range(world))):
            os.mkfifo(place / name)
        over[place] = turns
        return [*words, "--turns", str(place)], place

    def alone(words: list[str], place: Path, rank: int, world: int, steps: int) -> Stage:
        for each in range(world) if ((*words[1:],), rank) not in begun else ():
            files = place.with_name(f"rank{each}")
            begun[(*words[1:],), each] = pool.submit(record, words, files, each, world, steps)
        return begun[(*words[1:],), rank].result()

    def run(words: list[str], place: Path, world: int, steps: int) -> tuple[Floats, tuple[int, ...] | None]:
        other = begun.get(((*words,), None))
        return other.result() if other else _run(words, place, world, steps)

    with ThreadPoolExecutor(64) as pool:
        for layout in (case.layout, *case.others):
            pieces = parse_layout(layout, case.stages)
            flags = Model(pieces, ("dense",) * layout.count("t"), case.stages).flags(pieces)
            words = case.command if layout == case.layout else case.changed(flags, layout)
            taking, place = place_of(words, turns)
            begun[(*words,), None] = pool.submit(_run, taking, place / "files", world, steps)
            if layout == case.layout or len(pieces) > case.stages:  # a rehearsal runs its stages
                # Those that `record` profiles, one before these and one behind them.
                taking, place = place_of(words, turns + pipeline.PROFILED + 2)
                for rank in range(world):
                    files = place / f"files{rank}"
                    begun[(*words,), rank] = pool.submit(record, [sys.executable, *taking], files, rank, world, steps)
        taken = pool.submit(_take_turns, over, world)
        yield alone, run
        taken.result()


def _take_turns(turns: Mapping[Path, int], world: int) -> None:
    """Gives those at each place their turns, in another order each time, once all are ready."""
    names = "over", *map(str, range(world))
    pipes = {place: [os.open(place / name, os.O_RDWR) for name in names] for place in turns}

    def wait_for(place: Path) -> None:
        for _ in range(world):
            if not select.select(pipes[place][:1], [], [], TIME_LIMIT)[0]:
                raise TimeoutError(f"{place} did not end its turn")
            os.read(pipes[place][0], 1)

    for place in turns:
        wait_for(place)
    random, last = np.random.default_rng(0), max(turns.values()) - 1
    for turn in range(last + 1):
        places = [place for place, count in turns.items() if turn < count]
        for place in (places[at] for at in random.permutation(len(places))):
            for pipe in pipes[place][1:]:
                os.write(pipe, b".")
            if turn < last:
                wait_for(place)


def _run(words: list[str], place: Path, world: int, steps: int) -> tuple[Floats, tuple[int, ...] | None]:
    """Returns the milliseconds of the last ``steps`` steps, and the bytes that stages had allocated. Steps before these
    take longer, and not always by enough to be left out of a report."""
    place.mkdir(parents=True)
    trial.run([*RANKS, str(world), *words], place.absolute(), steps, TIME_LIMIT)
    report = analyze(place)
    (run,) = report.by_hand
    if run is None:
        raise SystemExit(f"{place}: {report.targets[0].what_if.warnings}")
    return run.baseline.table.length[-steps:], report.targets[0].what_if.allocated


def _memory(made: Rehearsal, real: tuple[int, ...] | None) -> float | None:
    if real is None:
        return None
    differences = (abs(one - other) for one, other in zip(made.what_if.allocated or (), real, strict=True))
    return max(differences) / GIB


if __name__ == "__main__":
    main()
