"""Four stages, and what can be wrong between them."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.found import Found
from tests.gpu.twins import Job, compare, of_a_pipeline


def run(work: Path, cpu: bool) -> Found:
    return compare(work, cpu, "pp4", Job({"pp": 4}, of_a_pipeline()))
