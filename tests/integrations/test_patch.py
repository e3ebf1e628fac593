"""Patches: added lines only, known versions only, reverted to the byte."""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.cli import CommandError, main
from megaprof.cli.training.patch import find
from megaprof.integrations import patch_files, registry
from megaprof.integrations.patch_files import FilePatch, Hunk, directory, known_hosts, parse, patches_of
from tests.integrations.driving import checkout
from tests.integrations.wheels import WHEELS

CHECKOUTS = {"megatron-lm": "MEGATRON_LM_CHECKOUT", "slime": "SLIME_CHECKOUT"}
SHIPPED = [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in sorted(directory().glob("*/*.patch"))]


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("path", SHIPPED)
def test_what_is_shipped_adds_a_few_lines_and_quotes_none(path: Path) -> None:
    patch = parse(path.read_bytes(), path.name)
    added = [line for file in patch.files for hunk in file.hunks for line in hunk.lines]
    assert patch.host == path.parent.name
    assert patch.version.removeprefix("commit ").startswith(path.stem.removesuffix("-slime"))
    assert 0 < len(added) <= 32
    # The hooks go in where the model is, or by a callback of ours in the host's own registry.
    assert any(b"install_hooks(" in line or b"import megatron_callback" in line for line in added)
    body = path.read_text().partition("diff --git")[2].splitlines()[1:]
    assert not [line for line in body if line.startswith(("-", " ")) and not line.startswith("--- a/")]
    assert all(re.fullmatch(r"@@ -\d+,0 \+\d+(,\d+)? @@", line) for line in body if line.startswith("@@"))


def copied(host: str, directory: Path) -> Path:
    """Of a checkout, the files that some patch of its host's changes."""
    source = Path(checkout(CHECKOUTS[host]))
    for path in {file.path for patch in patches_of(host) for file in patch.files}:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, directory / path)
    return directory


@pytest.mark.hosts
@pytest.mark.parametrize("host", [*WHEELS, *CHECKOUTS])
def test_what_a_host_ships(
    host: str, wheel: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copied(host, tmp_path) if host in CHECKOUTS else wheel(host)
    released = tree(root)
    assert main(["patch", host, str(root), "--check"]) == 0
    assert capsys.readouterr().out.endswith("unpatched\n")
    assert tree(root) == released

    for _ in range(2):  # the second time it is patched already
        assert main(["patch", host, str(root)]) == 0
        patched = tree(root)
        changed = [name for name in released if patched[name] != released[name]]
        assert changed == sorted(changed, key=list(released).index)
        assert len(changed) == (4 if host == "ms-swift" else 2)
    for name in changed:
        py_compile.compile(str(root / name), cfile=str(root / "x.pyc"), doraise=True)
        assert set(released[name][0].splitlines()) <= set(patched[name][0].splitlines())
        assert patched[name][1] == released[name][1]
    (root / "x.pyc").unlink()
    assert main(["patch", host, str(root), "--check"]) == 0
    assert capsys.readouterr().out.endswith(" patched\n")

    assert main(["patch", host, str(root), "--revert"]) == 0
    assert tree(root) == released

    altered = root / changed[0]
    altered.write_bytes(altered.read_bytes() + b"# mine\n")
    before = tree(root)
    for arguments in ([], ["--check"], ["--revert"]):
        assert main(["patch", host, str(root), *arguments]) == 1
        message = capsys.readouterr().err
        assert changed[0] in message
        assert "not the released file" in message
        assert tree(root) == before


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of two files in two versions, in the directory that is returned."""
    import hashlib

    patches = tmp_path / "patches" / "acme"
    patches.mkdir(parents=True)
    for version in ("1", "2"):
        contents = {"a.py": f"a = {version}\nb = 2\n".encode(), "sub/b.py": b"c = 3\r\nd = 4"}
        header = [f"sha256: {hashlib.sha256(text).hexdigest()}  {name}" for name, text in contents.items()]
        (patches / f"{version}.patch").write_text(
            "\n".join(["host: acme", "repository: https://example.org", f"version: {version}", *header])
            + "\ndiff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -0,0 +1 @@\n+top = 0\n"
            "@@ -1,0 +3,2 @@\n+x = 1\n+y = 2\n"
            "diff --git a/sub/b.py b/sub/b.py\n--- a/sub/b.py\n+++ b/sub/b.py\n@@ -1,0 +2 @@\n+z = 3\n"
        )
    monkeypatch.setattr(patch_files, "directory", lambda: tmp_path / "patches")
    root = tmp_path / "checkout"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_bytes(b"a = 2\nb = 2\n")
    (root / "sub" / "b.py").write_bytes(b"c = 3\r\nd = 4")
    return root


def test_the_version_is_found_by_its_files(host: Path) -> None:
    patch, root = find("acme", host)
    assert (patch.version, root) == ("2", host)
    patch.apply(root)
    assert (host / "a.py").read_bytes() == b"top = 0\na = 2\nx = 1\ny = 2\nb = 2\n"
    assert (host / "sub/b.py").read_bytes() == b"c = 3\r\nz = 3\nd = 4"
    assert find("acme", host)[0].version == "2"


def test_a_checkout_keeps_its_packages_in_src(host: Path) -> None:
    (host / "src").mkdir()
    for name in ("a.py", "sub"):
        (host / name).rename(host / "src" / name)
    assert find("acme", host)[1] == host / "src"


def test_a_missing_file_is_refused(host: Path) -> None:
    (host / "sub/b.py").unlink()
    with pytest.raises(CommandError, match=r"sub/b\.py is missing"):
        find("acme", host)
    assert (host / "a.py").read_bytes() == b"a = 2\nb = 2\n"


def test_what_was_left_half_done_can_be_finished_or_undone(host: Path) -> None:
    original = tree(host)
    patch, _ = find("acme", host)
    patch.apply(host)
    (host / "a.py").write_bytes(original["a.py"][0])
    assert patch.apply(host) == ["a.py"]
    (host / "a.py").write_bytes(original["a.py"][0])
    assert find("acme", host)[0].revert(host) == ["sub/b.py"]
    assert tree(host) == original


def test_a_disk_that_fails_half_way_leaves_everything_as_it_was(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tree(host)
    patch, _ = find("acme", host)
    replace, calls = os.replace, []

    def failing(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space left"):
        patch.apply(host)
    assert tree(host) == original


def test_a_hard_link_to_a_cache_is_not_written_through(host: Path, tmp_path: Path) -> None:
    os.link(host / "a.py", tmp_path / "cached.py")
    find("acme", host)[0].apply(host)
    assert (tmp_path / "cached.py").read_bytes() == b"a = 2\nb = 2\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("@@ -1,0 +2 @@", "@@ -1 +2 @@"), "only adds lines"),
        (("+z = 3", "-c = 3"), "more than add lines"),
        (("+++ b/sub/b.py", "+++ b/../b.py"), "leaves the host's directory"),
        (("host: acme\n", ""), "header must name"),
        (("  a.py", "  other.py"), "header must name"),
    ],
)
def test_a_patch_that_does_more_is_refused(change: tuple[str, str], message: str, host: Path) -> None:
    path = patch_files.directory() / "acme" / "1.patch"
    with pytest.raises(ValueError, match=message):
        parse(path.read_text().replace(*change).encode(), "1.patch")


def test_mistakes_in_the_command(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "nobody", str(host)]) == 2
    assert "known: acme" in capsys.readouterr().err
    assert main(["patch", "acme", str(host / "nowhere")]) == 1
    assert "not a directory" in capsys.readouterr().err


@given(
    content=st.lists(st.sampled_from([b"a\n", b"b\r\n", b"\n", b"\rc\n"]), max_size=8).map(b"".join),
    hunks=st.dictionaries(st.integers(0, 8), st.lists(st.sampled_from([b"a\n", b"x\n"]), min_size=1, max_size=3)),
)
def test_reverting_gives_the_bytes_back(content: bytes, hunks: dict[int, list[bytes]]) -> None:
    import hashlib

    count = content.count(b"\n")
    placed = tuple(Hunk(after, tuple(lines)) for after, lines in sorted(hunks.items()) if after <= count)
    file = FilePatch("f", hashlib.sha256(content).hexdigest(), placed)
    assert file.revert(file.apply(content)) == content
    assert not placed or file.revert(content) is None


def test_every_host_has_a_patch() -> None:
    assert known_hosts() == ["megatron-bridge", "megatron-lm", "ms-swift", "skyrl", "slime", "verl"]
    assert all(patches_of(name) for name in known_hosts())
    assert sorted(host.name for host in registry.HOSTS) == known_hosts()


def test_git_takes_them_too(host: Path) -> None:
    path = patch_files.directory() / "acme" / "2.patch"
    subprocess.run(["git", "apply", "--unidiff-zero", str(path)], cwd=host, check=True, timeout=60)
    assert (host / "a.py").read_bytes() == b"top = 0\na = 2\nx = 1\ny = 2\nb = 2\n"
