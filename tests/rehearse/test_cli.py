"""``megaprof rehearse``: what it refuses, and the example in stages that run alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megaprof.cli import FAILED, USAGE
from tests.cli.running import ROOT, as_a_user, check, megaprof
from tests.tune import job

EXAMPLE = ROOT / "docs" / "examples" / "layouts.py"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--world", "0", "--", "python", "train.py"], "--world 0"),
        (["--world", "8"], "no command"),
        (["--world", "8", "--", "torchrun", "train.py"], "torchrun"),
        (["--world", "8", "--", "python", "-m", "verl.trainer.main_ppo"], "starts ranks"),
        (["--world", "8", "--", "python", "-m", "torch.distributed.launch", "train.py"], "starts ranks"),
        (["--world", "8", "--memory-limit", "much", "--", "python", "t.py"], "valid: a size such as 60GiB or 500MB"),
        (["--world", "8", "--links", "ib=fast", "--saving-off", "", "--", "python", "t.py"], "--links"),
        (["--world", "8", "--", "python", "train.py"], "--saving-off"),
        (["--world", "8", "--saving-off", "", "--", "no-such-program"], "no-such-program"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], named: str, tmp_path: Path) -> None:
    ended = megaprof("rehearse", "--out", tmp_path / "out", *arguments)
    assert ended.returncode == USAGE
    assert named in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    ended = megaprof("rehearse", "--world", "2", "--out", tmp_path, "--saving-off", "", "--", "python", "train.py")
    assert (ended.returncode, [*tmp_path.iterdir()]) == (USAGE, [tmp_path / "mine"])


@pytest.mark.slow
def test_a_program_that_fails_alone_says_why(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import torch.distributed as dist\ndist.TCPStore('localhost', 0, 2, True)\n")
    ended = as_a_user("rehearse", "--world", "2", "--out", tmp_path / "out", "--saving-off", "", "--", program)
    assert ended.returncode == FAILED
    assert "rank 0 did not make its 16 steps (exit code 1): " in ended.stderr.splitlines()[-1]
    assert "a store of its own" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_example_is_rehearsed_stage_by_stage(tmp_path: Path) -> None:
    command = [EXAMPLE, "--num-layers", "3", "--decoder-first-pipeline-num-layers", "2"]  # too few for two chunks
    options = ["--world", "2", "--steps", "3", "--out", tmp_path / "out", "--saving-off", "", "--json"]
    ended = as_a_user("rehearse", *options, "--", *command)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    check("rehearse", found)
    report = megaprof("report", tmp_path / "out" / "predicted", "--json", "-")
    (target,) = json.loads(report.stdout)["targets"]
    assert len(target["steps"]) == 3
    first, last = target["stages"]
    assert [stage["chunks"][0]["holds"]["layers"] for stage in (first, last)] == [2, 1]
    assert found["sent_bytes"][0] > 0
    # Each of 8 microbatches waits at least 24 ms forward and 48 ms backward in each layer.
    assert first["forward_ms"]["mean"] >= 2 * 8 * 24 <= first["backward_ms"]["mean"] / 2
    assert found["step_ms"]["value"] >= found["measured_ms"] >= first["compute_ms"]["mean"]
    assert json.loads((tmp_path / "out" / "rehearsal.json").read_text()) == found
    assert (tmp_path / "out" / "report.html").stat().st_size > 0

    # The profiled steps of each stage show layers. They also make what lies beside layers longer, and so the part of
    # layers in a pass smaller: on a busy machine, much.
    costs = found["what_if"]["costs"]
    assert costs["from_ranges"]
    assert costs["by_kind"]["dense"]["backward_ms"] >= 48.0 / 2

    # All its ranks.
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    profile = ["--profile-target", "train_actor", "--profile-tool", "timeline", "--profile-dir", tmp_path / "real"]
    ran = as_a_user("run", *profile, "--", *job, "--train-iters", "14")
    assert ran.returncode == 0, ran.stderr
    against = megaprof("rehearse", "--out", tmp_path / "out", "--against", tmp_path / "real")
    assert against.returncode == 0, against.stderr
    assert "measured: " in against.stdout
    kept = json.loads((tmp_path / "out" / "links.json").read_text())
    assert kept["gloo"]["known"] == "measured"
    assert "real" in kept["gloo"]["source"]

    # As if these had been another layout's stages: a capture is compared with the prediction for its own layout.
    file, layout = tmp_path / "out" / "rehearsal.json", found["what_if"]["layout"]
    found["what_if"]["layout"] = "E|tttL"
    file.write_text(json.dumps(found))
    against = megaprof("rehearse", "--out", tmp_path / "out", "--against", tmp_path / "real")
    assert (against.returncode, against.stderr.count("\n"), layout in against.stderr) == (FAILED, 1, True)
    found["what_if"]["candidates"][0] |= {"layout": layout, "step_ms": {"value": 1.0, "low": 0.5, "high": 2.0}}
    file.write_text(json.dumps(found))
    against = megaprof("rehearse", "--out", tmp_path / "out", "--against", tmp_path / "real")
    assert "outside the interval" in against.stdout


@pytest.mark.slow
def test_memory_is_what_all_ranks_allocate_and_another_layout_keeps_the_limit(tmp_path: Path) -> None:
    """Layers and their activations are counted (`job`): in each stage alone, and then in all ranks. Layers wait for a
    given time, so that one more on a stage is surely quicker than to recompute."""
    words = ["--num-layers", "3", "--pipeline-model-parallel-size", "2", "--memory", "2", "1", "--layer-ms", "30", "60"]
    command = [job.__file__, *words, "--decoder-first-pipeline-num-layers", "2"]
    options = ["--world", "2", "--steps", "3", "--memory-limit", "7GiB", "--json"]
    ended = as_a_user("rehearse", *options, "--out", tmp_path / "out", "--", *command)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    given, best = found["what_if"]["allocated"], found["best"]
    assert (given, found["too_large"], best["fits"]) == ([8 * GIB, 3 * GIB], [0], True)
    assert max(best["needed"]) <= 7 * GIB
    for name, layout, predicted in (("given", command, given), ("best", found["best_command"], best["needed"])):
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *layout]
        profile = ["--profile-target", "train_actor", "--profile-tool", "timeline", "--profile-dir", tmp_path / name]
        ran = as_a_user("run", *profile, "--", *ranks, "--train-iters", "8")
        assert ran.returncode == 0, ran.stderr
        report = megaprof("report", tmp_path / name, "--json", "-")
        assert json.loads(report.stdout)["targets"][0]["what_if"]["allocated"] == predicted


def test_nothing_is_compared_without_a_rehearsal(tmp_path: Path) -> None:
    ended = megaprof("rehearse", "--out", tmp_path, "--against", tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (FAILED, 1)
