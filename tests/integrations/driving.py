"""What the tests share that drive a host's real functions on real megatron-core, over gloo, on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.autoload.arming import environment
from megaprof.formats.ranges import parse

ROOT = Path(__file__).parents[2]
#: Imported by hosts at their top, and either CUDA's or of no concern to what is driven.
EDGES = (
    "apex",
    "flash_attn",
    "mbridge",
    "megatron.energon",
    "modelopt",
    "nvidia_resiliency_ext",
    "nvdlfw_inspect",
    "ring_flash_attn",
    "sglang",
    "sglang_router",
    "torch_memory_saver",
    "vllm",
    "wandb",
)


#: Variables of Ray's for a busy machine with two cores.
PATIENT_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "400",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_worker_niceness": "1",
}


def start_ray(**options: Any) -> None:
    """``ray.init``, which gives its own processes 30 seconds to start: too few where the machine is busy."""
    import ray

    for attempts_left in reversed(range(5)):
        try:
            ray.init(include_dashboard=False, **options)
            return
        except Exception:
            ray.shutdown()
            if not attempts_left:
                raise


def host_environment(host: Path, config: ProfileConfig | None) -> dict[str, str]:
    """The environment of ``megaprof run`` for a process that imports ``host`` from its directory."""
    paths = [str(ROOT), str(Path(__file__).parent), str(host), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "KINETO_LOG_LEVEL": "6"}
    return environment(config or ProfileConfig(), env)


def checkout(variable: str) -> str:
    """The directory that ``variable`` names; the tests fetch no repository, so a missing one is a skip that says so."""
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set; it names a checkout, which the tests do not fetch (docs/hosts/README.md)")
    return os.environ[variable]


def skip_without_packages() -> None:
    """Skip, naming them, where packages that hosts need are not installed. Importing a host would tell it, too, and
    take as long as half of its test."""
    required = [each for each in requires("megaprof") or () if 'extra == "hosts"' in each]
    names = {re.split(r"[^\w.-]", each)[0] for each in required if "sys_platform" not in each}
    if missing := sorted(name for name in names if not _installed(name)):
        pytest.skip(f"not installed here: {', '.join(missing)}; pip install 'megaprof[hosts]'")


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def prepare(host: str | None = None, *edges: str) -> None:
    """Megatron-core first, as it is here; then nothing in the place of ``edges``, and of EDGES where they are missing.

    ``host`` goes on the path: a rank of ``run_ranks`` has the path of the test that started it.
    """
    import importlib.metadata

    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    from tests.integrations.edges import replace, replace_missing
    from tests.integrations.newer import newer_typing

    if host is not None:
        sys.path.append(host)
    newer_typing()
    replace_missing(*EDGES)
    replace(*edges)
    if "transformer_engine" in edges:  # hosts ask for its version, and compare it
        released = importlib.metadata.version
        named = {"transformer-engine": "2.9.0"}
        importlib.metadata.version = lambda distribution_name: (
            named.get(distribution_name) or released(distribution_name)
        )


def traces(directory: Path) -> dict[str, Any]:
    """Captured traces by target, role, step and pipeline rank, as in their names."""
    found = {}
    for path in sorted(directory.glob("*.pt.trace.json.gz")):
        with gzip.open(path) as file:
            found[path.name.partition("-tp")[0]] = json.load(file)
    return found


def labels(trace: Any) -> list[str]:
    names = (parse(str(event.get("name", ""))) for event in trace["traceEvents"])
    return [name.label for name in names if name is not None]
