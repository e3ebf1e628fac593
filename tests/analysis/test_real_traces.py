"""The generators' traces are such as a GPU's are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.analysis.kineto import launched
from tests.analysis.real_traces import differences
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder

SMALL = {"layers": (2, 1), "microbatches": 2}


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("collectives", exposed={"tp": 0.1, "ep": 0.1, "cp": 0.1}, dp=2, tail=3.0, **SMALL),
        Scenario("without operators", exposed={"tp": 0.1}, dp=2, tail=3.0, operators=False, **SMALL),
        Scenario("log probs", target="train_log_probs", peers=2, slow={0: 1.5}, **SMALL),
        Scenario("merged steps", steps=2, merged=True, **SMALL),
    ],
    ids=lambda scenario: scenario.name,
)
def test_scenarios(scenario: Scenario, tmp_path: Path) -> None:
    write(scenario, tmp_path)
    paths = list(tmp_path.iterdir())
    assert paths
    for path in paths:
        assert differences(json.loads(gzip.decompress(path.read_bytes()))) == set()


def test_a_copy_of_a_collective_bears_no_arguments() -> None:
    trace = TraceBuilder()
    name, group = "Memcpy DtoD (Device -> Device)", "TENSOR_MODEL_PARALLEL_GROUP"
    launched(trace.events, 5, name, 2.0, 1.0, 1.0, 1, 7, group=group, category="gpu_memcpy")
    assert differences(trace.document()) == set()


def test_what_differs_is_seen() -> None:
    trace = TraceBuilder()
    launched(trace.events, 5, "gemm", 2.0, 1.0, 1.0, 1, 7)
    launched(trace.events, 6, "ncclDevKernel_AllReduce", 2.0, 1.0, 1.0, 1, 20, group="TENSOR_MODEL_PARALLEL_GROUP")
    kernel, collective = trace.events[3], trace.events[-1]
    assert (kernel["cat"], collective["cat"]) == ("kernel", "kernel")
    kernel["args"]["correlation"] = 9
    del kernel["args"]["grid"], collective["args"]["dtype"]
    collective["ts"] = 0.0
    trace.events = [event for event in trace.events if event["name"] != "record_param_comms"]
    assert differences(trace.document()) == {
        "kernel without ['grid']",
        "kernel with a part of a collective's arguments",
        "kernel without its call",
        "kernel before its call",
        "a collective's kernel without its operator",
        "no arrow to the kernel",
    }
