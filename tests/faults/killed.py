"""Jobs that are killed at random moments while they keep a timeline.

One rank of a real Megatron-Core GPT per job. A job says over a pipe which step it has finished, the moment it has;
the last line of output is JSON with what each job said last before SIGKILL. Jobs are forked from a process that has
imported everything and computed nothing, since starting Python a hundred times would take the time of the test.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megaprof import ProfileConfig, install_hooks
from megaprof.testing import GPTWorkload, build, cpu_megatron

WORKLOAD = GPTWorkload(layers=1, microbatches=4, hidden=16, seq_length=8, heads=2)


def train_until_killed(directory: Path, said: int) -> None:
    torch.set_num_threads(1)
    directory.mkdir(parents=True)
    dist.init_process_group("gloo", init_method=f"file://{directory}/.store", rank=0, world_size=1)
    with cpu_megatron():
        gpt = build(WORKLOAD)
        install_hooks(gpt.chunks, ProfileConfig(target=("train_actor",), tool=("timeline",), dir=str(directory)))
        step = 0
        while True:
            gpt.train_step()
            os.write(said, step.to_bytes(4, "little"))
            step += 1


def main(directory: str, jobs: str, seed: str) -> None:
    chance = random.Random(int(seed))
    said_last = []
    with cpu_megatron():  # imports what a job needs
        import megatron.core.models.gpt
        import megatron.core.pipeline_parallel.schedules  # noqa: F401
    for number in range(int(jobs)):
        listening, said = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(Path(directory, str(number)), said)
            finally:
                os._exit(1)
        os.close(said)
        data = os.read(listening, 4)  # the first step is over
        time.sleep(chance.uniform(0, 3))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        while more := os.read(listening, 1 << 16):
            data = more[-4:]
        os.close(listening)
        said_last.append([status, int.from_bytes(data, "little") if data else None])
    print(json.dumps(said_last))
