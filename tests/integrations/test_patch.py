"""Patches: added lines only, applied by git to files of the right checksum, taken back to the byte."""

from __future__ import annotations

import py_compile
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprof.autoload import HOSTS
from tests.integrations.driving import checkout
from tests.integrations.patching import PATCHES, apply, files_of
from tests.integrations.wheels import WHEELS

CHECKOUTS = {"megatron-lm": "MEGATRON_LM_CHECKOUT", "slime": "SLIME_CHECKOUT"}
SHIPPED = sorted(PATCHES.glob("*/*.patch"))
README = Path(__file__).parents[2] / "docs" / "hosts" / "README.md"


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_shipped_adds_a_few_lines_and_quotes_none(path: Path) -> None:
    head, _, diff = path.read_text().partition("diff --git")
    known = dict(line.split(": ", 1) for line in head.splitlines())
    assert known["host"] == path.parent.name
    assert known["version"].removeprefix("commit ").startswith(path.stem.removesuffix("-slime"))
    assert files_of(path) == re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE), "each file has a checksum"
    body = diff.splitlines()[1:]
    added = [line for line in body if line.startswith("+") and not line.startswith("+++ b/")]
    assert 0 < len(added) <= 32
    # The hooks go in where the model is, or by a callback of ours in the host's own registry.
    assert any("install_hooks(" in line or "import megatron_callback" in line for line in added)
    assert not [line for line in body if line.startswith(("-", " ")) and not line.startswith("--- a/")]
    assert all(re.fullmatch(r"@@ -\d+,0 \+\d+(,\d+)? @@", line) for line in body if line.startswith("@@"))


def copied(host: str, directory: Path) -> Path:
    """Of a checkout, the files that some patch of its host's changes."""
    source = Path(checkout(CHECKOUTS[host]))
    for path in {path for patch in (PATCHES / host).glob("*.patch") for path in files_of(patch)}:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, directory / path)
    return directory


@pytest.mark.hosts
@pytest.mark.parametrize("host", [*WHEELS, *CHECKOUTS])
def test_what_a_host_ships(host: str, wheel: Callable[[str], Path], tmp_path: Path) -> None:
    root = copied(host, tmp_path) if host in CHECKOUTS else wheel(host)
    released = tree(root)
    apply(host, root)
    patched = tree(root)
    changed = [name for name in released if patched[name] != released[name]]
    assert len(changed) == (4 if host == "ms-swift" else 2)
    for name in changed:
        py_compile.compile(str(root / name), cfile=str(tmp_path / "x.pyc"), doraise=True)
        assert set(released[name].splitlines()) <= set(patched[name].splitlines())
    apply(host, root, "-R")
    assert {name: content for name, content in tree(root).items() if name in released} == released


HOST = {"a.py": b"a = 1\nb = 2\n", "sub/b.py": b"c = 3\r\nd = 4"}
PATCH = (
    "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -0,0 +1 @@\n+top = 0\n@@ -1,0 +3,2 @@\n+x = 1\n+y = 2\n"
    "diff --git a/sub/b.py b/sub/b.py\n--- a/sub/b.py\n+++ b/sub/b.py\n@@ -1,0 +2 @@\n+z = 3\n"
)


@pytest.mark.parametrize("newer", [False, True])
def test_the_documented_command_changes_the_release_alone(newer: bool, tmp_path: Path) -> None:
    """As it stands in docs/hosts/README.md, in a site-packages below a repository of something else."""
    import hashlib

    root, patch = tmp_path / "site-packages", tmp_path / "1.patch"
    for name, content in HOST.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    sums = [f"sha256: {hashlib.sha256(content).hexdigest()}  {name}" for name, content in HOST.items()]
    patch.write_text("\n".join(["host: acme", *sums, PATCH]))
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if newer:  # where git alone would put the lines one off
        (root / "a.py").write_bytes(b"import new\n" + HOST["a.py"])
    before = tree(root)
    command, back = re.findall(r"^\$ ((?:sed|GIT_CEILING)(?:.|(?<=\\)\n)*)", README.read_text(), re.MULTILINE)
    run = subprocess.run(["bash", "-c", f"PATCH={patch}\n{command}"], cwd=root, capture_output=True, text=True)
    if newer:
        assert run.returncode == 1
        assert "a.py: FAILED" in run.stdout
        assert tree(root) == before
        return
    assert run.returncode == 0, run.stderr
    assert tree(root) == {"a.py": b"top = 0\na = 1\nx = 1\ny = 2\nb = 2\n", "sub/b.py": b"c = 3\r\nz = 3\nd = 4"}
    subprocess.run(["bash", "-c", f"PATCH={patch}\n{back}"], cwd=root, check=True)
    assert tree(root) == before


def test_every_host_has_a_patch() -> None:
    assert sorted({path.parent.name for path in SHIPPED}) == sorted(HOSTS)
