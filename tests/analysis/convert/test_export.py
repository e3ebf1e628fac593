"""Timelines as Parquet: every step once, nothing lost, and the documented query finds the straggler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from megaprof.analysis.convert import export as exporting
from megaprof.analysis.convert.export import MARK, NothingToExport, export
from megaprof.formats import timeline as format
from megaprof.formats.files import Directory
from megaprof.formats.job import records, run
from megaprof.formats.job.run import RunRecord
from megaprof.formats.names import host
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.fleet.test_timeline_calls import timeless
from tests.analysis.job_timelines import START_NS, Slow, coupled, write_timelines

DOCS = (Path(__file__).parents[3] / "docs" / "scale.md").read_text()
LAYOUT = WorldLayout(ParallelSizes.of(32, tp=2, pp=4))


def rows(out: Path) -> list[dict[str, object]]:
    found = duckdb.sql(
        f"SELECT * EXCLUDE (start_time), epoch_us(start_time) AS start_us "
        f"FROM read_parquet('{out}/*/*/*/*.parquet', hive_partitioning = true) ORDER BY rank, step"
    )
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def files(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())


def test_every_step_of_every_rank_is_one_row(tmp_path: Path) -> None:
    paths = write_timelines(tmp_path / "job", LAYOUT, steps=7, role="actor", skew_ms=3, slow=[Slow(rank=3, factor=1.5)])
    done: list[tuple[int, int]] = []
    exported = export(tmp_path / "job", tmp_path / "out", progress=lambda *numbers: done.append(numbers))
    assert (exported.files, exported.rows, exported.partitions, exported.kept) == (32, 224, 4, 0)
    assert done[-1] == (32, 32)
    found = iter(rows(tmp_path / "out"))
    for rank, path in enumerate(paths):
        timeline = read_timeline(path)
        coords = LAYOUT.coords(rank)
        for step in timeline.steps:
            row = next(found)
            assert {axis: row[axis] for axis in ("rank", "pp", "tp", "cp", "ep", "dp")} == {
                axis: getattr(coords, axis) for axis in ("rank", "pp", "tp", "cp", "ep", "dp")
            }
            assert (row["target"], row["role"], row["host"]) == ("train_actor", "actor", f"node-{rank // 8:04d}")
            assert (row["step"], row["call_index"]) == (step["step"], 0)
            assert row["start_us"] == step["start_ns"] // 1000
            for name in ("duration", "forward", "backward", "combined", "finalize", "p2p", "own"):
                assert row[f"{name}_us"] == step[name]
            assert not any(row[name] for name in ("device_clock", "failed", "captured", "incomplete"))
            assert str(row["hour"]) == str(np.datetime64(int(step["start_ns"]), "ns"))[:13].translate(
                {ord("-"): None, ord("T"): None}
            )
    assert next(found, None) is None


def test_hours_are_partitions_and_flags_are_columns(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(2, pp=2))
    write_timelines(tmp_path / "job", layout, steps=40, forward_ms=30_000, device_clock=True, events=False, role=None)
    exported = export(tmp_path / "job", tmp_path / "out")
    hours = {re.search(r"hour=(\d{10})/", name)[1] for name in files(tmp_path / "out") if "hour" in name}  # type: ignore[index]
    assert len(hours) > 2
    assert exported.partitions == 2 * len(hours)
    found = rows(tmp_path / "out")
    assert {row["p2p_us"] > 0 for row in found} == {True}
    assert {(row["device_clock"], row["incomplete"], row["role"]) for row in found} == {(True, True, None)}


def test_times_that_the_gpu_did_not_say_are_null(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(2, pp=2))
    first, _ = write_timelines(tmp_path / "job", layout, steps=4, device_clock=True, events=False)
    timeless(first)
    export(tmp_path / "job", tmp_path / "out")
    found = {(row["rank"], row["duration_us"] is None, row["p2p_us"] is None) for row in rows(tmp_path / "out")}
    assert found == {(0, True, True), (1, False, False)}


def test_memory_is_bounded_and_the_rows_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=60, forward_ms=10_000)
    whole = export(tmp_path / "job", tmp_path / "whole")
    most = 0
    write = exporting._Dataset._write

    def watched(self: exporting._Dataset, place: exporting._Hour) -> None:
        nonlocal most
        most = max(most, self._waiting)
        write(self, place)

    monkeypatch.setattr(exporting, "WAITING_ROWS", 100)
    monkeypatch.setattr(exporting._Dataset, "_write", watched)
    parts = export(tmp_path / "job", tmp_path / "parts")
    assert most < 100 + 60
    assert (
        (parts.rows, parts.partitions) == (whole.rows, whole.partitions) == (1920, len(files(tmp_path / "whole")) - 1)
    )
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.parametrize("dialect", ["DuckDB", "Spark"])
def test_the_documented_query_finds_the_straggler_and_nobody_else(tmp_path: Path, dialect: str) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=200, slow=[Slow(rank=13, from_step=100, factor=1.3)], tails=0.02)
    write_timelines(tmp_path / "healthy", LAYOUT, steps=200, seed=1, tails=0.02)
    export(tmp_path / "job", tmp_path / "out", run="bad")
    export(tmp_path / "healthy", tmp_path / "out", run="good")
    query = documented(dialect)
    (source,) = re.findall(r"FROM (.*OUT.*)\n", query)
    if dialect == "Spark":  # no Spark here: its text is DuckDB's but for the source
        assert source == "parquet.`OUT`"
        assert query.replace(source, "X") == documented("DuckDB").replace(
            "read_parquet('OUT/*/*/*/*.parquet', hive_partitioning = true)", "X"
        )
        query = query.replace(source, "read_parquet('OUT/*/*/*/*.parquet', hive_partitioning = true)")
    found = duckdb.sql(query.replace("OUT", str(tmp_path / "out"))).fetchall()
    assert {(rank, place, since) for _, _, _, _, rank, place, since, _, _ in found} == {
        (rank, f"node-{rank // 8:04d}", 100) for rank in coupled(LAYOUT, 13)
    }
    assert {run for run, *_ in found} == {"bad"}
    assert all(1.2 < times < 1.4 and slow == 100 for *_, slow, times in found)


def documented(dialect: str) -> str:
    return re.findall(rf"```sql\n-- {dialect}\n(.*?)```", DOCS, re.S)[0]


def test_the_documented_columns_are_the_columns() -> None:
    table = DOCS.split("| column |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == {*exporting.COLUMNS.names, "run", "pp", "hour"}


@pytest.mark.parametrize("place", ["control", "control/role-actor"])
def test_the_run_is_what_the_job_says_from_its_start_on(tmp_path: Path, place: str) -> None:
    job = tmp_path / "job"
    (job / place).mkdir(parents=True)
    layout = WorldLayout(ParallelSizes.of(2))
    record = RunRecord.new(layout.coords(0), layout, ("train_actor",), None, 1.0)
    record = msgspec.structs.replace(record, run="77aa", started=START_NS / 1e9 + 3600)
    with Directory.open(job / place) as directory:
        records.write(directory, run.NAME, record)
    write_timelines(job, layout, steps=3)
    write_timelines(job, layout, steps=3, first_step=3, start_ns=START_NS + 3_700 * 10**9)
    assert export(job, tmp_path / "out").rows == 12
    runs = {(row["run"], row["step"]) for row in rows(tmp_path / "out")}
    earlier = {run for run, step in runs if step < 3}
    assert {run for run, step in runs if step >= 3} == {"run-77aa"}, "a run of digits only would be read as a number"
    assert len(earlier) == 1
    assert re.fullmatch(r"run-[0-9a-f]{12}", earlier.pop())


def test_without_a_name_the_same_data_get_the_same_one_wherever_they_lie(tmp_path: Path) -> None:
    for folder in ("here", "there/too"):
        write_timelines(tmp_path / folder, LAYOUT, steps=2)
    (tmp_path / "here" / "control").mkdir()
    (tmp_path / "here" / "control" / "run.json").write_text("{half")
    write_timelines(tmp_path / "other", LAYOUT, steps=2, start_ns=START_NS + 10**9)
    runs = [export(tmp_path / folder, tmp_path / "out").runs for folder in ("here", "there/too", "other")]
    assert runs[0] == runs[1] != runs[2]
    assert len(rows(tmp_path / "out")) == 128


def test_a_later_export_adds_and_never_takes_away(tmp_path: Path) -> None:
    job, out = tmp_path / "job", tmp_path / "out"
    layout = WorldLayout(ParallelSizes.of(4, pp=2))
    first = write_timelines(job, layout, steps=50, forward_ms=20_000)
    export(job, out, run="r")
    before = rows(out)
    # The same hours once more with more steps, and the oldest file of one rank was rotated away.
    second = write_timelines(job, layout, steps=50, first_step=50, forward_ms=20_000, start_ns=START_NS + 10**13)
    first[0].unlink()
    exported = export(job, out, run="r")
    assert exported.kept > 0
    after = rows(out)
    known = {(row["rank"], row["step"]) for row in after}
    assert len(known) == len(after) == 400
    assert [row for row in after if row["step"] < 50] == before  # type: ignore[operator]
    assert len(second) == 4


def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=2)
    for name, content in (("notes.txt", "mine"), (MARK, "[]"), (MARK, '{"megaprofExport": 99}')):
        out = tmp_path / f"out-{len(content)}"
        out.mkdir()
        (out / name).write_text(content)
        with pytest.raises(ValueError, match=r"nothing is written into it|export to another directory"):
            export(tmp_path / "job", out)
        assert (files(out), (out / name).read_text()) == ([name], content)
    with pytest.raises(ValueError, match="no directory"):
        export(tmp_path / "job", next((tmp_path / "job").iterdir()))


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=2)
    out = tmp_path / "new" / "out"
    export(tmp_path / "job", out)
    before = {name: (out / name).read_bytes() for name in files(out)}

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.pq.ParquetWriter, "write_table", full)
    for place in (out, tmp_path / "fresh"):
        with pytest.raises(OSError, match="No space left"):
            export(tmp_path / "job", place)
    assert {name: (out / name).read_bytes() for name in files(out)} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "new"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=2)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {f".out.{host()}.{ended.pid}.tmp": False, f".out.{host()}.{os.getppid()}.tmp": True, ".out.mine": True}
    for name in names:
        (tmp_path / name / "run=x").mkdir(parents=True)
    export(tmp_path / "job", tmp_path / "out")
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_damage_and_strange_metadata_cost_only_what_they_touch(tmp_path: Path) -> None:
    job = tmp_path / "job"
    paths = write_timelines(job, LAYOUT, steps=5)
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[1].write_bytes(b"something else")
    data = paths[2].read_bytes()
    metadata = dict(read_timeline(paths[2]).metadata[0].as_dict(), coords={"rank": 2})
    paths[2].write_bytes(format.MAGIC + format.metadata_record(metadata) + after_the_first_record(data))
    paths[9].rename(job / paths[9].name.replace("pp1", "pp3"))
    paths[10].rename(job / "renamed.timeline.bin")
    paths[3].write_bytes(format.MAGIC)
    data = paths[4].read_bytes()
    paths[4].write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    exported = export(job, tmp_path / "out")
    assert (exported.rows, exported.cut) == (32 * 5 - 2 - 5 * 5, 1)
    said = "\n".join(exported.warnings)
    for text in (
        "ends early: the record at byte",
        "is no timeline",
        "coords.tp=None",
        "stage 1, which its name does not say",
    ):
        assert text in said
    assert len(exported.warnings) == 5
    alone = export(job / "renamed.timeline.bin", tmp_path / "alone")
    assert (alone.rows, alone.warnings) == (5, ())


def after_the_first_record(data: bytes) -> bytes:
    start = len(format.MAGIC)
    return data[start + 5 + int.from_bytes(data[start + 1 : start + 5], "little") + 4 :]


def test_nothing_to_export_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingToExport, match="holds no timeline"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "a.timeline.bin").write_bytes(format.MAGIC)
    with pytest.raises(NothingToExport, match="holds no step"):
        export(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.timeline.bin"]


def test_shards_are_searched(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes.of(2048, tp=8, pp=16, cp=2, ep=8))
    write_timelines(tmp_path / "job", layout, steps=1, microbatches=16, ranks=[0, 1023, 1024, 2047])
    assert len(list((tmp_path / "job").iterdir())) == 2
    assert export(tmp_path / "job", tmp_path / "out").rows == 4
    assert pq.read_schema(next((tmp_path / "out").rglob("*.parquet"))).equals(exporting.COLUMNS)
