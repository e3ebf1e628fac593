"""A report opens each of its files once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace import columns, reading
from megaprof.formats import timeline as format
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.golden.inputs import REPORTS


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened, by name."""
    counts: Counter[str] = Counter()
    for module, name in ((format, "read_input"), (columns, "unpacked")):
        original = getattr(module, name)

        def counted(path: Path, *given: Any, original: Any = original, **named: Any) -> Any:
            counts[path.name] += 1
            return original(path, *given, **named)

        monkeypatch.setattr(module, name, counted)
    return counts


def test_of_traces_and_timelines_together(tmp_path: Path, opened: Counter[str]) -> None:
    REPORTS["drawn-cpu-and-timeline"](tmp_path)
    report = analyze(tmp_path)
    assert {path.name for path in (*report.traces, *report.timelines)} == opened.keys()
    assert set(opened.values()) == {1}


def test_of_recordings_by_others(tmp_path: Path, opened: Counter[str]) -> None:
    REPORTS["foreign"](tmp_path)
    report = analyze(tmp_path)
    assert {path.name for path in report.traces} == opened.keys()
    assert set(opened.values()) == {1}


def test_of_a_run_that_changes_and_stands_still(tmp_path: Path, opened: Counter[str]) -> None:
    slow = [Slow(rank=5, from_step=60, factor=1.5), Slow(rank=3, from_step=20, until_step=20, factor=500.0)]
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=2, dp=4)), steps=120, microbatches=4, slow=slow)
    report = analyze(tmp_path)
    assert report.targets[0].fleet.standstills
    assert report.steps()
    assert (len(opened), set(opened.values())) == (8, {1})


def test_of_more_than_can_be_kept_only_the_ranks_in_the_table_are_opened_again(
    tmp_path: Path, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_timelines(tmp_path, WorldLayout(ParallelSizes(pp=2, dp=4)), steps=12, microbatches=4)
    kept = analyze(tmp_path)
    opened.clear()
    monkeypatch.setattr(reading, "_KEPT", 0)
    assert analyze(tmp_path).targets == kept.targets
    assert max(opened.values()) > 1
