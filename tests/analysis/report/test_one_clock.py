"""What a clock shows does not depend on how far it is ahead: only on what ranks waited for."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megaprof.analysis.merge import merge
from megaprof.analysis.report.drawn import boxes
from megaprof.analysis.report.report import analyze
from megaprof.analysis.table.table import Table
from megaprof.analysis.trace.traces import MERGED
from tests.analysis.tables import tables_in
from tests.analysis.truth import files
from tests.analysis.truth.drawing import draw
from tests.analysis.truth.pipelines import Fault, Pipeline, Priced
from tests.golden.answers import differences, short

AHEAD_MS = (1200.5, 0.0, 700.25, 3.5)
RECORDINGS = ("gpu trace", "cpu trace", "timeline", "device timeline", "device timeline and gpu trace")


def pipeline(**changed: Any) -> Pipeline:
    """Three stages in two replicas, a host each, with a slow link; some of what is drawn otherwise is left out."""
    shape = {"stages": 3, "chunks": 1, "replicas": 2, "peers": 1, "microbatches": 6, "steps": 3, "layers": ((4,),) * 3}
    plain = {"load": 0.0, "forward_only": False, "overlapped": False, "apart": True, "link_ms": 2.0}
    faults = (Fault("slow_link", 12.0, stage=1),)
    return replace(draw(20261127, 45), **shape | plain | {"faults": faults} | changed)


def told(recording: str, ahead: tuple[float, ...], **changed: Any) -> tuple[Any, list[Any]]:
    """The report as JSON, and what it draws, of ranks whose clocks are ahead by so many milliseconds."""
    clock = property(lambda rank: ahead[(rank.stage + 3 * rank.replica) % len(ahead)])
    with tempfile.TemporaryDirectory() as directory, patch.object(files._Rank, "ahead", clock):
        for each in recording.split(" and "):
            priced = Priced(replace(pipeline(**changed), recording=each))
            files.write(priced.pipeline, priced.run(priced.all), Path(directory))
        report = analyze(Path(directory), workers=1)
        return short(report.to_json()["targets"]), [boxes(step) for step in report.steps().values()]


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_clock_that_is_ahead_changes_nothing_in_the_report_and_the_drawing(recording: str) -> None:
    (was, drawn_then), (now, drawn_now) = told(recording, (0.0,)), told(recording, AHEAD_MS)
    assert list(differences(was, now)) == []
    assert drawn_then
    for step, same in zip(drawn_then, drawn_now, strict=True):
        for row, other in zip(step["rows"], same["rows"], strict=True):
            assert other["boxes"] == pytest.approx(row["boxes"], abs=2), "microseconds"


@pytest.mark.parametrize("recording", ["gpu trace", "cpu trace"])
def test_a_merged_timeline_is_on_the_clock_of_the_table(recording: str) -> None:
    """Also where receivers wait unequally, and where no message connects two replicas."""
    clock = property(lambda rank: AHEAD_MS[(rank.stage + 3 * rank.replica) % len(AHEAD_MS)])
    with tempfile.TemporaryDirectory() as directory, patch.object(files._Rank, "ahead", clock):
        priced = Priced(replace(pipeline(), recording=recording))
        files.write(priced.pipeline, priced.run(priced.all), Path(directory))
        merged = merge(Path(directory), Path(directory) / "merged.json")
        header = json.loads((Path(directory) / "merged.json").read_bytes())[MERGED]
        (table,) = tables_in(Path(directory)).values()
    assert isinstance(table, Table)
    places = {int(rank): place for place, rank in np.ndenumerate(table.ranks)}
    offsets = {rank: table.offset_of(rank, 0) - table.offset_of(0, 0) for rank in merged.ranks}
    assert header["offset_ns"] == {str(rank): offset for rank, offset in offsets.items()}
    for rank, (replica, stage, _) in places.items():
        ahead_ns = 1e6 * (AHEAD_MS[0] - AHEAD_MS[(stage + 3 * replica) % len(AHEAD_MS)])
        assert offsets[rank] == pytest.approx(ahead_ns, abs=5e5)


def test_of_ranks_that_a_report_has_on_no_clock_a_merged_timeline_says_that_nothing_connects_them() -> None:
    clock = property(lambda rank: AHEAD_MS[(rank.stage + 3 * rank.replica) % len(AHEAD_MS)])
    with tempfile.TemporaryDirectory() as directory, patch.object(files._Rank, "ahead", clock):
        priced = Priced(replace(pipeline(forward_only=True, faults=()), recording="gpu trace"))
        files.write(priced.pipeline, priced.run(priced.all), Path(directory))
        merged = merge(Path(directory), Path(directory) / "merged.json")
    assert len(merged.ranks) == 6
    (warning,) = (warning for warning in merged.warnings if "on the clock of rank" in warning)
    assert warning.count("host node") == 5, "all but the first rank's"
    assert merged.clocks == ()
