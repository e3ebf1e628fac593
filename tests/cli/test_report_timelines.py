"""``megaprof report`` on timelines, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.cli.running import as_a_user, megaprof

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=4))


@pytest.fixture
def timelines(tmp_path: Path) -> Path:
    directory = tmp_path / "timelines"
    write_timelines(directory, LAYOUT, steps=60, microbatches=4, slow=[Slow(rank=5, from_step=20, factor=1.5)])
    return directory


def test_the_slow_rank_is_the_first_that_is_said(timelines: Path) -> None:
    run = megaprof("report", timelines)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.strip().splitlines()
    assert lines[:2] == ["train_actor", "all timelines: 8 ranks, steps 0-59"]
    verdict = 1 + next(n for n, line in enumerate(lines) if line.startswith("imbalance "))
    assert "rank 5 (stage 1, node-0000) computes " in lines[verdict].lower()
    assert "step time" in run.stdout
    assert "stage 1 passes" in run.stdout
    assert "\n48 steps from 0 to 59" in run.stdout
    assert "8 timelines" in run.stdout
    assert "perfetto" not in run.stdout  # a timeline is nothing to drag there
    assert "\x1b" not in run.stdout


def test_json_has_the_fleet_and_html_shows_the_same(timelines: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run = megaprof("report", timelines, "--json", "-", "--html", page)
    assert run.returncode == 0
    (target,) = json.loads(run.stdout)["targets"]
    fleet = target["fleet"]
    assert fleet["coverage"]["ranks"] == 8
    slow = target["diagnosis"]["causes"][0]
    assert (slow["kind"], slow["ranks"], slow["stage"]) == ("slow_rank", [5], 1)
    assert 20 <= slow["since"] <= 22
    assert [stage["pp"] for stage in fleet["stages"]] == [0, 1]
    assert len(fleet["buckets"]) == len(fleet["times"]["step_ms"]) == len(fleet["stages"][0]["compute_ms"]) == 60
    text = page.read_text()
    assert "rank 5 (stage 1, node-0000) computes " in text.lower()
    assert "The whole run: 8 ranks, steps 0-59" in text
    assert text.count("<polyline") == 1
    assert f"from step {slow['since']} on</title>" in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [row["rank"] for row in data[0]["rows"]] == [0, 4, 5]  # a pipeline without slow ranks, and the slow rank


def test_an_ascii_terminal_shows_it_too(timelines: Path) -> None:
    run = as_a_user("report", timelines, PYTHONIOENCODING="ascii")
    assert run.returncode == 0
    assert "rank 5 (stage 1, node-0000)" in run.stdout.lower()


def test_one_file_is_a_directory_of_one(timelines: Path) -> None:
    run = megaprof("report", sorted(timelines.iterdir())[3], "--json", "-")
    assert run.returncode == 0
    (target,) = json.loads(run.stdout)["targets"]
    coverage = target["fleet"]["coverage"]
    assert (coverage["ranks"], coverage["missing"]) == (1, [0, 1, 2, 4, 5, 6, 7])


def test_only_damaged_timelines_are_one_line_and_exit_code_1(timelines: Path) -> None:
    for path in timelines.iterdir():
        path.write_bytes(path.read_bytes()[:40])
    run = megaprof("report", timelines)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("megaprof report: ")
    assert run.stderr.count("\n") == 1
    assert "holds no trace or timeline by megaprof" in run.stderr


def test_one_run_of_several(timelines: Path) -> None:
    write_timelines(timelines / "again", LAYOUT, steps=40, microbatches=4, start_ns=2 * 10**18, run="again")
    newest, first = megaprof("report", timelines), megaprof("report", timelines, "--run", 1)
    assert (newest.returncode, first.returncode) == (0, 0)
    assert "all timelines: 8 ranks, steps 0-39" in newest.stdout
    assert "rank 5" not in newest.stdout.lower()
    told = newest.stdout.splitlines()[0]
    assert ("2 runs" in told, f"megaprof report {timelines} --run 1" in told) == (True, True)
    assert "all timelines: 8 ranks, steps 0-59" in first.stdout
    assert "rank 5" in first.stdout.lower()
    wrong = megaprof("report", timelines, "--run", 3)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--run 3: the files are of runs 1 to 2" in wrong.stderr


def test_the_command_of_a_finding_is_one_line_to_copy(tmp_path: Path) -> None:
    directory = tmp_path / "a directory"
    slow = [Slow(rank=5, from_step=20, factor=1.5)]
    write_timelines(directory, WorldLayout(ParallelSizes(tp=2, pp=2, dp=2)), steps=60, microbatches=8, slow=slow)
    run = megaprof("report", directory, "--html", tmp_path / "report.html")
    command = f"megaprof trigger '{directory}' --target train_actor --steps 2 --select 4-5"
    assert f"  {command}" in run.stdout.splitlines()
    shown = command.replace("'", "&#39;")
    assert f"<code>{shown}</code>" in (tmp_path / "report.html").read_text()


def test_names_from_files_are_escaped(timelines: Path, tmp_path: Path) -> None:
    write_timelines(timelines, LAYOUT, steps=20, microbatches=4, target="<script>alert(1)</script>\x1b[31m")
    page = tmp_path / "report.html"
    run = megaprof("report", timelines, "--html", page)
    assert run.returncode == 0
    assert "\x1b" not in run.stdout
    assert "<script>alert" not in page.read_text()
