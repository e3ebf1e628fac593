"""A rank's timeline files: rotated, bounded, never overwriting, and whole after a write that failed."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest

from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, RankCoords
from megaprof.recorders import timeline_steps as files
from megaprof.recorders.timeline_steps import Facts, PackedStep, TimelineFiles
from tests.formats.step_records import StepRecord

COORDS = RankCoords(rank=3, pp=1, tp=1, cp=0, ep=0, dp=0, sizes=ParallelSizes(tp=2, pp=2))
SHAPE = list(range(200))


@functools.cache
def described(role: str) -> dict[str, Any]:
    return Metadata("train_actor", COORDS, (0, 0), role=role).as_dict()


def step_of(step: int, key: str = "actor", shape: list[int] = SHAPE, facts: Facts | None = None) -> PackedStep:
    record = StepRecord(9, 9, step, 0, 10**18, 9000, shape, [s + 1 for s in shape], {"forward": 10})
    events = array("q", shape).tobytes()
    return PackedStep(described(key), events, record.begun(), record.spent(), record.times(), facts or [])


def append(timeline: TimelineFiles, step: int, key: str = "actor") -> None:
    timeline.append([step_of(step, key)])


def test_the_name_has_the_first_step_and_the_coordinates(tmp_path: Path) -> None:
    timeline = TimelineFiles(tmp_path, "actor", COORDS, 1 << 20)
    append(timeline, 40)
    append(timeline, 41, "ref")
    timeline.close()
    (path,) = tmp_path.iterdir()
    assert path.name == "timeline.actor.step000040.pp1-tp1-cp0-ep0-dp0.rank00003.timeline.bin"
    read = read_timeline(path)
    assert [(s["step"], read.metadata[s["metadata"]].role) for s in read.steps] == [(40, "actor"), (41, "ref")]
    assert len(read.shapes) == 1


@pytest.mark.parametrize("at_once", [1, 16, 64])
def test_size_is_bounded_and_every_file_stands_alone(tmp_path: Path, at_once: int) -> None:
    limit = 4 << 16
    timeline = TimelineFiles(tmp_path, None, COORDS, limit)
    for first in range(0, 3000, at_once):
        timeline.append([step_of(step) for step in range(first, min(first + at_once, 3000))])
    timeline.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == files.FILES
    assert sum(path.stat().st_size for path in paths) < 1.1 * limit
    read = [read_timeline(path) for path in paths]
    steps = [int(step["step"]) for timeline in read for step in timeline.steps]
    assert steps == list(range(steps[0], 3000))
    assert [f"step{read.steps['step'][0]:06}" in read.path.name for read in read] == [True] * len(read)
    assert all(timeline.metadata and timeline.shapes and timeline.damage is None for timeline in read)
    assert timeline.steps_lost == 0


def test_what_stands_beside_a_step_stands_in_every_file_and_once_as_long_as_it_holds(tmp_path: Path) -> None:
    timeline = TimelineFiles(tmp_path, None, COORDS, 4 << 16)
    work = [b"" if step < 5 else b"few" if step % 100 else b"many" for step in range(1000)]
    for first in range(0, 1000, 16):
        numbers = range(first, min(first + 16, 1000))
        timeline.append([step_of(n, facts=[(format.WORK, work[n]), (9, b"%d" % n)]) for n in numbers])
    timeline.close()
    for path in sorted(tmp_path.iterdir()):
        read = read_timeline(path)
        numbers = read.steps["step"].tolist()
        assert read.damage is None
        assert read.facts(9) == {row: b"%d" % number for row, number in enumerate(numbers)}
        told, holds = read.facts(format.WORK), b""
        for row, number in enumerate(numbers):
            assert told.get(row) != holds, "told twice"
            holds = told.get(row, holds)
            assert holds == work[number]
        assert not read_timeline(path, events=False).facts(9)


def test_steps_are_written_with_one_write_and_taken_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = TimelineFiles(tmp_path, None, COORDS, 1 << 20)
    real, sizes = os.write, []

    def write(file: int, data: bytes) -> int:
        sizes.append(len(data))
        if len(sizes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:700] if len(sizes) == 2 else data)

    monkeypatch.setattr(os, "write", write)
    timeline.append([step_of(step, shape=[1]) for step in range(10)])
    assert len(sizes) == 1
    timeline.append([step_of(step, shape=[1, 2]) for step in range(10, 30)])  # 700 bytes of it fit
    assert timeline.steps_lost == 20
    assert caplog.text.count("No space left on device") == 1
    timeline.close()
    (path,) = tmp_path.iterdir()
    read = read_timeline(path)
    assert (read.damage, read.steps["step"].tolist(), len(read.shapes)) == (None, list(range(10)), 1)


def test_a_file_of_an_earlier_run_is_left_alone(tmp_path: Path) -> None:
    for _ in range(3):
        timeline = TimelineFiles(tmp_path, None, COORDS, 1 << 20)
        append(timeline, 7)
        timeline.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    stem = "timeline.step000007.pp1-tp1-cp0-ep0-dp0.rank00003"
    assert names == [f"{stem}.2.timeline.bin", f"{stem}.3.timeline.bin", f"{stem}.timeline.bin"]
    assert all(len(read_timeline(path).steps) == 1 for path in tmp_path.iterdir())


def test_a_write_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = TimelineFiles(tmp_path, None, COORDS, 1 << 20)
    append(timeline, 0)
    real, full = os.write, False

    def write(file: int, data: bytes) -> int:
        if full and len(data) <= 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:100] if full else data)

    monkeypatch.setattr(os, "write", write)
    full = True
    append(timeline, 1)
    append(timeline, 2)  # in the pause: not even tried
    assert timeline.steps_lost == 2
    assert caplog.text.count("No space left on device") == 1
    full = False
    monkeypatch.setattr(timeline, "_paused_until", 0.0)
    append(timeline, 3)
    timeline.close()
    read = [read_timeline(path) for path in sorted(tmp_path.iterdir())]
    assert [(r.damage, r.steps["step"].tolist()) for r in read] == [(None, [0]), (None, [3])]


def test_behind_a_file_that_was_removed_comes_another(tmp_path: Path) -> None:
    timeline = TimelineFiles(tmp_path / "run", None, COORDS, 1 << 20)
    append(timeline, 1)
    shutil.rmtree(tmp_path / "run")
    append(timeline, 2)
    append(timeline, 3)
    timeline.close()
    (path,) = (tmp_path / "run").iterdir()
    assert read_timeline(path).steps["step"].tolist() == [2, 3]


def test_a_disk_that_stays_full_costs_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt begins a file; none of them holds a step, and none may push an older one out."""
    timeline = TimelineFiles(tmp_path, None, COORDS, 1 << 20)
    for step in range(3):
        append(timeline, step)
    real = os.write
    monkeypatch.setattr(files, "PAUSE_SECONDS", 0.0)

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for step in range(3, 3 + 5 * files.FILES):
        append(timeline, step)
    (left,) = tmp_path.iterdir()
    assert read_timeline(left).steps["step"].tolist() == [0, 1, 2]
    monkeypatch.setattr(os, "write", real)
    append(timeline, 100)
    timeline.close()
    read = [read_timeline(path).steps["step"].tolist() for path in sorted(tmp_path.iterdir())]
    assert read == [[0, 1, 2], [100]]


def test_a_directory_that_cannot_be_made_is_no_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    timeline = TimelineFiles(tmp_path / "file", None, COORDS, 1 << 20)
    append(timeline, 0)
    assert "cannot be written" in caplog.text
    timeline.close()


def test_more_kinds_of_steps_than_a_file_can_number_begin_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "MOST_NUMBERS", 4)
    timeline = TimelineFiles(tmp_path, None, COORDS, 1 << 20)
    for step in range(10):
        timeline.append([step_of(step, shape=[step])])
    timeline.close()
    read = [read_timeline(path) for path in sorted(tmp_path.iterdir())]
    assert [len(r.shapes) for r in read] == [4, 4, 2]
    assert [
        event for r in read for i in range(len(r.steps)) for event in r.shapes[r.steps["shape"][i]].tolist()
    ] == list(range(10))
