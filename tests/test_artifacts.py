"""Names of artifacts, and files that appear whole or not at all."""

from __future__ import annotations

import gzip
import logging
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof import artifacts
from megaprof.artifacts import Job, Writer, artifact_name, compress, raw_path, sanitise
from megaprof.topology import ParallelSizes, RankCoords, WorldLayout

COORDS = RankCoords(rank=37, pp=2, tp=1, cp=0, ep=1, dp=3, sizes=ParallelSizes(tp=2, pp=4, ep=2, dp=8))
CONTRACT = re.compile(r"[\w-]+(\.[\w-]+)?\.step\d{6,}\.pp\d+-tp\d+-cp\d+-ep\d+-dp\d+\.rank\d{5,}\.pt\.trace\.json\.gz", re.A)


def test_the_contract() -> None:
    name = artifact_name("train_actor", None, 12, COORDS, ".pt.trace.json.gz")
    assert name == "train_actor.step000012.pp2-tp1-cp0-ep1-dp3.rank00037.pt.trace.json.gz"
    name = artifact_name("train_log_probs", "ref", 5000, COORDS, ".nsys-rep")
    assert name == "train_log_probs.ref.step005000.pp2-tp1-cp0-ep1-dp3.rank00037.nsys-rep"


@given(st.text(min_size=1) | st.sampled_from(["../../x", "/etc/passwd", "a" * 500, "..", ".", "ref\x00", "Rolle-Ä", "a b"]))
def test_any_role_stays_one_short_component_of_a_path(role: str) -> None:
    name = artifact_name("train_actor", role, 1, COORDS, ".pt.trace.json.gz")
    assert CONTRACT.fullmatch(name)
    assert Path("/save", name).parent == Path("/save")
    assert len(name.encode()) < 255


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
def test_different_roles_have_different_names(one: str, other: str) -> None:
    assert (sanitise(one) == sanitise(other)) == (one == other)


def test_every_rank_of_a_world_has_its_own_name() -> None:
    layout = WorldLayout(ParallelSizes(tp=2, pp=4, ep=2, dp=4))
    names = {artifact_name("evaluate", None, 0, coords, ".x") for coords in layout}
    assert len(names) == len(layout)


def test_a_file_appears_whole_and_its_raw_file_goes(tmp_path: Path) -> None:
    final = tmp_path / "t.json.gz"
    raw = raw_path(final)
    raw.write_bytes(b"x" * 3_000_000)
    compress(raw, final)
    assert gzip.decompress(final.read_bytes()) == b"x" * 3_000_000
    assert [p.name for p in tmp_path.iterdir()] == ["t.json.gz"]


def test_a_failing_write_leaves_the_old_file_the_raw_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "t.json.gz"
    final.write_bytes(b"old")
    raw = raw_path(final)
    raw.write_bytes(b"new")

    def no_rename(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts.os, "replace", no_rename)
    with pytest.raises(OSError, match="No space"):
        compress(raw, final)
    assert final.read_bytes() == b"old"
    assert raw.read_bytes() == b"new"
    assert {p.name for p in tmp_path.iterdir()} == {final.name, raw.name}


def test_writer_starts_no_thread_before_its_first_job() -> None:
    before = threading.active_count()
    assert Writer().flush(0)
    assert threading.active_count() == before


def test_writer_writes_in_the_background_and_a_bad_job_does_not_stop_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer()
    good = tmp_path / "good.gz"
    raw_path(good).write_bytes(b"data")
    with caplog.at_level(logging.ERROR, logger="megaprof"):
        writer.submit(Job(tmp_path / "missing", tmp_path / "bad.gz"))
        writer.submit(Job(raw_path(good), good))
        assert writer.flush(30)
    assert gzip.decompress(good.read_bytes()) == b"data"
    assert not (tmp_path / "bad.gz").exists()
    assert "bad.gz failed" in caplog.text


def test_flush_says_what_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(artifacts, "compress", lambda raw, final: release.wait(30))
    writer = Writer()
    writer.submit(Job(tmp_path / "raw", tmp_path / "final"))
    assert not writer.flush(0.01)
    assert "1 trace files were not finished" in caplog.text
    release.set()
    assert writer.flush(30)
