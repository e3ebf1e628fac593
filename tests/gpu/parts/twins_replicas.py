"""Two stages of two replicas, one rank of the second stage slow."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.found import Found
from tests.gpu.twins import Job, compare, slow_rank


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, "pp2-dp2", Job({"pp": 2, "dp": 2}, slow_rank(3)))
