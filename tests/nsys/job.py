"""One rank of a two-stage job on the CPU, under nsys: ``python -m tests.nsys.job [flags]``, ranks by environment."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from megaprof import add_profile_args, install_hooks
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed

WORKLOAD = GPTWorkload(pp=2, layers=4, layout=(3, 1), microbatches=4, hidden=64, seq_length=32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die-in-step", type=int)
    args = add_profile_args(parser).parse_args()
    init_distributed()
    with cpu_megatron():
        gpt = build(WORKLOAD)
        with install_hooks(gpt.chunks, args):
            for step in range(6):
                if step == args.die_in_step and os.environ["RANK"] == "1":
                    gpt.chunks[0].register_forward_hook(die)
                gpt.train_step()
    print("trained", file=sys.stderr)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
