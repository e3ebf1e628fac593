"""The rules by which a diagnosis of drawn pipelines is marked, as docs/benchmarks.md has them."""

from __future__ import annotations

from tests.analysis.truth.drawing import NOTHING
from tests.analysis.truth.grading import FILLING, MUCH, OF_ITSELF, SAME, SOME, WITHIN

_WHAT = {
    "layers": "one stage holds more layers than the others",
    "embedding_or_loss": "the first or the last stage computes something besides its layers",
    "recomputation": "the backwards of one stage compute its forwards again",
    "slow_forward": "the forwards of one stage take longer",
    "slow_backward": "the backwards of one stage take longer",
    "slow_stage": "all passes of one stage take longer, for a reason that the files do not show",
    "slow_chunk": "one model chunk of one stage takes longer",
    "slow_rank": "one of several replicas or peers is slow: always, now and then, or from some step on",
    "slow_link": "messages between two neighbouring stages take longer",
    "late_entry": "a rank enters every step late",
    "data_wait": "the first forward of the first stage takes longer in every step",
    "uneven_microbatches": "microbatches differ in work, on all stages or on one",
    "communication": "exposed communication of tp, cp or ep makes passes longer, or that of dp makes steps longer",
    "host_bound": "the GPU waits for the host in every pass",
    "stalls": "single passes of any rank take much longer, in 4 % of a rank's steps",
    "unequal_replicas": "in every step, a different replica has more work",
}


_BEGINNING = """\
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

| fault | meaning | counts as found if one of these is named in the right place |
|---|---|---|
"""
_END = f"""
What the files cannot tell apart counts as the same: layers and embedding or loss on two stages; embedding or loss and
a slow first or last stage, or its outer chunk; pipeline communication and the only link of two stages. The right place
is the rank for a slow or late rank, the group for communication (or no group, in CPU traces and files of Nsight
Systems, which name none), either end for a link, and the stage for everything else.

| figure | meaning |
|---|---|
| `found` | of the faults worth {MUCH:.0%} of the step or more: how many are named in the right place |
| `found_2` | the same for those worth {SOME:.0%} to {MUCH:.0%} |
| `precision` | of the named causes: how many are faults worth {NOTHING:.0%} or more |
| `clean` | of the healthy pipelines: how many have no wrongly named cause |
| `price` | of the faults that are named with a price: how many have the right one |
| `layouts` | of the advised layouts: how many have their true speedup inside the predicted interval |
| `predicted` | the same for all predicted layouts |

A fault is worth what it costs alone, averaged over all steps. A named cause is really present if it costs enough alone,
or with all others fixed, or in the steps in which it is present. A stage that is called slow for an unknown reason is
present, but does not count as found. Messages between stages take time in every pipeline, so they have a price. Few
microbatches do not count if filling takes more than {FILLING:.0%} of a balanced step.

A price is right if the true price is inside its interval or, without an interval, within {WITHIN:.0%} of the step or
{OF_ITSELF:.0%} of itself. Work that has to be done somewhere (layers, embedding, loss) is neutral when it is spread
evenly over the stages; everything else is neutral when it is gone. The price may be that of the cause alone or, if the
diagnosis says so, with the causes before it fixed. A cause that is not present in all steps may have the price of the
steps in which it is, or the average.
"""


def rules() -> str:
    """Markdown."""
    rows = [
        f"| `{kind}` | {_WHAT[kind]} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in SAME.items()
    ]
    return _BEGINNING + "\n".join(rows) + "\n" + _END
