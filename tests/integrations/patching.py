"""The patches of ``patches/``, applied as docs/hosts/README.md says."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

PATCHES = Path(__file__).parents[2] / "patches"


def files_of(patch: Path) -> list[str]:
    """The files that it changes."""
    return [path for _, path in _checksums(patch)]


def apply(host: str, root: Path, *options: str) -> None:
    """Applies the patch whose checksums the files below ``root`` have, or takes it back with ``-R``."""
    for patch in sorted((PATCHES / host).glob("*.patch")):
        fits = all(
            (root / path).exists() and hashlib.sha256((root / path).read_bytes()).hexdigest() == checksum
            for checksum, path in _checksums(patch)
        )
        command = ["git", "apply", "--unidiff-zero", *options, str(patch)]
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
        back = "-R" in options and not subprocess.run([*command, "--check"], cwd=root, env=env).returncode
        if fits or back:
            subprocess.run(command, cwd=root, env=env, check=True)
            return
    raise AssertionError(f"{root}: no patch for this version of {host}")


def _checksums(patch: Path) -> list[tuple[str, str]]:
    return re.findall(r"^sha256: (\w+)  (.*)$", patch.read_text(), re.MULTILINE)
