"""Whatever goes wrong around megaprof: training ends with the same bits, and no broken file is left behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.testing import RanksFailed, run_ranks
from tests.faults import jobs

pytestmark = pytest.mark.slow

#: Fault -> (words of an error line, or None where there is none; whether hooks stay; traces that must exist).
EXPECTED: dict[str, tuple[str | None, bool, int]] = {
    "save directory unwritable": ("cannot be created", False, 0),
    "save directory removed": ("", True, 1),  # a line only if a file was waiting in it
    "kineto does not start": ("kineto is unwell", True, 0),
    "export raises": ("export is unwell", True, 0),
    "no space for the rename": ("No space left", True, 0),
    "clock going backwards": (None, True, 2),
    "second profiler": ("already active", True, 0),
    "role leaves the directory": (None, True, 2),
    "host memory limit": (None, True, 1),
}


def visible(directory: Path) -> list[Path]:
    """Files under a final name, anywhere below."""
    return sorted(p for p in directory.rglob("*") if p.is_file() and not p.name.startswith("."))


def whole_traces(directory: Path) -> list[Path]:
    """The traces below; every visible file must be whole."""
    traces = []
    for path in visible(directory):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if ".json" in path.suffixes:
            content: Any = json.loads(data)
            if ".trace" in path.suffixes:
                assert content["traceEvents"]
                assert content["megaprof"]["target"] == "train_actor"
                traces.append(path)
    return traces


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    directory = tmp_path_factory.mktemp("faults")
    for rank in range(2):
        (directory / f"rank{rank}").mkdir()
    return run_ranks(jobs.every_fault, 2, directory, timeout=240), directory


@pytest.mark.parametrize("fault", EXPECTED)
def test_training_ends_with_the_same_bits(fault: str, outcome: tuple[list[dict[str, Any]], Path]) -> None:
    ranks, directory = outcome
    words, stays, count = EXPECTED[fault]
    folder = {
        "save directory unwritable": "in the way",
        "save directory removed": "removed",
        "kineto does not start": "start",
        "export raises": "export",
        "no space for the rename": "rename",
        "clock going backwards": "clock",
        "second profiler": "second",
        "role leaves the directory": "role",
        "host memory limit": "memory",
    }[fault]
    for rank, results in enumerate(ranks):
        undisturbed = results["undisturbed"][0]
        disturbed, lines, active = results[fault]
        assert disturbed == undisturbed
        assert active is stays, lines
        if words is None:
            assert lines == []
        elif words:
            assert any(words in line for line in lines), lines
        traces = whole_traces(directory / f"rank{rank}" / folder)
        assert len(traces) >= count
        if fault == "host memory limit":
            meta = json.loads(gzip.decompress(traces[0].read_bytes()))["megaprof"]
            assert meta["truncated"] is True
            assert "memory" in meta["truncated_reason"]
    losses = ranks[1]["undisturbed"][0][0]
    assert losses[0] != losses[-1], "nothing was trained"


def test_no_role_leaves_the_directory(outcome: tuple[list[dict[str, Any]], Path]) -> None:
    _, directory = outcome
    top = {path.name for path in directory.iterdir()}
    assert top == {"rank0", "rank1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("mebibytes", [0.02, 0.05])
def test_full_disk(mebibytes: float, tmp_path: Path) -> None:
    """Full when the first compressed trace is written, or the second one."""
    try:
        ranks = run_ranks(jobs.full_disk, 2, tmp_path, mebibytes, timeout=120)
    except RanksFailed as failure:
        if "'mount'" in str(failure):
            pytest.skip("this container does not let root mount a tmpfs")
        raise
    for undisturbed, disturbed, lines, contents in ranks:
        assert disturbed == undisturbed
        assert lines, "a full disk must be said"
        for name, data in contents.items():
            if name.startswith("."):
                continue
            if name.endswith(SUFFIX):
                (tmp_path / name).write_bytes(data)
                assert read_timeline(tmp_path / name).damage is None
                continue
            json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def test_a_dying_rank_costs_the_others_no_file(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(jobs.dies_while_others_write, 2, tmp_path, timeout=120)
    assert failure.value.reports[0].outcome != "returned"
    assert "SIGKILL" in str(failure.value) or str(int(signal.SIGKILL)) in str(failure.value)
    traces = whole_traces(tmp_path)
    assert any("pp1" in path.name for path in traces), visible(tmp_path)


def test_keyboard_interrupt_is_the_hosts(tmp_path: Path) -> None:
    # The first stage loses its neighbour: gloo's error is the host's, too.
    assert run_ranks(jobs.interrupted, 2, tmp_path, timeout=120) == ["RuntimeError", "KeyboardInterrupt"]
    traces = whole_traces(tmp_path)
    assert len(traces) == 4
    truncated = [json.loads(gzip.decompress(p.read_bytes()))["megaprof"]["truncated"] for p in traces]
    assert truncated.count(True) == 2
