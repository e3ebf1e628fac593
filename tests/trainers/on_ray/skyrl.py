"""What both trainers of SkyRL are run with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

EDGES = (
    "flash_attn,apex,modelopt,vllm,vllm_router,nvidia_resiliency_ext,megatron.energon,mamba_ssm,causal_conv1d,fla,"
    "flashinfer,nixl,pynvml,nvdlfw_inspect,wandb"
)
VARIABLES = {
    "TRAINERS_ADAPT": "tests.trainers.on_ray.skyrl_names",
    "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1",
    "SKYRL_RAY_PG_TIMEOUT_IN_S": "300",
}


def packages(wheel: Callable[[str], Path]) -> tuple[Path, ...]:
    skyrl = wheel("skyrl")
    return skyrl, skyrl / "skyrl-gym", wheel("megatron-bridge")
