"""The script pretrain.py before megaprof: `megaprof run` profiles it as it is."""

import argparse

from megatron.core.pipeline_parallel import get_forward_backward_func

from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    init_distributed()
    with cpu_megatron():
        gpt = build(GPTWorkload(pp=2, layers=8, layout=(6, 2), microbatches=8, hidden=64, layer_ms=(8.0, 16.0)))
        forward_backward_func = get_forward_backward_func()
        for step in range(args.steps):
            losses = gpt.train_step(forward_backward_func)
            if losses:  # the last stage has them
                print(f"step {step}: loss {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
