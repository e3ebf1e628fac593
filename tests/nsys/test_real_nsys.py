"""The real Nsight Systems around real jobs on the CPU: `make test-nsys` puts it into .venv/nsys."""

from __future__ import annotations

import os
import shlex
import socket
import sqlite3
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megaprof.analysis.merge import merge
from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.reading import recordings_in, traces_in
from megaprof.analysis.trace.traces import Trace
from megaprof.cli import main
from megaprof.formats import ranges

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv" / "nsys"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (HOME / "bin" / "nsys").exists(),
        reason="there is no Nsight Systems in .venv/nsys: `make test-nsys` gets it where Debian's non-free can be had",
    ),
]
#: Between the ends of one range in NVTX and in the torch trace: both clocks, and the calls between the two.
CLOCK_NS = 1_000_000


@pytest.fixture(autouse=True)
def _nsys_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{HOME / 'bin'}:{os.environ['PATH']}")


def environment(rank: int, port: int, *, old_nvtx: bool = True) -> dict[str, str]:
    path = [*([str(HOME / "site")] if old_nvtx else []), str(ROOT)]
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ranks, **place, "PYTHONPATH": os.pathsep.join(path)}


def job(directory: Path, flags: list[str], *more: str, shutdown: bool = True, old_nvtx: bool = True) -> list[str]:
    """Two ranks, each under the nsys command that megaprof prints; returns what they wrote on stderr."""
    flags = [*flags, "--profile-target", "train_actor", "--profile-dir", str(directory), "--profile-select", "all"]
    printed = subprocess.run(
        [sys.executable, "-m", "megaprof", "nsys", "--capture", "nvtx", *(["--shutdown"] * shutdown), *flags],
        env=environment(0, 0),
        capture_output=True,
        text=True,
        check=True,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*shlex.split(printed.stdout), sys.executable, "-m", "tests.nsys.job", *more, *flags]
    running = [
        subprocess.Popen(
            command, env=environment(rank, port, old_nvtx=old_nvtx), cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 4, by nsys and by the torch profiler at once."""
    if not (HOME / "bin" / "nsys").exists():
        pytest.skip("no nsys")
    directory = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{HOME / 'bin'}:{os.environ['PATH']}")
        flags = ["--profile-tool", "nsys", "torch", "--profile-activities", "cpu"]
        said = job(directory, [*flags, "--profile-steps", "4", "--profile-ranges", "module"])
        for text in said:
            assert "trained" in text, text
        for kind in ("torch", "nsys"):
            (directory / kind).mkdir()
        for path in directory.glob("*.pt.trace.json*"):
            path.rename(directory / "torch" / path.name)
        for path in [*directory.glob("*.nsys.json"), *directory.glob("*.nsys-rep")]:
            path.rename(directory / "nsys" / path.name)
        analyze(directory / "nsys")  # exports
    return directory


def traces(directory: Path) -> dict[int, Trace]:
    found = [trace for source in recordings_in(directory)[0] for trace in traces_in(source)]
    return {trace.metadata.coords.rank: trace for trace in found}


def test_every_range_is_where_the_torch_trace_has_it(both: Path) -> None:
    torch, nsys = traces(both / "torch"), traces(both / "nsys")
    assert set(torch) == set(nsys) == {0, 1}
    for rank, trace in torch.items():
        # nsys has no ranges of collections of garbage, which come when Python likes.
        found = [each for each in trace.ranges if each.name.label != ranges.GARBAGE]
        assert [str(r.name) for r in nsys[rank].ranges] == [str(r.name) for r in found]
        assert nsys[rank].metadata == replace(trace.metadata, profiler=None)  # of which nsys says nothing
        pairs = list(zip(nsys[rank].ranges, found, strict=True))
        # The median: on a busy machine a thread may lose the processor between the two ends of one range.
        assert statistics.median(abs(ours.start - theirs.start) for ours, theirs in pairs) < CLOCK_NS
        assert statistics.median(abs(ours.end - theirs.end) for ours, theirs in pairs) < CLOCK_NS


def test_the_report_is_that_of_the_torch_trace(both: Path) -> None:
    (of_torch,), (of_nsys,) = (analyze(both / kind).to_json()["targets"] for kind in ("torch", "nsys"))
    for key in ("microbatches", "schedule", "sizes"):
        assert of_nsys[key] == of_torch[key]
    for ours, theirs in zip(of_nsys["stages"], of_torch["stages"], strict=True):
        assert [chunk["holds"] for chunk in ours["chunks"]] == [chunk["holds"] for chunk in theirs["chunks"]]
        assert set(ours["modules_ms"]) == set(theirs["modules_ms"])


def test_merge_and_diff(both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (merge(both / kind, tmp_path / f"{kind}.json.gz") for kind in ("nsys", "torch"))
    assert (ours.ranks, ours.arrows) == (theirs.ranks, theirs.arrows)
    assert ours.arrows == 4 * 2
    assert main(["diff", str(both / "torch"), str(both / "nsys")]) == 0
    assert "train_actor" in capsys.readouterr().out


def test_a_window_per_step_is_a_file_per_step(tmp_path: Path) -> None:
    for text in job(tmp_path, ["--profile-tool", "nsys", "--profile-steps", "2,4"], shutdown=False):
        assert "trained" in text, text
    assert len(list(tmp_path.glob("*.nsys-rep"))) == 4
    (target,) = analyze(tmp_path).targets
    assert target.steps == (2, 4)


def test_a_killed_rank_leaves_the_windows_before(tmp_path: Path) -> None:
    """The process writes the metadata of a window when that is closed, so the step in which it died is left out."""
    job(tmp_path, ["--profile-tool", "nsys", "--profile-steps", "2:6"], "--die-in-step", "4")
    found = []
    for path in recordings_in(tmp_path)[0]:
        with suppress(Undecodable):  # whether there is a file of that step depends on when nsys last took ranges over
            found += [trace for trace in traces_in(path) if trace.metadata.coords.pp == 1]
    assert found, "nsys keeps what it has"
    assert all(trace.metadata.steps < (4, 4) and not trace.metadata.truncated for trace in found)


def test_an_nvtx_that_nsys_does_not_see_is_said(tmp_path: Path) -> None:
    """A newer nvtx package under this nsys makes no ranges at all."""
    from importlib.metadata import version

    if tuple(map(int, version("nvtx").split(".")[:3])) < (0, 2, 12):
        pytest.skip("the nvtx package here is old enough for this nsys")
    for text in job(tmp_path, ["--profile-tool", "nsys", "--profile-steps", "2"], old_nvtx=False):
        assert text.count("nsys will record no ranges: nvtx") == 1, text
        assert "trained" in text


def test_a_controller_without_hooks_has_ranges(tmp_path: Path) -> None:
    out = tmp_path / "controller"
    options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", f"--output={out}"]
    command = ["nsys", "profile", *options, sys.executable, "-m", "tests.nsys.controller"]
    subprocess.run(command, env=environment(0, 0), cwd=ROOT, check=True, capture_output=True, timeout=120)
    database = sqlite3.connect(out.with_suffix(".sqlite"))
    rows = database.execute(
        "SELECT COALESCE(text, (SELECT value FROM StringIds WHERE id = textId)) FROM NVTX_EVENTS "
        "WHERE eventType = 59 ORDER BY start"
    )
    names = [name for (name,) in rows]
    database.close()
    assert names == ["megaprof/role/critic", "megaprof/role/rollout/generate", "megaprof/role/rollout/inner"]


def test_every_printed_option_is_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--profile-target",
        "train_actor",
        "--profile-dir",
        str(tmp_path / "new"),
        "--profile-tool",
        "nsys",
        "torch",
    ]
    flags += ["--profile-activities", "cpu", "--profile-memory"]
    for mode in (["--capture", "nvtx"], ["--shutdown"], []):
        assert main(["nsys", *mode, *flags]) == 0
        printed = capfd.readouterr()
        command = [*shlex.split(printed.out), "true"]
        ran = subprocess.run(command, env=environment(0, 0), capture_output=True, text=True, timeout=120, check=False)
        assert "unrecognised" not in ran.stdout + ran.stderr
        assert ran.returncode == 0
    assert (tmp_path / "new").is_dir()
