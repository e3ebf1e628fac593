"""The pipeline with two model chunks per stage."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.found import Found
from tests.gpu.parts.pipeline import compare


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, (3, 1, 3, 1), (2, 2, 2, 2), 2)
