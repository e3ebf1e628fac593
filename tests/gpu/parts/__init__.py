"""The parts of the bench, each a module with ``run(work, cpu)``.

``work`` is an empty directory, and ``cpu`` says whether this is a rehearsal without a GPU. What a part raises is its
failure. What it leaves in ``work / "keep"`` is a recording for others (``--keep``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """How a part is run."""

    what: str
    """What it compares."""
    alone: bool = False
    """It compares times of different runs, so nothing else runs meanwhile."""
    ranks: bool = False
    """It has several ranks, which share the GPU."""
    seconds: float = 90.0
    """The longest that it may take."""


#: Parts that time nothing come first, because they run beside each other; then, one after the other, those that time
#: something. Among each, what matters most comes first, because time may run out.
PARTS = {
    "axes": Part("TP=2, EP=2, CP=2 over NCCL, with and without CPU operators: whose communication it is", ranks=True),
    "overlap": Part("gradient reduction of two replicas that overlaps with compute: groups on kernels", ranks=True),
    "whole_graph": Part("full-iteration CUDA graphs: replayed steps are counted, captured, and say so"),
    "any_stage": Part("any rank of TP, EP, CP and PP jobs, exchanges faked and kernels real: coordinates, passes"),
    "compiled": Part("a module compiled by torch.compile: captured, said in the metadata", seconds=60.0),
    "cupti_held": Part("a second subscriber that holds CUPTI: the window says that kernels are missing"),
    "layer_graphs": Part("CUDA graphs of single layers: captured, and what has no ranges is said"),
    "memory": Part("CUDA memory history of a window in which an allocation fails"),
    "nsys": Part("cudaProfilerStart and Stop, seen by nsys where there is one"),
    "graph_names": Part("kernels of a replayed full-iteration graph bear microbatch and layer, by annotations"),
    "transformer_engine": Part("Transformer Engine's real layers, bf16 and FP8: ranges and kernels"),
    "twins_pipeline": Part(
        "PP=4 with and without each of five faults: the price in the report against plain steps",
        alone=True,
        ranks=True,
        seconds=130.0,
    ),
    "cost": Part(
        "a job that the host limits: what recording adds to a step, before and after CUPTI was attached; the report",
        alone=True,
    ),
    "twins_tensor": Part("TP=2 with and without a slow rank", alone=True, ranks=True),
    "cost_large": Part("the cost and the report of a job that the GPU limits", alone=True, seconds=100.0),
    "twins_replicas": Part("PP=2 DP=2 with and without a slow rank", alone=True, ranks=True),
    "device_clock": Part(
        "PP=2 recorded by the timeline on the device's clock: stages and passes against CUDA events",
        alone=True,
        ranks=True,
    ),
    "marks": Part("what one mark of the timeline takes, against torch's own and the bare event", alone=True),
    "pipeline": Part(
        "PP=2: the slow stage, what-if against a re-run, what the profiler's start takes", alone=True, ranks=True
    ),
    "interleaved": Part("the same with two model chunks per stage", alone=True, ranks=True),
    "rehearsal": Part(
        "PP=2 by megaprof rehearse, each stage alone, against its ranks", alone=True, ranks=True, seconds=130.0
    ),
    "activities": Part("Kineto with and without CPU operators, and without CUDA: what is known", alone=True),
    "arrivals": Part("NCCL's times of collectives, and what timing costs", alone=True, ranks=True),
}
