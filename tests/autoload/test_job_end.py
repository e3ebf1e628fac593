"""The end of a job waits for the files of its workers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megaprof.artifacts import writer
from megaprof.artifacts.writer import Artifact, Writer
from megaprof.autoload.job_end import wait_for_files
from megaprof.formats.names import raw_path


def handed_over(directory: Path, name: str) -> Artifact:
    raw = raw_path(directory / name)
    raw.write_bytes(b"data")
    return Artifact(raw, directory / name)


def test_the_end_of_a_job_waits_until_the_last_file_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file is only begun when the first one is finished: between them nothing is half-written."""
    background, gate, order = Writer(), threading.Event(), []
    publish = writer.publish

    def late(raw: Path, final: Path) -> None:
        gate.wait(30)
        publish(raw, final)

    def derive() -> None:
        order.append("between")
        second.wait(30)
        background.finish(handed_over(tmp_path, "b.json"))

    second = threading.Event()
    monkeypatch.setattr(writer, "publish", late)
    background.submit(handed_over(tmp_path, "a.json"))
    background.run(derive)
    waiting = threading.Thread(target=lambda: (wait_for_files(str(tmp_path), 30, time.time()), order.append("waited")))
    waiting.start()
    gate.set()
    waiting.join(1.0)
    assert (waiting.is_alive(), order) == (True, ["between"])
    second.set()
    waiting.join(30)
    assert order == ["between", "waited"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    background.close()


def test_it_gives_up_and_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handed_over(tmp_path, "a.json")
    assert not wait_for_files(str(tmp_path), 0, time.time())
    assert ".a.json." in caplog.text


def test_files_of_other_jobs_are_not_waited_for(tmp_path: Path) -> None:
    old = handed_over(tmp_path, "a.json").raw
    os.utime(old, (1e9, 1e9))
    (tmp_path / ".hidden").touch()  # somebody else's
    assert wait_for_files(str(tmp_path), 0, time.time())
    assert wait_for_files(str(tmp_path / "on another machine"), 0, time.time())
