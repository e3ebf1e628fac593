"""Traces and timelines that were made to do harm: read, or refused in one line, whatever stands in them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprof.cli import main
from tests.analysis.fuzzing import (
    nsys_files,
    refused_in_one_line_or_read,
    timelines,
    traces,
    write_mutated_nsys,
    write_mutated_timelines,
    write_mutated_traces,
)


def fuzz_traces(directory: Path, seeds: range) -> None:
    directory.joinpath("healthy").mkdir()
    healthy = traces(directory / "healthy")
    for seed in seeds:
        case = directory / f"case{seed}"
        (case / "job").mkdir(parents=True)
        write_mutated_traces(healthy, case / "job", random.Random(seed))
        try:
            refused_in_one_line_or_read(case / "job", case, ("report", "merge"))
        except BaseException as fault:
            raise AssertionError(f"seed {seed}: {fault!r}") from fault
        shutil.rmtree(case)


def fuzz_timelines(directory: Path, seeds: range) -> None:
    directory.joinpath("healthy").mkdir()
    healthy = timelines(directory / "healthy")
    for seed in seeds:
        case = directory / f"case{seed}"
        (case / "job").mkdir(parents=True)
        write_mutated_timelines(healthy, case / "job", random.Random(seed))
        try:
            refused_in_one_line_or_read(case / "job", case, ("report", "export"))
        except BaseException as fault:
            raise AssertionError(f"seed {seed}: {fault!r}") from fault
        shutil.rmtree(case)


def fuzz_nsys(directory: Path, seeds: range) -> None:
    directory.joinpath("healthy").mkdir()
    healthy = nsys_files(directory / "healthy")
    assert main(["merge", str(directory / "healthy"), "-o", str(directory / "m.json")]) == 0
    for seed in seeds:
        case = directory / f"case{seed}"
        (case / "job").mkdir(parents=True)
        write_mutated_nsys(healthy, case / "job", random.Random(seed))
        try:
            refused_in_one_line_or_read(case / "job", case, ("report", "merge"))
        except BaseException as fault:
            raise AssertionError(f"seed {seed}: {fault!r}") from fault
        shutil.rmtree(case)


#: Each takes what one command or two on changed files take: a third of a second.
FUZZ = pytest.mark.parametrize("fuzz", [fuzz_nsys, fuzz_traces, fuzz_timelines])


@FUZZ
def test_changed_files_are_read_or_refused(tmp_path: Path, fuzz: Callable[[Path, range], None]) -> None:
    fuzz(tmp_path, range(10))


@pytest.mark.slow
@FUZZ
def test_many_changed_files_are_read_or_refused(tmp_path: Path, fuzz: Callable[[Path, range], None]) -> None:
    fuzz(tmp_path, range(1000, 1015))
