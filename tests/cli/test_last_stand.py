"""What a job's status files tell when it hangs, and after it was killed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megaprof.analysis.hang import Hang
from megaprof.analysis.report.text.causes import in_brief
from megaprof.analysis.report.text.sentences import standstill_findings
from megaprof.cli import FAILED, UNWELL, main
from megaprof.cli.look import last_stand
from megaprof.formats.job import RunRecord, Standing, Standstill, completed
from tests.cli.running import check
from tests.control import places
from tests.control.test_blame import job, record

#: No process of this machine has it: above what Linux gives.
NOBODY = 1 << 30


def write(
    directory: Path,
    run: RunRecord,
    phases: Mapping[int, tuple[str | None, int | None]],
    ago: float,
    ended: Collection[int] = (),
    **other: Any,
) -> None:
    paths = places.Paths.of(directory, None, run.world)
    places.write(paths.run, run)
    now = time.time()
    for rank, (phase, microbatch) in phases.items():
        written = record(run, rank, phase, microbatch, since=now - ago, time=now)
        places.write(paths.status(rank), written | {"host": run.host, "pid": run.pid, "ended": rank in ended} | other)


def stand(directory: Path) -> Standstill | None:
    last = last_stand(directory)
    return None if last is None else last[0]


HANGS = {0: ("recv_backward", None), 1: ("forward", 3)}


def test_a_job_that_hangs(tmp_path: Path) -> None:
    write(tmp_path, job(pp=2), HANGS, ago=40)
    found = stand(tmp_path)
    assert found is not None
    assert (found.step, found.outcome, found.waiting) == (7, "lasts", 1)
    assert found.seconds == pytest.approx(40, abs=5)
    assert found.waited_for == (Standing(1, 1, "forward", 3, 0),)


def test_hang_names_in_its_json_whom_its_text_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits in a collective; rank 1 stands still in its own work."""
    write(tmp_path, job(pp=2), HANGS, ago=40)
    nobody = Hang(1, (0, 1), (), (), 0, (), ())
    monkeypatch.setattr("megaprof.cli.look.hang_of_job", lambda *_: nobody)
    assert main(["hang", str(tmp_path)]) == UNWELL
    assert "rank 1" in capsys.readouterr().out
    assert main(["hang", str(tmp_path), "--json"]) == UNWELL
    printed = json.loads(capsys.readouterr().out)
    check("hang", printed)
    assert [(each["rank"], each["phase"]) for each in printed["outside"]] == [(1, "forward")]


def test_a_job_that_hung_and_was_killed(tmp_path: Path) -> None:
    write(tmp_path, replace(job(pp=2), pid=NOBODY), HANGS, ago=40)
    found = stand(tmp_path)
    assert found is not None
    assert (found.step, found.outcome, found.waiting) == (7, "unfinished", 1)
    assert found.seconds == pytest.approx(40, abs=5)
    assert found.waited_for == (Standing(1, 1, "forward", 3, 0),)


def test_a_job_that_is_gone_ran_until_it_was_last_heard_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_ago = time.time() - 3600
    write(tmp_path, replace(job(pp=2), pid=NOBODY, started=long_ago - 90), HANGS, ago=40, time=long_ago)
    assert main(["status", str(tmp_path)]) == UNWELL
    assert ", ran for 90 s, none of them answering" in capsys.readouterr().out


def test_a_job_that_was_killed_while_it_ran(tmp_path: Path) -> None:
    write(tmp_path, replace(job(pp=2), pid=NOBODY), HANGS, ago=0.1)
    found = stand(tmp_path)
    assert found is not None
    assert (found.step, found.outcome, found.seconds, found.waited_for) == (7, "unfinished", 0.0, ())


def test_the_rank_that_was_waited_for_is_killed_and_the_others_end_with_an_exception(tmp_path: Path) -> None:
    """Its timeline lacks the step, but its status file says where it stood. The report says so once."""
    ended = replace(job(pp=2), pid=NOBODY, ended=time.time())
    write(tmp_path, ended, {0: (None, None), 1: HANGS[1]}, ago=40, ended=[0])
    last = stand(tmp_path)
    assert last is not None
    assert (last.step, last.outcome) == (7, "unfinished")
    assert last.waited_for == (Standing(1, 1, "forward", 3, 0),)
    of_timelines = Standstill(7, 41.0, (), 1, "unfinished")
    assert completed([of_timelines], last) == (dataclasses.replace(of_timelines, waited_for=last.waited_for),)
    assert completed([of_timelines], None) == (of_timelines,)
    over = Standstill(7, 41.0, (), 1, "went_on")
    assert completed([over], last) == (over,)


def test_a_job_of_several_targets_and_roles_names_the_target(tmp_path: Path) -> None:
    """The critic is idle. Another target of the actor has higher step numbers."""
    run, now = job(pp=2), time.time()
    for role, phases in (("actor", HANGS), ("critic", {0: (None, None), 1: (None, None)})):
        of_role = replace(run, role=role)
        paths = places.Paths.of(tmp_path, role, run.world)
        places.write(paths.run, of_role)
        for rank, (phase, microbatch) in phases.items():
            written = record(of_role, rank, phase, microbatch, since=now - 40, time=now)
            passes = {"target": "train_log_probs", "begun": 20, "seconds": 0.5, "step": 19, "count": 20}
            calls = [*written["calls"], passes]
            places.write(paths.status(rank), written | {"host": run.host, "pid": run.pid, "calls": calls})
    last = last_stand(tmp_path)
    assert last is not None
    standstill, heard = last
    assert (standstill.step, standstill.target) == (7, "train_actor")
    assert heard == pytest.approx(now)
    (finding,) = standstill_findings([standstill])
    assert finding.text.startswith("The job stands still in step 7 of train_actor, for 4")


def test_jobs_that_run_or_ended_or_were_killed_between_two_steps(tmp_path: Path) -> None:
    write(tmp_path / "runs", job(pp=2), HANGS, ago=0.1)
    write(tmp_path / "ended", replace(job(pp=2), pid=NOBODY, ended=time.time()), HANGS, ago=40, ended=[0, 1])
    write(tmp_path / "between", replace(job(pp=2), pid=NOBODY), {0: (None, None), 1: (None, None)}, ago=0.1)
    for name in ("runs", "ended", "between", "nothing"):
        assert stand(tmp_path / name) is None, name


def test_without_a_timeline_no_rank_is_blamed_and_no_place_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last step that has begun is known, so the ranks may be in the step or after it."""
    calls = [{"target": "train_actor", "begun": 8, "seconds": 0.5, "step": 7, "count": None}]
    run = job(pp=2)
    for pid in (run.pid, NOBODY):
        write(tmp_path, replace(run, pid=pid), {0: (None, None), 1: (None, None)}, ago=40, calls=calls)
        found = stand(tmp_path)
        assert found is not None
        assert (found.step, found.waited_for, found.inside) == (7, (), None)
        since = "since step 7 began"
        assert in_brief(None, None, found).severity == "open"
        assert since in in_brief(None, None, found).text
        for command in ("status", "hang"):
            assert main([command, str(tmp_path)]) == UNWELL
            out = capsys.readouterr().out
            assert "outside of the schedule" not in out
            assert (since in out) == (pid == NOBODY)
            assert ("Only a timeline" in out) == (pid != NOBODY)


def test_a_job_without_a_timeline_that_was_killed_while_it_ran(tmp_path: Path) -> None:
    calls = [{"target": "train_actor", "begun": 8, "seconds": 0.5, "step": 7, "count": None}]
    write(tmp_path, replace(job(pp=2), pid=NOBODY), {0: (None, None), 1: (None, None)}, ago=0.1, calls=calls)
    found = stand(tmp_path)
    assert found is not None
    assert [finding.text for finding in standstill_findings([found])] == ["The job was cut off in step 7 or after it."]


def test_a_job_that_stands_still_between_two_steps(tmp_path: Path) -> None:
    write(tmp_path, job(pp=2), {0: (None, None), 1: (None, None)}, ago=40)
    found = stand(tmp_path)
    assert found is not None
    (finding,) = standstill_findings([found])
    assert finding.severity == "open"
    assert finding.text.startswith("No rank has moved for 4")
    assert finding.text.endswith(" s, since step 6 ended.")


def test_a_report_without_any_file_says_at_least_where_the_job_stood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, replace(job(pp=2), pid=NOBODY), HANGS, ago=40)
    assert main(["report", str(tmp_path)]) == FAILED
    said = capsys.readouterr().err
    assert "The job ended in the middle of step 7, in which it had stood still for 40 s: rank 1 (stage 1)" in said
    assert "holds no trace" in said
