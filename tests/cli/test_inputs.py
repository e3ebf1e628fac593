"""Commands on files that are none: one line, and no waiting."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from megaprof.cli import COMMANDS, main, writing
from megaprof.formats.phrases import Unanswerable

NAME = "train_actor.step000005.pp0-tp0-cp0-ep0-dp0.rank00000"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A FIFO, a link to an endless device and a huge sparse file, each as a trace and as a timeline."""
    for number, suffix in enumerate((".pt.trace.json.gz", ".pt.trace.json", ".timeline.bin")):
        os.mkfifo(tmp_path / f"fifo{number}{suffix}")
        (tmp_path / f"endless{number}{suffix}").symlink_to("/dev/zero")
        with open(tmp_path / f"{NAME}{suffix}", "wb") as file:
            file.truncate(1 << 41)
    return tmp_path


def test_the_option_of_the_output_is_not_blamed_for_what_cannot_be_read(tmp_path: Path) -> None:
    source, out = tmp_path / "traces", tmp_path / "out" / "step.json"
    for folder in (source, out.parent):
        folder.mkdir()
    for read in (source / f"{NAME}.pt.trace.json", source / "gone" / "it", tmp_path / "elsewhere", out.parent / "b"):
        with pytest.raises(FileNotFoundError), writing("-o", out, source):
            read.open()
    for written in (out, out.parent / ".step.json.1.tmp", out / "part-0", tmp_path / "out" / "step.json" / "a" / "b"):
        with pytest.raises(Unanswerable, match=f"-o {out} cannot be written: No such file"), writing("-o", out, source):
            written.open()
    with pytest.raises(Unanswerable, match=r"-o .* cannot be written: No space left"), writing("-o", out, source):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "command",
    [
        ["report", "{}"],
        ["merge", "{}", "-o", "{}/out.json.gz"],
        ["export", "{}", "--parquet", "{}/out"],
        ["diff", "{}", "{}"],
        ["report", "{}/fifo0.pt.trace.json.gz"],
        ["merge", "{}/fifo0.pt.trace.json.gz", "-o", "{}/out.json.gz"],
        ["export", "{}/fifo2.timeline.bin", "--parquet", "{}/out"],
        ["diff", "{}/fifo1.pt.trace.json", "{}/endless1.pt.trace.json"],
        ["merge", "{}", "-o", "{}/fifo0.pt.trace.json.gz"],
    ],
)
def test_hostile_inputs_are_refused_in_one_line(
    hostile: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(hostile) for part in command]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith(f"megaprof {command[0]}: ")
    assert said.count("\n") == 1


def test_a_file_that_does_not_fit_into_memory_is_one_line(tmp_path: Path) -> None:
    with open(tmp_path / f"{NAME}.timeline.bin", "wb") as file:
        file.truncate(3 << 30)
    script = (
        "import resource, sys\n"
        "from megaprof.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "sys.exit(main(['report', sys.argv[1], '--max-input-mib', '100000']))"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "it does not fit into memory" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_the_option_is_a_number_of_mib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--max-input-mib", "0"]) == 2
    assert "--max-input-mib 0" in capsys.readouterr().err


@pytest.fixture
def closed() -> Iterator[Path]:
    """A directory that is another user's alone, as this process finds it; pytest's own are closed as a whole."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    (place / "closed" / "inside").mkdir(parents=True)
    (place / "closed").chmod(0o700)
    (place / "closed" / "inside" / f"{NAME}.pt.trace.json.gz").touch()
    for module, _ in COMMANDS.values():  # the other user need not be able to read it
        import_module(f"megaprof.{module}")
    os.seteuid(23456)
    yield place / "closed"
    os.seteuid(0)
    shutil.rmtree(place)


@pytest.mark.parametrize("inside", ["", "/inside", f"/inside/{NAME}.pt.trace.json.gz"])
@pytest.mark.parametrize(
    "command",
    [
        ["report", "{}"],
        ["merge", "{}", "-o", "out.json.gz"],
        ["export", "{}", "--parquet", "out"],
        ["diff", "{}", "{}"],
        ["open", "{}"],
        ["ui", "{}", "--no-open"],
        ["status", "{}", "--wait", "0"],
        ["watch", "{}", "--once"],
        ["trigger", "{}", "--target", "train_actor"],
    ],
    ids=lambda command: command[0],
)
def test_what_another_user_has_closed_is_refused_in_one_line(
    closed: Path, inside: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(f"{closed}{inside}") for part in command]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"megaprof {command[0]}: ")
    assert said.count("\n") == 1
    assert str(closed) in said


@pytest.mark.parametrize(
    "command",
    [
        ["report", "{}"],
        ["report", "{}", "--html", "{}"],
        ["export", "{}", "--parquet", "out"],
        ["open", "{}"],
        ["status", "{}", "--wait", "0"],
        ["trigger", "{}", "--target", "train_actor"],
        ["ui", "{}"],
        ["watch", "{}", "--once"],
    ],
    ids=" ".join,
)
def test_a_path_that_the_file_system_refuses_is_said_in_a_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("x" * 300)
    assert main([each.format(path) for each in command]) == 1
    assert capsys.readouterr().err == f"megaprof {command[0]}: {path} cannot be read: File name too long\n"


def test_a_working_directory_that_is_gone_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(["tune", "--", "true"]) == 1
    assert capsys.readouterr().err == "megaprof tune: the working directory cannot be read: No such file or directory\n"
