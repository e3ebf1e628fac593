"""``megaprof diff`` as a user runs it."""

from __future__ import annotations

import json

import pytest

from tests.analysis.synthetic import pipeline
from tests.cli.running import megaprof


@pytest.fixture
def captures(tmp_path):
    for name, layers in (("a", [6, 2]), ("b", [4, 4])):
        pipeline(tmp_path / name, layers)
    return tmp_path / "a", tmp_path / "b"


def test_stages_are_shown_side_by_side(captures):
    run = megaprof("diff", *captures, COLUMNS="80")
    assert (run.returncode, run.stderr) == (0, "")
    assert "emb+6 → emb+4" in run.stdout
    assert "-33% *" in run.stdout
    assert "causes: layers of stage 0 (" in run.stdout
    assert "step time 720 → 481 ms -33% ?" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "…" not in run.stdout


def test_a_report_file_stands_for_its_directory(captures, tmp_path):
    saved = tmp_path / "a.json"
    assert megaprof("report", captures[0], "--json", saved).returncode == 0
    direct = megaprof("diff", "--json", *captures)
    assert direct.returncode == 0
    assert json.loads(direct.stdout)["targets"][0]["verdict_before"].startswith("layers of stage 0")
    assert megaprof("diff", saved, captures[1], "--json").stdout == direct.stdout


@pytest.mark.parametrize("content", ["", "{", "[1]", "NaN", '{"version": 1, "targets": []}', "[" * 100_000])
def test_what_is_no_report_is_one_line(captures, tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    run = megaprof("diff", captures[0], path)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("\n") == 1
    assert "x.json" in run.stderr


def test_a_directory_without_traces_is_one_line(captures, tmp_path):
    run = megaprof("diff", captures[0], tmp_path / "nowhere")
    assert run.returncode == 1
    assert "does not exist" in run.stderr
    assert run.stderr.count("\n") == 1


def test_names_from_files_cannot_speak_to_the_terminal(tmp_path):
    for name in ("a", "b"):
        pipeline(tmp_path / name, [6, 2], role="x\x1b]0;owned\x07[bold red]")
    run = megaprof("diff", tmp_path / "a", tmp_path / "b")
    assert run.returncode == 0
    assert "\x1b" not in run.stdout
    assert "[bold red]" in run.stdout


def test_a_gate_for_ci(tmp_path):
    for name, layers in (("a", [4, 4]), ("b", [6, 2])):
        for step in (1, 2, 3):
            pipeline(tmp_path / name, layers, step=step)
    slower = megaprof("diff", tmp_path / "a", tmp_path / "b", "--json", "--fail-above", "3%")
    assert slower.returncode == 3
    assert json.loads(slower.stdout)["targets"][0]["step_time"]["low"] > 0.03
    assert slower.stderr.startswith("megaprof diff: train_actor: a step is surely more than 3.0% slower (+50%")
    assert megaprof("diff", tmp_path / "b", tmp_path / "a", "--fail-above", "3").returncode == 0
    assert megaprof("diff", tmp_path / "a", tmp_path / "b", "--fail-above", "80%").returncode == 0
    for wrong in ("-1", "three", "nan", "inf", "%"):
        run = megaprof("diff", tmp_path / "a", tmp_path / "b", f"--fail-above={wrong}")
        assert (run.returncode, run.stdout) == (2, "")
        assert f"--fail-above: '{wrong}' is not valid; valid: a percentage" in run.stderr


def test_a_gate_does_not_fail_for_what_is_not_certain(captures):
    run = megaprof("diff", captures[1], captures[0], "--fail-above", "3%")  # one step each
    assert run.returncode == 0
    assert "is not certain: it takes three steps in each capture" in run.stderr
