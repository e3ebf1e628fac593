"""The end of a job waits for the files of its workers, or says how far it came if no hooks went in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaprof import ProfileConfig
from megaprof.artifacts import writer
from megaprof.artifacts.writer import Writer
from megaprof.autoload import arming, ray
from megaprof.autoload.arming import environment
from megaprof.formats.names import raw_path

ROOT = Path(__file__).parents[2]
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], check=True)"
LOADED = "import sys, types; sys.modules['{0}'] = types.ModuleType('{0}')"
ASKED = """
from megatron.core.pipeline_parallel import get_forward_backward_func
try:
    get_forward_backward_func()
except AssertionError:
    pass
"""


def job_in(directory: Path, seconds: int = 0) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), dir=str(directory), flush_seconds=seconds)


def handed_over(directory: Path, name: str) -> tuple[Path, Path]:
    raw = raw_path(directory / name)
    raw.write_bytes(b"data")
    return raw, directory / name


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
        publish(*handed_over(tmp_path, "b.json"))

    second = threading.Event()
    monkeypatch.setattr(writer, "publish", late)
    background.submit(*handed_over(tmp_path, "a.json"))
    background.run(derive)
    waiting = threading.Thread(target=lambda: (ray.wait(job_in(tmp_path, 30), time.time()), order.append("waited")))
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
    assert not ray.wait(job_in(tmp_path), time.time())
    assert ".a.json." in caplog.text


def test_files_of_other_jobs_are_not_waited_for(tmp_path: Path) -> None:
    old, _ = handed_over(tmp_path, "a.json")
    os.utime(old, (1e9, 1e9))
    (tmp_path / ".hidden").touch()  # somebody else's
    assert ray.wait(job_in(tmp_path), time.time())
    assert ray.wait(job_in(tmp_path / "on another machine"), time.time())


def said(tmp_path: Path, *command: str, **env: str) -> list[str]:
    """What a program says on stderr in an armed environment; afterwards nothing of ours lies in its directory."""
    places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "MEGAPROF_DIR": ""}
    ours = environment(ProfileConfig(target=("train_actor",), dir=str(tmp_path / "traces")), {**os.environ, **places})
    done = subprocess.run([sys.executable, *command], env={**ours, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("megaprof-*"))
    return [line for line in done.stderr.splitlines() if line.startswith("megaprof")]


@pytest.mark.parametrize(
    ("code", "came"),
    [
        ("print(1)", 0),
        (LOADED.format("torch"), 1),
        (LOADED.format("megatron.core"), 2),
        (LOADED.format("megatron.core.pipeline_parallel.schedules"), 3),
        pytest.param(ASKED, 4, marks=pytest.mark.slow),
        (CHILD.format(LOADED.format("torch")), 1),
        ("import os\nif os.fork() == 0:\n    raise SystemExit\nos.wait()", 0),
        ("import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])", 0),
    ],
)
def test_one_line_says_how_far_it_came(tmp_path: Path, code: str, came: int) -> None:
    (line,) = said(tmp_path, "-c", code)
    assert line.startswith("megaprof: no hooks were installed in this process")
    assert line.endswith(arming._REASONS[came])


@pytest.mark.slow
def test_a_launcher_says_it_once_for_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    (line,) = said(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert line.endswith(arming._REASONS[1])


@pytest.mark.parametrize(
    "code",
    [
        "import megaprof; megaprof.install_hooks(None)",
        "from megaprof.runtime.armed import armed; armed.mark('installed')",
        # As if it was killed.
        "import megaprof, os; megaprof.install_hooks(None); os._exit(0)",
    ],
)
def test_whoever_asked_for_hooks_hears_of_them_elsewhere(tmp_path: Path, code: str) -> None:
    off = "import os; del os.environ['MEGAPROF_TARGET']; "
    assert said(tmp_path, "-c", off + code) == []
    assert said(tmp_path, "-c", CHILD.format(off + code)) == []


def test_of_many_first_processes_one_speaks(tmp_path: Path) -> None:
    assert said(tmp_path, "-c", "print(1)", SLURM_PROCID="3") == []
    assert len(said(tmp_path, "-c", "print(1)", SLURM_PROCID="0")) == 1


def test_an_executor_of_another_kind_stays_as_it_is() -> None:
    class Manager:
        def _make_actor_method_executor(self, name: str) -> object:
            return name

    ray.between_methods(Manager)
    assert Manager()._make_actor_method_executor("of a later version of Ray's") == "of a later version of Ray's"
