"""``megaprof report`` as a user runs it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines
from tests.analysis.synthetic import pipeline
from tests.cli.running import ROOT, as_a_user, megaprof


@pytest.fixture
def traces(tmp_path):
    directory = tmp_path / "traces"
    pipeline(directory, [6, 2])
    return directory


def test_the_slow_stage_is_named(traces):
    run = megaprof("report", traces)
    assert (run.returncode, run.stderr) == (0, "")
    assert "Stage 0 holds 6 layers" in run.stdout
    assert "\x1b" not in run.stdout


def test_json_to_standard_output_is_nothing_but_json(traces):
    run = megaprof("report", traces, "--json", "-")
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["targets"][0]["slowest_stage"] == 0


def test_a_target_whose_traces_are_gone_is_still_reported(traces):
    """From the timelines of the steps around its windows."""
    layout = WorldLayout(ParallelSizes(pp=2))
    write_timelines(traces, layout, steps=10, target="train_log_probs", around_windows=True)
    targets = json.loads(megaprof("report", traces, "--json", "-").stdout)["targets"]
    assert [target["target"] for target in targets] == ["train_actor", "train_log_probs"]
    assert targets[1]["fleet"] is None


def test_json_to_a_file_replaces_an_older_report(traces, tmp_path):
    out = tmp_path / "report.json"
    for _ in range(2):
        assert megaprof("report", traces, "--json", out).returncode == 0
        assert json.loads(out.read_text())["targets"][0]["imbalance"] == 1.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "traces"]


def test_no_other_file_is_overwritten(traces, tmp_path):
    trace = next(traces.iterdir())
    notes = tmp_path / "notes.json"
    notes.write_text('{"mine": 1}')
    for path in (trace, notes, tmp_path):
        before = path.read_bytes() if path.is_file() else None
        run = megaprof("report", traces, "--json", path)
        assert run.returncode == 2
        assert str(path) in run.stderr
        assert before is None or path.read_bytes() == before
    assert megaprof("report", traces, "--json", "").returncode == 2, "a variable without a value"


def test_json_that_cannot_be_written_is_one_line(traces, tmp_path):
    run = megaprof("report", traces, "--json", tmp_path / "missing" / "report.json")
    assert run.returncode == 1
    assert "cannot be written" in run.stderr
    assert run.stderr.count("\n") == 1


def test_json_to_a_device_leaves_the_device_alone(traces):
    assert megaprof("report", traces, "--json", os.devnull).returncode == 0
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "does not exist"), ({}, "is empty"), ({"a.pt.trace.json": b"[" * 100_000}, "nested too deeply")],
)
def test_an_input_that_cannot_answer_is_one_line_and_exit_code_1(tmp_path, content, says):
    directory = tmp_path / "in\nput"
    if content is not None:
        directory.mkdir()
        for name, data in content.items():
            (directory / name).write_bytes(data)
    run = megaprof("report", directory, "--json", "-")
    assert (run.returncode, run.stdout) == (1, "")
    assert says in run.stderr
    assert run.stderr.startswith("megaprof report: ")
    assert run.stderr.count("\n") == 1


def test_ctrl_c_is_said(tmp_path, monkeypatch, capsys):
    from megaprof.cli import main, report

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "analyze", interrupted)
    assert main(["report", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("megaprof report: interrupted\n")


@pytest.mark.parametrize("arguments", [["report"], ["nonsense"], ["report", ".", "--json"], ["--nonsense"]])
def test_wrong_usage_is_exit_code_2(arguments):
    run = megaprof(*arguments)
    assert run.returncode == 2
    assert "usage: megaprof" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--help"], "report"), (["report", "--help"], "--json"), (["--version"], "0.")]
)
def test_help_and_version(arguments, says):
    run = megaprof(*arguments)
    assert run.returncode == 0
    assert says in run.stdout


def test_an_ascii_terminal_is_no_reason_to_fail(traces):
    run = as_a_user("report", traces, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_reader_that_leaves_early_sees_no_traceback_and_has_all_files(traces, tmp_path):
    for printed, files in (
        ([], ["--json", "report.json", "--html", "page.html"]),
        (["--json", "-"], ["--html", "2.html"]),
    ):
        line = shlex.join([sys.executable, "-m", "megaprof", "report", str(traces), *printed, *files])
        run = subprocess.run(
            ["bash", "-c", f"{line} | true"],
            cwd=tmp_path,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=120,
            text=True,
        )
        assert run.stderr == ""
    assert json.loads((tmp_path / "report.json").read_text())["targets"]
    for page in ("page.html", "2.html"):
        assert (tmp_path / page).read_text().rstrip().endswith("</html>")


def test_a_file_that_cannot_be_written_does_not_take_the_report_with_it(traces, tmp_path):
    for printed in ([], ["--json", "-"]):
        run = megaprof("report", traces, *printed, "--html", tmp_path / "missing" / "page.html")
        assert run.returncode == 1
        assert "cannot be written" in run.stderr
        assert ("Stage 0 holds 6 layers" if not printed else '"slowest_stage": 0') in run.stdout


def test_a_missing_extra_is_named(traces):
    code = "import sys; sys.modules['rich'] = None; from megaprof.cli import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-c", code, "report", str(traces)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        text=True,
    )
    assert run.returncode == 1
    assert "pip install 'megaprof[report]'" in run.stderr
    assert "Traceback" not in run.stderr
