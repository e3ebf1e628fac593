"""The JSON of a report follows its schema, and gives back the report."""

from __future__ import annotations

import os
from pathlib import Path

from megaprof.analysis.report.document import Document
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text.words import milliseconds
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import pipeline
from tests.cli.running import check

PIPELINE, TENSOR = WorldLayout(ParallelSizes(pp=4, dp=8)), WorldLayout(ParallelSizes(tp=2, pp=4, dp=4))


def test_the_json_follows_its_schema_and_gives_back_the_report(tmp_path: Path) -> None:
    pipeline(tmp_path / "plain", [6, 2])
    pipeline(tmp_path / "single", [4])
    gpu = Scenario("gpu", layers=(4, 6, 4, 4), loss=9.0, exposed={"tp": 0.15}, steps=3, tail=3.0, dp=2)
    write(gpu, tmp_path / "gpu")
    write(Scenario("slow", layers=(4, 4), slow={1: 1.5}, peers=2), tmp_path / "slow")
    slow = [Slow(rank=19, from_step=70, factor=1.5), Slow(stage=1, from_step=30, factor=3, kind="finalize")]
    some = {"steps": 120, "microbatches": 4}
    write_timelines(tmp_path / "tp", TENSOR, slow=slow, last_step={3: 77}, **some)
    slow = [Slow(stage=2, from_step=50, factor=1.4), Slow(from_step=40, until_step=40, factor=4)]
    write_timelines(tmp_path / "stage", PIPELINE, slow=slow, ranks=range(30), **some)
    for directory in tmp_path.iterdir():
        report = analyze(directory)
        check("report", report.to_json())
        read = Document.from_json(report.json())
        assert (read.targets, read.warnings, read.source) == (report.targets, report.warnings, str(directory))


def test_a_step_in_brief_is_that_of_the_tables(tmp_path: Path) -> None:
    pipeline(tmp_path, [6, 2])
    report = analyze(tmp_path)
    (target,) = report.targets
    assert target.profiled
    assert milliseconds(target.step_ms) in page(report, {})


def test_a_path_that_is_not_utf_8_is_written_with_question_marks(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"a\xff")
    pipeline(directory, [6, 2])
    for path in [*directory.iterdir()]:
        path.rename(directory / os.fsdecode(b"\xff" + os.fsencode(path.name)))
    report = analyze(directory)
    assert report.to_json()["source"] == str(tmp_path / "a?")
    assert Document.from_json(report.json()).run == report.run
