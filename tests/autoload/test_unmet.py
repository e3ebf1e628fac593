"""A run under ``megaprof run`` in which no hooks went in says so once, with how far it came."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaprof import ProfileConfig
from megaprof.autoload import unmet
from megaprof.autoload.arming import environment

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
    assert line.endswith(unmet._REASONS[came])


@pytest.mark.slow
def test_a_launcher_says_it_once_for_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    (line,) = said(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert line.endswith(unmet._REASONS[1])


@pytest.mark.parametrize(
    "code", ["import megaprof; megaprof.install_hooks(None)", "import megaprof.autoload.unmet as u; u.installed()"]
)
def test_whoever_asked_for_hooks_hears_of_them_elsewhere(tmp_path: Path, code: str) -> None:
    off = "import os; del os.environ['MEGAPROF_TARGET']; "
    assert said(tmp_path, "-c", off + code) == []
    assert said(tmp_path, "-c", CHILD.format(off + code)) == []


def test_of_many_first_processes_one_speaks(tmp_path: Path) -> None:
    assert said(tmp_path, "-c", "print(1)", SLURM_PROCID="3") == []
    assert len(said(tmp_path, "-c", "print(1)", SLURM_PROCID="0")) == 1
