"""Capture on demand in a real job of two stages: started without any window, asked from other processes."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaprof.analysis.trace.traces import read_trace
from megaprof.control.directory import find_job
from megaprof.control.request import Outcome, Requester, new_request
from megaprof.testing import run_ranks
from tests.cli.running import as_a_user
from tests.control.control_jobs import SMALL, Running, running, train
from tests.control.malformed import UNREADABLE
from tests.control.places import Paths

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("job") / "traces"
    with running(directory, ["--profile-steps", "none", "--profile-on-demand"]) as job:
        yield job


def places(directory: Path, files: list[Path]) -> set[tuple[int, int]]:
    """Stage and step of each trace."""
    found = set()
    for path in files:
        with gzip.open(path) as file:
            meta = json.load(file)["megaprof"]
        found.add((meta["coords"]["pp"], meta["steps"][0]))
    return found


def test_trigger_captures_the_same_steps_on_every_stage(job: Running) -> None:
    assert not list(job.directory.glob("*.gz"))
    asked = as_a_user("trigger", job.directory, "--target", "train_actor", "--steps", 2, "--timeout", 90)
    assert asked.returncode == 0, asked.stderr
    files = [Path(line) for line in asked.stdout.splitlines()]
    assert sorted(files) == sorted(job.directory.glob("*.pt.trace.json.gz"))
    found = places(job.directory, files)
    first = min(step for _, step in found)
    assert found == {(pp, step) for pp in (0, 1) for step in (first, first + 1)}


def test_trigger_captures_whole_steps_of_the_host(tmp_path: Path) -> None:
    flags = ["--profile-target", "train_overall", "--profile-steps", "none", "--profile-on-demand"]
    with running(tmp_path / "traces", flags) as job:
        asked = as_a_user("trigger", job.directory, "--target", "train_overall", "--steps", 2, "--timeout", 90)
        assert asked.returncode == 0, asked.stderr
        files = [Path(line) for line in asked.stdout.splitlines()]
    assert sorted(files) == sorted(job.directory.glob("train_overall.*.pt.trace.json.gz"))
    found = places(job.directory, files)
    first = min(step for _, step in found)
    assert found == {(pp, step) for pp in (0, 1) for step in (first, first + 1)}
    for file in files:  # each is one step with the pipeline's work in it, and whole
        trace = read_trace(file)
        assert (trace.metadata.target, trace.metadata.truncated) == ("train_overall", False)
        labels = [each.name.label for each in trace.ranges]
        assert (labels.count("train_overall"), labels.count("train_actor")) == (1, 1)
        assert labels.count("forward") == labels.count("backward") == SMALL.microbatches


def test_fifty_requests_at_once_in_the_place_of_what_is_none(job: Running) -> None:
    for path in job.directory.glob("*.gz"):
        path.unlink()
    found = find_job(job.directory)
    paths = Paths.of(job.directory, None, found.run.world)
    for write in UNREADABLE.values():
        paths.capture.unlink(missing_ok=True)
        write(found.run, paths.capture)
        time.sleep(0.2)
    asking = [Requester(found, new_request(found.run, "train_actor", steps=1, timeout=90)) for _ in range(50)]
    found_out: list[Outcome] = []
    while asking:
        for requester in list(asking):
            if (outcome := requester.advance()) is not None:
                found_out.append(outcome)
                asking.remove(requester)
        time.sleep(0.1)
    outcomes = [each for each in found_out if each.captured]
    refused = [str(each.reason) for each in found_out if not each.captured]
    assert outcomes, refused
    assert len(outcomes) + len(refused) == 50
    assert all(outcome.reason is None and outcome.captured == 2 and len(outcome.steps) == 1 for outcome in outcomes)
    assert all("busy with" in reason for reason in refused)
    files = sorted(job.directory.glob("*.gz"))
    assert places(job.directory, files) == {(pp, outcome.steps[0]) for pp in (0, 1) for outcome in outcomes}
    assert len(files) == 2 * len(outcomes)


def test_refusals_say_why(job: Running) -> None:
    usage = as_a_user("trigger", job.directory, "--target", "train_actor", "--select", "0,7")
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "--select: rank 7 in '0,7' is outside the world of 2 ranks" in usage.stderr
    assert as_a_user("trigger", job.directory, "--target", "rollout").returncode == 2
    refused = as_a_user("trigger", job.directory, "--target", "train_actor", "--tool", "nsys", "--timeout", 60)
    assert refused.returncode == 1
    assert "does not run under nsys" in refused.stderr
    assert refused.stderr.count("Traceback") == 0
    nobody = as_a_user("trigger", job.directory, "--target", "evaluate", "--timeout", 60)
    assert nobody.returncode == 1, nobody.stderr
    assert "nobody has run evaluate in this job so far; what runs is train_actor" in nobody.stderr


def test_status_of_a_healthy_job(job: Running) -> None:
    status = as_a_user("status", job.directory)
    assert status.returncode == 0, status.stderr
    assert "2 ranks (pp=2)" in status.stdout
    assert "!" not in status.stdout
    assert [line.split()[0] for line in status.stdout.splitlines() if line.split()[:1] in (["0"], ["1"])] == ["0", "1"]


def test_training_is_untouched(job: Running) -> None:
    results = job.end()
    ended = as_a_user("trigger", job.directory, "--target", "train_actor")
    assert ended.returncode == 1
    assert "the job has ended" in ended.stderr
    steps = len(results[1][0])
    assert results == run_ranks(train, 2, SMALL, [], "", steps, timeout=240)
    assert results[1][0][0] != results[1][0][-1], "the model did not learn: nothing was compared"
