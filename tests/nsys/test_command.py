"""nsys command lines: the assembled arguments, for a launcher and for Ray."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaprof import nsys
from megaprof.cli import main
from megaprof.config.options import ProfileConfig


def on(**fields: Any) -> ProfileConfig:
    return ProfileConfig(**{"target": ("train_actor",), "dir": "/traces", "tool": ("nsys",), **fields})


def line(config: ProfileConfig, **how: Any) -> list[str]:
    """The whole command line."""
    return ["nsys", "profile", *(f"--{name}={value}" for name, value in nsys.options(config, **how).items())]


def test_the_command_line() -> None:
    assert line(on()) == [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,cudnn,cublas",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=repeat",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=graph",
        "--force-overwrite=true",
        "--output=/traces/nsys.rank%q{RANK}.%h.%p",
    ]


def test_what_the_configuration_adds() -> None:
    command = line(on(profile_memory=True, with_stack=True), output="/x/report")
    assert set(command) - set(line(on())) == {
        "--cuda-memory-usage=true",
        "--python-sampling=true",
        "--output=/x/report",
    }


def test_shutting_down_after_the_last_window_leaves_the_training_alone() -> None:
    command = line(on(steps="1,2,5"), shutdown=True, models=2)
    assert {"--capture-range-end=repeat-shutdown:6", "--kill=none"} <= set(command)
    assert not any("kill" in argument for argument in line(on(steps="1,2,5")))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 1),
        ({"schedule": "3:0:4:2:3"}, 6),
        ({"schedule": "3:0:0:1:0"}, None),
        ({"steps": "1,2,5"}, 3),
        ({"steps": "0:10:2,4"}, 5),
        ({"role_select": "actor=1,2"}, None),
        ({"target": ("train_actor", "train_log_probs"), "steps": "train_actor=1:4;train_log_probs=0"}, 4),
        ({"target": ("train_overall", "train_actor"), "steps": "1"}, None),
    ],
)
def test_number_of_windows(fields: dict[str, Any], count: int | None) -> None:
    assert nsys.windows(on(**fields)) == count


def test_rays_options_for_workers_and_for_the_controller() -> None:
    assert nsys.options(on(steps="3"), ray=True, shutdown=True) == {
        "trace": "cuda,nvtx,cudnn,cublas",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat-shutdown:1",
        "kill": "none",
        "sample": "none",
        "cpuctxsw": "none",
        "cuda-graph-trace": "graph",
        "force-overwrite": "true",
        "o": "/traces/nsys.worker.%h.%p",
    }
    assert nsys.controller_options(on()) == {
        "trace": "nvtx,osrt",
        "sample": "none",
        "cpuctxsw": "none",
        "force-overwrite": "true",
        "o": "/traces/nsys.controller.%h.%p",
    }


def test_ray_keeps_the_output_path() -> None:
    """Ray joins ``o`` to its log directory as pathlib does, which an absolute path survives; a relative one is made so.

    Ray hands every option of several letters on as ``--name=value`` and of one as ``-n value``.
    """
    for config, output in ((on(), None), (on(dir="traces"), None), (on(), "/data/report.%p")):
        for options in (
            nsys.options(config, ray=True, output=output),
            nsys.controller_options(config, output=output),
        ):
            assert str(Path("/tmp/ray/session/logs/nsight") / options["o"]) == options["o"]
            assert [name for name in options if len(name) == 1] == ["o"]
            assert "output" not in options


def test_rays_shell_finds_nothing_to_interpret() -> None:
    for path in ("/data/my traces/x", "/data/$HOME", "/data/'x'"):
        with pytest.raises(ValueError, match="characters that Ray's shell would interpret"):
            nsys.options(on(), ray=True, output=path)


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        (ProfileConfig(), {}, "there is nothing to capture: set --profile-target"),
        (ProfileConfig(target=("train_actor",), dir="/t"), {}, "--profile-tool torch opens no capture range"),
        (on(steps="none"), {}, "there is nothing to capture"),
        (
            on(schedule="3:0:0:1:0"),
            {"shutdown": True},
            "number of windows is not known with a --profile-schedule without an end",
        ),
        (on(discrete=True), {"shutdown": True}, "number of windows is not known"),
        (on(steps="none", on_demand=True), {"shutdown": True}, "captures on demand alone"),
        (on(), {"models": 0}, "models=0 is not valid"),
    ],
)
def test_what_makes_no_sense_is_refused(config: ProfileConfig, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        line(config, **arguments)


FLAGS = ["nsys", "--profile-target", "train_actor", "--profile-tool", "nsys"]


def test_the_printed_line_is_one_a_shell_passes_on_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--profile-dir", "/tmp/traces", "--profile-steps", "1,2", "--shutdown"]) == 0
    printed = capsys.readouterr().out
    expected = line(on(dir="/tmp/traces", steps="1,2"), shutdown=True)
    assert shlex.split(printed) == expected
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {printed.strip()}; printf '%s\\n' $(echo {shlex.quote(printed.strip())})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert echoed.stdout.splitlines() == expected * 2, "typed, and inserted by $(megaprof nsys ...)"


def test_a_path_that_needs_quotes_gets_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--profile-dir", "/tmp/my traces"]) == 0
    assert shlex.split(capsys.readouterr().out)[-1] == "--output=/tmp/my traces/nsys.rank%q{RANK}.%h.%p"


def test_rays_options_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--profile-dir", "/tmp/traces", "--ray", "worker"]) == 0
    assert json.loads(capsys.readouterr().out) == {"nsight": nsys.options(on(dir="/tmp/traces"), ray=True)}
    assert main([*FLAGS, "--profile-dir", "/tmp/traces", "--ray", "controller", "-o", "/tmp/x/y"]) == 0
    assert json.loads(capsys.readouterr().out) == nsys.controller_options(on(), output="/tmp/x/y")


@pytest.mark.parametrize("flags", [["--profile-tool", "torch"], ["--profile-steps", "5:2"], ["--profile-target", "x"]])
def test_mistakes_are_exit_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--profile-dir", "/tmp/traces", *flags]) == 2
    assert "megaprof nsys: --profile-" in capsys.readouterr().err


def test_a_range_opens_the_windows_where_there_is_no_cuda() -> None:
    command = line(on(), capture="nvtx")
    assert {"--capture-range=nvtx", "--nvtx-capture=megaprof/window@megaprof"} <= set(command)


@pytest.mark.parametrize("flags", [["--profile-dir", "memory://bucket"], ["--profile-dir", "/t", "-o", "memory://x/y"]])
@pytest.mark.parametrize("ray", [[], ["--ray", "worker"], ["--ray", "controller"]])
def test_nsys_writes_no_remote_files(flags: list[str], ray: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, *flags, *ray]) == 2
    assert "is remote, and nsys writes local files only" in capsys.readouterr().err


def test_a_missing_rank_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main([*FLAGS, "--profile-dir", "/tmp"]) == 0
    assert "RANK is not set here" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main([*FLAGS, "--profile-dir", "/tmp"]) == 0
    assert "RANK is not set here" not in capsys.readouterr().err


def test_ray_gets_whole_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--profile-dir", str(tmp_path), "--ray"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["worker"]["worker_process_setup_hook"] == "megaprof.autoload.arming.arm"
    for env in found.values():
        assert ProfileConfig.from_env(env["env_vars"]).tool == ("nsys",)
        assert env["nsight"]["o"].startswith(str(tmp_path))
