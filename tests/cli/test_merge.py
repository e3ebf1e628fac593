"""``megaprof merge`` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis import scenarios
from tests.analysis.exchanging import exchanging, write
from tests.analysis.job_timelines import write_timelines
from tests.analysis.scenarios import Scenario
from tests.cli.running import megaprof


@pytest.fixture
def traces(tmp_path):
    directory = tmp_path / "traces"
    write(exchanging([0.0, 40.0]), directory)
    return directory


def test_what_was_merged_and_how_far_clocks_were_off_is_printed(traces, tmp_path):
    write(exchanging([0.0, 0.0], target="evaluate", step=2), traces)
    out = tmp_path / "step.json"
    run = megaprof("merge", traces, "-o", out)
    assert (run.returncode, run.stderr) == (0, "")
    assert "train_actor step 5: 2 ranks" in run.stdout
    assert "6 arrows from sends to receives" in run.stdout
    assert "host node-1: clock 40.0" in run.stdout
    assert "Not merged (see --target, --role, --step): evaluate step 2" in run.stdout
    assert len({e["pid"] for e in json.loads(out.read_text())["traceEvents"]}) == 2
    assert megaprof("merge", traces, "-o", out, "--target", "evaluate").stdout.startswith("evaluate step 2")


def test_of_many_ranks_the_lowest_of_each_stage_are_merged_unless_others_are_asked_for(tmp_path):
    """40 pipelines of two stages, in directories as a large job has them."""
    directory, out = tmp_path / "traces", tmp_path / "step.json"
    for dp in range(40):
        for pp, trace in enumerate(exchanging([0.0, 0.0], metadata={"coords": None})):
            rank = 40 * pp + dp + 1000
            place = {"rank": rank, "pp": pp, "tp": 0, "cp": 0, "ep": 0, "dp": dp}
            trace.metadata |= {"coords": place, "sizes": asdict(ParallelSizes(pp=2, dp=40))}
            trace.write(directory / f"ranks{rank // 1024 * 1024:06d}-{rank // 1024 * 1024 + 1023:06d}")
    assert len(list(directory.iterdir())) == 2
    run = megaprof("merge", directory, "-o", out)
    assert (run.returncode, run.stderr) == (0, "")
    assert "2 ranks" in run.stdout
    assert "6 arrows" in run.stdout
    assert "Left out: 78 ranks (see --ranks)" in run.stdout
    for selection, count in (("dp=0|7", 4), ("pp=1,dp=3-5", 3), ("1003", 1), ("all", 80)):
        run = megaprof("merge", directory, "-o", out, "--ranks", selection)
        assert f"{count} rank" in run.stdout
    for selection, absent in (("1003,1200,2000-4000", "rank=1200|2000-4000"), ("dp=0|40-99,pp=1-2", "pp=2,dp=40-99")):
        run = megaprof("merge", directory, "-o", out, "--ranks", selection, "--json")
        assert (run.returncode, len(json.loads(run.stdout)["ranks"])) == (0, 1)
        assert any(absent in warning for warning in json.loads(run.stdout)["warnings"])
    run = megaprof("merge", directory, "-o", out, "--ranks", "0-9")
    assert run.returncode == 1
    assert "captured on 80 ranks, and none of them is in '0-9'" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--ranks", "nobody"], 2, "--ranks: 'nobody' in 'nobody' is not a number"),
        (["--step", "9"], 1, "no such step, but: train_actor step 5"),
        (["--step", "x"], 2, "invalid int value"),
        (["--target", "evil\nname"], 1, "no such step"),
    ],
)
def test_what_cannot_be_merged_is_one_line(traces, tmp_path, arguments, code, says):
    run = megaprof("merge", traces, "-o", tmp_path / "out.json", *arguments)
    assert run.returncode == code
    assert says in run.stderr
    assert "Traceback" not in run.stderr
    assert code == 2 or run.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("place", ["traces/../nowhere/out.json", "traces"])
def test_an_output_that_cannot_be_is_one_line(traces, tmp_path, place):
    run = megaprof("merge", traces, "-o", tmp_path / place)
    assert run.returncode in (1, 2)
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("megaprof merge: -o ")


def test_no_trace_is_overwritten(traces):
    path = sorted(traces.iterdir())[0]
    before = path.read_bytes()
    run = megaprof("merge", traces, "-o", path)
    assert (run.returncode, path.read_bytes()) == (2, before)
    assert "not overwritten" in run.stderr


@pytest.mark.parametrize("command", ["report", "merge"])
def test_a_merged_timeline_is_no_recording_of_a_rank(command, tmp_path):
    """Its GPU kernels are those of several ranks."""
    scenarios.write(Scenario("even", layers=(2, 2), microbatches=4), traces := tmp_path / "traces")
    megaprof("merge", traces, "-o", tmp_path / "step.json")
    run = megaprof(command, tmp_path / "step.json", *(["-o", tmp_path / "again.json"] * (command == "merge")))
    assert (run.returncode, "holds copies of several traces" in run.stderr) == (1, True)


def test_timelines_alone_are_said_to_be_some(tmp_path):
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=2)), steps=8)
    run = megaprof("merge", tmp_path, "-o", tmp_path / "out.json")
    assert (run.returncode, "but timelines" in run.stderr) == (1, True)


def test_an_empty_directory_is_one_line(tmp_path):
    run = megaprof("merge", tmp_path, "-o", tmp_path / "out.json")
    assert run.returncode == 1
    assert "holds no trace" in run.stderr
