"""A small pretrain script with megaprof's two lines: a real Megatron-Core GPT in two pipeline stages, on the CPU."""

import argparse

from megatron.core.pipeline_parallel import get_forward_backward_func

from megaprof import add_profile_args, install_hooks
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    add_profile_args(parser)  # 1. the options --profile-target and others
    args = parser.parse_args()
    workload = GPTWorkload(
        pp=2, layers=4, layout=(3, 1), microbatches=8, hidden=64, seq_length=32, layer_ms=(24, 48), patient=True
    )
    init_distributed()
    with cpu_megatron():
        gpt = build(workload)
        install_hooks(gpt.chunks, args)  # 2. after the model is built, before the training loop
        forward_backward_func = get_forward_backward_func()
        for step in range(args.steps):
            losses = gpt.train_step(forward_backward_func)
            if losses:  # the last stage has them
                print(f"step {step}: loss {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
