"""What it costs to leave the timeline on: real steps of a real job, alternately with and without it.

    python -m tests.benchmarks.timeline [--microbatches 32] [--steps 3000] [--step-ms 100] [--busy] [--collectives 4]

Megatron-Core's own 1F1B schedule and exchanges over gloo at PP=2, autograd included; with ``--collectives``, so many
of both stages end each step, whether it is recorded or not, and their arrivals are recorded, too. What gloo takes for
them is more than all that is measured, and scatters, so it is left out of all figures; torch's ring is full of others,
which are read as well.
In place of layers a stage sleeps, as a process does that waits for its GPU: so a step is 100 ms long on any machine,
two ranks do not disturb each other, and hooks run in caches that have gone cold. Steps come in groups of four: one with
the recorder, two without, one with it, or the other way round. Without it, all hooks are out, because a job without
megaprof has none: a call through a hook that records nothing has its price, too. Steps of a group are 0.5 s apart, so
that a drift of the machine cancels out: alternating blocks of 8 steps need ten times as many steps for the same error.
The background thread does in one of five groups what it does in a second of a job: it writes ten recorded steps and the
rank's status, and looks for requests, in a recorded step. In the other four it does nothing. So a job's step costs 0.8
times what one costs in the quiet groups, and 0.2 times what one costs in the others, each by its median. Ranks run at
real-time priority where that is permitted (as root), background thread included: 200 sleeps make a step, and the
ordinary scheduler wakes each of them a little too late, which is noise. Cores are kept awake for the same reason, by
processes that run when nothing else wants to. Wall time is that of the pipeline; CPU time is that of the whole process,
background thread included, of the rank that pays more. gloo's threads are a part of that, and scatter: so the training
thread and the background thread are also looked at by themselves, with clocks of their own.

The last line is JSON. ``overhead`` and ``overhead_cpu``: what a step gets longer by and what CPU time it takes more,
as fractions of a step of 100 ms; ``_error``: the standard error. ``overhead_threads``: the CPU time of the two threads
alone, and of readings of torch's ring, which are too rare for the groups: one takes ``reading_ms``, all of them
``reading_share`` of the time. ``lock_ms``: for how long one holds the interpreter's lock in one go. ``stall_ms``: the
most CPU time that one round of the background thread took, a reading included, an upper bound of how long the training
thread waits for the interpreter's lock; Python's switch interval is another one. ``bytes_per_rank_step``: what the
busiest rank wrote. ``realtime``: whether the ranks ran at real-time priority. ``--busy`` keeps one core busy with
something else meanwhile, at ordinary priority.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megaprof import ProfileConfig, install_hooks
from megaprof.capture.process import process
from megaprof.recorders import flight, tape
from megaprof.runtime import background
from megaprof.testing import cpu_megatron, init_distributed, run_ranks
from tests.benchmarks.cores import awake, one_busy, real_time

STEP_US = 100e3
WIDTH = 16
#: Of so many groups, each of which records two steps, the background thread has a round in one: a job has one a second.
GROUPS_PER_ROUND = 5
#: Longer than any benchmark, in seconds.
ENDLESS = 1e6


def _config(directory: str, collectives: int) -> ProfileConfig:
    return ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory, collectives=collectives > 0)


class Wait(torch.autograd.Function):
    """Sleeps for a forward, and twice as long for its backward."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


#: What all collectives took so far, by each clock.
_met = np.zeros(4)


def _meet(count: int, *_: Any, **others: Any) -> None:
    """So many collectives, as gradients are reduced; what they take is left out."""
    global _met
    began = _clocks()
    for _ in range(count):
        torch.distributed.all_reduce(torch.ones(1), group=parallel_state.get_model_parallel_group())
    _met = _met + _clocks() - began


class Stage(torch.nn.Module):
    """A pipeline stage that sleeps."""

    def __init__(self, config: TransformerConfig, seconds: float) -> None:
        super().__init__()
        self.config = config
        self.seconds = seconds
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.model_type = ModelType.encoder_or_decoder
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, received: torch.Tensor | list[torch.Tensor | None] | None) -> None:
        self.received = received[0] if isinstance(received, list) else received

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return Wait.apply(self.linear(input_ids if self.received is None else self.received), self.seconds)


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return output.sum(), {}

    return model(next(data)), loss


@dataclass(frozen=True)
class Cost:
    """What the timeline adds to a step: medians over groups of four steps, each with its standard error, weighted as
    their kinds occur in a job."""

    groups: int
    step_us: float
    wall_us: float
    wall_error_us: float
    cpu_us: float
    cpu_error_us: float
    training_us: float
    training_error_us: float
    background_us: float
    background_error_us: float

    @property
    def threads_us(self) -> float:
        """CPU time of the training thread and of the background thread."""
        return self.training_us + self.background_us

    @property
    def threads_error_us(self) -> float:
        return math.hypot(self.training_error_us, self.background_error_us)


def _clocks() -> npt.NDArray[np.float64]:
    """Wall time, and CPU time of the process, of this thread and of the background thread, in microseconds."""
    thread = process.background._thread
    ours = 0.0 if thread is None else time.clock_gettime(time.pthread_getcpuclockid(int(thread.ident or 0)))
    return 1e6 * np.array((time.perf_counter(), time.process_time(), time.thread_time(), ours))


def _stretches(patch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Watches the background thread. Returns a function that returns the longest CPU time, in seconds, that it has
    taken without a pause since that function was called."""
    longest = since = 0.0

    def note() -> None:
        nonlocal longest, since
        now = time.thread_time()
        longest, since = max(longest, now - since), now

    def noted(original: Callable[..., Any], *given: Any) -> Any:
        note()
        return original(*given)

    def read() -> float:
        nonlocal longest
        found, longest = longest, 0.0
        return found

    patch.setattr(process.background, "pause", partial(noted, process.background.pause))
    patch.setattr(background, "_drain", partial(noted, background._drain))  # between two rounds
    return read


def _put_hooks(*, back_in: bool) -> None:
    """Takes all hooks out, or puts them back in."""
    replaced = process.patches._applied
    for owner, name, original, replacement in replaced if back_in else reversed(replaced):
        setattr(owner, name, replacement if back_in else original)


def _groups(step: Callable[[], object], steps: int) -> Cost:
    """Alternate single steps with and without the recorder in about so many ``steps``."""
    quiet, rounds, without = list[list[float]](), list[list[float]](), []
    for group in range(max(3 * GROUPS_PER_ROUND, steps // 4)):
        first, has_round = bool(group % 2), group % GROUPS_PER_ROUND == GROUPS_PER_ROUND - 1
        spent = np.zeros(4)
        for number, recorded in enumerate((first, not first, not first, first)):
            _put_hooks(back_in=recorded)
            if has_round and recorded and number >= 2:
                process.background.wake()
            began = _clocks() - _met
            step()
            took = _clocks() - began - _met
            spent += took if recorded else -took
            if not recorded:
                without.append(float(took[0]))
        (rounds if has_round else quiet).append((spent / 2).tolist())
    _put_hooks(back_in=True)
    figures = list[float]()
    for of_quiet, of_rounds in zip(zip(*quiet, strict=True), zip(*rounds, strict=True), strict=True):
        (usual, usual_error), (more, more_error) = _median(of_quiet), _median(of_rounds)
        part = 1 / GROUPS_PER_ROUND
        figures += (1 - part) * usual + part * more, math.hypot((1 - part) * usual_error, part * more_error)
    return Cost(len(quiet) + len(rounds), statistics.median(without), *figures)


def _median(values: Sequence[float]) -> tuple[float, float]:
    """Median and its standard error, from what lies half a root of their number above and below it in rank: one
    disturbed step changes little."""
    ordered, middle, off = sorted(values), (len(values) - 1) / 2, math.sqrt(len(values)) / 2
    low, high = ordered[max(0, round(middle - off))], ordered[min(len(values) - 1, round(middle + off))]
    return statistics.median(values), (high - low) / 2


@contextlib.contextmanager
def _without_mode() -> Iterator[None]:
    """Switches off the torch function mode of `cpu_megatron`, which no job has: with it, asking a tensor for its shape
    takes 40 times as long. What the schedule makes on a GPU without asking for a device stays on the CPU."""
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch, torch._C.DisableTorchFunction():
        patch.setattr(torch, "zeros", lambda *size, **options: zeros(*size, **options | {"device": "cpu"}))
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        yield


def job(microbatches: int, steps: int, seconds: float, directory: str, collectives: int) -> dict[str, Any]:
    """The cost of the timeline in so many steps of so many seconds, bytes of a step, and the longest burst of the
    background thread."""
    torch.set_num_threads(1)
    realtime = real_time()
    init_distributed()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
    )
    model = Stage(config, seconds / 3 / (microbatches + 1))  # fill and drain make it one microbatch more
    batch = torch.randn(1, 1, WIDTH)

    def step() -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=itertools.repeat(batch),
            model=[model],
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )

    with cpu_megatron(), _without_mode(), pytest.MonkeyPatch.context() as patch:
        stall = _stretches(patch)
        if collectives:
            config.finalize_model_grads_func = partial(_meet, collectives)
            _meet(flight.USUAL)  # torch's ring is full
        for _ in range(5):
            step()
        with install_hooks([model], _config(directory, collectives)) as handle:
            timeline = None if handle._session is None else handle._session.timeline
            listeners = [*process.listeners.values()]
            if timeline is None or not listeners:
                raise RuntimeError("no timeline, or no status")
            for _ in range(20):
                step()
            for task in (timeline.drain, listeners[0].look):  # when `_groups` says so, instead of once a second
                process.background.remove(task)
                process.background.add(task, ENDLESS, woken=True)
            stall()
            found, stalled = _groups(step, steps), stall()
            recorded = timeline.by_key["train_actor", None].finished[1]
            reading = timeline._collectives
            read = {"took": 0.0, "share": 0.0, "lock": 0.0}
            if reading is not None:
                read = {"took": 1e3 * reading.took, "share": reading.share, "lock": _locked_ms()}
    return {
        "cost": found,
        "bytes": timeline._files._size / recorded,
        "stall": 1e3 * stalled,
        "realtime": realtime,
        **read,
    }


def _locked_ms() -> float:
    """Milliseconds in which torch's ring is decoded, which is the longest part of reading it that holds the lock."""
    took = []

    def timed(ring: bytes) -> Any:
        began = time.thread_time()
        found = flight._calls(ring)
        took.append(1e3 * (time.thread_time() - began))
        return found

    for _ in range(9):
        flight._read(timed)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--collectives", type=int, default=0, help="in each step, of both stages")
    args = parser.parse_args()
    quiet = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, awake(), one_busy(args.busy):
        measured = args.microbatches, args.steps, args.step_ms / 1e3, str(Path(folder)), args.collectives
        ranks = run_ranks(job, 2, *measured, timeout=1800, env=quiet)
    how = "C" if tape.IN_C else "Python"
    print(f"hooks in {how}; a step without the timeline: {ranks[0]['cost'].step_us / 1e3:.1f} ms")
    for number, rank in enumerate(ranks):
        c = rank["cost"]
        print(
            f"rank {number}: wall {c.wall_us:+.0f} ± {c.wall_error_us:.0f} us a step, "
            f"CPU {c.cpu_us:+.0f} ± {c.cpu_error_us:.0f} us, of which the training thread {c.training_us:+.0f} ± "
            f"{c.training_error_us:.0f} us and the background thread {c.background_us:+.0f} ± "
            f"{c.background_error_us:.0f} us, {c.groups} groups"
        )
    wall = max((rank["cost"] for rank in ranks), key=lambda c: c.wall_us)
    cpu = max((rank["cost"] for rank in ranks), key=lambda c: c.cpu_us)
    threads = max((rank["cost"] for rank in ranks), key=lambda c: c.threads_us)
    reading = max(ranks, key=lambda rank: rank["share"])
    print(
        json.dumps(
            {
                "overhead": round(wall.wall_us / STEP_US, 5),
                "overhead_error": round(wall.wall_error_us / STEP_US, 5),
                "overhead_cpu": round(cpu.cpu_us / STEP_US, 5),
                "overhead_cpu_error": round(cpu.cpu_error_us / STEP_US, 5),
                "overhead_threads": round(threads.threads_us / STEP_US + reading["share"], 5),
                "overhead_threads_error": round(threads.threads_error_us / STEP_US, 5),
                "reading_ms": round(reading["took"], 2),
                "reading_share": round(reading["share"], 5),
                "lock_ms": round(reading["lock"], 2),
                "stall_ms": round(max(rank["stall"] for rank in ranks), 3),
                "bytes_per_rank_step": round(max(rank["bytes"] for rank in ranks)),
                "groups": wall.groups,
                "busy": args.busy,
                "collectives": args.collectives,
                "realtime": all(rank["realtime"] for rank in ranks),
            }
        )
    )


if __name__ == "__main__":
    main()
