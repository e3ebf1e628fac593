"""A step in which the whole job stood still is told first, with whom the others waited for, and counts for no time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megaprof.analysis.fleet.fleet import Fleet, survey
from megaprof.analysis.fleet.reading import read_fleet, standstills, stood_still
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text.causes import in_brief
from megaprof.analysis.trace.reading import recordings_in
from megaprof.formats.job import Standing, Standstill, completed
from megaprof.formats.timeline import FAILED
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.telling import of_fleet

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))
#: A forward takes 10 ms, so that the passes of one step take a minute.
HANG = 500.0


def fleet_of(directory: Path, *slow: Slow, steps: int = 30) -> Fleet:
    write_timelines(directory, LAYOUT, steps=steps, microbatches=4, slow=slow)
    (fleet,) = survey(read_fleet(recordings_in(directory)[1]))
    return fleet


@pytest.mark.parametrize(("step", "outcome"), [(12, "went_on"), (29, "last")])
def test_a_rank_that_held_all_others_up_is_named(tmp_path: Path, step: int, outcome: str) -> None:
    fleet = fleet_of(tmp_path, Slow(rank=3, from_step=step, until_step=step, factor=HANG))
    (found,) = fleet.standstills
    assert (found.step, found.outcome, found.waiting) == (step, outcome, 3)
    assert found.seconds == pytest.approx(60, rel=0.2)
    (rank,) = found.waited_for
    assert (rank.rank, rank.stage) == (3, 1)
    assert rank.phase in ("forward", "backward")
    assert of_fleet(fleet)[0].kind == "standstill"
    assert of_fleet(fleet)[0].severity == "slow"


def test_its_step_counts_for_no_time(tmp_path: Path) -> None:
    healthy = fleet_of(tmp_path / "healthy")
    hung = fleet_of(tmp_path / "hung", Slow(rank=3, from_step=29, until_step=29, factor=HANG))
    assert healthy.times.step is not None
    assert hung.times.step is not None
    assert hung.times.step.max == pytest.approx(healthy.times.step.max, rel=0.1)
    assert hung.times.single.count == healthy.times.single.count == 0
    assert hung.coverage.left_out == 0
    report = analyze(tmp_path / "hung")
    (target,) = report.targets
    begin, _, rest = page(report, {}).partition("</header>")
    assert target.ends[0].text in begin, "the page begins with it"
    assert 'class="glance"' not in begin, "steps that went well are no summary of it"
    assert target.ends[0].text not in rest
    assert 29 not in target.steps
    assert target.step_time_ms is not None
    assert target.step_time_ms.mean < 1000


def test_the_report_adds_whom_status_files_name_and_says_it_once(tmp_path: Path) -> None:
    """A rank that was killed in its step has no such step in its timeline."""
    fleet_of(tmp_path, steps=12)
    report = analyze(tmp_path)
    (target,) = report.targets
    assert target.fleet is not None
    last = Standstill(11, 58.0, (Standing(3, 1, "forward", 2, 0),), 0, "unfinished")
    now = time.time()
    assert report.with_standstill(last, now).standstill == last, "no timeline has the step"
    second = replace(report, span=(now - 60, now + 60))
    assert second.with_standstill(last, now).standstill == last
    assert second.with_standstill(last, now - 61).standstill is None, "of the run before it"
    assert second.with_standstill(last, now + 61).standstill is None, "of the run after it"
    unnamed = Standstill(11, 59.0, (), 3, "unfinished")
    report = replace(report, targets=(replace(target, fleet=replace(target.fleet, standstills=(unnamed,))),))
    report = report.with_standstill(last, now)
    (told,) = (finding.text for finding in report.targets[0].ends)
    assert "stood still for 59 s: rank 3 (stage 1) stood in forward of microbatch 2; 3 ranks waited for it." in told
    assert report.standstill is None
    # A peer of it stood in the same forward until it failed, and so wrote the step.
    (stood,) = completed([Standstill(11, 59.0, (Standing(2, 1, "forward", 2, 0),), 2, "unfinished")], last)
    assert ([each.rank for each in stood.waited_for], stood.waiting) == ([3, 2], 2)


def test_slow_steps_are_no_standstill(tmp_path: Path) -> None:
    """A step of a checkpoint or of a first compilation, and a run that is slow as a whole."""
    first, single = Slow(from_step=0, until_step=0, factor=HANG), Slow(rank=1, from_step=9, until_step=9, factor=30)
    assert not fleet_of(tmp_path / "single", first, single).standstills
    assert not fleet_of(tmp_path / "whole", Slow(factor=HANG), steps=6).standstills


def test_a_step_that_an_exception_ended_is_told_where_it_is_the_last(tmp_path: Path) -> None:
    from megaprof.formats.timeline import read_timeline

    (path, *_) = write_timelines(tmp_path, LAYOUT, steps=10, microbatches=4)
    calls = read_timeline(path, events=False).steps.copy()
    coords = LAYOUT.coords(0)
    compute = calls["forward"].astype(int) + calls["backward"]
    assert stood_still(calls, compute, coords)[1] == []
    calls["flags"][4] |= FAILED  # tried again, as after an exception that the host handles
    assert stood_still(calls, compute, coords)[1] == []
    calls["flags"][-1] |= FAILED
    _, rank_steps = stood_still(calls, compute, coords)
    found = standstills(rank_steps, 9, lambda rank, step, index: ())
    assert [(each.step, each.outcome, each.seconds, each.waited_for) for each in found] == [(9, "unfinished", 0.0, ())]
    (fleet,) = survey(read_fleet(recordings_in(tmp_path)[1]))
    assert in_brief(None, replace(fleet, standstills=found)).text == "ended in the middle of step 9"
