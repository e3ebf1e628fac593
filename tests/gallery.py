"""Reports to look at without installing anything: static pages of jobs with a known answer, for the documentation.

    python -m tests.gallery build/site/gallery

The jobs are generated as the tests generate theirs, and the pages are what `megaprof report --html` writes of them.
docs/gallery.md shows them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.benchmarks.scale import layout

Job = Callable[[Path], object]
LARGE = "large-job"
#: Ranks of the large job.
RANKS = 16_384


def traced(**options: Any) -> Job:
    """Four stages on GPUs; three steps are captured on one rank of each."""
    return partial(write, Scenario("gallery", steps=3, exposed={"tp": 0.05}, **options))


def recorded(*slow: Slow) -> Job:
    """Eight ranks in four stages, with a timeline of every step."""
    eight = WorldLayout(ParallelSizes.of(8, pp=4))
    return partial(write_timelines, layout=eight, steps=60, slow=slow, chunk_layers=[4] * 4)


def jobs(ranks: int) -> dict[str, Job]:
    """By the name of the page."""
    world = layout(ranks)
    slow = [Slow(rank=ranks // 2 + 3, from_step=8, factor=1.3)]
    return {
        "balanced": traced(),
        "unbalanced": traced(layers=(7, 3, 3, 3)),
        "slow-link": traced(link={1: 8.0}),
        "slow-rank": recorded(Slow(rank=5, from_step=20, factor=1.6)),
        "hang": recorded(Slow(rank=5, from_step=59, until_step=59, factor=250.0)),
        LARGE: partial(write_timelines, layout=world, steps=20, microbatches=32, slow=slow),
    }


def build(out: Path, ranks: int) -> None:
    """Write every page."""
    out.mkdir(parents=True, exist_ok=True)
    for name, job in jobs(ranks).items():
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch, name)
            job(directory)
            report = analyze(directory)
            text = page(report, report.steps()).replace(scratch, "/data")  # commands name the directory
        (out / f"{name}.html").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="static pages of real reports")
    parser.add_argument("out", type=Path)
    build(parser.parse_args().out, RANKS)
