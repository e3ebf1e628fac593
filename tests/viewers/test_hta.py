"""Holistic Trace Analysis loads what we write.

Of a directory it takes every ``.json`` and ``.gz`` file, and one per rank: of a save directory with several windows, or
with kernel summaries and timelines beside the traces, it has to be told the files of one window. Its analyses are about
GPU kernels, which no CPU trace has: those get traces of known times.
"""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from glob import glob
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hta", reason="`make test-viewers` installs it")

from hta.trace_analysis import TraceAnalysis

from tests.viewers.job import RANKS, TARGETS, SaveDirectory, our_ranges, read


@pytest.fixture(autouse=True)
def _nothing_to_collect() -> None:
    """HTA forks. A child that collects a process group of gloo's, which an earlier test left, waits for ever for the
    group's threads."""
    gc.collect()


def ranges_in(trace: Any, rank: int) -> Counter[str]:
    names = trace.get_trace(rank)["s_name"]
    return Counter(names[names.str.startswith("megaprof/")])


@pytest.mark.parametrize("target", TARGETS)
def test_one_window_of_a_save_directory(saved: SaveDirectory, timeline: Path, target: str) -> None:
    loaded = TraceAnalysis(trace_files=glob(saved.pattern(target))).t
    assert loaded.trace_files == {rank: str(saved.trace(target, rank)) for rank in RANKS}
    loaded.decode_symbol_ids(use_shorten_name=False)
    for rank in RANKS:
        path = saved.trace(target, rank)
        assert ranges_in(loaded, rank) == our_ranges(path)
        assert len(loaded.get_trace(rank)) == sum(event["cat"] != "Trace" for event in read(path))


def test_a_directory_of_one_window(saved: SaveDirectory, tmp_path: Path) -> None:
    for path in glob(saved.pattern("train_actor")):
        shutil.copy(path, tmp_path)
    loaded = TraceAnalysis(trace_dir=str(tmp_path)).t
    assert {rank: Path(path).name for rank, path in loaded.trace_files.items()} == {
        rank: saved.trace("train_actor", rank).name for rank in RANKS
    }


def test_gpu_times_are_those_of_the_report(tmp_path: Path) -> None:
    from megaprof.analysis.report.report import analyze
    from tests.analysis.scenarios import Scenario, write

    # Of fewer than 128 launches HTA 0.5 takes their numbers, and then those of events, for 8 bits.
    write(Scenario("uneven", layers=(4, 2), microbatches=16, exposed={"tp": 0.1}, idle=0.1), tmp_path)
    (target,) = analyze(tmp_path).targets
    traces = dict(enumerate(sorted(map(str, tmp_path.iterdir()))))
    found = TraceAnalysis(trace_files=traces)
    breakdown = found.get_temporal_breakdown(visualize=False).set_index("rank")
    kinds = found.get_gpu_kernel_breakdown(visualize=False)[1]
    for stage in target.stages:
        ours = stage.compute_ms.mean * 1000
        assert breakdown.loc[stage.pp, "compute_time(us)"] == pytest.approx(ours, rel=0.01)
        kernels = kinds[kinds["rank"] == stage.pp].groupby("kernel_type")["sum (us)"].sum()
        assert kernels["COMPUTATION"] == pytest.approx(ours, rel=0.01)
        assert kernels["COMMUNICATION"] > 0
