"""The rules by which a diagnosis of drawn pipelines is marked, as docs/truth.md has them."""

from __future__ import annotations

from tests.analysis.truth.drawing import NOTHING
from tests.analysis.truth.grading import FILLING, MUCH, OF_ITSELF, SAME, SOME, WITHIN

_WHAT = {
    "layers": "one stage holds more layers than the others",
    "embedding_or_loss": "the first or the last stage computes something beside its layers",
    "recomputation": "the backwards of one stage compute its forwards again",
    "slow_forward": "the forwards of one stage take longer",
    "slow_backward": "the backwards of one stage take longer",
    "slow_stage": "all passes of one stage take longer, for no reason that the files tell",
    "slow_chunk": "one model chunk of one stage takes longer",
    "slow_rank": "one of several replicas' or peers' ranks is slow: always, now and then, or since a step",
    "slow_link": "messages between two neighbouring stages take longer",
    "late_entry": "a rank enters every step late",
    "data_wait": "the first forward of the first stage takes longer in every step",
    "uneven_microbatches": "microbatches differ in work, on all stages alike or on one alone",
    "communication": "passes take longer by communication of tp, cp or ep that nothing hides, or steps by that of dp",
    "host_bound": "the GPU waits for the host in every pass",
    "stalls": "single passes of all ranks in turn take much longer, in 4 % of a rank's steps",
    "unequal_replicas": "another replica has more work in every step",
}


_BEGINNING = """\
## Drawn pipelines

Runs that were written down once can be tuned to. `make bench-truth` draws hundreds of pipelines from a seed instead:
1 to 8 stages, 1 to 3 model chunks, 1 to 4 replicas, 4 to 64 microbatches, 1 to 60 steps; 1F1B, interleaved,
forward-only or without a pipeline; exchanges as a rendezvous, buffered or overlapped; noise of 0.3 to 5 % that only
adds or does not, bursts of other load, hosts with clocks of their own; GPU traces, files of Nsight Systems, CPU
traces, and timelines on either clock. A quarter of them is healthy, half has one fault, a quarter two. They are
simulated by code that shares nothing with the analysis (`tests/analysis/truth`), and the true price of a fault is the
step with it less the step without it, from the same random numbers. [benchmarks.md](benchmarks.md) has the figures.

| fault | what it is | found when one of these is named there |
|---|---|---|
"""
_END = f"""
What the files cannot tell apart counts as the same: layers and embedding or loss on two stages; a slow first or last
stage, or their outer chunks, and embedding or loss; the only link of two stages and pipeline communication. A slow rank
or a late one is found by its rank, a communication by its group (or by none, in CPU traces and files of Nsight Systems,
which name none), all others by their stage. Either end of a link will do.

| figure | what it says |
|---|---|
| `found` | of the faults worth {MUCH:.0%} of the step or more, how many are named with their place |
| `found_2` | the same of those worth {SOME:.0%} to {MUCH:.0%} |
| `precision` | of the causes that are named, how many are faults worth {NOTHING:.0%} or more |
| `clean` | of the healthy pipelines, how many have no cause named that is not there |
| `price` | of the faults that are named with a price, how many have the right one |
| `layouts` | of the layouts that are advised, how many have their true speedup inside what was predicted |
| `predicted` | the same of all layouts that are predicted |

A fault is worth what it costs alone, averaged over all steps. A named one is there when it costs enough alone, or
with all others mended, or in the steps in which it is there. A stage that is called slow for an unknown reason is
there, but does not count as found. Messages between stages take time in every pipeline, and have a price. Few
microbatches do not count where filling takes more than {FILLING:.0%} of a balanced step.

A price is right inside its interval; where none is given, within {WITHIN:.0%} of the step or {OF_ITSELF:.0%} of
itself. Work that has to be done somewhere (layers, embedding, loss) is neutral when it is spread evenly over the
stages, all else when it is gone. A price is that of a cause alone, or, where the diagnosis says so, with those named
before it mended; one that went by the name of such work is spread then, and what one would lose by being mended alone
is taken off the next one. What is not there in all steps may have the price of those steps or the average.
"""


def rules() -> str:
    """Markdown."""
    rows = [
        f"| `{kind}` | {_WHAT[kind]} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in SAME.items()
    ]
    return _BEGINNING + "\n".join(rows) + "\n" + _END
