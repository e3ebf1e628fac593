"""The command, with a real training script under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import ROOT, check, megaprof

JOB = Path(__file__).with_name("job.py")
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
GIVEN = ["--num-layers", "8", "--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "7"]
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def tune(out: Path, *words: str, options: tuple[object, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = ["--", *RANKS, str(JOB), *GIVEN, *words] if words else []
    arguments = [sys.executable, "-m", "megaprof", "tune", "--out", out, "--steps", 5, *options, *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **QUIET}
    return subprocess.run(list(map(str, arguments)), capture_output=True, env=env, timeout=500, text=True)


def result(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def skip_where_too_few_cores(trials: list[Any]) -> None:
    """Nothing is proposed where the pipeline waits for a rank, because other programs have its core, and it is said."""
    if len(trials) == 1 and "for a processor core" in (trials[0]["verdict"] or ""):
        pytest.skip(trials[0]["verdict"])


@pytest.mark.slow
def test_a_job_gets_faster_and_what_it_saved_stays(tmp_path: Path) -> None:
    out, saved = tmp_path / "tuned", tmp_path / "checkpoints"
    saved.mkdir()
    (saved / "checkpoint").write_text("of last week")
    words = ["--save", str(saved)]
    ended = tune(out, *words, options=("--trials", 2, "--json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    check("tune", found)
    assert found == result(out)
    assert found["trials"][0]["layout"] == "Et*7|tL"
    skip_where_too_few_cores(found["trials"])
    first, second = found["trials"]
    assert (first["outcome"], second["outcome"]) == ("measured", "measured")
    assert second["layout"] == second["proposal"]["layout"]
    steps = [each["step_ms"]["value"] for each in (first, second)]
    best = found["trials"][found["result"]["trial"] - 1]
    assert best["step_ms"]["value"] == min(steps)
    assert found["result"]["command"][-2:] == (best["proposal"]["flags"] if best["proposal"] else words)[-2:]
    assert str(saved) in found["result"]["command"]
    assert (saved / "checkpoint").read_text() == "of last week"
    assert "Tuning" in (out / "report.html").read_text()
    again = tune(out, *words, options=("--json",))  # all trials are there: nothing runs
    assert json.loads(again.stdout)["trials"] == found["trials"]
    other = tune(out, "--global-batch-size", "4")
    assert (other.returncode, result(out)["trials"]) == (2, found["trials"])


@pytest.mark.slow
def test_a_trial_that_fails_leaves_the_others(tmp_path: Path) -> None:
    given = tune(tmp_path / "a", "--refuse", "7+1", options=("--json",))
    assert given.returncode == 1
    (only,) = json.loads(given.stdout)["trials"]
    assert only["outcome"] == "out_of_memory"
    assert "CUDA out of memory" in only["why"]
    printed = tune(tmp_path / "b", "--train-iters", "8", options=("--next",))
    assert printed.returncode == 0
    assert result(tmp_path / "b")["trials"][0]["outcome"] is None
    early = megaprof("tune", "--out", tmp_path / "b", "--next")
    assert early.returncode == 1
    assert "has not run yet" in early.stderr
    line = printed.stdout.strip().replace("megaprof run", f"{sys.executable} -m megaprof run", 1)
    subprocess.run(line, shell=True, check=True, timeout=200, capture_output=True)
    then = megaprof("tune", "--out", tmp_path / "b", "--next")
    found = result(tmp_path / "b")["trials"]
    assert found[0]["outcome"] == "measured"
    assert found[0]["layout"] == "Et*7|tL"
    skip_where_too_few_cores(found)
    assert found[1]["outcome"] is None
    assert found[1]["proposal"]["flags"][-1] in then.stdout


@pytest.mark.slow
def test_a_trial_that_fails_amid_a_tuning_leaves_the_others(tmp_path: Path) -> None:
    out, saved = tmp_path / "tuned", tmp_path / "checkpoints"
    saved.mkdir()
    (saved / "checkpoint").write_text("of last week")
    words = ["--save", str(saved), "--second-fails"]
    ended = tune(out, *words, options=("--trials", 3, "--json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    skip_where_too_few_cores(found["trials"])
    assert [each["outcome"] for each in found["trials"]] == ["measured", "failed", "measured"]
    _, second, third = found["trials"]
    assert "error: no space left for the cache of the data set" in second["why"]
    assert third["layout"] != second["proposal"]["layout"]
    assert found["result"]["trial"] in (1, 3)
    assert (saved / "checkpoint").read_text() == "of last week"
    again = tune(out, *words, options=("--json",))  # all trials are there: nothing runs
    assert json.loads(again.stdout) == found


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--trials", "0", "--", "x.py"], 2),
        (["--", "bash", "-c", "true"], 2),  # may save checkpoints
        (["--", "no-such-program", "--num-layers", "8"], 2),
        ([], 2),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(arguments: list[str], code: int, tmp_path: Path) -> None:
    ended = megaprof("tune", "--out", tmp_path / "new", *arguments)
    assert ended.returncode == code
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("new/*"))


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    assert megaprof("tune", "--out", tmp_path, "--", "x.py").returncode == 1
    (tmp_path / "report.json").rename(tmp_path / "thesis.tex")
    assert megaprof("tune", "--out", tmp_path, "--", "x.py").returncode == 2
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]
