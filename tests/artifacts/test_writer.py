"""The background writer: bounded, and never in anybody's way."""

from __future__ import annotations

import gzip
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaprof.artifacts import writer
from megaprof.artifacts.writer import Writer
from megaprof.formats.names import raw_path, temporary_path

Gate = Callable[[], None]


def job(directory: Path, name: str = "t.bin.gz", content: bytes = b"data") -> tuple[Path, Path]:
    final = directory / name
    raw = raw_path(final)
    raw.write_bytes(content)
    return raw, final


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A disk that does not answer: the writer's thread waits until the test calls the gate."""
    gate = threading.Event()
    publish = writer.publish

    def slow(raw: Path, final: Path) -> None:
        gate.wait(60)
        publish(raw, final)

    monkeypatch.setattr(writer, "publish", slow)
    yield gate.set
    gate.set()


def test_no_thread_before_the_first_job_and_none_after_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    background = Writer()
    assert background.flush(0)
    assert set(threading.enumerate()) == before
    background.submit(*job(tmp_path))
    (thread,) = set(threading.enumerate()) - before
    assert background.close(30)
    thread.join(30)
    assert not thread.is_alive()
    assert background.close(0)


def test_a_bad_job_does_not_stop_the_next_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    background = Writer()
    (tmp_path / "file").touch()
    (tmp_path / "raw").write_bytes(b"x")
    background.submit(tmp_path / "missing", tmp_path / "a.gz")
    background.submit(tmp_path / "raw", tmp_path / "file" / "b.gz")
    background.submit(*job(tmp_path))
    assert background.flush(30)
    assert gzip.decompress((tmp_path / "t.bin.gz").read_bytes()) == b"data"
    assert "a.gz is lost: its raw file was not written" in caplog.text
    assert "b.gz failed" in caplog.text
    assert f"{tmp_path}/raw stays there until megaprof runs on this host again" in caplog.text, "as in scratch"


def test_a_full_disk_keeps_the_trace_uncompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(raw: Path, final: Path) -> None:  # tests/artifacts/test_files.py fills a real disk
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "publish", full)
    background = Writer()
    background.submit(*job(tmp_path, "t.pt.trace.json.gz", b"whole"))
    assert background.flush(30)
    assert listing(tmp_path) == ["t.pt.trace.json"]
    assert (tmp_path / "t.pt.trace.json").read_bytes() == b"whole"
    assert "No space left on device; kept" in caplog.text


def test_half_a_trace_is_removed_and_said_to_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    background = Writer()
    background.submit(*job(tmp_path, "t.pt.trace.json.gz", b'{"traceEvents": [{'))
    assert background.flush(30)
    assert listing(tmp_path) == []
    assert "t.pt.trace.json.gz is lost" in caplog.text


def test_what_kineto_left_on_a_full_disk_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = raw_path(tmp_path / "t.pt.trace.json.gz")
    Path(f"{raw}.tmp").write_bytes(b"x" * 1000)
    Writer().submit(raw, tmp_path / "t.pt.trace.json.gz")
    assert listing(tmp_path) == []
    assert "is the disk full" in caplog.text


def test_a_disk_that_does_not_answer_holds_up_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thing that the writer's thread does is to remove the file that says that it is at work."""
    removing, answers, remove = threading.Event(), threading.Event(), writer._remove

    def slow(path: Path) -> None:
        removing.set()
        answers.wait(60)
        remove(path)

    monkeypatch.setattr(writer, "_remove", slow)
    background = Writer()
    background.submit(*job(tmp_path, "a.bin.gz"))
    assert removing.wait(30)
    seen: list[str] = []

    def train() -> None:
        background.run(lambda: seen.extend(listing(tmp_path)))
        background.submit(*job(tmp_path, "b.bin.gz"))

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(10)
    waits = training.is_alive()
    answers.set()
    assert background.flush(30)
    assert not waits
    assert listing(tmp_path) == ["a.bin.gz", "b.bin.gz"]
    assert temporary_path(tmp_path / "writer").name in seen, "others take this process to be done"


def test_flush_names_what_is_not_finished(tmp_path: Path, stuck: Gate, caplog: pytest.LogCaptureFixture) -> None:
    background = Writer()
    background.submit(*job(tmp_path))
    assert not background.flush(0.01)
    assert f"not finished within 0 s: {tmp_path}/t.bin.gz" in caplog.text
    stuck()
    assert background.flush(30)
    assert listing(tmp_path) == ["t.bin.gz"]


def test_what_is_not_finished_at_the_end_is_kept_whole(
    tmp_path: Path, stuck: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    background = Writer()
    background.submit(*job(tmp_path, "a.bin.gz", b"one"))
    background.submit(*job(tmp_path, "b.bin.gz", b"two"))
    assert not background.close(0.01)
    assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == {"a.bin": b"one", "b.bin": b"two"}
    assert "a.bin, uncompressed" in caplog.text


def test_a_fault_in_a_task_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    background = Writer()
    background.run(broken)
    background.submit(*job(tmp_path))
    assert background.flush(30)
    assert "no" in caplog.text
    assert listing(tmp_path) == ["t.bin.gz"]


def test_a_flush_in_a_signal_handler_in_the_middle_of_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SIGTERM does: the training thread holds the writer's lock and flushes."""
    background = Writer()
    background.submit(*job(tmp_path, "a.gz"))
    with background._idle:
        assert background.flush(30)
    assert listing(tmp_path) == ["a.gz"]


def test_without_a_thread_the_caller_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:  # as Python 3.12 does while the interpreter shuts down
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background = Writer()
    background.submit(*job(tmp_path))
    assert not background.pending
    assert listing(tmp_path) == ["t.bin.gz"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


FORK = """
import os, sys, threading, time
from pathlib import Path
from megaprof.artifacts import writer
from megaprof.artifacts.writer import Writer
from megaprof.formats.names import raw_path

directory = Path(sys.argv[1])
gate = threading.Event()
publish = writer.publish
writer.publish = lambda raw, final: (gate.wait(60), publish(raw, final))
background = Writer()
final = directory / "t.gz"
raw = raw_path(final)
raw.write_bytes(b"data")
background.submit(raw, final)
background._idle.acquire()  # the fork comes at the worst moment: the lock is held
child = os.fork()
if child == 0:
    background.forget()
    own = directory / "child.gz"
    raw_path(own).write_bytes(b"child")
    flushed = background.flush(0) and background.close(0)  # nothing is pending here
    gate.set()
    background.submit(raw_path(own), own)
    os._exit(0 if flushed and background.flush(30) and not final.exists() else 1)
background._idle.release()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
gate.set()
sys.exit(status or not background.close(30))
"""


def test_a_forked_child_waits_for_nothing_and_finishes_nothing_of_its_parent(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", FORK, tmp_path], timeout=120, cwd=os.getcwd())
    assert ran.returncode == 0
    assert listing(tmp_path) == ["child.gz", "t.gz"]


def test_an_exception_of_the_hosts_while_a_task_is_queued_leaves_nothing_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler of the host's may raise in any line."""
    writer, done = Writer(), []

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.run(lambda: done.append(1))
    assert writer.close(timeout=30.0)
    assert (done, writer.pending) == ([1], False)
