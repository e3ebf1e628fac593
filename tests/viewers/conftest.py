"""One real capture for all viewers, see job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaprof.testing import run_ranks
from tests.viewers.job import RANKS, TARGETS, SaveDirectory, train


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SaveDirectory:
    path = tmp_path_factory.mktemp("viewers") / "saved"
    steps = ";".join(f"{target}={step}" for target, step in TARGETS.items())
    flags = ["--profile-target", *TARGETS, "--profile-steps", steps, "--profile-dir", str(path)]
    run_ranks(train, len(RANKS), [*flags, "--profile-all-ranks", "--profile-kernels"], timeout=180)
    assert len(list(path.glob("*.pt.trace.json.gz"))) == len(list(path.glob("*.kernels.json"))) == 2 * len(RANKS)
    return SaveDirectory(path)


@pytest.fixture(scope="package")
def timeline(saved: SaveDirectory) -> Path:
    """The merged timeline of the training step, in the save directory like everything else."""
    from megaprof.cli import main

    out = saved.path / "timeline.json.gz"
    assert main(["merge", str(saved.path), "-o", str(out)]) == 0
    return out
