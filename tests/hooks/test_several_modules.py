from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats import ranges
from megaprof.testing import run_ranks
from tests.hooks import several_modules
from tests.hooks.several_modules import MICROBATCHES, STAGES

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
pytestmark = pytest.mark.skipif(
    not hasattr(schedules, "backward_step_multimodule"), reason="this megatron-core has no pipelines of several modules"
)


def test_modules_that_follow_each_other_are_stages_of_one_pipeline(tmp_path: Path) -> None:
    stages = sum(STAGES.values())
    plain = run_ranks(several_modules.train, stages, None)
    assert run_ranks(several_modules.train, stages, str(tmp_path)) == plain, "the gradients are what they were"
    for trace in map(read_trace, find_traces(tmp_path)):
        coords = trace.metadata.coords
        assert (coords.pp, trace.metadata.sizes.pp, trace.metadata.schedule) == (coords.rank, stages, "1f1b")
        found = Counter(each.name.label for each in trace.ranges)
        assert (found["forward"], found["backward"]) == (MICROBATCHES, MICROBATCHES)
        exchanges = {
            each.name.fields["mb"]
            for each in trace.ranges
            if ranges.transfers(each.name.label) and "mb" in each.name.fields
        }
        assert exchanges >= set(range(MICROBATCHES)), "those between the modules, too, and each knows what it carries"
    (target,) = analyze(tmp_path).targets
    assert [stage.pp for stage in target.stages] == list(range(stages))
    assert target.microbatches == MICROBATCHES
