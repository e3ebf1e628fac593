"""The hosts' released wheels, downloaded once per run of the tests; a missing registry skips, and says so."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.wheels import DOWNLOADS


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``wheel(host)``: a directory with its unpacked wheel, which the caller may change: each call unpacks anew."""
    downloads = tmp_path_factory.mktemp("wheels")
    failures: dict[str, str] = {}

    def unpacked(host: str) -> Path:
        directory = downloads / host
        if not directory.exists() and host not in failures:
            options = ["--no-deps", "--ignore-requires-python", "--quiet", "--dest", str(directory)]
            command = [sys.executable, "-m", "pip", "download", *options, DOWNLOADS[host]]
            run = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if run.returncode:
                failures[host] = (run.stderr.strip().splitlines() or ["no message"])[-1]
        if host in failures:
            pytest.skip(f"{DOWNLOADS[host]} cannot be downloaded: {failures[host]}")
        target = tmp_path_factory.mktemp(host)
        with zipfile.ZipFile(next(directory.glob("*.whl"))) as archive:
            # Some bring their tests along, as a package that would stand before this one.
            archive.extractall(target, [name for name in archive.namelist() if not name.startswith("tests/")])
        return target

    return unpacked
