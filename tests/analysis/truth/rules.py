"""The rules by which a diagnosis of drawn pipelines is marked, as docs/benchmarks.md has them."""

from __future__ import annotations

from tests.analysis.truth.drawing import NOTHING
from tests.analysis.truth.grading import FILLING, OF_ITSELF, WITHIN


def rules() -> str:
    """Markdown."""
    return f"""\
A fixed list of runs can be tuned to. So `make bench-truth` draws hundreds of random pipelines from a seed: 1 to 8
stages, 1 to 3 model chunks, 1 to 4 replicas, 4 to 64 microbatches, 1 to 60 steps; 1F1B, interleaved, forward-only, or
no pipeline; exchanges that are a rendezvous, buffered or overlapped; noise of 0.3 to 5 %, bursts of other load, hosts
with clocks of their own; as GPU traces, CPU traces, files of Nsight Systems, and timelines on either clock. A quarter
of them are healthy, half have one fault, and a quarter have two.

Traces are of a profiler that disturbs: in a profiled step, the host takes 1.2 to 2.5 times as long, so a GPU waits for
it, or a CPU computes for longer. A timeline of 25 steps without a profiler is beside them, and only these are graded.
Files of Nsight Systems are alone and undisturbed.

The pipelines are simulated by code that shares nothing with the analysis (`tests/analysis/truth`). The true price of a
fault is the step with it minus the step without it, from the same random numbers.

The faults are [the causes of the report](report.md#what-is-named-and-what-it-costs). One is found if it is named in
the right place: the rank for a slow or late rank, the group for communication (or no group, in CPU traces and files of
Nsight Systems, which name none), either end for a link, and the stage for everything else. What the files cannot tell
apart counts as the same: recomputation and slow backwards; layers and embedding or loss on two stages; embedding or
loss and a slow first or last stage, or its outer chunk; pipeline communication and the only link of two stages.

A fault is worth what it costs alone, averaged over all steps. A named cause is really present if it costs {NOTHING:.0%}
of the step alone, or with all others fixed, or in the steps in which it is present. A stage that is called slow for an
unknown reason is present, and found only if that is the fault. Messages between stages take time in every pipeline, so
they have a price. Few microbatches do not count if filling takes more than {FILLING:.0%} of a balanced step.

A price is right if the true price is inside its interval or, without an interval, within {WITHIN:.0%} of the step or
{OF_ITSELF:.0%} of itself. Work that has to be done somewhere (layers, embedding, loss) is neutral when it is spread
evenly over the stages; everything else is neutral when it is gone. The price may be that of the cause alone or, if the
diagnosis says so, with the causes before it fixed. A cause that is not present in all steps may have the price of the
steps in which it is, or the average.
"""
