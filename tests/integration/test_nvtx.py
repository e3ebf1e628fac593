"""What really reaches NVTX: a tool in C, attached the way Nsight Systems attaches, against the torch trace."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from megaprof import ProfileConfig, annotate, install_hooks, role
from megaprof.analysis.trace.traces import find_traces
from megaprof.formats.ranges import PREFIX
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

WORKLOAD = GPTWorkload(pp=2, layers=2, microbatches=3, hidden=32, seq_length=16, heads=2, num_experts=2)


@annotate(role="rollout", color="red", domain="host", category="generation", message="generate a batch")
def generate() -> None:
    with annotate(message="inner"):
        pass


@annotate
async def fetch() -> None:
    pass


def train(directory: str) -> int:
    import asyncio

    init_distributed()
    with cpu_megatron():
        gpt = build(WORKLOAD)
        config = ProfileConfig(("train_overall",), directory, select="all", schedule="1", ranges="module")
        with install_hooks(gpt.chunks, config):
            for _ in range(3):
                gpt.train_step()
                generate()
                asyncio.run(fetch())
                with role("ref"):
                    gpt.log_probs_pass()
    return os.getpid()


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library: Path = tmp_path_factory.mktemp("nvtx") / "tool.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the NVTX tool with")
    source = Path(__file__).with_name("nvtx_tool.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.slow  # the tool is loaded when a process begins
def test_nvtx_and_the_trace_have_the_same_ranges(tool: Path, tmp_path: Path) -> None:
    log, traces = tmp_path / "log", tmp_path / "traces"
    env = {"NVTX_INJECTION64_PATH": str(tool), "NVTX_TOOL_LOG": str(log)}
    for rank, pid in enumerate(run_ranks(train, WORKLOAD.world_size, str(traces), env=env, timeout=180)):
        (path,) = [path for path in find_traces(traces) if f"rank{rank:05d}" in path.name]
        with gzip.open(path) if path.suffix == ".gz" else open(path) as file:
            events = json.load(file)["traceEvents"]
        traced = Counter(
            e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)
        )

        lines = [line.split("\t") for line in Path(f"{log}.{pid}").read_text().splitlines()]
        seen = Counter(name for what, domain, _, _, name, _, _ in lines if what in ("push", "start"))
        assert seen == traced
        # A name that a CUDA graph is captured with must outlive the capture: registered, once, it lives for ever.
        registered = Counter(name for what, domain, _, _, name, _, _ in lines if what == "register")
        assert {what for what, *_ in lines} >= {"push", "start", "register"}
        assert "unregistered" not in {what for what, *_ in lines}
        assert registered == Counter(seen.keys())
        labels = {name.split()[0].removeprefix(PREFIX) for name in seen}
        assert labels & {"token_dispatch", "token_permutation"}  # from 0.13 on, and before
        assert labels >= {
            *("train_overall", "train_actor", "train_log_probs", "forward", "backward", "finalize_grads"),
            *("layer", "attention_backward", "experts", "experts_backward"),
            *("role/ref", "role/rollout/generate_a_batch", "role/rollout/inner", "annotated/fetch"),
        }
        assert seen["megaprof/role/ref"] == 1, "a scope of another role is named once, not once more per call"

        depth: defaultdict[tuple[str, str], int] = defaultdict(int)
        for what, domain, thread, *_ in lines:
            depth[domain, thread] += {"push": 1, "pop": -1}.get(what, 0)
            assert depth[domain, thread] >= 0
        assert set(depth.values()) == {0}
        assert {domain for what, domain, *_ in lines if what == "push"} == {"megaprof", "host"}
        ((_, domain, _, _, _, color, category),) = [e for e in lines if e[0] == "push" and "generate" in e[4]]
        assert (domain, color) == ("host", "ff0000")
        assert ["category", "host", "generation", category] in [[e[0], e[1], e[4], e[6]] for e in lines]
        (begun,) = [e for e in lines if e[0] == "start"]
        assert [e[3] for e in lines if e[0] == "end"] == [begun[3]]
