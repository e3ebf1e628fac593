"""What is installed is enough: what is imported is declared, and reading traces needs no trainer."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import megaprof
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import write_timelines
from tests.analysis.synthetic import pipeline
from tests.control.control_jobs import running

ROOT = Path(__file__).parents[1]
#: Modules that need a trainer when they are imported: nobody imports them before a tool is chosen, or a demo starts.
NEED_TORCH = {
    *(f"megaprof.recorders.{name}" for name in ("cuda_tools", "torch_profiler")),
    "megaprof.testing",
}
#: Extras that a user asks for. The others are for working on megaprof.
FOR_USERS = ("", "train", "report", "export", "mcp", "ui")
#: Hosts, which are there wherever the code that imports them runs.
HOSTS = {"swift"}
#: What a package is called where it is imported, if not what it is called where it is installed from.
IMPORTED_AS = {
    "megatron-core": "megatron",
    "opentelemetry-sdk": "opentelemetry",
    "transformer-engine": "transformer_engine",
}


def declared() -> dict[str, set[str]]:
    """The names under which each extra's packages are imported; the base install is the extra ''."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lists = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    return {extra: {_imported(line) for line in text.split("\n") if line.strip()} for extra, text in lists.items()}


def _imported(requirement: str) -> str:
    name = re.split(r"[^\w-]", requirement.strip())[0]
    return IMPORTED_AS.get(name, name.replace("-", "_"))


def imports() -> Iterator[tuple[Path, str, bool]]:
    """File, top-level name of what it imports, and whether that happens as soon as the file is imported."""
    for path in sorted((ROOT / "megaprof").rglob("*.py")):
        tree = ast.parse(path.read_text())
        at_once = {id(statement) for statement in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            yield from ((path.relative_to(ROOT), name.partition(".")[0], id(node) in at_once) for name in names)


def test_what_is_imported_is_declared() -> None:
    packages = declared()
    known = {"megaprof", *sys.stdlib_module_names}.union(*(packages[extra] for extra in FOR_USERS))
    unknown = {(path, name, at_once) for path, name, at_once in imports() if name not in known}
    of_hosts = {each for each in unknown if each[0].parts[1] == "hosts" and each[1] in HOSTS and not each[2]}
    assert {(str(path), name) for path, name, _ in unknown - of_hosts} == set()


def test_what_training_imports_comes_with_the_base_install_or_the_extra_train() -> None:
    packages = declared()
    known = {"megaprof", *sys.stdlib_module_names} | packages[""] | packages["train"]
    reading = {"agents", "analysis", "cli", "demo", "export", "foreign", "nsys", "rehearse", "tune", "ui"}
    missing = {(str(path), name) for path, name, at_once in imports() if at_once and name not in known}
    assert {each for each in missing if each[0].split("/")[1] not in reading} == set()


# -- without a trainer ------------------------------------------------------------------------------------------------


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of an interpreter, and of all that it starts, in which torch and megatron-core cannot be
    imported."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules.update(torch=None, megatron=None)\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(hidden), str(ROOT)]), "COLUMNS": "100"}


def command(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_every_module_can_be_imported_without_torch(without_torch: dict[str, str]) -> None:
    code = (
        "import importlib, json, pkgutil, megaprof\n"
        "failed = []\n"
        "for module in pkgutil.walk_packages(megaprof.__path__, 'megaprof.', onerror=lambda name: None):\n"
        "    if module.name.endswith(('__main__', 'sitecustomize')): continue\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as missing:\n"
        "        assert missing.name.split('.')[0] in ('torch', 'megatron'), (module.name, missing)\n"
        "        failed.append(module.name)\n"
        "print(json.dumps(failed))"
    )
    ran = command(without_torch, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert {name for name in json.loads(ran.stdout) if not name.startswith("megaprof.testing.")} == NEED_TORCH


def test_hooks_without_a_trainer_say_what_is_missing(without_torch: dict[str, str]) -> None:
    code = (
        "import argparse\n"
        "from megaprof import add_profile_args, install_hooks\n"
        "parser = add_profile_args(argparse.ArgumentParser())\n"
        "assert not install_hooks(config=parser.parse_args([])).active\n"
        "install_hooks(config=parser.parse_args(['--profile-target', 'train_actor', '--profile-dir', 'traces']))"
    )
    ran = command(without_torch, "-c", code)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: install_hooks: torch is not installed; hooks need torch and megatron-core: "
        "pip install 'megaprof[train]'"
    )
    ran = command(without_torch, "-m", "megaprof", "demo")
    assert (ran.returncode, ran.stderr) == (1, "megaprof demo: needs torch: pip install 'megaprof[train]'\n")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Traces of two stages in ``traces/``, of another layout in ``even/``, and timelines of two ranks in ``job/``."""
    pipeline(tmp_path / "traces", [6, 2])
    pipeline(tmp_path / "even", [4, 4])
    write_timelines(tmp_path / "job", WorldLayout(ParallelSizes(pp=2)), steps=3)
    (tmp_path / "empty").mkdir()
    return tmp_path


#: Arguments, the exit code, and something that it says.
READERS = [
    (["report", "traces"], 0, "holds 6 layers"),
    (["report", "traces", "--html", "report.html", "--json", "report.json"], 0, "Report as one HTML file"),
    (["report", "job"], 0, "train_actor"),
    (["merge", "traces", "-o", "step.json.gz"], 0, "train_actor step 5: 2 ranks"),
    (["diff", "traces", "even"], 0, "emb+6 → emb+4"),
    (["export", "job", "--parquet", "tables"], 0, "6 rows from 2 files"),
    (["status", "empty", "--wait", "0"], 1, ""),
    (["watch", "empty", "--once"], 1, ""),
    (["trigger", "empty", "--target", "train_actor"], 1, ""),
]


def check(ran: subprocess.CompletedProcess[str], code: int, says: str) -> None:
    """Exit code 0 and nothing on stderr, or another one and one line there."""
    assert ran.returncode == code, ran.stderr
    assert says in ran.stdout
    assert len(ran.stderr.splitlines()) == (0 if code == 0 else 1), ran.stderr


# -- the wheel --------------------------------------------------------------------------------------------------------


#: The interpreters for which there are to be wheels, by the tag of their version. Not all need to be installed.
PYTHONS = {f"cp3{minor}": f"python3.{minor}" for minor in range(10, 14)}
PYTHONS[HERE := f"cp3{sys.version_info.minor}"] = sys.executable


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("dist"), *PYTHONS.values())


def built(directory: Path, *pythons: str) -> Path:
    """What `make dist` leaves, run on a copy below ``directory``: a build writes beside the sources."""
    copy = directory / "megaprof"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))
    made = subprocess.run(
        [
            "make",
            "dist",
            "--assume-old=.venv/ready",
            f"BIN={Path(sys.executable).parent}",
            f"DIST_PYTHONS={' '.join(pythons)}",
        ],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return copy / "dist"


def wheel(dist: Path, version: str = HERE) -> Path:
    """The wheel for a Python. Skips the test if that is not installed."""
    for found in dist.glob(f"megaprof-*-{version}-*.whl"):
        return found
    pytest.skip(f"{PYTHONS[version]} is not installed")


@pytest.fixture(scope="module")
def empty(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has nothing but the wheel."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=True)
    install(home / "bin", str(wheel(dist)))
    return home / "bin"


def install(programs: Path, *what: str) -> None:
    line = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(line, env=alone(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def alone() -> dict[str, str]:
    """The environment without what would make this checkout importable."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "COLUMNS": "100"}


@pytest.mark.slow
def test_the_same_sources_give_the_same_files(dist: Path, tmp_path: Path) -> None:
    again = {path.name: path.read_bytes() for path in built(tmp_path, sys.executable).iterdir()}
    assert len(again) == 2
    assert again == {name: (dist / name).read_bytes() for name in again}


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_of_each_python_reads_a_trace_without_torch(
    dist: Path, version: str, traces: Path, tmp_path: Path
) -> None:
    path = wheel(dist, version)
    assert "manylinux_2_17" in path.name
    subprocess.run([PYTHONS[version], "-m", "venv", tmp_path / "home"], check=True, timeout=120)
    programs = tmp_path / "home" / "bin"
    install(programs, f"{path}[report]")
    folder = tmp_path / "nothing"
    folder.mkdir()
    for line, says in (
        ([programs / "python", "-c", "from megaprof.recorders import _tape; print(_tape.__file__)"], ".so"),
        ([programs / "megaprof", "report", traces / "traces"], "holds 6 layers"),
    ):
        ran = subprocess.run(line, env=alone(), cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        check(ran, 0, says)
    assert not list((tmp_path / "home").rglob("site-packages/torch"))


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment(dist: Path, empty: Path, traces: Path) -> None:
    assert len(list(dist.glob("megaprof-*.tar.gz"))) == 1

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [str(empty / program), *arguments]
        return subprocess.run(line, env=alone(), cwd=traces, capture_output=True, text=True, timeout=120, check=False)

    assert run("python", "-c", "import torch").returncode == 1
    check(run("megaprof", "--version"), 0, f"megaprof {megaprof.__version__}")
    ran = run("python", "-c", "import megaprof, os; print(os.listdir(megaprof.__path__[0] + '/patches'))")
    check(ran, 0, "megatron-lm")
    ran = run("python", "-c", "import megaprof; print(megaprof.simulate([[1.0]] * 2, [[2.0]] * 2, 4).step_ms)")
    check(ran, 0, "15.0")
    # The message names a command, and the command works although megaprof itself is on no index.
    ran = run("megaprof", "report", "traces")
    check(ran, 1, "")
    extra = re.search(r"pip install '(megaprof\[\w+\])'", ran.stderr)
    assert extra is not None, ran.stderr
    install(empty, extra[1])
    for arguments, code, says in READERS:
        if arguments[0] == "export":
            check(run("megaprof", *arguments), 1, "")
            install(empty, "megaprof[export]")
        check(run("megaprof", *arguments), code, says)
    assert run("python", "-c", "import torch").returncode == 1


@pytest.mark.slow
def test_an_agent_is_answered_from_an_environment_without_torch(empty: Path, traces: Path) -> None:
    """Documents included, which are beside the package in a checkout."""
    install(empty, "megaprof[mcp]")
    code = (
        "import asyncio, sys; from mcp import Client, StdioServerParameters\n"
        "async def main():\n"
        "    async with Client(StdioServerParameters(command=sys.argv[1], args=['mcp'])) as client:\n"
        "        print((await client.call_tool('report', {'dir': 'traces'})).content[0].text[:60])\n"
        "        for each in (await client.list_resources()).resources:\n"
        "            print((await client.read_resource(str(each.uri))).contents[0].text.splitlines()[0])\n"
        "asyncio.run(main())"
    )
    line = [str(empty / "python"), "-c", code, str(empty / "megaprof")]
    ran = subprocess.run(line, env=alone(), cwd=traces, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "layers of stage 0" in ran.stdout
    assert {"# The report", "# Options", "# Scripts and agents"} <= set(ran.stdout.splitlines())


@pytest.mark.slow
def test_a_running_job_is_asked_from_an_environment_without_torch(empty: Path, tmp_path: Path) -> None:
    install(empty, "megaprof[report]")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [str(empty / "megaprof"), *arguments]
        return subprocess.run(line, env=alone(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    with running(tmp_path / "job", ["--profile-tool", "timeline", "--profile-on-demand"], quick=True):
        check(run("status", "job"), 0, "2 ranks")
        check(run("watch", "job", "--once"), 0, "2 ranks")
        asked = run("trigger", "job", "--target", "train_actor", "--select", "per-stage", "--steps", "1")
        assert asked.returncode == 0, asked.stdout + asked.stderr
    assert len(list((tmp_path / "job").rglob("*.pt.trace.json.gz"))) == 2
    check(run("report", "job"), 0, "train_actor")
