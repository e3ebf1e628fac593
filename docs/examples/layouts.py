"""A small GPT in pipeline stages on the CPU, with the options of Megatron-LM that place layers: an example for tune."""

import argparse

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megaprof.analysis.what_if.layouts import default_layout, parse_layout
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--decoder-first-pipeline-num-layers", type=int)
    parser.add_argument("--decoder-last-pipeline-num-layers", type=int)
    parser.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    parser.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    parser.add_argument("--train-iters", type=int, default=1000)
    args = parser.parse_args()
    stages, chunks = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank
    layout = default_layout(
        stages,
        chunks,
        args.num_layers,
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        account_for_embedding=args.account_for_embedding_in_pipeline_split,
        account_for_loss=args.account_for_loss_in_pipeline_split,
    )
    if args.pipeline_model_parallel_layout:
        layout = parse_layout(args.pipeline_model_parallel_layout, stages)
    if layout is None:
        parser.error("these options make no layout")
    init_distributed()
    with cpu_megatron():
        gpt = build(
            GPTWorkload(
                pp=stages,
                vpp=len(layout) // stages if len(layout) > stages else None,
                layers=args.num_layers,
                layout=tuple(piece.count("t") for piece in layout),
                microbatches=8,
                hidden=64,
                seq_length=32,
                layer_ms=(24, 48),  # what each layer waits forward and backward, as a host waits for a GPU
            )
        )
        for _ in range(args.train_iters):
            gpt.train_step(get_forward_backward_func())
            torch.distributed.barrier()  # as Megatron-LM reduces the norm of gradients over all stages


if __name__ == "__main__":
    main()
