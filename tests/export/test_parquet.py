"""Timelines as Parquet: every step once, nothing lost, and the documented query finds the straggler."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import msgspec
import pyarrow.parquet as pq
import pytest

from megaprof.export import parquet as exporting
from megaprof.export.parquet import export
from megaprof.formats import timeline as format
from megaprof.formats.job import RunRecord
from megaprof.formats.phrases import Unanswerable
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.diagnosis.test_stages_of_timelines import timeless
from tests.analysis.job_timelines import START_NS, Slow, coupled, write_timelines

DOCS = (Path(__file__).parents[2] / "docs" / "timeline.md").read_text()
LAYOUT = WorldLayout(ParallelSizes(tp=2, pp=4, dp=4))


def rows(out: Path) -> list[dict[str, object]]:
    found = duckdb.sql(
        f"SELECT * EXCLUDE (start_time), epoch_us(start_time) AS start_us "
        f"FROM read_parquet('{out}') ORDER BY rank, step"
    )
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def test_every_step_of_every_rank_is_one_row(tmp_path: Path) -> None:
    paths = write_timelines(tmp_path / "job", LAYOUT, steps=7, role="actor", skew_ms=3, slow=[Slow(rank=3, factor=1.5)])
    done: list[tuple[int, int]] = []
    exported = export(tmp_path / "job", tmp_path / "out", progress=lambda *numbers: done.append(numbers))
    assert (exported.files, exported.rows, exported.cut, exported.warnings) == (32, 224, 0, ())
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
    assert next(found, None) is None


def test_times_that_the_gpu_did_not_say_are_null(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    first, _ = write_timelines(tmp_path / "job", layout, steps=4, device_clock=True, events=False)
    timeless(first)
    export(tmp_path / "job", tmp_path / "out")
    found = {(row["rank"], row["duration_us"] is None, row["p2p_us"] is None) for row in rows(tmp_path / "out")}
    assert found == {(0, True, True), (1, False, False)}
    assert {(row["device_clock"], row["incomplete"], row["role"]) for row in rows(tmp_path / "out")} == {
        (True, True, None)
    }


def test_rows_wait_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=60)
    export(tmp_path / "job", tmp_path / "whole")
    monkeypatch.setattr(exporting, "WAITING_ROWS", 100)
    export(tmp_path / "job", tmp_path / "parts")
    groups = pq.ParquetFile(tmp_path / "parts").metadata
    assert {groups.row_group(number).num_rows for number in range(groups.num_row_groups)} == {120}
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_the_documented_query_finds_the_straggler_and_nobody_else(tmp_path: Path) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=200, slow=[Slow(rank=13, from_step=100, factor=1.3)], tails=0.02)
    write_timelines(tmp_path / "healthy", LAYOUT, steps=200, seed=1, tails=0.02)
    (tmp_path / "history").mkdir()
    export(tmp_path / "job", tmp_path / "history" / "bad.parquet", run="bad")
    export(tmp_path / "healthy", tmp_path / "history" / "good.parquet", run="good")
    (query,) = re.findall(r"```sql\n(.*?)```", DOCS, re.S)
    found = duckdb.sql(query.replace("history", str(tmp_path / "history"))).fetchall()
    assert {(rank, place, since) for _, _, _, _, rank, place, since, _, _ in found} == {
        (rank, f"node-{rank // 8:04d}", 100) for rank in coupled(LAYOUT, 13)
    }
    assert {run for run, *_ in found} == {"bad"}
    assert all(1.2 < times < 1.4 and slow == 100 for *_, slow, times in found)


def test_the_documented_columns_are_the_columns() -> None:
    table = DOCS.split("| column |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == {*exporting.COLUMNS.names}


@pytest.mark.parametrize("place", ["control", "control/role-actor"])
def test_the_run_is_what_the_job_says_from_its_start_on(tmp_path: Path, place: str) -> None:
    job = tmp_path / "job"
    (job / place).mkdir(parents=True)
    layout = WorldLayout(ParallelSizes(dp=2))
    record = RunRecord.new(layout.coords(0), layout, None, 1.0)
    record = msgspec.structs.replace(record, run="77aa", started=START_NS / 1e9 + 3600)
    (job / place / "run.json").write_bytes(msgspec.json.encode(record))
    write_timelines(job, layout, steps=3)
    write_timelines(job, layout, steps=3, first_step=3, start_ns=START_NS + 3_700 * 10**9)
    assert export(job, tmp_path / "out").rows == 12
    assert {(row["run"], row["step"] < 3) for row in rows(tmp_path / "out")} == {(None, True), ("77aa", False)}


def test_a_failure_leaves_nothing_and_an_earlier_export_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_timelines(tmp_path / "job", LAYOUT, steps=2)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        export(tmp_path / "job", tmp_path / "mine")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        export(tmp_path / "job", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "mine"]


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
    assert (exported.rows, exported.cut) == (32 * 5 - 2 - 5 * 3, 1)
    said = "\n".join(exported.warnings)
    for text in (
        "a record is damaged",
        "is no timeline",
        "missing required field `pp`",
    ):
        assert text in said
    assert len(exported.warnings) == 3
    alone = export(job / "renamed.timeline.bin", tmp_path / "alone")
    assert (alone.rows, alone.warnings) == (5, ())


def after_the_first_record(data: bytes) -> bytes:
    start = len(format.MAGIC)
    return data[start + 5 + int.from_bytes(data[start + 1 : start + 5], "little") + 4 :]


def test_nothing_to_export_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unanswerable, match="holds no timeline"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "a.timeline.bin").write_bytes(format.MAGIC)
    (tmp_path / "b.timeline.bin").write_bytes(b"")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(Unanswerable, match=r"bin holds no step that can be exported: .+"):
            export(path, tmp_path / "out")
    (tmp_path / "b.timeline.bin").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["a.timeline.bin"]
