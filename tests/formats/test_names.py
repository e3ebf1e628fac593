"""Names of artifacts, whose unfinished files are whose, and files that appear whole or not at all."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.artifacts.writer import Writer
from megaprof.formats import names
from megaprof.formats.names import (
    ArtifactName,
    appearing,
    artifact_name,
    host,
    is_leftover,
    kineto_temporary,
    parse_artifact_name,
    raw_path,
    repeats,
    sanitise,
    shard,
    temporary_path,
)
from megaprof.parallel.topology import Coords, ParallelSizes, RankCoords, WorldLayout
from megaprof.recorders import Window
from tests.parallel.test_topology import everybody

COORDS = RankCoords(rank=37, pp=2, tp=1, cp=0, ep=1, dp=3, sizes=ParallelSizes(tp=2, pp=4, ep=2, dp=8))
CONTRACT = re.compile(
    r"[\w-]+(\.[\w-]+)?\.step\d{6,}\.pp\d+-tp\d+-cp\d+-ep\d+-dp\d+\.rank\d{5,}\.pt\.trace\.json\.gz", re.A
)


@pytest.fixture(scope="module")
def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_the_contract() -> None:
    name = artifact_name("train_actor", None, 12, COORDS, ".pt.trace.json.gz")
    assert name == "train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.pt.trace.json.gz"
    name = artifact_name("train_log_probs", "ref", 5000, COORDS, ".nsys-rep")
    assert name == "train_log_probs.ref.step005000.pp2-tp1-cp0-ep1-dp3.rank00037.nsys-rep"


@given(
    st.text(min_size=1) | st.sampled_from(["../../x", "/etc/passwd", "a" * 500, "..", ".", "ref\x00", "Rolle-Ä", "a b"])
)
def test_any_role_stays_one_short_component_of_a_path(role: str) -> None:
    name = artifact_name("train_actor", role, 1, COORDS, ".pt.trace.json.gz")
    assert CONTRACT.fullmatch(name)
    assert Path("/save", name).parent == Path("/save")
    assert len(kineto_temporary(temporary_path(Path("/save", name))).name.encode()) < 255


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
def test_different_roles_have_different_names(one: str, other: str) -> None:
    assert (sanitise(one) == sanitise(other)) == (one == other)


@given(
    st.text(min_size=1, max_size=30),
    st.none() | st.text(min_size=1, max_size=30),
    st.integers(0, 10**18 - 1),
    st.integers(1, 10**9 - 1),
    st.sampled_from([".pt.trace.json.gz", ".timeline.bin", ".kernels.json", ".nsys.json", ""]),
)
def test_a_name_is_read_back(target: str, role: str | None, step: int, repeat: int, suffix: str) -> None:
    place = Coords(rank=37, pp=2, tp=1, cp=0, ep=1, dp=3)
    stem = artifact_name(target, role, step, place, "")
    assert artifact_name(target, role, step, COORDS, suffix) == stem + suffix
    name = f"{stem}.{repeat}{suffix}" if repeat > 1 else stem + suffix
    wanted = ArtifactName(sanitise(target), role and sanitise(role), step, place, suffix)
    assert parse_artifact_name(name) == wanted


def test_a_repeated_file_has_a_number_before_its_suffix() -> None:
    first = Window("train_actor", "ref", 12, COORDS).path("/save", ".pt.trace.json.gz")
    again = repeats(first)
    assert next(again) == first
    assert next(again).name == "train_actor.ref.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.2.pt.trace.json.gz"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "trace.pt.trace.json.gz",
        "train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.1.pt.trace.json.gz",
        "train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.02.pt.trace.json.gz",
        "train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank\u0663.pt.trace.json.gz",
        "train_actor.a.b.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.pt.trace.json.gz",
        "train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank" + "9" * 5000,
        ".train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.pt.trace.json.gz",
    ],
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_artifact_name(name) is None


def test_every_rank_of_a_world_has_its_own_name() -> None:
    layout = WorldLayout(ParallelSizes(tp=2, pp=4, ep=2, dp=4))
    found = {artifact_name("evaluate", None, 0, coords, ".x") for coords in everybody(layout)}
    assert len(found) == layout.sizes.world


def test_a_world_that_fits_one_directory_has_no_other() -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=4, dp=32))
    assert {shard(coords.rank, coords.sizes.world) for coords in everybody(layout)} == {""}
    path = Window("train_actor", "ref", 12, COORDS).path("/save", ".x")
    assert path == Path("/save", artifact_name("train_actor", "ref", 12, COORDS, ".x"))


def test_a_larger_world_has_directories_of_1024_ranks() -> None:
    layout = WorldLayout(ParallelSizes(tp=8, pp=16, cp=2, ep=8, dp=8))
    assert shard(0, layout.sizes.world) == shard(1023, layout.sizes.world) == "ranks000000-001023"
    assert shard(1024, layout.sizes.world) == shard(2047, layout.sizes.world) == "ranks001024-002047"
    name = artifact_name("timeline", None, 7, layout.coords(1024), ".x")
    path = Window("timeline", None, 7, layout.coords(1024)).path("/save", ".x")
    assert path == Path("/save/ranks001024-002047", name)


def test_no_folder_holds_100_000_files_when_131_072_ranks_capture() -> None:
    """Every kind of file that one window can have, with those that are still unfinished, of every 16th rank."""
    layout = WorldLayout(ParallelSizes(tp=8, pp=16, cp=2, ep=8, dp=512))
    kinds = [".pt.trace.json.gz", ".et.json", ".kernels.json", ".stacks.txt.gz", ".nsys.json", ".memory.pickle"]
    folders = collections.Counter(shard(rank, layout.sizes.world) for rank in range(0, 131_072, 16))
    assert len(folders) == 128
    assert 16 * max(folders.values()) * 2 * len(kinds) < 100_000
    for coords in map(layout.coords, (0, 1023, 1024, 131_071)):
        for kind in kinds:
            path = Window("train_actor", None, 5, coords).path("/save", kind)
            assert path.parent == temporary_path(path).parent == Path("/save", shard(coords.rank, coords.sizes.world))


def test_leftovers_in_a_shard_are_removed(tmp_path: Path, dead_pid: int) -> None:
    coords = WorldLayout(ParallelSizes(tp=8, dp=256)).coords(1500)
    final = Window("train_actor", None, 5, coords).path(tmp_path, ".et.json")
    raw_path(final).write_text("{}")
    leftover = final.with_name(f".older.{host()}.{dead_pid}.raw")
    leftover.touch()
    writer = Writer()
    writer.submit(raw_path(final), final)
    assert writer.close(60)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")] == [Path("ranks001024-002047", final.name)]


def test_a_raw_file_has_a_directory_even_if_somebody_removed_it(tmp_path: Path) -> None:
    raw = raw_path(tmp_path / "gone" / "a.gz")
    assert raw.parent.is_dir()
    assert raw.name.startswith(".")


def test_only_files_of_dead_processes_of_this_host_are_leftovers(dead_pid: int) -> None:
    for kind in ("raw", "tmp", "raw.tmp"):
        assert is_leftover(f".a.b.gz.{host()}.{dead_pid}.{kind}")
        assert not is_leftover(f".a.b.gz.{host()}.{os.getpid()}.{kind}")
        assert not is_leftover(f".a.b.gz.other-{host()}.{dead_pid}.{kind}")
        assert not is_leftover(f".a.b.gz.{host()}.{10**30}.{kind}")
        assert not is_leftover(f"a.b.gz.{host()}.{dead_pid}.{kind}")
    assert not is_leftover(f".{host()}.{dead_pid}.raw")
    assert not is_leftover(f".a.gz.{host()}.{dead_pid}.gz")


def test_what_this_process_is_writing_is_no_leftover(tmp_path: Path) -> None:
    raw = raw_path(tmp_path / "a.gz")
    for path in (raw, temporary_path(tmp_path / "a.gz"), kineto_temporary(raw)):
        assert names._UNFINISHED.fullmatch(path.name)
        assert not is_leftover(path.name)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    final, precious = tmp_path / "report.json", tmp_path / "precious"
    precious.write_text("ten years")
    temporary_path(final).symlink_to(precious)
    final.symlink_to(precious)
    with appearing(final) as file:
        file.write(b"new")
    assert precious.read_text() == "ten years"
    assert not final.is_symlink()
    assert final.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["precious", "report.json"]


def test_after_an_exception_there_is_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "report.json"
    final.write_text("old")

    def fails() -> None:
        with appearing(final) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert final.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]
