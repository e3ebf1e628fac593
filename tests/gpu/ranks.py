"""Several NCCL ranks on one GPU: each says that it is another host, so NCCL does not refuse the GPU twice.

They talk over the loopback, through host memory, which is slow; kernels, groups and schedules are the real ones. Where
CUDA's multi-process service runs, kernels of all ranks run side by side, each rank on its share of the GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megaprof.testing.launcher import init_distributed, run_ranks
from tests.gpu.job import device_of

T = TypeVar("T")

_ENV = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_SOCKET_NTHREADS": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
DEADLINE = "MEGAPROF_GPU_PART_ENDS"
"""The variable with the time (of `time.monotonic`) at which the process of a part is killed."""


def together(fn: Callable[..., T], world: int, *args: Any, cpu: bool, env: Mapping[str, str] | None = None) -> list[T]:
    """What ``fn(*args)`` returns on each rank. Ranks that hang are ended, with their stacks, before the part is."""
    left = float(os.environ.get(DEADLINE, math.inf)) - time.monotonic()
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // world)}
    given = {} if cpu else {**_ENV, **share}
    return run_ranks(fn, world, *args, timeout=max(min(left - 8, 300), 5), env={**given, **(env or {})})


@contextlib.contextmanager
def joined(cpu: bool) -> Iterator[str]:
    """The device to build on, in a rank of `together`."""
    if cpu:
        init_distributed()
    else:
        torch.set_num_threads(1)
        torch.cuda.set_device(0)
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    destroy = dist.destroy_process_group
    # The launcher calls it for all groups when the result is written, and NCCL takes down dozens of them, second by
    # second. Megatron calls it for single groups before it makes others.
    dist.destroy_process_group = lambda group=None: os._exit(0) if group is None else destroy(group)
    with device_of(cpu) as device:
        yield device


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """The environment in which processes use a service of their own; nothing where the machine has none."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as directory:
        own = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        env = {**os.environ, **own}
        quiet: dict[str, Any] = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 10}
        started = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            started = subprocess.run([control, "-d"], check=False, **quiet).returncode == 0
        try:
            yield own if started else {}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input=b"quit -t 2\n", check=False, **quiet)
