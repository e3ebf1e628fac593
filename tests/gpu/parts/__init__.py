"""The parts of the bench, each a module with ``run(work, cpu)``.

``work`` is an empty directory, and ``cpu`` says whether this is a rehearsal without a GPU. What a part raises is its
failure.
"""

#: What each part compares; the ones that matter most come first, because time may run out.
PARTS = {
    "capture": "PP=1 on NCCL, bf16: the report against CUDA events, the kernel summary against torch's key_averages()",
    "any_stage": "any rank of TP, EP, CP and PP jobs, exchanges faked and kernels real: coordinates, names, passes",
    "pipeline": "PP=2 as two processes on the one GPU, through host memory: slow stage, what-if against a re-run",
    "interleaved": "the same with two model chunks per stage",
    "device_clock": "PP=2 recorded by the timeline on the device's clock: stages and passes against CUDA events",
    "start": "what the profiler's start takes on each of two ranks, and the report's step all the same",
    "activities": "Kineto with and without CPU operators, and without CUDA: what is known and what is null",
    "cupti_held": "a second subscriber that holds CUPTI: the window says that kernels are missing",
    "cost": "step time off, armed, ranges, CUDA only, full profiler and timeline; the end of a window against torch's",
    "marks": "host time of one mark of the timeline in C and in Python; marks against torch's events, and in a capture",
    "whole_graph": "full-iteration CUDA graphs: replayed steps are counted, captured, and say so",
    "graph_names": "kernels of a replayed full-iteration graph bear microbatch and layer, by torch's annotations",
    "layer_graphs": "CUDA graphs of single layers: captured, and what has no ranges is said",
    "transformer_engine": "Transformer Engine's real layers, bf16 and FP8: ranges and kernels",
    "memory": "CUDA memory history of a window, and the snapshot on out of memory",
    "nsys": "cudaProfilerStart and Stop, seen by nsys where there is one",
    "compiled": "layers compiled by torch.compile: captured, said in the metadata",
    "axes": "TP=2 over NCCL, with and without CPU operators: whose communication it is; needs two GPUs",
    "arrivals": "NCCL's times of collectives, what timing costs; of two GPUs the late rank is named",
    "overlap": "gradient reduction that overlaps with compute, in a group of one: group names on kernels",
}
