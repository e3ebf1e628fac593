"""The finish hook: a command of the user's, which must not be able to hurt."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megaprof.artifacts.writer import FinishHook, Writer
from megaprof.formats.names import raw_path


def submit(background: Writer, final: Path) -> None:
    raw_path(final).write_bytes(b"data")
    background.submit(raw_path(final), final)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_once_per_window_with_the_files_of_that_window(tmp_path: Path) -> None:
    out = tmp_path / "out"
    hook = FinishHook(f'echo "$PROFILED_DIR" $PROFILED_FILES >> {out}', "/save")
    background = Writer(hook=hook)
    for window in ("a", "b"):
        submit(background, tmp_path / f"{window}.gz")
        submit(background, tmp_path / f"{window}.pickle")
        background.end_window()
    background.end_window()  # a window without a file
    assert background.close(60)
    assert out.read_text().splitlines() == [f"/save {tmp_path}/{w}.gz {tmp_path}/{w}.pickle" for w in "ab"]


def test_it_runs_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = tmp_path / "typed"
    typed.mkdir()
    monkeypatch.chdir(typed)
    background = Writer(hook=FinishHook("pwd >> out", "/save"))
    monkeypatch.chdir(tmp_path)
    submit(background, tmp_path / "a.gz")
    background.end_window()
    assert background.flush(60)
    assert (typed / "out").read_text() == f"{typed}\n"
    (typed / "out").unlink()
    typed.rmdir()  # then where the process is
    submit(background, tmp_path / "b.gz")
    background.end_window()
    assert background.close(60)
    assert (tmp_path / "out").read_text() == f"{tmp_path}\n"


def test_nothing_runs_without_a_file(tmp_path: Path) -> None:
    background = Writer(hook=FinishHook(f"touch {tmp_path}/ran", "/save"))
    background.end_window()
    assert background.close(60)
    assert list(tmp_path.iterdir()) == []


def test_its_output_and_its_failure_are_logged_and_not_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    background = Writer(hook=FinishHook("echo said; echo complained >&2; exit 7", "/save"))
    submit(background, tmp_path / "a.gz")
    assert background.close(60)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "ERROR",
            "megaprof: --profile-on-finish 'echo said; echo complained >&2; exit 7': exit status 7: said\ncomplained",
        )
    ]
    assert capfd.readouterr() == ("", "")


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pids = tmp_path / "pids"
    hook = FinishHook(f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait", "/save", seconds=2)
    hook.run(["a"])
    assert "killed after 2 s" in caplog.text
    started = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []  # a busy machine may be late
    deadline = time.monotonic() + 30
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, started))


def test_something_left_running_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hook = FinishHook(f"sleep 600 & echo $! > {pid}", "/save", seconds=300)
    hook.run(["a"])
    left = int(pid.read_text())
    assert alive(left)
    os.kill(left, 9)


def test_the_end_of_the_process_does_not_wait_for_a_hanging_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = tmp_path / "pid"
    background = Writer(hook=FinishHook(f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600", "/save"))
    submit(background, tmp_path / "a.gz")
    background.end_window()
    while not pid.exists():
        time.sleep(0.01)
    assert not background.close(0.01)
    assert "not finished within 0 s: the finish hook" in caplog.text
    assert not alive(int(pid.read_text()))
    assert background.flush(30)
