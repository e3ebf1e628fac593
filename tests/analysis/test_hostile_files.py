"""Traces and timelines that were made to do harm: read, or refused in one line, whatever stands in them."""

from __future__ import annotations

import random
import shutil
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


def test_changed_files_of_nsys_are_read_or_refused(tmp_path: Path) -> None:
    fuzz_nsys(tmp_path, range(20))


def test_changed_traces_are_read_or_refused(tmp_path: Path) -> None:
    fuzz_traces(tmp_path, range(20))


def test_changed_timelines_are_read_or_refused(tmp_path: Path) -> None:
    fuzz_timelines(tmp_path, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_hundreds_of_changed_traces_are_read_or_refused(tmp_path: Path, part: int) -> None:
    fuzz_traces(tmp_path, range(1000 + 125 * part, 1000 + 125 * (part + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_hundreds_of_changed_timelines_are_read_or_refused(tmp_path: Path, part: int) -> None:
    fuzz_timelines(tmp_path, range(1000 + 125 * part, 1000 + 125 * (part + 1)))


@pytest.mark.slow
def test_hundreds_of_changed_files_of_nsys_are_read_or_refused(tmp_path: Path) -> None:
    fuzz_nsys(tmp_path, range(1000, 1200))
