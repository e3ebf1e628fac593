"""A window of a job that the GPU limits."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.found import Found
from tests.gpu.job import large
from tests.gpu.parts.capture import compare


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, large(cpu))
