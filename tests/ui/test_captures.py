"""What is found below a directory, and what is not followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaprof.formats.names import artifact_name, shard
from megaprof.formats.timeline import SUFFIX
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.ui import captures
from megaprof.ui.captures import look_below
from tests.analysis.synthetic import pipeline
from tests.ui.pages import HOSTILE


def names(top: Path) -> list[str]:
    return sorted(place.name for place in look_below(top)[0].values())


def test_every_directory_with_captures_is_a_place(tmp_path: Path) -> None:
    pipeline(tmp_path / "a" / "deep", [1, 1])
    pipeline(tmp_path / HOSTILE, [1, 1], step=7)
    (tmp_path / "nothing").mkdir()
    assert names(tmp_path) == sorted(["a/deep", HOSTILE])
    place = next(place for place in look_below(tmp_path)[0].values() if place.name == HOSTILE)
    assert (place.files, place.targets, place.steps) == ({"trace": 2}, {"train_actor"}, (7, 7))


def test_the_name_of_a_timeline_has_its_first_step_and_no_target(tmp_path: Path) -> None:
    coords = WorldLayout(ParallelSizes(pp=2)).coords(0)
    files = ("timeline", 0, SUFFIX), ("train_actor", 20, ".pt.trace.json.gz")
    names = [artifact_name(target, None, step, coords, suffix) for target, step, suffix in files]
    (tmp_path / names[0]).touch()
    assert [(place.steps, place.targets) for place in look_below(tmp_path)[0].values()] == [(None, set())]
    (tmp_path / names[1]).touch()
    assert [(place.steps, place.targets) for place in look_below(tmp_path)[0].values()] == [((20, 20), {"train_actor"})]


def test_files_of_many_ranks_are_one_place(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2, dp=2048))
    for rank in (0, 1500, 4000):
        coords = layout.coords(rank)
        folder = tmp_path / shard(coords.rank, coords.sizes.world)
        folder.mkdir()
        (folder / artifact_name("train_actor", None, 3, coords, ".pt.trace.json.gz")).touch()
    (place,) = look_below(tmp_path)[0].values()
    assert (place.name, place.files) == (tmp_path.name, {"trace": 3})


def test_a_place_is_another_one_when_a_file_is(tmp_path: Path) -> None:
    (first, *_) = pipeline(tmp_path / "a", [1, 1])
    pipeline(tmp_path / "b", [1, 1])
    before = {place.name: (place.id, place.identity) for place in look_below(tmp_path)[0].values()}
    os.utime(first, ns=(1, 1))
    after = {place.name: (place.id, place.identity) for place in look_below(tmp_path)[0].values()}
    assert before["b"] == after["b"]
    assert before["a"][0] == after["a"][0]
    assert before["a"][1] != after["a"][1]


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    (elsewhere, *_) = pipeline(tmp_path / "elsewhere", [1, 1])
    top = tmp_path / "top"
    pipeline(top / "own", [1, 1])
    pipeline(top / "linking" / "below", [1, 1])
    os.symlink(tmp_path / "elsewhere", top / "away")
    os.symlink(elsewhere, top / "linking" / elsewhere.name)
    os.symlink(top / "own" / elsewhere.name, top / "linking" / "below" / "again.pt.trace.json.gz")
    (top / "linking" / "x.pt.trace.json.gz").touch()
    found = {place.name: place.outside for place in look_below(top)[0].values()}
    assert found == {"own": None, "linking": elsewhere.name, "linking/below": None}


def test_a_place_is_read_with_all_below_it_so_a_link_there_counts(tmp_path: Path) -> None:
    (elsewhere, *_) = pipeline(tmp_path / "elsewhere", [1, 1])
    top = tmp_path / "top"
    pipeline(top, [1, 1])
    for hidden in (".hidden", "control", "sub/.deep"):
        (top / hidden).mkdir(parents=True)
        os.symlink(elsewhere, top / hidden / elsewhere.name)
        (place,) = look_below(top)[0].values()
        assert place.outside == elsewhere.name
        (top / hidden / elsewhere.name).unlink()
    (place,) = look_below(top)[0].values()
    assert place.outside is None


def test_a_directory_that_is_a_link_itself_is_served(tmp_path: Path) -> None:
    pipeline(tmp_path / "real" / "run", [1, 1])
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert names(tmp_path / "link") == ["run"]


def test_there_is_an_end_to_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in range(6):
        pipeline(tmp_path / str(place), [1, 1])
    monkeypatch.setattr(captures, "MOST_PLACES", 3)
    places, more = look_below(tmp_path)
    assert (len(places), more) == (3, True)
    monkeypatch.setattr(captures, "MOST_ENTRIES", 8)
    assert look_below(tmp_path)[1]
