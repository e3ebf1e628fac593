"""Nsight Systems' files: what a window in them is, and the same report as of a trace of Kineto's."""

from __future__ import annotations

import gzip
import json
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from megaprof.analysis.merge import merge
from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.reading import recordings_in, traces_in
from megaprof.cli import main
from megaprof.formats.phrases import Unanswerable
from tests.analysis.exchanging import exchanging
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, chunk, kinds
from tests.nsys.written import write_document, write_nsys


def as_nsys(directory: Path, out: Path) -> None:
    """Every trace of a directory as a file of nsys's."""
    for path in sorted(directory.glob("*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        described = document["megaprof"]
        trace = TraceBuilder(
            pp=described["coords"]["pp"], step=described["steps"][0], target=described["target"],
            coords=described["coords"], metadata=described,
        )  # fmt: skip
        write_document(document, out, trace)


def edit(path: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()
    return path


def told(path: Path) -> str:
    """Why a file cannot be read."""
    with pytest.raises(Undecodable) as fault:
        traces_in(path)
    assert "\n" not in str(fault.value)
    return str(fault.value)


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """Two stages on one host, three microbatches, with metadata beside them."""
    for trace in two_stages():
        write_nsys(trace, tmp_path)
    return tmp_path


def two_stages() -> list[TraceBuilder]:
    traces = exchanging([0.0, 0.0], hosts=["node-1", "node-1"])
    for trace in traces:
        trace.events[-1]["dur"] += 10  # no range ends with the step's
    return traces


class TestTheSameReport:
    @pytest.mark.parametrize(
        "scenario",
        [
            Scenario("layers", layers=(6, 4, 4), microbatches=4),
            Scenario("interleaved", layers=((2, 3), (2, 2)), microbatches=4),
            Scenario("experts", layers=(3, 3), microbatches=4, exposed={"ep": 0.1}),
            Scenario("heads", layers=(3, 3), microbatches=4, exposed={"cp": 0.1}, transfer=1.0),
            Scenario("tail", layers=(3, 3), microbatches=4, tail=9.0, dp=2, steps=2),
            Scenario("idle", layers=(3, 3), microbatches=4, idle=0.3),
            Scenario("hosts", layers=(3, 3), microbatches=4, apart=True),
        ],
        ids=lambda scenario: scenario.name,
    )
    def test_as_of_a_trace(self, scenario: Scenario, tmp_path: Path) -> None:
        """The ranges, kernels and launches of a GPU job, once as Kineto's files and once as nsys's, which know no
        process groups: every number is the same."""
        write(scenario, tmp_path / "kineto")
        as_nsys(tmp_path / "kineto", tmp_path / "nsys")
        kineto, nsys = (analyze(tmp_path / kind) for kind in ("kineto", "nsys"))
        if scenario.name == "tail":  # behind the passes it may be an embedding's, and nsys does not say
            for report in (kineto, nsys):
                for stage in report.targets[0].stages:
                    assert (stage.dp_tail_ms is not None) == (report is kineto)
                    assert (stage.exposed_ms["unknown"].mean > 0) == (report is nsys)
            assert [w.names for w in nsys.targets[0].warnings if w.kind == "exposed_unknown"] == [("dp",)]
        else:
            assert (nsys.targets, nsys.warnings) == (kineto.targets, kineto.warnings)

    def test_on_a_cpu_without_collectives(self, stages: Path) -> None:
        report = analyze(stages).to_json()
        (target,) = report["targets"]
        assert (target["step_time_ms"]["mean"], target["microbatches"]) == (pytest.approx(23.4, abs=3), 3)
        assert [stage["exposed_ms"]["pp"] for stage in target["stages"]] == [None, None]
        assert report["warnings"] == []
        assert any(note.get("names") == ["pp"] for note in target["warnings"])

    def test_no_zero_stands_for_collectives_that_are_not_there(self, tmp_path: Path) -> None:
        trace = TraceBuilder(sizes={"tp": 2, "cp": 2}, microbatches=1)
        trace.call(0, 40)
        trace.forward(0, 0, 10)
        trace.backward(0, 10, 20)
        trace.event("megaprof/finalize_grads", 30, 5)
        write_nsys(trace, tmp_path)
        (target,) = analyze(tmp_path).targets
        exposed = target.stages[0].exposed_ms
        assert (exposed["tp"], exposed["dp"].mean, exposed["ep"].mean) == (None, 5, 0)
        assert [w.names for w in target.warnings if w.kind == "exposed_unknown"] == [("tp", "cp")]

    def test_diff_and_the_command_line(self, stages: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first = sorted(stages.glob("*.sqlite"))[0]
        assert main(["diff", str(stages), str(stages), "--json"]) == 0
        assert main(["report", str(first), "--json", "-"]) == 0
        assert "1 of 2 stages captured" in capsys.readouterr().out

    def test_merged_onto_one_timeline(self, stages: Path, tmp_path: Path) -> None:
        merged = merge(stages, tmp_path / "m.json")
        assert (merged.ranks, merged.arrows) == ((0, 1), 6)
        events = json.loads((tmp_path / "m.json").read_text())["traceEvents"]
        forwards = [event for event in events if event["name"] == "megaprof/forward mb=0 chunk=0"]
        assert [(event["pid"], event["dur"]) for event in forwards] == [(1, 2000.0), (2, 2000.0)]


class TestWithoutMetadata:
    def test_a_file_without_any_is_skipped(self, tmp_path: Path) -> None:
        for trace in two_stages():
            write_nsys(trace, tmp_path, sidecar=False)
        why = r"no \.nsys\.json of its windows lies beside it: megaprof writes one for each into --profile-dir\.$"
        with pytest.raises(Unanswerable, match=why):
            analyze(tmp_path)

    def test_metadata_of_another_process_are_not_taken(self, stages: Path) -> None:
        one, _ = sorted(stages.glob("*.nsys.json"))
        one.write_text(one.read_text().replace('"pid": 7', '"pid": 8'))
        report = analyze(stages)
        assert [(w.kind, w.files) for w in report.warnings] == [("skipped", (sorted(stages.glob("*.sqlite"))[0].name,))]
        assert [stage.ranks for stage in report.targets[0].stages] == [(1,)]

    def test_a_window_without_them_is_left_out(self, tmp_path: Path) -> None:
        for step in (5, 6):
            trace = TraceBuilder(step=step, microbatches=1)
            begin = 100.0 * step
            trace.event(f"megaprof/train_actor step={step} pp=0 tp=0 cp=0 ep=0 dp=0", begin, 50)
            trace.forward(0, begin + 1, 10)
            trace.backward(0, begin + 20, 10)
            write_nsys(trace, tmp_path, name="all.sqlite", sidecar=step == 5)
        report = analyze(tmp_path)
        assert report.targets[0].steps == (5,)
        assert [(w.kind, w.steps, w.count) for w in report.warnings] == [("without_sidecar", (6,), 7)]

    def test_damaged_metadata_are_said(self, stages: Path) -> None:
        for path in stages.glob("*.nsys.json"):
            path.write_text("[" * 100_000)
        with pytest.raises(Unanswerable, match="nested too deeply"):
            analyze(stages)


class TestWindows:
    def test_several_windows_and_processes_in_one_file(self, tmp_path: Path) -> None:
        for step, pid in ((5, 7), (6, 7), (5, 8)):
            trace = TraceBuilder(step=step, microbatches=1, metadata={"pid": pid}, coords={"rank": pid - 7})
            trace.pp, trace.sizes = 0, {"dp": 2}
            trace.coords["dp"] = pid - 7
            begin = 100.0 * step
            trace.event(f"megaprof/train_actor step={step} pp=0 tp=0 cp=0 ep=0 dp={pid - 7}", begin, 50)
            trace.forward(0, begin + 1, 10)
            trace.backward(0, begin + 20, 10)
            write_nsys(trace, tmp_path, name="all.sqlite")
        traces = traces_in(*recordings_in(tmp_path)[0])
        assert [(t.metadata.pid, t.metadata.steps, len(t.ranges)) for t in traces] == [
            (7, (5, 5), 3),
            (7, (6, 6), 3),
            (8, (5, 5), 3),
        ]
        assert {trace.metadata.coords.dp for trace in traces} == {0, 1}

    def test_a_recording_that_ended_first_leaves_a_truncated_window(self, stages: Path) -> None:
        """nsys ends what was open then, all at once."""
        path = sorted(stages.glob("*.sqlite"))[0]
        ((kill,),) = query(path, "SELECT MAX(end) - 3000000 FROM NVTX_EVENTS")
        edit(
            path,
            f"DELETE FROM NVTX_EVENTS WHERE start > {kill}",
            f"UPDATE NVTX_EVENTS SET end = {kill} WHERE end > {kill}",
        )
        (trace,) = traces_in(path)
        assert trace.metadata.truncated
        (target,) = analyze(stages).targets
        assert [w.why.kind for w in target.warnings if w.kind == "left_out"] == ["incomplete"]

    def test_a_range_without_an_end_is_open_too(self, stages: Path) -> None:
        path = sorted(stages.glob("*.sqlite"))[0]
        edit(path, "UPDATE NVTX_EVENTS SET end = NULL WHERE start = (SELECT MAX(start) FROM NVTX_EVENTS)")
        assert traces_in(path)[0].metadata.truncated


def query(path: Path, statement: str) -> list[tuple[int, ...]]:
    with sqlite3.connect(path) as database:
        found = database.execute(statement).fetchall()
    database.close()
    return found


class TestRefused:
    def test_what_is_no_export(self, tmp_path: Path) -> None:
        text = tmp_path / "a.sqlite"
        text.write_text("no database")
        assert told(text) == "it is no SQLite file"
        other = edit(tmp_path / "b.sqlite", "CREATE TABLE runs (id INTEGER)")
        assert "it holds no NVTX ranges" in told(other)
        assert "no regular file" in told(tmp_path)

    def test_a_directory_of_nothing_else(self, tmp_path: Path) -> None:
        edit(tmp_path / "mlflow.sqlite", "CREATE TABLE runs (id INTEGER)")
        with pytest.raises(Unanswerable, match="it holds no NVTX ranges"):
            analyze(tmp_path)

    def test_a_damaged_file(self, stages: Path) -> None:
        path = sorted(stages.glob("*.sqlite"))[0]
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        path.write_bytes(data)
        assert "its database is damaged" in told(path)

    def test_a_view_is_a_program_and_is_not_run(self, stages: Path) -> None:
        path = sorted(stages.glob("*.sqlite"))[0]
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start FROM n"
        edit(path, "ALTER TABLE NVTX_EVENTS RENAME TO hidden", f"CREATE VIEW NVTX_EVENTS AS {endless}")
        assert "it holds no NVTX ranges" in told(path)

    def test_computed_columns(self, tmp_path: Path) -> None:
        path = edit(
            tmp_path / "x.sqlite",
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, "
            "textId INTEGER, text TEXT AS (hex(zeroblob(900000000))))",
        )
        assert "computed columns" in told(path)

    def test_a_query_that_never_ends(self, stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from megaprof.nsys import files as tables

        path = sorted(stages.glob("*.sqlite"))[0]
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000)"
        edit(path, f"INSERT INTO StringIds {numbers} SELECT i + 1000, 'x' FROM n")
        monkeypatch.setattr(tables, "_SECONDS", -1e9)
        assert "takes longer than any healthy file" in told(path)

    def test_more_rows_than_fit(self, stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from megaprof.nsys import files as tables

        monkeypatch.setattr(tables, "_ROW_BYTES", 1 << 50)
        assert "more than 0 rows" in told(sorted(stages.glob("*.sqlite"))[0])

    def test_values_of_other_types_are_counted(self, stages: Path) -> None:
        path = sorted(stages.glob("*.sqlite"))[0]
        edit(path, "UPDATE NVTX_EVENTS SET start = 'early' WHERE start = (SELECT MAX(start) FROM NVTX_EVENTS)")
        (trace,) = traces_in(path)
        assert [(w.kind, w.count) for w in trace.warnings] == [("events_left_out", 1)]

    def test_nothing_is_written_and_no_journal_is_left(self, stages: Path) -> None:
        before = {path.name: path.read_bytes() for path in stages.iterdir()}
        analyze(stages)
        assert {path.name: path.read_bytes() for path in stages.iterdir()} == before


class TestReports:
    """``.nsys-rep``, by an nsys that only does what ``nsys export`` is asked for."""

    @pytest.fixture
    def nsys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        tool = tmp_path / "bin" / "nsys"
        tool.parent.mkdir()
        tool.write_text(
            '#!/bin/sh\necho "$@" >> "$0.log"\nfor last; do :; done\n'
            'for arg; do case "$arg" in --output=*) cp "$last" "${arg#--output=}";; esac; done\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
        return tool

    def test_a_report_is_exported_once(self, nsys: Path, tmp_path: Path) -> None:
        job = tmp_path / "job"
        for trace in two_stages():
            write_nsys(trace, job)
        for path in list(job.glob("*.sqlite")):
            path.rename(path.with_suffix(".nsys-rep"))
        first = analyze(job).to_json()
        assert len(first["targets"]) == 1
        assert analyze(job).to_json() == first
        assert len(nsys.with_name("nsys.log").read_text().splitlines()) == 2
        assert len(list(job.glob("*.sqlite"))) == 2
        assert not list(job.glob(".*"))

    def test_nsys_is_needed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.nsys-rep"
        path.write_text("x")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "nsys is not on PATH here: run 'nsys export --type sqlite a.nsys-rep'" in told(path)

    def test_an_export_that_fails_leaves_nothing(self, nsys: Path, tmp_path: Path) -> None:
        path = tmp_path / "job" / "a.nsys-rep"
        path.parent.mkdir()
        path.write_text("x")
        nsys.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 1\n")
        assert told(path) == "nsys export failed: no such thing"
        assert [each.name for each in path.parent.iterdir()] == ["a.nsys-rep"]


def test_annotations_in_a_window_are_kept(tmp_path: Path) -> None:
    trace = TraceBuilder(microbatches=1, chunks=[chunk(2)])
    trace.call(0, 40)
    trace.forward(0, 0, 10)
    trace.event("megaprof/role/ref", 12, 3)
    write_nsys(replace(trace), tmp_path)
    (read,) = traces_in(*recordings_in(tmp_path)[0])
    assert [r.name.label for r in read.ranges] == ["train_actor", "forward", "role/ref"]


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ("end = end + 200000000", True),
        ("start = 0, end = 0", False),
        ("end = start - 1000", False),
        ("end = end + 4000000000000000", False),
    ],
)
def test_impossible_times_of_kernels(change: str, known: bool, tmp_path: Path) -> None:
    """The same checks as for traces of Kineto's."""
    write(Scenario("gpu", layers=(2, 2), microbatches=4), tmp_path / "kineto")
    as_nsys(tmp_path / "kineto", tmp_path / "nsys")
    (whole,) = analyze(tmp_path / "nsys").targets
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    stream = f"SELECT MIN(streamId) FROM {table}"
    some = f"SELECT rowid FROM {table} WHERE streamId = ({stream}) ORDER BY start LIMIT 3 OFFSET 2"
    for path in (tmp_path / "nsys").glob("*.sqlite"):
        edit(path, f"UPDATE {table} SET {change} WHERE rowid IN ({some})")
    (found,) = analyze(tmp_path / "nsys").targets
    for stage, expected in zip(found.stages, whole.stages, strict=True):
        if known:
            assert stage.compute_ms.mean == pytest.approx(expected.compute_ms.mean, rel=0.01)
        else:
            assert stage.compute_ms is None
    assert "times_impossible" in kinds(found.warnings)
