"""Two tensor-parallel ranks, one of them slow."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.found import Found
from tests.gpu.twins import Job, compare, slow_rank


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, "tp2", Job({"tp": 2}, slow_rank(1), {"collectives": True}))
