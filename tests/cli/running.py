"""Runs the command as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def megaprof(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "megaprof", *map(str, arguments)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **environment},
        timeout=120,
        text=True,
    )
