"""``megaprof export`` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines
from tests.cli.running import as_a_user, megaprof


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_timelines(tmp_path / "job", WorldLayout(ParallelSizes(pp=2, dp=2)), steps=3)
    return tmp_path / "job"


def test_what_was_written_is_printed(job: Path, tmp_path: Path) -> None:
    run = megaprof("export", job, "--parquet", tmp_path / "it's out", "--run", "mine")
    assert (run.returncode, run.stderr) == (0, "")
    assert "12 rows from 4 files, " in run.stdout
    query = run.stdout.partition("for DuckDB: ")[2]
    assert [(*row[:3], row[3] > 0) for row in duckdb.sql(query).fetchall()] == [("mine", pp, 3, True) for pp in (0, 1)]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{job}"], 2, "--parquet"),
        (["{job}", "--parquet", "{job}"], 2, "exists"),
        (["{job}", "--parquet", "{tmp}/x", "--run", " "], 2, "--run ' ' is not a name"),
        (["{tmp}/nowhere", "--parquet", "{tmp}/x"], 1, "does not exist"),
        (["{tmp}/empty", "--parquet", "{tmp}/x"], 1, "holds no timeline"),
        (["{job}", "--parquet", "{tmp}/file/x"], 1, "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line(job: Path, tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    run = megaprof("export", *(argument.format(job=job, tmp=tmp_path) for argument in arguments))
    assert (run.returncode, run.stdout) == (code, "")
    assert says in run.stderr
    assert "Traceback" not in run.stderr
    if says != "--parquet":
        assert run.stderr.count("\n") == 1
    assert len(list(job.iterdir())) == 4
    assert not (tmp_path / "x").exists()


def test_without_pyarrow_the_extra_is_named(job: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "pyarrow.py").write_text("raise ModuleNotFoundError(\"No module named 'pyarrow'\", name='pyarrow')")
    run = as_a_user("export", job, "--parquet", tmp_path / "out", PYTHONPATH=str(hidden))
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "megaprof export: needs pyarrow: pip install 'megaprof[export]'\n"
