"""What the documents say is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megaprof
from megaprof.cli import _COMMANDS
from megaprof.config.options import ALL_RANKS, flag, options, variable

ROOT = Path(__file__).parents[1]
OPTIONS = (ROOT / "docs" / "options.md").read_text()
README = (ROOT / "README.md").read_text()


def test_every_option_is_documented_with_its_variable_and_default() -> None:
    rows = {
        line.split("`")[1].split()[0]: line
        for line in OPTIONS.split("\n## ")[0].splitlines()
        if line.startswith("| `--profile-")
    }
    assert set(rows) == {flag(option.name) for option in options()} | {flag(ALL_RANKS)}
    assert f"`{variable(ALL_RANKS)}`" in rows[flag(ALL_RANKS)]
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


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+)(?=:)", makefile, re.M)) | set(re.findall(r"^([\w-]+)%:", makefile, re.M))
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^\$ make ([\w-]+)|`make ([\w-]+)", texts, re.M))
    for name in {a or b for a, b in named}:
        assert name in targets or any(name.startswith(target) for target in targets if target.endswith("-")), name


def test_every_command_in_the_readme_exists() -> None:
    named = set(re.findall(r"(?:`|^\$ )megaprof ([a-z]+)", README, re.M))
    assert named <= set(_COMMANDS), named - set(_COMMANDS)


def test_every_relative_link_leads_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


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


def test_importing_megaprof_is_light() -> None:
    """No torch, no Megatron, no CUDA, no thread, nothing heavy; and the hooks themselves load no report library."""
    code = (
        "import sys, threading; import megaprof; "
        "heavy = {'torch','megatron','numpy','rich','msgspec','plotly','pandas'} & set(sys.modules); "
        "assert not heavy, heavy; assert threading.active_count() == 1; "
        "from megaprof import install_hooks; import torch; "
        "heavy = {'rich','msgspec','plotly','pandas'} & set(sys.modules); assert not heavy, heavy; "
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
