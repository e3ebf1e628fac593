"""Reading commands on addresses that fsspec knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megaprof.analysis.report.report import analyze
from megaprof.cli import main
from megaprof.formats.inputs import Unreachable, files_below, local_copy, path_of
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.exchanging import exchanging
from tests.analysis.fuzzing import nsys_files
from tests.analysis.job_timelines import write_timelines

ROOT = Path(__file__).parents[2]


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    local_copy.cache_clear()


def upload(directory: Path, filesystem: Any, to: str) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            filesystem.pipe_file(f"{to}/{path.relative_to(directory)}", path.read_bytes())


def job(directory: Path) -> Path:
    """Two stages on two hosts, in a directory of their own."""
    for trace in exchanging([0.0, 40.0]):
        trace.write(directory / "shard")
    return directory


def without_places(document: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in document.items() if key not in ("source", "traces", "timelines")})


def test_a_remote_report_says_the_same(tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    local = job(tmp_path / "job")
    upload(local, memory, "/bucket/job")
    there = analyze("memory://bucket/job")
    assert without_places(there.to_json()) == without_places(analyze(local).to_json())
    assert [path.name for path in there.traces] == [path.name for path in analyze(local).traces]
    assert main(["report", "memory://bucket/job", "--html", str(tmp_path / "r.html")]) == 0
    assert "memory://bucket/job" in capsys.readouterr().out
    (first, *_) = [str(path) for path in there.traces]
    assert first.startswith("memory://bucket/job/shard/")
    assert main(["report", first]) == 0


def test_remote_traces_are_merged_and_compared(tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    local = job(tmp_path / "job")
    upload(local, memory, "/bucket/job")
    outs = [tmp_path / "there.json", tmp_path / "here.json"]
    for source, out in zip(("memory://bucket/job", str(local)), outs, strict=True):
        assert main(["merge", source, "-o", str(out)]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert main(["report", str(local), "--json", str(tmp_path / "r.json")]) == 0
    memory.pipe_file("/bucket/r.json", (tmp_path / "r.json").read_bytes())
    capsys.readouterr()
    for before in ("memory://bucket/job", "memory://bucket/r.json"):
        assert main(["diff", before, str(local)]) == 0
        assert "+0.0%" in capsys.readouterr().out


def test_remote_timelines_are_reported_and_exported(tmp_path: Path, memory: Any) -> None:
    write_timelines(tmp_path / "job", WorldLayout(ParallelSizes(pp=2, dp=2)), steps=6, microbatches=2)
    upload(tmp_path / "job", memory, "/bucket/job")
    there, here = analyze("memory://bucket/job").to_json(), analyze(tmp_path / "job").to_json()
    assert there["targets"][0]["stages"] == here["targets"][0]["stages"]
    assert main(["export", "memory://bucket/job", "--parquet", str(tmp_path / "parquet")]) == 0
    assert (tmp_path / "parquet").is_file()


def test_remote_files_of_nsys_are_copied_once(tmp_path: Path, memory: Any) -> None:
    directory = tmp_path / "job"
    nsys_files(directory)
    upload(directory, memory, "/bucket/job")
    there = analyze("memory://bucket/job")
    assert without_places(there.to_json()) == without_places(analyze(directory).to_json())
    names = sorted(path.name for path in directory.glob("*.sqlite"))
    first, again = (local_copy(path_of("memory://bucket/job") / names[0]) for _ in range(2))
    assert first == again
    assert local_copy.cache_info().misses == 2 * len(names), "each of them once, there and here"
    memory.pipe_file("/bucket/other/x.nsys-rep", b"x")
    with pytest.raises(Exception, match="nsys exports no remote file"):
        analyze("memory://bucket/other")


@pytest.mark.parametrize(
    "command", [["report"], ["merge", "-o", "{}/m.json"], ["export", "--parquet", "{}/p"], ["diff", "{}"]]
)
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("memory://bucket/nothing", "does not exist"),
        ("nonsense://bucket/job", "cannot be reached: ValueError: Protocol not known: nonsense"),
    ],
)
def test_what_cannot_be_reached_is_one_line(
    tmp_path: Path, command: list[str], address: str, reason: str, memory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], address, *(part.format(tmp_path) for part in command[1:])]) == 1
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1


def test_a_connection_that_breaks_is_a_warning_about_one_file(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(job(tmp_path), memory, "/bucket/job")
    whole = type(memory)._open

    def broken(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if "pp1" in path:
            raise RuntimeError("the network\nis gone")
        return whole(self, path, *arguments, **options)

    monkeypatch.setattr(type(memory), "_open", broken)
    (note,) = [each for each in analyze("memory://bucket/job").warnings if each.kind == "skipped"]
    assert "it cannot be read: RuntimeError: the network is gone" in note.said


def test_paths_stay_remote(memory: Any) -> None:
    path = path_of("memory://bucket/a/b.json.gz")
    assert (str(path), path.name, path.suffix) == ("memory://bucket/a/b.json.gz", "b.json.gz", ".gz")
    assert (str(path.parent), str(path.parent / "c")) == ("memory://bucket/a", "memory://bucket/a/c")
    assert path_of("file:///tmp/x") == Path("/tmp/x") == path_of("/tmp/x")
    memory.pipe_file("/bucket/a/b.json.gz", b"abc")
    assert path.stat().st_size == 3
    assert list(map(str, files_below(path_of("memory://bucket"), (".gz",)))) == [str(path)]
    assert list(map(str, path_of("memory://bucket").iterdir())) == [str(path.parent)]
    with pytest.raises(Unreachable):
        (path.parent / "none").stat()


@pytest.mark.slow
def test_reports_on_a_real_server_that_speaks_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    running = server.ThreadedMotoServer(port=0)
    running.start()
    try:
        host, port = running.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        filesystem = s3fs.S3FileSystem(endpoint_url=f"http://{host}:{port}")
        filesystem.mkdir("bucket")
        local = job(tmp_path / "job")
        upload(local, filesystem, "bucket/job")
        command = [sys.executable, "-m", "megaprof"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        for arguments in (
            ["report", "s3://bucket/job", "--json", str(tmp_path / "there.json")],
            ["merge", "s3://bucket/job", "-o", str(tmp_path / "m.json.gz")],
            ["diff", "s3://bucket/job", str(local)],
        ):
            ran = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=300)
            assert ran.returncode == 0, ran.stderr
        there = json.loads((tmp_path / "there.json").read_text())
        assert there["targets"] == analyze(local).to_json()["targets"]
        gone = subprocess.run(
            [*command, "report", "s3://no-such-bucket/job"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert gone.returncode == 1
        assert gone.stderr.count("\n") == 1, gone.stderr
    finally:
        running.stop()
