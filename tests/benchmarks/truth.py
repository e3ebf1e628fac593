"""Does the diagnosis find what is wrong? Pipelines that nobody has seen, with faults whose price is known.

Every pipeline is drawn from the seed (`tests.analysis.truth.drawing`), simulated by code that shares nothing with the
analysis, and written as files. An engine reads these, and what it says is compared with the truth
(`tests.analysis.truth.grading`). The seed of a published figure is its date.

    python -m tests.benchmarks.truth [--pipelines N] [--seed S] [--engine report] [--only N ...] [--keep DIR]

The last line is JSON. ``found``: of the faults worth 5 % of the step or more, the part that is named, with its place;
``found_2``: the same of those worth 2 to 5 %; ``precision``: the part of the named causes that is there; ``clean``: the
part of the healthy jobs of which nothing is said; ``price``: the part of the prices that is right, inside the interval
where one is given; ``layouts``: the part of the advised layouts whose true speedup is inside what was predicted;
``predicted``: the same of all predicted layouts. ``counts`` has each as ``[number, of]``, ``kinds`` by kind.
``failed``: pipelines on which the engine raised something; ``seconds``: CPU time of the engine, of the median pipeline.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.analysis.truth.drawing import draw, observed
from tests.analysis.truth.engines import ENGINES, Said
from tests.analysis.truth.files import write, write_observed
from tests.analysis.truth.grading import MUCH, SOME, Graded, grade
from tests.analysis.truth.pipelines import Priced


def judge(seed: int, number: int, engine: str, keep: Path | None = None) -> Graded:
    """One pipeline, from its seed to its marks."""
    pipeline, profiled = observed(draw(seed, number))
    priced = Priced(pipeline)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) if keep is None else keep / f"{number:04d}"
        if profiled is None:
            write(pipeline, priced.run(priced.all), directory)
        else:
            write_observed(pipeline, profiled, directory)
        said, failure, begun = Said((), (), in_order=False), None, time.process_time()
        try:
            said = ENGINES[engine](directory)
        except Exception:  # an engine that fails is wrong about this pipeline, not about the others
            failure = traceback.format_exc()
        seconds = time.process_time() - begun
    found = replace(grade(number, priced, said), failure=failure, seconds=seconds)
    if keep is not None:
        (keep / f"{number:04d}" / "truth.txt").write_text(f"{pipeline}\n{profiled}\n{found}\n")
    return found


def _judge(task: tuple[int, int, str, Path | None]) -> Graded:
    return judge(*task)


class Counts:
    """How many of how many, in all and by kind."""

    def __init__(self) -> None:
        self.all: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.kinds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def add(self, figure: str, kind: str, good: bool) -> None:
        for count in (self.all[figure], self.kinds[kind][figure]):
            count[0] += good
            count[1] += 1

    def part(self, figure: str) -> float | None:
        good, every = self.all[figure]
        return round(good / every, 4) if every else None


FIGURES = ("found", "found_2", "precision", "clean", "price", "layouts", "predicted")


def count(results: Iterable[Graded]) -> Counts:
    counts = Counts()
    for one in results:
        for fault in one.faults:
            if fault.worth >= SOME and fault.drawn:
                counts.add("found" if fault.worth >= MUCH else "found_2", fault.kind, fault.named)
        if one.healthy:
            counts.add("clean", one.recording, all(claim.there for claim in one.claims) and one.failure is None)
        for claim in one.claims:
            counts.add("precision", claim.kind, claim.there)
            if claim.inside is not None:
                counts.add("price", claim.kind, claim.inside)
        for layout in one.layouts:
            counts.add("predicted", "layout", layout.inside)
            if layout.best:
                counts.add("layouts", "layout", layout.inside)
    return counts


def wrong(one: Graded) -> list[str]:
    """What is not as it should be, a line each."""
    lines = [f"failed: {one.failure}"] if one.failure else []
    for fault in one.faults:
        if fault.drawn and fault.worth >= SOME and not fault.named:
            lines.append(f"missed {fault.kind} {fault.where}, worth {fault.worth:.1%}")
    for claim in one.claims:
        price = "" if claim.price is None else f" at {claim.price:.1%}"
        if claim.low is not None and claim.high is not None:
            price += f" ({claim.low:.1%} to {claim.high:.1%})"
        if not claim.there:
            lines.append(f"false {claim.name}{price}")
        elif claim.inside is False:
            lines.append(f"price of {claim.name}{price}, truth {claim.truth or 0.0:.1%}")
    for layout in one.layouts:
        if not layout.inside:
            said = f"{layout.speedup:.3f} ({layout.low:.3f} to {layout.high:.3f})"
            lines.append(f"{'best ' if layout.best else ''}layout {layout.layout}: {said}, truth {layout.truth:.3f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipelines", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--engine", choices=sorted(ENGINES), default="report")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of single pipelines")
    parser.add_argument("--keep", type=Path, help="write the files of every pipeline here, and what they hold")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    numbers = range(given.pipelines) if given.only is None else given.only
    results = []
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        tasks = [(given.seed, number, given.engine, given.keep) for number in numbers]
        for done in pool.imap(_judge, tasks):
            results.append(done)
            for line in wrong(done):
                print(f"{done.number:4d} {done.recording}: {line}", flush=True)
    counts = count(results)
    print()
    for kind in sorted(counts.kinds):
        told = (f"{name} {good} of {every}" for name, (good, every) in counts.kinds[kind].items())
        print(f"{kind:22s} {', '.join(told)}")
    summary: dict[str, Any] = {name: counts.part(name) for name in FIGURES}
    summary |= {"counts": {name: counts.all[name] for name in FIGURES}, "kinds": counts.kinds}
    summary |= {"engine": given.engine, "seed": given.seed, "pipelines": len(results)}
    summary |= {"seconds": round(statistics.median(one.seconds for one in results), 2)}
    summary |= {"failed": sum(one.failure is not None for one in results)}
    summary |= {"minutes": round((time.monotonic() - begun) / 60, 1)}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
