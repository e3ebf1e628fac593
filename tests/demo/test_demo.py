"""``megaprof demo`` as a user runs it: real ranks, real traces, the stage that was built slow named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from megaprof import demo
from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.report.report import analyze
from megaprof.analysis.samples import Interval
from megaprof.analysis.trace.traces import read_trace
from megaprof.cli import main
from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.parallel.machine import processes_with
from megaprof.parallel.schedules import EXCHANGES
from megaprof.testing import launcher
from tests.analysis.scenarios import Scenario, write

SMALL = ["--microbatches", "6", "--steps", "2"]
SMALLER = ["--microbatches", "4"]
STARTING = "starting the ranks"
LIVE = ["--live", "--microbatches", "4"]


def test_more_steps_are_captured_as_the_report_asks(tmp_path: Path) -> None:
    write(Scenario("even", layers=(4, 4), gpu=False, steps=2), tmp_path)
    report = analyze(tmp_path)
    (target,) = report.targets
    price = Interval(9.0, -2.0, 20.0)
    asking = [Cause("layers", price, 1.0, 9.0, 6, None, more_steps=more) for more in (7, 37, 0)]
    assert target.diagnosis is not None
    unsure = replace(target.diagnosis, causes=(), perhaps=tuple(asking))
    assert demo._steps_needed(replace(report, targets=(replace(target, diagnosis=unsure),))) == 37
    flags = demo.profile_flags(tmp_path, 9 + 37, None)
    assert flags[-1] == "39,40,41"


@pytest.mark.parametrize(
    ("steps", "captured"), [(1, [0]), (2, [1]), (3, [1, 2]), (4, [1, 2]), (9, [4, 5, 6]), (16, [9, 10, 11])]
)
def test_steps_without_a_profiler_surround_the_captured_ones(steps: int, captured: list[int], tmp_path: Path) -> None:
    assert demo.profile_flags(tmp_path, steps, None)[-1] == ",".join(map(str, captured))


@pytest.mark.slow
def test_a_demo_captures_and_reports_what_it_was_told_to_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # That uneven layers are named as the cause: tests/analysis/report/test_truth.py, on times that no load blurs.
    out = tmp_path / "out"
    status = main(["demo", *SMALL, "--layout", "2,6", "--out", str(out)])
    stdout, stderr = capfd.readouterr()
    assert status == 0, stderr
    phases = [line.strip() for line in stderr.splitlines() if line.startswith("  ")]
    assert phases == [
        "starting the ranks",
        "importing Megatron-Core",
        "building the model",
        "train_actor step 0 (1 of 2)",
        "train_actor step 1 (2 of 2)",
        "train_log_probs step 0 (1 of 2)",
        "train_log_probs step 1 (2 of 2)",
        "evaluation pass",
        "finishing the files",
    ]
    order = [stderr.index(text) for text in ("train_actor step 1 (", "captured train_actor step 1:")]
    assert order == sorted(order), "a step is announced before it is captured"
    assert "Warning" not in stderr, "Megatron-Core's, of what a CPU lacks"
    assert "ui.perfetto.dev" in stdout
    assert str(out) in stdout.replace("\n", "")
    assert len(list(out.glob("*.pt.trace.json.gz"))) == 4
    assert "<title>megaprof: " in (out / "report.html").read_text()
    hints = stdout.rpartition("To see it in your browser: ")[2].splitlines()
    assert hints[:3] == [
        f"megaprof ui {out}",
        f"Report as JSON: {out / 'report.json'}",
        f"Report as one HTML file: {out / 'report.html'}",
    ]
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert [target["target"] for target in report["targets"]] == ["train_actor", "train_log_probs"]
    for target in report["targets"]:
        assert [[chunk["holds"]["layers"] for chunk in stage["chunks"]] for stage in target["stages"]] == [[2], [6]]
        assert all(stage["forward_ms"]["mean"] > 0 for stage in target["stages"])


@pytest.mark.slow
def test_one_stage_has_no_pipeline_to_be_imbalanced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["demo", *SMALL, "--pp", "1", "--out", str(out)]) == 0
    for target in json.loads((out / "report.json").read_text())["targets"]:
        assert target["slowest_stage"] is None
        assert {cause["stage"] for cause in target["diagnosis"]["causes"]} <= {0, None}
        assert [stage["bubble_ms"]["mean"] for stage in target["stages"]] == [0.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "5,4,1"], "layout"),
        (["--layout", "six"], "--layout six"),
        (["--steps", "0"], "--steps 0"),
        (["--pp", "0"], "--pp 0: must be at least 1"),
        (["--pp", "64"], "--pp 64: 64 ranks on one CPU; must be at most 32"),
        (["--dp", "33"], "--pp 2 --dp 33: 66 ranks on one CPU"),
        (["--fault", "hang"], "--fault hang: needs --live"),
        (
            ["--fault", "slow-rank", "--dp", "1"],
            "--fault slow-rank with --dp 1: no other rank does the same work;",
        ),
        (["--fault", "slow-rank", "--ep", "2", "--dp", "2"], "--dp must be at least 4"),
        (
            ["--fault", "slow-link", "--pp", "1"],
            "--pp 1: there is no link; --pp must be at least 2",
        ),
        (["--fault", "slow-link", "--vpp", "2"], "--fault slow-link with --vpp 2: exchanges overlap"),
        (["--fault", "hang", "--live"], "--fault hang with --steps 2: the fault begins at step 3"),
        (["--fault", "hang", "--live", "--steps", "9", "--pp", "1"], "--fault hang with one rank"),
        (["--out", "."], "--out ."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "new")]
    assert main(["demo", *SMALL, *arguments, *out]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


class Dropped:
    """Python loses what a handler of a signal raises in here."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("live", [["--live"], []])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_counts_wherever_the_launcher_is(
    number: signal.Signals, live: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = launcher.start

    def started(code: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
        dropped = Dropped(number)
        del dropped
        return start("import time; time.sleep(5)", env)

    monkeypatch.setattr(launcher, "start", started)
    arguments = ["demo", *live, "--pp", "1", "--out", str(tmp_path / "out")]
    if number == signal.SIGINT:
        assert main(arguments) == 130
    else:
        with pytest.raises(SystemExit, match="143"):
            main(arguments)


class Live:
    """A demo that runs on, with what it has printed so far."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.token = f"DEMO_{uuid.uuid4().hex}"
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megaprof", "demo", *LIVE, *arguments],
            cwd=directory,
            env={**os.environ, self.token: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        streams = (self.process.stdout, self.lines), (self.process.stderr, self.errors)
        self.readers = [threading.Thread(target=self._read, args=each) for each in streams]
        for reader in self.readers:
            reader.start()

    @staticmethod
    def _read(stream: IO[str], found: list[str]) -> None:
        for line in stream:
            found.append(line)

    def until(self, text: str, *, errors: bool = False) -> None:
        """Wait until it has said ``text``."""
        lines, deadline = self.errors if errors else self.lines, time.monotonic() + 120
        while not any(text in line for line in lines):
            assert self.process.poll() is None, "".join(self.errors)
            assert time.monotonic() < deadline, (self.lines, self.errors)
            time.sleep(0.05)

    @property
    def commands(self) -> dict[str, str]:
        """What it tells a user to type, by the name of the command."""
        typed = [line.strip() for line in self.lines if " megaprof " in line and line.startswith("  ")]
        return {line.partition(" megaprof ")[2].split()[0]: line for line in typed}

    def type(self, name: str) -> subprocess.CompletedProcess[str]:
        """Type one of them as it was printed, in a shell that stands elsewhere."""
        return subprocess.run(["bash", "-c", self.commands[name]], cwd="/", capture_output=True, text=True, timeout=120)

    def end(self, number: int = signal.SIGINT) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(120)
        for reader in self.readers:
            reader.join()
        assert "Traceback" not in "".join((*self.lines, *self.errors))
        assert processes_with(self.token) == []
        return code


@contextmanager
def live(directory: Path, *arguments: str) -> Iterator[Live]:
    demo = Live(directory, list(arguments))
    try:
        yield demo
    finally:
        if demo.process.poll() is None:
            demo.process.kill()


@pytest.mark.slow
def test_a_live_demo_is_watched_and_asked_by_the_printed_commands_until_ctrl_c(tmp_path: Path) -> None:
    with live(tmp_path) as job:
        job.until("Ctrl-C ends the job")
        assert sorted(job.commands) == ["status", "trigger", "watch"]
        watch = subprocess.Popen(
            ["bash", "-c", "exec " + job.commands["watch"]], cwd="/", stdout=subprocess.PIPE, text=True
        )
        status, trigger = job.type("status"), job.type("trigger")
        assert job.end() == 0
        watched, _ = watch.communicate(timeout=60)
    assert status.returncode == 0, status.stderr
    assert "train_actor: step " in status.stdout
    assert trigger.returncode == 0, trigger.stderr
    assert len([path for path in trigger.stdout.splitlines() if Path(path).is_file()]) == 4
    assert watch.returncode == 0
    assert "imbalance" in watched
    said = "".join(job.lines)
    assert "The demo has ended after " in said
    (out,) = (tmp_path / "megaprof-demo").iterdir()
    assert "train_actor" in said.partition("The demo has ended")[2]
    assert "<title>megaprof: " in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_job_that_hangs_ends_and_says_where_its_files_are(tmp_path: Path) -> None:
    # That status names who hangs: tests/control/test_hang.py.
    with live(tmp_path, "--fault", "hang") as job:
        job.until("Fault: rank 1 (stage 1) stops in microbatch 2 of step 3, and the others wait for it.")
        assert job.end(signal.SIGTERM) == 143
        (hint,) = [line for line in job.errors if line.startswith("To see what was recorded: ")]
    assert hint.split()[-2] == "report"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
def test_a_signal_ends_all_ranks_while_they_start(tmp_path: Path, number: int, code: int) -> None:
    with live(tmp_path) as job:
        job.until(STARTING, errors=True)
        assert job.end(number) == code


@pytest.mark.slow
def test_ranks_that_do_not_end_are_killed_by_a_second_ctrl_c(tmp_path: Path) -> None:
    with live(tmp_path) as job:
        job.until("Ctrl-C ends the job")
        for rank in set(processes_with(job.token)) - {job.process.pid}:
            os.kill(rank, signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        job.until("press again to end at once", errors=True)
        assert job.end() == 130
        assert [line for line in job.errors if line.startswith("To see what was recorded: ")]


@pytest.mark.slow
def test_the_slow_rank_takes_longer_for_every_layer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # That it is named: tests/cli/test_report_timelines.py, on times that no load blurs.
    arguments = ["--fault", "slow-rank", "--live", "--steps", "9", "--out", str(tmp_path / "out")]
    assert main(["demo", *SMALLER, *arguments]) == 0
    said = capfd.readouterr().out
    assert "Fault: rank 1 (stage 0) takes at least twice as long for every layer, from step 3 on.\n" in said
    assert "The demo has ended after 9 steps.\n" in said
    assert json.loads((tmp_path / "out" / "report.json").read_text())["targets"]
    (path,) = (tmp_path / "out").rglob(f"*.rank00001*{SUFFIX}")
    slow = [int(step["forward"]) for step in read_timeline(path).steps if step["step"] >= 3]
    assert len(slow) == 6
    assert min(slow) >= 0.99 * 4 * 2 * 2 * 24_000  # microbatches, layers, twice its microseconds


@pytest.mark.slow
def test_every_exchange_of_the_slow_link_takes_longer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # That a slow link is named: tests/integration/test_causes.py.
    assert main(["demo", *SMALLER, "--fault", "slow-link", "--steps", "1", "--out", str(tmp_path / "out")]) == 0
    assert "Fault: each exchange between stages 1 and 2 takes 50 ms longer, in every step.\n" in capfd.readouterr().out
    (path,) = (tmp_path / "out").glob("train_actor.*.pp1-*.gz")
    exchanges = [each for each in read_trace(path).ranges if each.name.label in EXCHANGES]
    delayed = [each for each in exchanges if {"send_next", "recv_next"} & {*EXCHANGES[each.name.label]}]
    assert len(delayed) >= 4
    assert all(each.end - each.start >= 50_000_000 for each in delayed)
