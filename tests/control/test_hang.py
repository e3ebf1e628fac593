"""A job that hangs: the rank that keeps all others waiting is named, from their status files alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megaprof.control.blame import find_culprits
from megaprof.control.directory import find_job
from tests.cli.running import as_a_user
from tests.control.control_jobs import Slow, running

pytestmark = pytest.mark.slow


def test_status_names_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    slow = Slow(rank=1, step=4, microbatch=2)
    with running(tmp_path / "traces", ["--profile-tool", "timeline"], slow=slow) as job:
        found = find_job(job.directory)
        deadline = time.monotonic() + 150
        while not find_culprits(found.run, found.statuses(), time.time()).still and time.monotonic() < deadline:
            time.sleep(0.5)
        status = as_a_user("status", job.directory)
        hang = as_a_user("hang", job.directory)
        watch = as_a_user("watch", job.directory, "--once")
        found_as_data = as_a_user("status", job.directory, "--json")
        hanging = json.loads(as_a_user("report", job.directory, "--json", "-").stdout)["standstill"]
    assert status.returncode == 3, status.stderr
    assert "The job appears to hang: no rank has moved for" in status.stdout
    assert found_as_data.returncode == 3
    data = json.loads(found_as_data.stdout)
    assert (data["state"], [culprit["rank"] for culprit in data["culprits"]]) == ("hangs", [1])
    (named,) = [line for line in status.stdout.splitlines() if line.startswith("!")]
    assert named.startswith("! rank 1 (stage 1, ")
    assert "has been in forward of microbatch 2, train_actor step 4, for" in named
    assert named.endswith("; 1 rank waits for it")
    assert hang.returncode == 3, hang.stderr
    assert "rank 1 (stage 1, " in hang.stdout
    first, second = (line for line in status.stdout.splitlines() if line.split()[:1] in (["0"], ["1"]))
    assert "recv_backward" in first
    assert "forward of microbatch 2" in second
    assert watch.returncode == 0, watch.stderr
    assert "rank 1 (stage 1, " in watch.stdout
    assert (hanging["step"], hanging["outcome"], hanging["waiting"]) == (4, "lasts", 1)
    assert [(each["rank"], each["phase"], each["microbatch"]) for each in hanging["waited_for"]] == [(1, "forward", 2)]
    released = json.loads(as_a_user("report", job.directory, "--json", "-").stdout)
    assert released["standstill"] is None
    (target,) = released["targets"]
    (stood,) = target["fleet"]["standstills"]
    assert (stood["step"], stood["waited_for"][0]["rank"], stood["waiting"]) == (4, 1, 1)
    assert 4 not in target["steps"]
    for command, code in (("status", 1), ("hang", 3)):
        ended = as_a_user(command, job.directory)
        assert ended.returncode == code, command
        assert "The job stood still in step 4 for " in ended.stdout + ended.stderr, command
        assert ": rank 1 (stage 1) stood in forward of microbatch 2; 1 rank waited" in ended.stdout + ended.stderr
    ended_as_data = json.loads(as_a_user("status", job.directory, "--json").stdout)
    assert ended_as_data["standstills"] == [stood]
    slowest = max(status["recent"]["step_ms"] for status in ended_as_data["status"])
    assert slowest < 1e3 * stood["seconds"] / 2, "the step counts for no time"
