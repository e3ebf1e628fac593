"""`megaprof status`, `watch` and `trigger` on jobs that are made of files."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megaprof.cli import main
from megaprof.formats.job import RunRecord
from megaprof.formats.timeline import HOST_BOUND, fact_record
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.cli.running import check
from tests.control import places

ROOT = Path(__file__).parents[2]
LAYOUT = WorldLayout(ParallelSizes(pp=2))


class Job:
    """Ranks of this process, as far as their files go; two unless ``layout`` says otherwise."""

    def __init__(self, directory: Path, layout: WorldLayout = LAYOUT) -> None:
        self.directory, self.layout = directory, layout
        self.run = RunRecord.new(layout.coords(0), layout, None, 0.1)
        self.paths = places.Paths.of(directory, None, layout.sizes.world)

    def begin(self) -> None:
        self.write_run()

    def write_run(self) -> None:
        places.write(self.paths.run, self.run)

    def status(self, rank: int, **other: Any) -> None:
        calls = {"calls": [{"target": "train_actor", "begun": 5, "step": 4, "seconds": 0.2}]}
        places.write(self.paths.status(rank), places.status(self.run, self.layout, rank, **calls | other))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    job.begin()
    for rank in (0, 1):
        job.status(rank)
    return job


@pytest.fixture(scope="module")
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def _paragraphs(shown: str) -> list[str]:
    """Lines as they were before the terminal's width broke them, as far as sentences begin a line."""
    return re.sub(r" ?\n(?=\S)", " ", shown).replace("The job stood", "\nThe job stood").splitlines()


def status(job: Job, *options: str) -> int:
    return main(["status", str(job.directory), *options])


def as_json(job: Job, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = status(job, "--json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    check("status", found)
    return code, found


def test_a_job_that_runs(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(job) == 0
    shown = capsys.readouterr().out
    assert "all of them answering" in shown
    assert "train_actor: step 4, one every 200 ms" in shown
    job.status(0)
    job.status(1)
    code, found = as_json(job, capsys)
    assert (code, found["state"], found["heard"], found["culprits"]) == (0, "runs", [0, 1], [])
    assert [each["step"] for each in found["status"]] == [4, 4]
    assert found["sizes"]["pp"] == 2


def recent(step_ms: float, compute_ms: float, finalize_ms: float = 1.0) -> dict[str, Any]:
    passes = dict.fromkeys(("forward_ms", "backward_ms", "combined_ms"), 1.0)
    times = {"step_ms": step_ms, "compute_ms": compute_ms, "finalize_ms": finalize_ms, "p2p_ms": None}
    return {"target": "train_actor", "steps": 5, **passes, **times}


def test_a_step_takes_as_long_as_on_its_longest_stage_wherever_it_is_shown(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, step_ms in ((0, 900.0), (1, 1000.0)):
        calls = [{"target": "train_actor", "begun": 5, "step": 4, "seconds": step_ms / 1e3 + 0.05}]
        job.status(rank, recent=recent(step_ms, 1.0), calls=calls)
    assert status(job) == 0
    assert "takes 1000 ms, one every 1050 ms" in capsys.readouterr().out
    assert main(["watch", str(job.directory), "--once"]) == 0
    assert "step 1000 ms" in capsys.readouterr().out


def test_a_line_of_a_stage_shows_the_figures_of_the_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow ranks do not count, as everywhere else."""
    job = Job(tmp_path, WorldLayout(ParallelSizes(pp=2, dp=16)))
    job.begin()
    for rank in range(32):
        slow = rank >= 24
        job.status(rank, recent=recent(step_ms=700.0, compute_ms=600.0 if slow else 200.0 + rank))
    _, found = as_json(job, capsys)
    assert [stage["compute_ms"] for stage in found["now"]["stages"]] == [207.5, 219.5]
    assert status(job) == 0
    shown = capsys.readouterr().out.splitlines()
    header = next(place for place, line in enumerate(shown) if line.startswith(" stage  rank count"))
    rows = [line.split()[:5] for line in shown[header + 2 : header + 4]]
    assert rows == [["0", "16", "4", "700", "208"], ["1", "16", "4", "700", "220"]]


def test_watch_fits_80_columns_and_a_row_is_of_ranks_that_are_not_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer of a slow rank waits for it in the gradients. With its compute and the bubble that is its step, as in a
    row of a report; the mean of both would be nobody's."""
    monkeypatch.setenv("COLUMNS", "80")
    job = Job(tmp_path, WorldLayout(ParallelSizes(pp=2, dp=2)))
    job.begin()
    for rank, (compute_ms, finalize_ms) in enumerate(((9000, 7000), (9000, 7000), (4000, 12000), (15000, 1000))):
        job.status(rank, recent=recent(16000.0, float(compute_ms), float(finalize_ms)))
    assert main(["watch", str(job.directory), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    table = [line.split() for line in shown.splitlines()]
    assert ["rank", "step", "passes", "gradients", "slowest", "passes"] in table
    assert ["stage", "count", "step", "ms", "ms", "ms", "imbalance", "rank", "ms"] in table
    assert ["1", "2", "4", "16000", "4000", "12000", "0.62", "3", "15000"] in table
    assert "step 16000 ms, imbalance 1.38, bubble 0.0%" in shown
    _, found = as_json(job, capsys)
    assert found["now"]["stages"][1]["gradients_ms"] == 12000


def test_status_and_watch_say_since_when_a_rank_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, WorldLayout(ParallelSizes(pp=2, dp=2)))
    start_ns = time.time_ns()
    job.begin()
    write_timelines(tmp_path, job.layout, steps=20, start_ns=start_ns, slow=[Slow(rank=3, from_step=5, factor=2.0)])
    for rank in range(4):
        job.status(rank, recent=recent(100.0, 90.0 if rank == 3 else 45.0))
    said = "Rank 3 (stage 1) computes 2.0 times as long as its peers, since step 5."
    assert status(job) == 0
    assert said in capsys.readouterr().out
    assert main(["watch", str(job.directory), "--once"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    _, found = as_json(job, capsys)
    assert (found["slow"]["ranks"], found["slow"]["since"]) == ([3], 5)


def test_status_says_since_when_gpus_wait_for_their_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, WorldLayout(ParallelSizes(pp=2, dp=2)))
    start_ns = time.time_ns()
    job.begin()
    paths = write_timelines(tmp_path, job.layout, steps=20, start_ns=start_ns, device_clock=True)
    with paths[3].open("ab") as file:
        bits = ["ff0f" if step >= 12 else "0000" for step in range(20)]
        file.write(b"".join(fact_record(row, HOST_BOUND, bytes.fromhex(each)) for row, each in enumerate(bits)))
    for rank in range(4):
        job.status(rank, recent=recent(100.0, 45.0) | {"host_bound_passes": 0.75 if rank > 1 else 0.125 * rank})
    _, found = as_json(job, capsys)
    assert [stage["host_bound_passes"] for stage in found["now"]["stages"]] == [0.0625, 0.75]
    assert found["host_bound"] == {"stages": [1], "passes": 0.75, "rank": 2, "since": None}
    job.status(3, recent=recent(100.0, 45.0) | {"host_bound_passes": 1.0})
    _, found = as_json(job, capsys)
    assert found["host_bound"] == {"stages": [1], "passes": 0.875, "rank": 3, "since": 12}
    assert status(job) == 0
    assert "in 88% of the passes of stage 1 (it did not before step 12)" in capsys.readouterr().out


def test_watch_names_a_slow_link_about_which_no_status_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, WorldLayout(ParallelSizes(pp=4)))
    job.begin()
    for rank in range(4):
        job.status(rank, recent=recent(100.0, 90.0), waits=0.3)
    write(Scenario("slow link", link={1: 8.0}), tmp_path)
    assert main(["watch", str(job.directory), "--once"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 0 < said.index("Exchanges between stages 1 and 2") < said.index("wait for a processor core")


def test_without_a_timeline_it_is_known_how_often_a_step_begins(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        job.status(rank, calls=[{"target": "train_actor", "begun": 5, "step": 4, "seconds": 0.2}])
    assert status(job) == 0
    assert "one every 200 ms" in capsys.readouterr().out
    assert main(["watch", str(job.directory), "--once"]) == 0
    assert "one step every 200 ms" in capsys.readouterr().out


def test_the_time_from_one_step_to_the_next_stands_in_no_column_of_steps(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 keeps no timeline."""
    calls = [{"target": "train_actor", "begun": 5, "step": 4, "seconds": 0.777}]
    job.status(0, recent=recent(200.0, 100.0), calls=calls)
    job.status(1, calls=calls)
    assert status(job) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "0", "4", "200", "100"] in [row[:5] for row in rows]
    assert "777" not in next(row for row in rows if row[:3] == ["1", "1", "4"])


def test_before_the_first_step_there_are_no_figures(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        job.status(rank, calls=[{"target": "train_actor", "begun": 1, "step": 0}])
    assert main(["watch", str(job.directory), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 ranks, no step has been timed yet"


def test_one_rank_is_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, WorldLayout(ParallelSizes()))
    job.begin()
    job.status(0)
    assert status(job) == 0
    assert capsys.readouterr().out.startswith("1 rank (no parallelism)")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "1 rank, one step every" in capsys.readouterr().out


def test_watch_shows_a_job_whose_report_cannot_be_made(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megaprof.formats.inputs.MOST_OTHERS", 1)
    for name in ("model.pt", "optimizer.pt"):
        (job.directory / name).touch()
    assert main(["watch", str(job.directory), "--once"]) == 0
    assert "2 ranks" in capsys.readouterr().out


def test_after_a_kill_the_ranks_that_are_gone_are_not_heard(
    job: Job, dead_pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job.status(1, pid=dead_pid)
    assert status(job) == 3
    shown = capsys.readouterr().out
    assert "1 of them answering" in shown
    gone = f"rank 1 (stage 1, here, process {dead_pid}) is gone: the process does not exist any more"
    assert f"! {gone}" in shown
    assert main(["watch", str(job.directory), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert gone in shown, "watch names it, too"
    assert "2 ranks, 1 of them answering" in shown
    job.run = replace(job.run, pid=dead_pid)
    job.write_run()
    job.status(0, pid=dead_pid)
    assert status(job) == 3
    shown = capsys.readouterr().out
    assert "none of them answering" in shown
    assert "\nThe job is gone: process" in shown
    assert shown.count("not heard of any more") == 2
    code, found = as_json(job, capsys)
    assert (code, found["state"], found["heard"]) == (3, "died", [])
    assert {culprit["rank"]: culprit["gone"] for culprit in found["culprits"]} == {0: True, 1: True}


def test_a_job_that_hangs(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    long_ago = time.time() - 60
    for rank in (0, 1):
        job.status(rank, since=long_ago)
    assert status(job) == 3
    assert "The job appears to hang: no rank has moved for 60 s." in capsys.readouterr().out
    for rank in (0, 1):
        job.status(rank, since=long_ago)
    assert status(job, "--hang-after", "300") == 0


def test_the_first_step_may_take_minutes(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for calls in ([], [{"target": "train_actor", "begun": 1, "step": 0}]):
        for rank in (0, 1):
            job.status(rank, since=time.time() - 200, calls=calls)
        code, found = as_json(job, capsys)
        assert (code, found["state"]) == (0, "runs" if calls else "starts")
        for rank in (0, 1):
            job.status(rank, since=time.time() - 400, calls=calls)
        code, found = as_json(job, capsys)
        assert (code, found["state"]) == (3, "hangs")


def test_a_job_that_has_ended(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.run = replace(job.run, ended=time.time() - 5)
    job.write_run()
    assert status(job) == 1
    assert "the job has ended, 5 s ago" in capsys.readouterr().err
    assert status(job, "--json") == 1
    shown = capsys.readouterr()
    assert "the job has ended, 5 s ago" in shown.err
    found = json.loads(shown.out)
    assert (found["state"], found["standstills"]) == ("ended", [])
    assert main(["hang", str(job.directory)]) == 1
    assert "ago, and its files show no step in which it stood still" in capsys.readouterr().err


def test_a_rank_that_died_before_its_job_ended_is_named(
    job: Job, dead_pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others ended as they should: with the exception of an exchange that failed."""
    place = {"target": "train_actor", "step": 4, "phase": "forward", "microbatch": 3, "chunk": 0, "since": time.time()}
    job.status(0, pid=dead_pid, ended=True)
    job.status(1, pid=dead_pid, position=place)
    job.run = replace(job.run, pid=dead_pid, ended=time.time() - 5)
    job.write_run()
    died = f"Rank 1 (stage 1, here, process {dead_pid}) is gone: the process does not exist any more; it was last seen "
    died += "in forward of microbatch 3, train_actor step 4"
    for command, code in (("status", 1), ("watch", 1), ("hang", 3)):
        assert main([command, str(job.directory)]) == code, command
        said = "".join(capsys.readouterr())
        assert died in said, command
        assert "ank 0" not in said, command


def test_what_stood_still_is_the_same_in_every_command_after_the_job_ended(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """The statuses say nothing any more: every rank went on when it was released. The timelines know."""
    hung = Slow(rank=1, from_step=5, until_step=5, factor=500.0)
    write_timelines(job.directory, job.layout, steps=6, slow=[hung], chunk_layers=[4, 4])
    job.run = replace(job.run, ended=time.time() - 5)
    job.write_run()
    assert main(["report", str(job.directory)]) == 0
    sentence = "The job stood still in step 5 for "
    (reported,) = [line for line in _paragraphs(capsys.readouterr().out) if line.startswith(sentence)]
    reported = reported[: reported.index("no time.") + 8]
    assert ": rank 1 (stage 1) stood in backward of microbatch " in reported
    for command, code in (("status", 1), ("watch", 1), ("hang", 3)):
        assert main([command, str(job.directory)]) == code, command
        assert reported in "".join(capsys.readouterr()), command
    _, answer = as_json(job, capsys)
    assert main(["hang", str(job.directory), "--json"]) == 3
    hang = json.loads(capsys.readouterr().out)
    check("hang", hang)
    assert main(["report", str(job.directory), "--json", "-"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert answer["standstills"] == hang["standstills"] == target["fleet"]["standstills"]


def test_what_stood_still_is_the_same_in_every_command_after_the_job_was_killed(
    job: Job, dead_pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is alive, so whom they waited for is not a matter of who is silent."""
    job.run = replace(job.run, pid=dead_pid)
    job.write_run()
    now, place = time.time(), {"target": "train_actor", "step": 7, "chunk": 0, "since": time.time() - 40}
    for rank, (phase, microbatch) in {0: ("recv_backward", None), 1: ("forward", 3)}.items():
        position = place | {"phase": phase, "microbatch": microbatch}
        job.status(rank, pid=dead_pid, time=now, since=now - 40, position=position)
    stood = "rank 1 (stage 1) stood in forward of microbatch 3; 1 rank waited for it"
    for command in ("status", "hang"):
        assert main([command, str(job.directory)]) == 3, command
        said = capsys.readouterr().out
        assert "The job ended in the middle of step 7, in which it had stood still for 40 s" in said, command
        assert stood in said, command
    assert main(["watch", str(job.directory), "--once"]) == 1
    assert stood in capsys.readouterr().err


def test_where_a_silent_rank_was_last_seen_is_not_where_the_job_stands_still(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have been stopped steps after its last status."""
    now = time.time()
    place = {"target": "train_actor", "chunk": 0, "since": now - 40}
    job.status(0, time=now, since=now - 40, position=place | {"step": 6, "phase": "recv_backward", "microbatch": None})
    job.status(1, time=now - 40, since=now - 41, position=place | {"step": 4, "phase": "forward", "microbatch": 3})
    assert status(job) == 3
    said = capsys.readouterr().out
    assert "it was last seen in forward of microbatch 3, train_actor step 4; 1 rank waits for it" in said
    assert "The job stands still in step 6, for 40 s by now. This step" in said


PAIRS = {"1": (0, 1), "2": (2, 3)}


def in_flight(job: Job, called: dict[int, int]) -> None:
    """Writes what ranks of two stages with two replicas have in flight: a pair's all_reduce 6, or nothing. ``called``:
    the number of the last one that each rank called."""
    for rank, number in called.items():
        group = "1" if rank < 2 else "2"
        reduction = {
            "process_group": (group, "DATA_PARALLEL_GROUP_WITH_CP"),
            "collective_seq_id": number,
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": (1_800_000_000 + rank) * 10**9,
            "state": "scheduled",
            "retired": number < 6,
            "record_id": 0,
            "input_sizes": [[8]],
        }
        config = {group: {"desc": "DATA_PARALLEL_GROUP_WITH_CP", "ranks": json.dumps(PAIRS[group])}}
        path = job.paths.root / "collectives" / f"rank{rank:05}.json"
        path.parent.mkdir(exist_ok=True, mode=0o700)
        record = {"version": 2, "run": job.run.run, "rank": rank, "entries": [reduction], "pg_config": config}
        path.write_text(json.dumps(record))


def replicas(directory: Path, dead_pid: int | None = None) -> Job:
    """A job that stands still: replica 1 of stage 1 computes, and everybody waits for it."""
    job = Job(directory, WorldLayout(ParallelSizes(pp=2, dp=2)))
    if dead_pid is not None:
        job.run = replace(job.run, pid=dead_pid)
    job.begin()
    since = time.time() - 40
    phases = {0: "finalize_grads", 1: "send_forward_recv_backward", 2: "finalize_grads", 3: "forward"}
    for rank, phase in phases.items():
        place = {"target": "train_actor", "step": 5, "phase": phase, "microbatch": None, "chunk": None, "since": since}
        job.status(rank, since=since, position=place, **({} if dead_pid is None else {"pid": dead_pid}))
    return job


@pytest.mark.parametrize("lives", [True, False])
def test_a_rank_that_waits_in_an_exchange_that_no_dump_shows_is_no_culprit(
    tmp_path: Path, dead_pid: int, lives: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """gloo's exchanges are not in the dumps: in these, ranks 1 and 3 have nothing in flight."""
    job = replicas(tmp_path, None if lives else dead_pid)
    in_flight(job, {0: 6, 1: 5, 2: 6, 3: 5})
    assert main(["hang", str(tmp_path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    check("hang", found)
    assert [(each["rank"], each["waiting"]) for each in found["culprits"]] == [(3, [2])]
    assert [(each["rank"], each["waits_for"], each["waiting"]) for each in found["held_up"]] == [(1, 3, [0])]
    assert found["behind"] == 0, "each rank is named once"
    code, status_now = as_json(job, capsys)
    assert code == 3
    assert status_now["collectives"]["standstills"] == status_now["standstills"]
    for of_one in (found, status_now["collectives"]):
        for standstill in of_one["standstills"]:
            standstill["seconds"] = round(standstill["seconds"])
    assert status_now["collectives"] == found
    for command in ("hang", "status"):
        assert main([command, str(tmp_path)]) == 3
        said = " ".join(capsys.readouterr().out.split())
        came = "did not come to all_reduce number 6, of 8 elements, in the dp group of ranks"
        assert f"Rank 3 {came} 2-3. Rank 2 waits" in said
        assert f"Rank 1 {came} 0-1, because it waits" in said
        assert "because it waits for rank 3. Rank 0 waits for it." in said
        assert "cannot go on" not in said


def test_where_no_collective_shows_it_the_statuses_name_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replicas(tmp_path)
    in_flight(job, {0: 6, 1: 5, 2: 5, 3: 5})
    assert main(["hang", str(tmp_path)]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "because it waits for rank 3. Rank 0 waits for it." in said
    assert "! rank 3 (stage 1, " in said
    assert "No rank keeps" not in said
    in_flight(job, {0: 5})
    assert main(["hang", str(tmp_path)]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "No rank keeps another waiting in a collective: the dumps show nothing in flight. ! rank 3" in said
    _, status_now = as_json(job, capsys)
    assert [standing["rank"] for standing in status_now["collectives"]["outside"]] == [3]


def test_whoever_waits_in_a_collective_is_no_suspect_beside_the_rank_that_did_not_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As tensor-parallel peers do, ranks 2 and 3 stand in the forward of the same microbatch."""
    job = Job(tmp_path, WorldLayout(ParallelSizes(pp=2, tp=2)))
    job.begin()
    since = time.time() - 40
    for rank, phase in enumerate(("recv_backward", "recv_backward", "forward", "forward")):
        place = {"target": "train_actor", "step": 5, "phase": phase, "microbatch": 2, "chunk": 0, "since": since}
        job.status(rank, since=since, position=place)
    in_flight(job, {2: 6, 3: 5})
    _, found = as_json(job, capsys)
    assert [(each["rank"], each["waiting"]) for each in found["culprits"]] == [(3, 3)]
    (stands,) = found["standstills"]
    assert ([each["rank"] for each in stands["waited_for"]], stands["waiting"]) == ([3], 3)


def test_a_rank_of_which_nothing_is_known_is_in_the_answer_for_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas(tmp_path).paths.status(3).unlink()
    assert main(["hang", str(tmp_path), "--json"]) == 3
    (other,) = json.loads(capsys.readouterr().out)["outside"]
    assert (other["rank"], other["stage"], other["phase"]) == (3, 1, None)


def test_what_the_dumps_show_counts_more_than_the_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its status rank 1 waits for rank 3, but rank 3 waits for rank 2 in a collective."""
    job = replicas(tmp_path)
    in_flight(job, {0: 6, 1: 5, 2: 5, 3: 6})
    assert main(["hang", str(tmp_path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert sorted(each["rank"] for each in found["culprits"]) == [1, 2]
    assert found["held_up"] == []


@pytest.mark.parametrize("options", [("--wait", "-1"), ("--hang-after", "0"), ("--wait", "nan")])
def test_arguments_that_make_no_sense(job: Job, options: tuple[str, str]) -> None:
    assert status(job, *options) == 2


def test_it_waits_while_the_job_starts_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path), "--wait", "0"]) == 1
    assert "no job in" in capsys.readouterr().err
    job, waited = Job(tmp_path), threading.Event()

    def start() -> None:
        job.begin()
        job.status(0)
        waited.wait(0.5)  # the other rank comes later
        job.status(1)
        job.status(0)

    starting = threading.Timer(0.3, start)
    starting.start()
    assert status(job, "--wait", "60") == 0
    starting.join()
    shown = capsys.readouterr()
    assert "Waiting for a job to start in" in shown.err
    assert "all of them answering" in shown.out


def test_the_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert "3 if it appears to hang" in " ".join(capsys.readouterr().out.split())


WITHOUT_A_TRAINER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "nvtx", "transformer_engine"):
            raise ModuleNotFoundError(f"No module named {name!r}: blocked", name=name)
sys.meta_path.insert(0, Blocked())
from megaprof.cli import main
print(main(sys.argv[1:]))
assert not {"torch", "megatron", "nvtx"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (["status"], "all of them answering"),
        (["watch", "--once"], "2 ranks, one step every"),
        (["trigger", "--target", "train_actor", "--timeout", "1"], "nobody answered within 1 s"),
        (["status", "--json"], '"heard": ['),
        (["trigger", "--target", "rollout"], "unknown target 'rollout'"),
    ],
)
def test_where_people_read_there_is_no_trainer(job: Job, command: list[str], shows: str) -> None:
    far_ahead = time.time() + 3600  # heard of, however long Python takes to start here
    for rank in (0, 1):
        job.status(rank, time=far_ahead, since=far_ahead)
    name, *options = command
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_TRAINER, name, str(job.directory), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )
    assert ran.returncode == 0, ran.stderr
    assert shows in ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == {"trigger": "1", "status": "0", "watch": "0"}[name] or "rollout" in shows


def test_one_look_as_json(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    recent = {"target": "train_actor", "steps": 5, "step_ms": 50.0, "forward_ms": 10.0, "combined_ms": 0.0}
    for rank, backward in ((0, 30.0), (1, 20.0)):
        of_rank = {"backward_ms": backward, "compute_ms": 10.0 + backward, "finalize_ms": 1.0, "p2p_ms": 2.0}
        job.status(rank, recent=recent | of_rank)
    assert main(["status", str(job.directory), "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    check("status", look)
    assert (look["ranks"], look["heard"], look["stuck"], look["run"]) == (2, [0, 1], [], job.run.run)
    assert [stage["compute_ms"] for stage in look["now"]["stages"]] == [40.0, 30.0]
    assert [stage["gradients_ms"] for stage in look["now"]["stages"]] == [1.0, 1.0]
    assert (look["now"]["slowest_stage"], look["now"]["imbalance"]) == (0, pytest.approx(40 / 35))


def test_nothing_captured_is_json_too(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trigger", str(job.directory), "--target", "train_actor", "--timeout", "1", "--json"]) == 1
    said = capsys.readouterr()
    answer = json.loads(said.out)
    check("trigger", answer)
    assert (answer["selected"], answer["captured"], answer["steps"], answer["files"]) == ([0, 1], 0, [], [])
    assert answer["reason"].startswith("nobody answered")
    assert answer["reason"] in said.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "rollout"], "unknown target 'rollout'"),
        (["--target", "train_actor", "--steps", "0"], "--steps"),
        (["--target", "train_actor", "--timeout", "0"], "--timeout"),
        (["--target", "train_actor", "--select", "pp=x"], "--select"),
        (["--target", "train_actor", "--tool", "nosuch"], "'nosuch'"),
    ],
)
def test_arguments_of_trigger_that_no_job_would_take_are_told_without_a_job(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trigger", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert main(["trigger", str(tmp_path), "--target", "train_actor"]) == 1


def test_watch_waits_for_a_job_and_writes_every_look_into_a_pipe_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path / "made by the job")
    command = [sys.executable, "-m", "megaprof", "watch", str(job.directory)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert str(job.directory) in watching.stderr.readline()
        far_ahead = time.time() + 3600
        for rank in (0, 1):
            job.status(rank, time=far_ahead, since=far_ahead)
        job.begin()
        headings = 0
        for line in itertools.islice(watching.stdout, 200):
            headings += "imbalance" in line and watching.poll() is None
            if headings == 2:  # the second look comes while the command still runs
                break
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=30)
    assert (headings, watching.returncode, said) == (2, 0, "\n")


def test_watch_waits_for_no_job_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["watch", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"megaprof watch: {tmp_path / 'file'} is not a directory\n"
