"""``megaprof report --html`` as a user runs it."""

from __future__ import annotations

import re

import pytest

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.synthetic import pipeline
from tests.cli.running import megaprof


@pytest.fixture
def traces(tmp_path):
    directory = tmp_path / "traces"
    pipeline(directory, [6, 2])
    return directory


def test_the_page_is_written_beside_the_report_and_may_be_replaced(traces, tmp_path):
    out = tmp_path / "report.html"
    for _ in range(2):
        run = megaprof("report", traces, "--html", out)
        assert (run.returncode, run.stderr) == (0, "")
        assert f"Report as one HTML file: {out}" in run.stdout
        assert "Stage 0 holds 6 layers" in out.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "traces"]


def test_json_on_standard_output_stays_nothing_but_json(traces, tmp_path):
    plain = megaprof("report", traces, "--json", "-")
    both = megaprof("report", traces, "--json", "-", "--html", tmp_path / "report.html")
    assert both.stdout == plain.stdout
    assert (tmp_path / "report.html").stat().st_size > 0


def test_no_other_file_is_overwritten(traces, tmp_path):
    trace, page = next(traces.iterdir()), tmp_path / "mine.html"
    page.write_text("<!DOCTYPE html><title>mine</title>")
    for path in (trace, page, tmp_path):
        before = path.read_bytes() if path.is_file() else None
        run = megaprof("report", traces, "--html", path)
        assert (run.returncode, run.stdout) == (2, "")
        assert f"--html {path}" in run.stderr
        assert before is None or path.read_bytes() == before


def test_a_page_that_cannot_be_written_is_one_line(traces, tmp_path):
    run = megaprof("report", traces, "--html", tmp_path / "missing" / "report.html")
    assert run.returncode == 1
    assert "--html" in run.stderr
    assert run.stderr.count("\n") == 1


def test_nothing_is_green_about_a_job_that_stood_still(tmp_path):
    slow = Slow(rank=1, from_step=19, until_step=19, factor=1000.0)
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=2)), steps=20, microbatches=4, slow=[slow])
    run = megaprof("report", tmp_path, "--html", tmp_path / "report.html")
    assert run.returncode == 0, run.stderr
    shown = re.findall(r'<div class="verdict (\w+)"', (tmp_path / "report.html").read_text())
    assert shown[0] == "slow"
    assert "fine" not in shown
