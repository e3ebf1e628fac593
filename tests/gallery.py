"""Reports to look at without installing anything: static pages of jobs with a known answer, in docs/gallery.

    python -m tests.gallery [OUT]

The jobs are generated as the tests generate theirs, or were recorded on a GPU, and the pages are what
`megaprof report --html` writes of them. docs/index.md lists them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.golden.inputs import recorded

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"


def timelines(layers: Sequence[int], *slow: Slow) -> Callable[[Path], object]:
    """Eight ranks in four stages, with a timeline of every step."""
    eight = WorldLayout(ParallelSizes(pp=4, dp=2))
    forward_ms, backward_ms = [2.5 * held for held in layers], [5.0 * held for held in layers]
    return partial(
        write_timelines,
        layout=eight,
        steps=60,
        microbatches=16,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        slow=slow,
        chunk_layers=layers,
    )


#: By the name of the page.
JOBS: dict[str, Callable[[Path], object]] = {
    "unbalanced": timelines((7, 3, 3, 3)),
    "slow-rank": timelines((4, 4, 4, 4), Slow(rank=5, from_step=20, factor=1.6)),
    "hang": timelines((4, 4, 4, 4), Slow(rank=5, from_step=59, until_step=59, factor=250.0)),
    "gpu": recorded("pp4-even", "pp4-even-timeline"),
}


def build(out: Path) -> None:
    """Write every page."""
    out.mkdir(parents=True, exist_ok=True)
    for name, job in JOBS.items():
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch, name)
            directory.mkdir()
            job(directory)
            report = analyze(directory)
            text = page(report, report.steps()).replace(scratch, "/data")  # commands name the directory
        (out / f"{name}.html").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="static pages of real reports")
    parser.add_argument("out", type=Path, nargs="?", default=GALLERY)
    build(parser.parse_args().out)
