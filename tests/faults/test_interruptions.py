"""A host's signal handler that raises in the middle of megaprof's code: the host gets its exception, and a process in
which nothing of megaprof is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import programs
from tests.faults import interruptions

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("configuration", "kind", "stride"),
    [("torch", "timeout", 61), ("overall", "interrupt", 47), ("timeline", "timeout", 7), ("annotated", "stop", 47)],
)
def test_what_a_signal_handler_raises_reaches_the_host(
    configuration: str, kind: str, stride: int, tmp_path: Path
) -> None:
    done = programs.run(interruptions.program, tmp_path, kind, configuration, str(stride), limit=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] > 20
    assert found["swallowed"] == []
    assert found["dirty"] == {}
