"""Patches for hosts: reads them, finds the one that fits a checkout, and applies and reverts them to the byte.

A patch is a unified diff without context (``git diff -U0``) that only adds lines. The lines before the diff name the
host, its repository, its version or commit, and the SHA-256 of every file as the host ships it. A file with another
checksum is never touched, so no line can land in the wrong place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

ORIGINAL, PATCHED, OTHER, MISSING = "original", "patched", "other", "missing"

_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines that are added."""

    after: int
    """The line of the original, from 1, after which they are added; 0 is the top."""
    lines: tuple[bytes, ...]
    """The lines, with their line ends."""


@dataclass(frozen=True)
class FilePatch:
    """The change of one file."""

    path: str
    """Its path below the host's directory."""
    sha256: str
    """The checksum of the file as the host ships it, in hexadecimal."""
    hunks: tuple[Hunk, ...]
    """In the order of the file."""

    def apply(self, original: bytes) -> bytes:
        """Returns ``original`` with the lines added."""
        lines = _lines(original)
        for hunk in reversed(self.hunks):
            lines[hunk.after : hunk.after] = hunk.lines
        return b"".join(lines)

    def revert(self, patched: bytes) -> bytes | None:
        """Returns the original; None if ``patched`` is not what `apply` makes of it."""
        lines = _lines(patched)
        for hunk in self.hunks:  # what was added before this hunk is gone already
            end = hunk.after + len(hunk.lines)
            if tuple(lines[hunk.after : end]) != hunk.lines:
                return None
            del lines[hunk.after : end]
        original = b"".join(lines)
        return original if _sha256(original) == self.sha256 else None

    def state(self, root: Path) -> str:
        """Returns ORIGINAL, PATCHED, OTHER or MISSING for the file below ``root``."""
        try:
            content = (root / self.path).read_bytes()
        except OSError:
            return MISSING
        if _sha256(content) == self.sha256:
            return ORIGINAL
        return PATCHED if self.revert(content) is not None else OTHER


@dataclass(frozen=True)
class Patch:
    """One patch file: the change of one version of a host."""

    host: str
    """The host's name, as in ``megaprof patch HOST``."""
    repository: str
    """The URL of the repository that has the version."""
    version: str
    """A release, a tag, or ``commit`` and its hash."""
    files: tuple[FilePatch, ...]
    """The files that are changed."""

    def states(self, root: Path) -> dict[str, str]:
        """Returns the state of each file below ``root``, by path."""
        return {file.path: file.state(root) for file in self.files}

    def apply(self, root: Path) -> list[str]:
        """Patches the original files and returns their paths. Raises OSError; then everything is as before."""
        return self._write(
            root, {file: file.apply(_read(root, file)) for file in self.files if file.state(root) == ORIGINAL}
        )

    def revert(self, root: Path) -> list[str]:
        """Reverts the patched files and returns their paths. Raises OSError; then everything is as before."""
        reverted = {file: file.revert(_read(root, file)) for file in self.files if file.state(root) == PATCHED}
        return self._write(root, {file: content for file, content in reverted.items() if content is not None})

    def _write(self, root: Path, contents: dict[FilePatch, bytes]) -> list[str]:
        """Writes all files or none. They are replaced, not overwritten: an installed one may be a hard link to a
        cache."""
        originals = {file: _read(root, file) for file in contents}
        staged: list[tuple[str, Path]] = []
        replaced: list[FilePatch] = []
        try:
            for file, content in contents.items():
                staged.append((_staged(_target(root, file), content), _target(root, file)))
            for file, (source, target) in zip(contents, staged, strict=True):
                os.replace(source, target)
                replaced.append(file)
        except OSError:
            for file in replaced:
                os.replace(_staged(_target(root, file), originals[file]), _target(root, file))
            for source, _ in staged:
                Path(source).unlink(missing_ok=True)
            raise
        return [file.path for file in contents]


def directory() -> Path:
    """Returns the directory of the patches: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def known_hosts() -> list[str]:
    return sorted(path.name for path in directory().iterdir() if path.is_dir())


def patches_of(host: str) -> list[Patch]:
    return [parse(path.read_bytes(), path.name) for path in sorted((directory() / host).glob("*.patch"))]


def parse(content: bytes, name: str) -> Patch:
    """Reads a patch file. Raises ValueError, which names it, for anything but added lines with a complete header."""
    lines = _lines(content)
    start = next((index for index, line in enumerate(lines) if line.startswith(b"diff --git ")), len(lines))
    header: dict[str, str] = {}
    checksums: dict[str, str] = {}
    for line in lines[:start]:
        key, _, value = line.decode().strip().partition(": ")
        if key == "sha256":
            digest, _, path = value.partition("  ")
            checksums[path] = digest
        elif value:
            header[key] = value
    hunks = _hunks(lines[start:], name)
    if {"host", "repository", "version"} - header.keys() or checksums.keys() != hunks.keys() or not hunks:
        raise ValueError(f"{name}: its header must name host, repository, version and the sha256 of each file")
    files = tuple(FilePatch(path, checksums[path], tuple(file_hunks)) for path, file_hunks in hunks.items())
    return Patch(header["host"], header["repository"], header["version"], files)


def _hunks(lines: list[bytes], name: str) -> dict[str, list[Hunk]]:
    hunks: dict[str, list[Hunk]] = {}
    path, position = "", 0
    while position < len(lines):
        line = lines[position].decode().rstrip("\n")
        position += 1
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{name}: {path!r} leaves the host's directory")
            hunks[path] = []
        elif hunk := _HUNK.fullmatch(line):
            added = lines[position : position + int(hunk[3] or 1)]
            if not all(text.startswith(b"+") for text in added):
                raise ValueError(f"{name}: {line!r} does more than add lines")
            position += len(added)
            hunks[path].append(Hunk(int(hunk[1]), tuple(text[1:] for text in added)))
        elif not line.startswith(("diff --git ", "index ", "--- a/")):
            raise ValueError(f"{name}: {line!r} is not part of a diff that only adds lines without context")
    return hunks


def _lines(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)  # bytes.splitlines would end a line at a lone carriage return too


def _staged(target: Path, content: bytes) -> str:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        shutil.copymode(target, name)
    except OSError:
        os.unlink(name)
        raise
    return name


def _target(root: Path, file: FilePatch) -> Path:
    return (root / file.path).resolve()


def _read(root: Path, file: FilePatch) -> bytes:
    return (root / file.path).read_bytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
