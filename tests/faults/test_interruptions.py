"""A host's signal handler that raises in the middle of megaprof's code: the host gets its exception, and a process in
which nothing of megaprof is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("configuration", "kind", "stride"),
    [("torch", "timeout", 61), ("overall", "interrupt", 47), ("timeline", "timeout", 7), ("annotated", "stop", 47)],
)
def test_what_a_signal_handler_raises_reaches_the_host(
    configuration: str, kind: str, stride: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.faults.interruptions", str(tmp_path), kind, configuration, str(stride)]
    env = os.environ | {"PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "6"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] > 20
    assert found["swallowed"] == []
    assert found["dirty"] == {}
