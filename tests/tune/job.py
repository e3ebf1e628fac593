"""A training script as Megatron-LM's users have it: its options on the command line, real schedules over gloo.

Layers and the output layer take a given time in each pass, most of which they wait, as a host waits for a GPU, so that
a step is the same on any machine, however many stages share its cores. With ``--compute``, layers compute. With
``--memory`` what stands for torch's allocator counts a given size for each layer, and for each of its activations as
they come and go. With ``--second-fails`` the last rank ends the second trial with an error, once some steps are made,
while the others wait. With ``--turns DIR`` a rank waits before every step until it is its turn: it writes a byte to the
pipe ``DIR/over`` and reads one from the pipe that is named for it.

``torchrun --nproc-per-node 2 job.py --num-layers 8 ...``
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megaprof.analysis.what_if.layouts import Layout, default_layout, layers_per_stage, parse_layout
from megaprof.config.options import variable
from megaprof.formats.timeline import Memory
from megaprof.parallel.megatron import language_model
from megaprof.recorders import timeline as recorder
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed
from megaprof.testing.faults import layers, pace

#: Milliseconds of a layer's forward and of its backward.
LAYER = (10.0, 20.0)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--pipeline-model-parallel-size", type=int, required=True)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--decoder-first-pipeline-num-layers", type=int)
    parser.add_argument("--decoder-last-pipeline-num-layers", type=int)
    parser.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    parser.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=8)  # in microbatches of one sequence
    parser.add_argument("--train-iters", type=int, default=100_000)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--compute", action="store_true")  # layers take what they compute
    parser.add_argument("--layer-ms", type=float, nargs=2, default=LAYER)
    parser.add_argument("--loss-ms", type=float, nargs=2, default=(0.0, 0.0))
    parser.add_argument("--memory", type=float, nargs=2, metavar=("LAYER", "ACTIVATIONS"))  # GiB
    parser.add_argument("--save", type=Path)
    parser.add_argument("--refuse")  # a layout in which it runs out of memory
    parser.add_argument("--second-fails", action="store_true")
    parser.add_argument("--turns", type=Path)
    parser.add_argument("--overlap-p2p-communication-warmup-flush", action="store_true")
    args = parser.parse_args()
    if args.save is not None:
        (args.save / "checkpoint").write_text("overwritten")
    pieces = _layout(args)
    split = tuple(piece.count("t") for piece in pieces)
    if args.refuse == "+".join(map(str, layers_per_stage(pieces, args.pipeline_model_parallel_size))):
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    init_distributed()
    chunks = len(pieces) // args.pipeline_model_parallel_size
    tp = args.tensor_model_parallel_size
    replicas = torch.distributed.get_world_size() // args.pipeline_model_parallel_size // tp
    workload = GPTWorkload(
        tp=tp,
        pp=args.pipeline_model_parallel_size,
        dp=replicas,
        vpp=chunks if chunks > 1 else None,
        layers=args.num_layers,
        layout=split,
        microbatches=args.global_batch_size // replicas,
        hidden=args.hidden_size,
        seq_length=args.seq_length,
        options={"overlap_p2p_comm_warmup_flush": args.overlap_p2p_communication_warmup_flush},
    )
    with cpu_megatron():
        gpt = build(workload)
        if not args.compute:
            pace(layers(gpt.chunks), lambda: tuple(args.layer_ms))
        ends = [model.output_layer for model in map(language_model, gpt.chunks) if model.post_process]
        pace(ends, lambda: tuple(args.loss_ms))
        if args.memory is not None:
            _count_memory(layers(gpt.chunks), *(round(each * (1 << 30)) for each in args.memory))
        second = args.second_fails and os.environ[variable("dir")].endswith("trial-2")
        for step in range(args.train_iters):
            if second and step == 2 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                sys.exit("error: no space left for the cache of the data set")
            if args.turns is not None:
                with (args.turns / "over").open("wb", buffering=0) as over:
                    over.write(b".")
                with (args.turns / str(torch.distributed.get_rank())).open("rb", buffering=0) as turn:
                    turn.read(1)
            gpt.train_step(schedules.get_forward_backward_func())
            torch.distributed.barrier()  # Megatron-LM reduces the norm of gradients over all stages


def _count_memory(own: list[Any], layer: int, activations: int) -> None:
    allocated = peak = layer * len(own)

    def add(size: int) -> None:
        nonlocal allocated, peak
        allocated += size
        peak = max(peak, allocated)

    def ran(module: Any, inputs: Any, output: Any) -> None:
        add(activations)
        output[0].register_hook(lambda gradient: add(-activations))

    for each in own:
        each.register_forward_hook(ran)
    recorder.device_memory = lambda: lambda: Memory(allocated, peak, 80 << 30)


def _layout(args: argparse.Namespace) -> Layout:
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout:
        return parse_layout(args.pipeline_model_parallel_layout, stages)
    found = default_layout(
        stages,
        args.num_virtual_stages_per_pipeline_rank,
        args.num_layers,
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        account_for_embedding=args.account_for_embedding_in_pipeline_split,
        account_for_loss=args.account_for_loss_in_pipeline_split,
    )
    if found is None:
        sys.exit("these options make no layout")
    return found


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # what waits shares no core, and must not be less certain for it
    main()
