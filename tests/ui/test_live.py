"""The live page, on jobs that are made of files, and a capture that it asks a real job for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient

from megaprof.cli.look import View, verdict
from megaprof.control.blame import Blame
from megaprof.control.directory import RunningJob
from megaprof.formats.job import Calls, RankStatus, Recent, RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.ui import live
from megaprof.ui.captures import Place
from megaprof.ui.live import Now
from megaprof.ui.server import render
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.synthetic import pipeline
from tests.cli.test_status import Job
from tests.control import places
from tests.control.control_jobs import running
from tests.ui.pages import HERE, Reader, address, browsing, page

RECENT = {
    "target": "train_actor",
    "steps": 8,
    "step_ms": 100.0,
    "forward_ms": 20.0,
    "backward_ms": 40.0,
    "combined_ms": 0.0,
    "compute_ms": 60.0,
    "finalize_ms": 5.0,
    "p2p_ms": 10.0,
}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "job")
    job.directory.mkdir()
    job.begin()
    for rank in (0, 1):
        job.status(rank, recent=RECENT)
    return job


def looks(client: TestClient, top: Path) -> Iterator[dict[str, Any]]:
    """What the script of the page is told, each time that it asks."""
    for _ in range(300):
        yield client.get(f"/live/{address(top, 'job')}/now").json()
        time.sleep(0.1)


def test_the_page_shows_stages_and_their_times(job: Job, tmp_path: Path) -> None:
    job.status(1, recent=RECENT | {"forward_ms": 50.0, "compute_ms": 90.0})
    with browsing(tmp_path) as client:
        shown = page(client, f"/live/{address(tmp_path, 'job')}")
    assert "The job runs: 2 ranks" in shown.text
    assert "1.20" in shown.text  # imbalance: 90 over 75
    assert "--allow-trigger" in shown.text
    assert not shown.all("form")
    assert [each["data-now"] for each in shown.all("div") if "data-now" in each] == [
        f"/live/{address(tmp_path, 'job')}/now"
    ]


def test_where_there_is_no_job_it_says_so(tmp_path: Path) -> None:
    from tests.analysis.synthetic import pipeline

    pipeline(tmp_path / "run", [1, 1])
    with browsing(tmp_path) as client:
        shown = page(client, f"/live/{address(tmp_path, 'run')}")
    assert "The job is not there" in shown.text
    assert "--profile-on-demand" in shown.text


def test_a_job_that_has_ended_is_not_offered_to_be_captured(job: Job, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    running = job.run
    killed, ended = replace(running, pid=process.pid), replace(running, ended=time.time())
    for run, offered in ((running, True), (killed, False), (ended, False)):
        job.run = run
        job.write_run()
        for rank in (0, 1):
            job.status(rank, pid=run.pid)
        with browsing(tmp_path, allow_trigger=True) as client:
            shown = page(client, f"/live/{address(tmp_path, 'job')}")
            assert next(looks(client, tmp_path))["captures"] is offered
        (section,) = [each for each in shown.all("section") if each.get("id") == "to-capture"]
        assert ("hidden" not in section) is offered
    (job.directory / "control" / "status" / "rank00001.json").unlink()
    with browsing(tmp_path) as client:
        assert "answering" not in page(client, f"/live/{address(tmp_path, 'job')}").text, "nobody does any more"


def test_a_first_look_that_takes_long_keeps_no_page_waiting(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    look = live.LiveJob._look
    monkeypatch.setattr(live, "PATIENCE", 0.1)
    monkeypatch.setattr(live.LiveJob, "_look", lambda job: (seen.wait(60), look(job))[1])
    with browsing(tmp_path) as client:
        assert "The job is being looked at" in page(client, f"/live/{address(tmp_path, 'job')}").text
        seen.set()
        assert next(each for each in looks(client, tmp_path) if each["state"] != "unseen")["state"] == "runs"


def test_a_hanging_job_names_whom_all_wait_for(job: Job, tmp_path: Path) -> None:
    since = time.time() - 900
    job.run = replace(job.run, started=since)
    job.write_run()
    place = {"target": "train_actor", "step": 7, "chunk": 0, "since": since}
    job.status(0, since=since, position=place | {"phase": "forward", "microbatch": 2})
    job.status(1, since=since, position=place | {"phase": "recv_forward", "microbatch": None, "chunk": None})
    with browsing(tmp_path) as client:
        shown = page(client, f"/live/{address(tmp_path, 'job')}")
    assert "The job appears to hang" in shown.text
    assert "Rank 0 (stage 0, here, process" in shown.text
    assert "has been in forward of microbatch 2, train_actor step 7" in shown.text
    assert "1 rank waits for it" in shown.text


def test_the_report_says_for_how_long_its_job_has_stood_still(job: Job, tmp_path: Path) -> None:
    """The report is read again, although its files are as they were."""
    pipeline(job.directory, [3, 1])
    with browsing(tmp_path) as client:
        for ago, said in ((900, "for 15 min by now"), (7200, "for 2 h 0 min by now")):
            since = time.time() - ago
            job.run = replace(job.run, started=since)
            job.write_run()
            place = {"target": "train_actor", "step": 7, "chunk": 0, "since": since}
            job.status(0, since=since, position=place | {"phase": "forward", "microbatch": 2})
            job.status(1, since=since, position=place | {"phase": "recv_forward", "microbatch": None, "chunk": None})
            shown = page(client, f"/capture/{address(tmp_path, 'job')}").text
            assert said in shown


def test_the_page_says_where_a_job_stood_still_that_is_gone(job: Job, tmp_path: Path) -> None:
    """Killed, it is in the statuses; ended, in the timelines, as in the report. No stage is marked for being silent."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    job.run = replace(job.run, pid=process.pid)
    job.write_run()
    place = {"target": "train_actor", "step": 7, "chunk": 0, "since": time.time() - 60}
    job.status(0, pid=process.pid, position=place | {"phase": "recv_backward", "microbatch": None, "chunk": None})
    job.status(1, pid=process.pid, position=place | {"phase": "forward", "microbatch": 2})
    with browsing(tmp_path) as client:
        shown = page(client, f"/live/{address(tmp_path, 'job')}")
    assert "The job ended in the middle of step 7, in which it had stood still for 60 s: rank 1 (stage 1)" in shown.text
    assert len([head for head in shown.all("th") if head.get("class") == "slow"]) == 1

    hung = Slow(rank=1, from_step=5, until_step=5, factor=500.0)
    write_timelines(job.directory, job.layout, steps=6, slow=[hung], chunk_layers=[4, 4])
    job.run = replace(job.run, ended=time.time())
    job.write_run()
    for rank in (0, 1):
        job.status(rank, pid=process.pid, position=None, ended=True)
    with browsing(tmp_path) as client:
        shown = page(client, f"/live/{address(tmp_path, 'job')}")
        (inserted,) = [div["data-brief"] for div in shown.all("div") if "data-brief" in div]
        said = Reader(client.get(str(inserted)).text).text
        listed = Reader(client.get(str(inserted).partition("?")[0]).text).text
    assert "The job stood still in step 5 for 2 min, and did no other step after it: rank 1 (stage 1)" in said
    assert "stood still in step 5" in listed
    assert "rank 1" not in listed, "the list of captures stays short"


def test_looks_go_on_when_the_job_begins_again(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LEAST_SECONDS", 0.0)
    with browsing(tmp_path) as client:
        seen = looks(client, tmp_path)
        assert next(seen)["state"] == "runs"
        job.run = replace(job.run, ended=time.time())
        job.write_run()
        assert next(look for look in seen if look["state"] == "ended")
        again = Job(job.directory)
        again.run = replace(again.run, run="another", started=time.time() - 60)
        again.write_run()
        for rank in (0, 1):
            again.status(rank, recent=RECENT | {"step_ms": 321.0})
        last = next(look for look in seen if look["state"] == "runs")
        assert "321 ms" in Reader(last["html"]).text


def test_pages_share_a_look(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[live.LiveJob] = []
    look = live.LiveJob._look
    monkeypatch.setattr(live, "_LEAST_SECONDS", 60.0)
    monkeypatch.setattr(live.LiveJob, "_look", lambda job: (made.append(job), look(job))[1])
    with browsing(tmp_path) as client:
        where = f"/live/{address(tmp_path, 'job')}"
        assert [client.get(each).status_code for each in (where, where, f"{where}/now")] == [200, 200, 200]
        assert client.get(f"{where}/now").json()["every"] == 60.0
    assert len(made) == 1


def test_hostile_statuses_are_text(job: Job, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    job.status(0, recent=RECENT | {"target": hostile}, name=hostile)
    with browsing(tmp_path, allow_trigger=True) as client:
        shown = page(client, f"/live/{address(tmp_path, 'job')}")
    assert not shown.all("img")
    assert hostile in shown.text


def test_roles_have_a_page_each(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=1))
    for role, ms in (("actor", 111.0), ("critic", 222.0)):
        own = Job(tmp_path / "job", layout)
        own.run = RunRecord.new(layout.coords(0), layout, role, 0.1)
        paths = places.Paths.of(tmp_path / "job", role, 1)
        own.paths = paths
        own.write_run()
        own.status(0, recent=RECENT | {"step_ms": ms})
    with browsing(tmp_path) as client:
        where = f"/live/{address(tmp_path, 'job')}"
        assert "111 ms" in page(client, where).text
        assert "222 ms" in page(client, f"{where}?role=critic").text
        assert "111 ms" in page(client, f"{where}?role=nobody").text


# -- captures ---------------------------------------------------------------------------------------------------------


def test_a_capture_is_asked_for_by_the_files_of_trigger(job: Job, tmp_path: Path) -> None:
    where = f"/live/{address(tmp_path, 'job')}"
    with browsing(tmp_path, allow_trigger=True) as client:
        shown = page(client, where)
        (form,) = shown.all("form")
        assert (form["method"], form["action"]) == ("post", f"{where}/capture")
        fields = {"target": "train_actor", "steps": "1", "select": "per-stage"}
        asked = client.post(f"{where}/capture", data=fields, headers={"origin": HERE}, follow_redirects=False)
        assert (asked.status_code, asked.headers["location"]) == (303, where)
        request = job.paths.request()
        assert (request.target, request.steps, request.by) == ("train_actor", 1, "megaprof ui")
        assert "waiting for 2 of 2 to answer" in _until(client, where, "waiting for")
        twice = client.post(f"{where}/capture", data=fields, headers={"origin": HERE})
        assert (twice.status_code, "busy with" in twice.text) == (409, True)
    assert not job.paths.capture.exists(), "nobody waits for it any more"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"target": "nothing", "steps": "1"}, 409),
        ({"target": "train_actor", "steps": "0"}, 409),
        ({"target": "train_actor", "steps": "1e3"}, 400),
        ({"target": "train_actor", "steps": "1", "select": "99"}, 409),
        ({"target": "train_actor", "steps": "1", "select": "x" * 5000}, 409),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(job: Job, tmp_path: Path, fields: dict[str, str], code: int) -> None:
    with browsing(tmp_path, allow_trigger=True) as client:
        where = f"/live/{address(tmp_path, 'job')}/capture"
        answer = client.post(where, data=fields, headers={"origin": HERE})
        assert answer.status_code == code, answer.text
        assert client.post(where, content=b"{}\xff", headers={"origin": HERE}).status_code == 409
    assert not job.paths.capture.exists()


def _until(client: Any, where: str, text: str) -> str:
    for _ in range(600):
        if text in (shown := page(client, where).text):
            return shown
        time.sleep(0.1)
    raise AssertionError(shown)


@pytest.mark.slow
def test_a_real_job_captures_what_the_page_asks_for(tmp_path: Path) -> None:
    with (
        running(tmp_path / "job", ["--profile-tool", "timeline", "--profile-on-demand"], quick=True),
        browsing(tmp_path, allow_trigger=True) as client,
    ):
        where = f"/live/{address(tmp_path, 'job')}"
        assert "The job" in _until(client, where, "The job runs: 2 ranks")
        fields = {"target": "train_actor", "steps": "1", "select": "per-stage"}
        assert client.post(f"{where}/capture", data=fields, headers={"origin": HERE}).status_code == 200
        for _ in range(600):
            shown = page(client, where).text
            if "train_actor: captured step" in shown:
                break
            time.sleep(0.2)
        assert "on 2 ranks" in shown
    assert len(list((tmp_path / "job").rglob("*.pt.trace.json.gz"))) == 2


# -- what is drawn ----------------------------------------------------------------------------------------------------


def status(layout: WorldLayout, rank: int, compute: float) -> RankStatus:
    coords = layout.coords(rank)
    recent = Recent("train_actor", 8, 100.0, compute / 3, 2 * compute / 3, 0.0, compute, 5.0, 10.0)
    return RankStatus(
        "run",
        rank,
        {axis: getattr(coords, axis) for axis in ("pp", "tp", "cp", "ep", "dp")},
        "h",
        "h",
        1,
        100.0,
        1.0,
        100.0,
        (Calls("train_actor", begun=5, step=4),),
        recent=recent,
    )


def test_a_job_of_16384_ranks_is_a_small_page(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=16, dp=1024))
    run = RunRecord.new(layout.coords(0), layout, None, 16.0)
    statuses = {rank: status(layout, rank, 60.0 + (rank == 777) * 30) for rank in range(16384)}
    view = View(RunningJob(tmp_path, run), statuses, 100.0, Blame((), (), 0.0, {}), None)
    shown = render("now.html", now=Now("runs", None, view), place=Place(tmp_path, "job"))
    text = Reader(shown).text
    assert "16384 ranks" in text
    assert "777" in text
    assert len(shown) < 60_000


@pytest.mark.parametrize(
    ("state", "longer", "waits", "colour"),
    [
        ("runs", 90.0, None, "slow"),
        ("ended", 90.0, None, "open"),
        ("runs", 0.0, 0.4, "slow"),
        ("runs", 0.0, 0.05, "fine"),
    ],
)
def test_a_rank_that_is_slow_or_waits_for_a_core_is_red_as_long_as_its_job_runs(
    tmp_path: Path, state: str, longer: float, waits: float | None, colour: str
) -> None:
    layout = WorldLayout(ParallelSizes(pp=2, dp=2))
    run = RunRecord.new(layout.coords(0), layout, None, 1.0)
    statuses = {rank: status(layout, rank, 60.0 + (rank == 3) * longer) for rank in range(4)}
    statuses[3] = replace(statuses[3], waits=waits)
    view = View(RunningJob(tmp_path, run), statuses, 100.0, Blame((), (), 0.0, {}), None)
    said = verdict(view) if state == "runs" else None
    shown = render("now.html", now=Now(state, None, view, said), place=Place(tmp_path, "job", {"timeline": 4}))
    assert f'class="verdict {colour}"' in shown
    assert ("Rank 3" in shown) == (colour == "slow")
    assert ("data-brief" in shown) == (state == "ended"), "what became of the job is in its report"
    for figures in ("<dt>step time", 'aria-label="Stages of the job"'):
        assert (figures in shown) == (state != "ended"), "and so are its figures"
