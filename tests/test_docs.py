"""What the documents say is what the code does."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import megaprof
from megaprof.cli import COMMANDS
from megaprof.config.options import ALIASES, flag, options, variable
from tests.gallery import GALLERY
from tests.ui.pages import Reader

ROOT = Path(__file__).parents[1]
OPTIONS = (ROOT / "docs" / "options.md").read_text()
README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "docs" / "examples"
#: Names that begin like a module's and are none: metrics, settings and files.
NOT_MODULES = {"megaprof.dir", "megaprof.imbalance", "megaprof.step", "megaprof.target"}


def blocks(language: str, document: str = README) -> list[str]:
    """A document's code blocks in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document, re.M | re.S)


def commands(document: str = README) -> list[str]:
    """What a document tells a user to type, without the prompts and the comments behind it."""
    text = "".join(blocks("console", document)).replace("\\\n", "")
    return [re.sub(r"\s+# .*", "", line[2:]) for line in text.splitlines() if line.startswith("$ ")]


def test_the_documents_stay_short() -> None:
    """Without what is generated. Rebases have twice brought back everything that was cut from the changelog."""
    pages = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "json.md"}
    assert sum(len(page.read_text().split()) for page in pages) < 40_000
    assert len((ROOT / "CHANGELOG.md").read_text().split()) < 1_600


def test_every_option_is_documented_with_its_variable_and_default() -> None:
    rows = {
        line.split("`")[1].split()[0]: line
        for line in OPTIONS.split("\n## ")[0].splitlines()
        if line.startswith("| `--profile-")
    }
    assert set(rows) == {flag(option.name) for option in options()} | {flag(alias) for alias in ALIASES}
    assert all(f"`{variable(alias)}`" in rows[flag(alias)] for alias in ALIASES)
    for option in options():
        row = rows[flag(option.name)]
        assert f"`{variable(option.name)}`" in row
        default = option.default
        if isinstance(default, bool):  # before anything else: 1 == True
            shown = "on" if default else "off"
        elif default is None or default == ():
            shown = "none"
        else:
            shown = " ".join(default) if isinstance(default, tuple) else str(default)
        assert row.rstrip(" |").endswith(f"| {shown}"), f"{row!r} does not end with the default {shown!r}"


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_is_a_module_that_can_be_imported(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    import_module(f"tests.benchmarks.{path.stem}")
    if path.stem not in ("cores", "load", "test_scale"):
        assert f"-m tests.benchmarks.{path.stem} " in makefile


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+)(?=:)", makefile, re.M)) | set(re.findall(r"^([\w-]+)%:", makefile, re.M))
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^\$ make ([\w-]+)|`make ([\w-]+)", texts, re.M))
    for name in {a or b for a, b in named}:
        assert name in targets or any(name.startswith(target) for target in targets if target.endswith("-")), name


def test_ci_runs_what_a_developer_is_told_to_run() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    told = {line for line in commands((ROOT / "CONTRIBUTING.md").read_text()) if line.startswith("make ")}
    assert told
    assert told == {line for line in script if line.startswith("make ")}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("unbalanced", "Stage 0 holds 7 layers"),
        ("slow-rank", "rank 5"),
        ("hang", "rank 5 (stage 2) stood in backward"),
        ("gpu", "The GPU waits for the host"),
    ],
)
def test_a_page_of_the_gallery_begins_with_its_fault(name: str, first: str) -> None:
    path = GALLERY / f"{name}.html"
    assert first in Reader(path.read_text()).text[:2000]
    assert path.stat().st_size < 300_000


@pytest.mark.slow
def test_the_gallery_is_made_by_its_command(tmp_path: Path) -> None:
    made = _run([sys.executable, "-m", "tests.gallery", str(tmp_path / "gallery")], ROOT)
    assert made.returncode == 0, made.stderr
    pages = {path.name: Reader(path.read_text()).text for path in (tmp_path / "gallery").iterdir()}
    assert pages.keys() == {path.name for path in GALLERY.iterdir()}
    assert "4+4+4+4 layers" in pages["unbalanced.html"]
    assert "clock" not in pages["unbalanced.html"], "one host is not taken for several"


def test_every_extra_in_the_readme_exists() -> None:
    declared = set(re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text(), re.M))
    named = {
        extra
        for extras in re.findall(r"pip install ['\"][^'\"]*\[([\w,]+)\]['\"]", README)
        for extra in extras.split(",")
    }
    assert named
    assert named <= declared


def test_the_readmes_script_is_the_example_and_two_lines_are_all_that_was_added() -> None:
    documented, code = (EXAMPLES / "pretrain.py").read_text().split("\n\n", 1)
    assert documented.startswith('"""')
    assert blocks("python")[0] == code
    added = [line for line in code.splitlines(keepends=True) if re.search("add_profile_args|install_hooks", line)]
    assert len(added) == 3  # an import, and the two
    for line in added:
        code = code.replace(line, "")
    assert (EXAMPLES / "unedited.py").read_text().split("\n\n", 1)[1] == code


@pytest.mark.slow
def test_the_documented_test_of_an_integration_runs(tmp_path: Path) -> None:
    (snippet,) = blocks("python", (ROOT / "docs" / "reference.md").read_text())
    (tmp_path / "snippet.py").write_text(snippet)
    ran = _run([sys.executable, "snippet.py"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    losses = ast.literal_eval(ran.stdout)
    assert [len(step) for step in losses] == [4, 4, 4]


@pytest.mark.slow
def test_the_readmes_commands_run_as_printed(tmp_path: Path) -> None:
    """Those of a user; `make` sets up an environment, and test_packaging.py installs."""
    shutil.copytree(EXAMPLES, tmp_path / "docs" / "examples")
    typed = [line for line in commands() if line.split()[0] not in ("make", "pip")]
    assert {line.split()[0] for line in typed} == {"megaprof", "torchrun"}
    said = []
    for line in typed:
        ran = _run(["bash", "-c", line], tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        said.append(ran.stdout)
    assert "emb+3" in said[1]
    assert "step 15: loss" in said[0]
    assert "step 15: loss" in said[2]
    names = [sorted(path.name for path in (tmp_path / each).iterdir()) for each in ("traces", "traces2")]
    assert names[0] == names[1]
    assert [name.endswith(".timeline.bin") for name in names[0]] == [True] * 2 + [False] * 6


@pytest.mark.slow
def test_the_example_of_tune_tries_other_layouts(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "docs" / "examples")
    (line,) = [each for each in commands((ROOT / "docs" / "tune.md").read_text()) if "docs/examples/" in each]
    ran = _run(["bash", "-c", line], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tuned = json.loads((tmp_path / "tuned-demo" / "report.json").read_text())
    assert tuned["result"] is not None
    assert len(tuned["trials"]) > 1


@pytest.mark.slow
def test_the_tutorials_commands_lead_where_it_says(tmp_path: Path) -> None:
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    said = []
    for line in commands(tutorial):
        assert line.startswith("megaprof ")
        ran = _run(["bash", "-c", line], tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        said.append(ran.stdout)
    first, again, _, compared = (" ".join(each.split()) for each in said)  # sentences are wrapped
    for each in (first, again):
        assert "emb+3" in each
    assert "emb+3 → emb+2" in compared


def test_the_tutorials_replay_says_that_even_is_faster(tmp_path: Path) -> None:
    (snippet,) = blocks("python", (ROOT / "docs" / "tutorial.md").read_text())
    ran = _run([sys.executable, "-c", snippet], tmp_path)
    uneven, even = (float(number) for number in re.findall(r"(\d+) ms", ran.stdout))
    assert even < uneven


def _run(line: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": programs}
    return subprocess.run(
        line, cwd=directory, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_every_module_and_file_that_is_named_exists() -> None:
    named = set(_named())
    assert len({name for _, name in named}) > 10
    assert {(document, name) for document, name in named if not _exists(name)} == set()


def _named() -> Iterator[tuple[str, str]]:
    """Every `megaprof.x.y`, `megaprof/x/y.py` and `tests/x/y.py` in documents and patches, with its place."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *_patches()]:
        for name in re.findall(r"\bmegaprof(?:\.[A-Za-z_]\w*)+|\b(?:megaprof|tests)(?:/\w+)+\.py\b", path.read_text()):
            yield str(path.relative_to(ROOT)), name
    # Of the moved modules, the new names.
    for row in re.findall(r"^\| `megaprof\.\S+ \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        yield from (("CHANGELOG.md", name) for name in re.findall(r"megaprof(?:\.\w+)+", row))


def _patches() -> Iterator[Path]:
    return (ROOT / "patches").rglob("*.patch")


def _exists(name: str) -> bool:
    if name in NOT_MODULES:
        return True
    if "/" in name:
        return (ROOT / name).is_file()
    found: object = megaprof
    path = "megaprof"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            try:
                import_module(path)
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_every_command_in_the_readme_exists() -> None:
    named = set(re.findall(r"(?:`|^\$ )megaprof ([a-z]+(?:-[a-z]+)*)", README, re.M))
    assert named <= set(COMMANDS), named - set(COMMANDS)


def test_every_relative_link_leads_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: megaprof\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    assert sorted(named) == sorted(set(megaprof.__all__) - {"__version__"})


def test_the_changelog_begins_with_this_version_or_the_next_one() -> None:
    (latest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert latest in (megaprof.__version__, "Unreleased")


def test_every_room_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.name for path in (ROOT / "megaprof").iterdir() if not path.name.startswith((".", "__pycache__"))}
    missing = [room for room in rooms - {"py.typed", "__main__.py", "version.py"} if f"`{room}" not in text]
    assert missing == []


@pytest.mark.parametrize("name", megaprof.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(megaprof, name)
    if name != "__version__":
        assert value.__doc__


@pytest.mark.slow
def test_importing_megaprof_is_light() -> None:
    """No torch, no Megatron, no CUDA, no thread, nothing heavy; and the hooks load no torch and no report library."""
    code = (
        "import sys, threading; import megaprof; "
        "heavy = {'torch','megatron','numpy','rich','msgspec','plotly','pandas'} & set(sys.modules); "
        "assert not heavy, heavy; assert threading.active_count() == 1; "
        "from megaprof import install_hooks; assert not {'torch','megatron'} & set(sys.modules); import torch; "
        "heavy = {'rich','plotly','pandas'} & set(sys.modules); assert not heavy, heavy; "
        "assert threading.active_count() == 1, threading.enumerate(); assert not torch.cuda.is_initialized()"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


def test_no_assert_in_the_package() -> None:
    found = [
        f"{path.name}:{number}"
        for path in (ROOT / "megaprof").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*assert ", line) and "/testing/" not in str(path)
    ]
    assert found == []
