"""A process that is on the CPU for good, as a trainer sees it: each test is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.trainers.cpu_process import cpu_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(code: str) -> list[str]:
    """What ``code`` prints in a process that calls `cpu_process` first; it ends without a traceback."""
    program = "from tests.trainers.cpu_process import cpu_process\ncpu_process(gpus=2)\nimport torch\n" + code
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "Traceback" in line]) == (
        0,
        [],
    ), done.stderr
    return done.stdout.splitlines()


def test_it_has_devices_that_are_the_cpu_in_every_thread_and_ends_without_a_traceback() -> None:
    lines = run("""
import threading
from concurrent.futures import ThreadPoolExecutor
cpu_process(gpus=2)
print(int(torch.cuda.current_device()), torch.cuda.is_available(), torch.cuda.device_count())
device = torch.device('cuda', torch.cuda.current_device())
print(torch.ones(2, device=device).to(torch.cuda.current_device()).sum().item())
@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(2)
print(scripted(torch.ones(2)).sum().item())

def made():
    first = torch.zeros(1, device="cuda", pin_memory=True)
    weight = torch.nn.Linear(1, 1, device="cuda").to(0).weight
    return {t.device.type for t in (first, first.to("cuda:1"), first.new_ones(2, device="cuda"), weight,
                                    torch.empty_like(first, device=0))}
print(ThreadPoolExecutor().submit(made).result())
found = []
thread = threading.Thread(target=lambda: found.append(made())); thread.start(); thread.join()
print(*found)

weights = torch.arange(3.0, device="cuda")
kept = weights.cpu().pin_memory()  # as Megatron-Core keeps parameters that it takes off the device
weights.untyped_storage().resize_(0)
weights.untyped_storage().resize_(kept.untyped_storage().size())
weights.copy_(kept)
print(weights.tolist())
""")
    assert lines == ["0 True 2", "2.0", "4.0", "{'cpu'}", "{'cpu'}", "[0.0, 1.0, 2.0]"]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_megatrons_own_bf16_optimizer_trains_over_what_it_takes_for_nccl(distributed_optimizer: bool) -> None:
    if distributed_optimizer and version("megatron-core").startswith("0.12."):
        pytest.skip("the distributed optimizer of megatron-core 0.12 needs Transformer Engine for bf16")
    lines = run(f"""
import tempfile
import torch.distributed as dist
dist.init_process_group("nccl", init_method="file://" + tempfile.mkdtemp() + "/s", rank=0, world_size=1,
                        device_id=torch.device("cuda:0"))
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megaprof.testing import GPTWorkload, build
gpt = build(GPTWorkload(layers=2, hidden=32, seq_length=16, heads=2, dtype="bfloat16"))
ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer={distributed_optimizer})
gpt.chunks = [DistributedDataParallel(gpt.config, ddp, chunk.module) for chunk in gpt.chunks]
options = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16,
                          use_distributed_optimizer={distributed_optimizer})
optimizer = get_megatron_optimizer(options, gpt.chunks)
print(dist.get_backend(), next(gpt.chunks[0].parameters()).type())
average = torch.tensor([3.0], device="cuda")
dist.all_reduce(average, op=dist.ReduceOp.AVG)
losses = []
for _ in range(4):
    for chunk in gpt.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses.append(sum(loss["lm loss"].item() for loss in gpt._run(None, 0, forward_only=False)))
    assert optimizer.step()[0]
print(average.item(), losses[-1] < losses[0])
dist.destroy_process_group()
""")
    assert lines == ["gloo torch.cuda.BFloat16Tensor", "3.0 True"]


def test_a_number_of_gpus_that_is_none() -> None:
    with pytest.raises(ValueError, match="gpus=0: must be at least 1"):
        cpu_process(gpus=0)
