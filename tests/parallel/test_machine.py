"""The machine of a rank, as the operating system describes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaprof.parallel.machine import physical_cores

CPUS = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1)]  # package and core of every hardware thread


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for cpu, (package, core) in enumerate(CPUS):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(CPUS))), raising=False)
    return tmp_path


def test_two_hardware_threads_are_one_core(system: Path) -> None:
    assert physical_cores(system) == 4


def test_only_those_that_the_process_may_use_count(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4})
    assert physical_cores(system) == 2


def test_what_is_not_told_is_not_guessed(system: Path) -> None:
    (system / "cpu3" / "topology" / "core_id").unlink()
    assert physical_cores(system) is None


def test_this_machine_has_some() -> None:
    assert physical_cores() in (None, *range(1, (os.cpu_count() or 1) + 1))
