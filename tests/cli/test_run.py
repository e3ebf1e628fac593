"""``megaprof run`` as a user runs it: the command behind ``--`` is what runs, with nothing of it changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.autoload.test_autoload import UNMET

ROOT = Path(__file__).parents[2]
SHOW = """
import json, multiprocessing, os, sys
def answer():
    return __name__, os.environ.get("MEGAPROF_TARGET"), type(sys.meta_path[0]).__name__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(answer)
    print(json.dumps({"argv": sys.argv, "main": sys.modules["__main__"].__dict__ is globals(), "path": sys.path[0],
                      "file": __file__, "package": __package__, "orig": sys.orig_argv[1:], "child": child,
                      "env": {k: v for k, v in os.environ.items() if k.startswith("MEGAPROF_")}}))
    sys.exit(7)
"""
PROFILE = ("--profile-target", "train_actor", "train_log_probs", "--profile-dir", "traces")


def run(*arguments: Any, python: tuple[str, ...] = (), **options: Any) -> Any:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [sys.executable, *python, "-m", "megaprof", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **options)


def script(directory: Path) -> Path:
    path = directory / "train.py"
    path.write_text(SHOW)
    return path


def test_a_script_runs_as_it_would_alone(tmp_path: Path) -> None:
    path = script(tmp_path)
    arguments = ["--profile-target", "mine", "--", "-x"]
    plain = subprocess.run([sys.executable, "-u", path, *arguments], capture_output=True, text=True, timeout=60)
    ours = run(*PROFILE, "--", path, *arguments, python=("-u",), cwd=tmp_path)
    assert (plain.returncode, ours.returncode) == (7, 7)
    assert UNMET.fullmatch(ours.stderr)
    expected, seen = json.loads(plain.stdout), json.loads(ours.stdout)
    assert expected["env"] == {}
    assert seen["env"] == {
        "MEGAPROF_TARGET": "train_actor train_log_probs",
        "MEGAPROF_DIR": str(tmp_path / "traces"),
    }
    assert seen["child"] == ["__mp_main__", "train_actor train_log_probs", "_Finder"]
    same = expected.keys() - {"env", "child"}
    assert {key: seen[key] for key in same} == {key: expected[key] for key in same}
    assert seen["orig"][0] == "-u"


def test_a_module_and_a_launcher_run_too(tmp_path: Path) -> None:
    script(tmp_path)
    module = run(*PROFILE, "--", "-m", "train", "-x", cwd=tmp_path)
    assert module.returncode == 7
    assert UNMET.fullmatch(module.stderr)
    assert json.loads(module.stdout)["argv"][1:] == ["-x"]
    launched = run(*PROFILE, "--", "sh", "-c", f"cd / && {sys.executable} {tmp_path}/train.py; exit 9", cwd=tmp_path)
    assert launched.returncode == 9
    assert UNMET.fullmatch(launched.stderr)
    assert json.loads(launched.stdout)["env"]["MEGAPROF_DIR"] == str(tmp_path / "traces")


def test_the_end_by_a_signal_is_the_commands_own() -> None:
    assert run(*PROFILE, "--", "sh", "-c", "kill -INT $$").returncode == -signal.SIGINT


def test_without_a_target_the_command_runs_as_it_is(tmp_path: Path) -> None:
    ours = run("--", script(tmp_path), cwd=tmp_path)
    assert ours.returncode == 7
    assert "nothing is profiled" in ours.stderr
    assert json.loads(ours.stdout)["env"] == {}


def test_mistakes_are_usage_errors_before_anything_runs(tmp_path: Path) -> None:
    for arguments, message in (
        (PROFILE, "no command"),
        ((*PROFILE, "--", "no-such-program"), "no-such-program"),
        ((*PROFILE, "--profile-steps", "9:3", "--", "true"), "--profile-steps"),
        (("--profile-target", "train_actor", "--", "true"), "--profile-dir"),
    ):
        failed = run(*arguments, cwd=tmp_path)
        assert failed.returncode == 2
        assert message in failed.stderr
        assert len(failed.stderr.splitlines()) == 1


def test_the_command_line_beats_the_environment(tmp_path: Path) -> None:
    ours = run(*PROFILE, "--profile-warmup", "0", "--", script(tmp_path), cwd=tmp_path, env={"MEGAPROF_WARMUP": "3"})
    assert "MEGAPROF_WARMUP" not in json.loads(ours.stdout)["env"]
