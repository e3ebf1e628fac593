"""Is the price in a report that of the job as it runs, without a profiler? Real jobs over gloo, with one fault each.

Every job first runs without megaprof, and switches its fault on and off in turn: these twins differ by what the fault
really costs. Then it runs with the fault under a default capture (``--profile-tool torch``), whose profiled steps are
longer than the others. The price of the fault in the report of that is compared with the difference. A fault between
the steps is a part of whole iterations, which a timeline has, so what the report says of that part is compared.

The last line is JSON. ``found``: faults that are named, in the right place, as ``[number, of]``; ``within``: those
whose price differs from the twins' difference by 5 % of the step or less; ``inside``: those whose interval contains the
difference, give or take two standard errors of it; a part of iterations has none. ``faults`` has each, in milliseconds.

    python -m tests.benchmarks.observer [--only FAULT ...] [--repeats N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze
from megaprof.formats.facts import PARTS
from megaprof.testing import GPTWorkload, run_ranks
from tests.analysis.truth.engines import Named, report
from tests.benchmarks.cores import awake, real_time

#: Milliseconds of a layer's forward and of its backward, and of what a forward takes beside its layers. Nearly all of a
#: job waits: what ranks compute at the same time takes longer on few cores, and a fault changes what that is.
LAYER_MS, BESIDE_MS = (6.0, 12.0), 3.0
#: Steps of a twin in a row, and how often each twin has its turn.
IN_A_ROW, TURNS = 3, 4
#: Of the capture: steps before the window, in it, and behind it.
BEFORE, CAPTURED, BEHIND = 10, 2, 6
#: A price is right within this part of the step.
WITHIN = 0.05


@dataclass(frozen=True)
class Fault:
    """What is wrong with a job of ``workload``, and by which kinds of causes, at which stage or rank, it counts as
    found; or which part of its iterations, if it is between the steps. ``longer``: milliseconds of what the fault adds.
    ``every``: in one of so many steps."""

    workload: GPTWorkload
    kinds: tuple[str, ...]
    longer: float = 0.0
    stage: int | None = None
    rank: int | None = None
    every: int = 1

    @property
    def part(self) -> str | None:
        return self.kinds[0] if self.kinds[0] in PARTS else None

    def is_named(self, named: Named) -> bool:
        here = named.stage == self.stage if self.rank is None else self.rank in named.ranks
        return named.kind in self.kinds and here


def _workload(pp: int, layers: int = 0, **changes: Any) -> GPTWorkload:
    return GPTWorkload(**{"layers": layers or 2 * pp, "microbatches": 6, **changes}, pp=pp, hidden=32, seq_length=16)


FAULTS = {
    "layers": Fault(_workload(2, 6, layout=(4, 2)), ("layers",), stage=0),
    "slow-rank": Fault(_workload(2, dp=2), ("slow_rank",), 3.0, rank=3),
    "tp-rank": Fault(_workload(2, tp=2), ("slow_rank",), 3.0, rank=1),
    "slow-link": Fault(_workload(3), ("slow_link",), 8.0, stage=0),
    "data-loader": Fault(_workload(2), ("data_wait",), 10.0, stage=0),
    "data-rank": Fault(_workload(2, dp=2), ("data_wait",), 10.0, rank=1),
    "data-all": Fault(_workload(2, dp=2), ("data_wait",), 10.0, stage=0),
    "data-eighth": Fault(_workload(2, microbatches=16), ("data_wait",), 60.0, stage=0),
    "host": Fault(_workload(3), ("slow_forward",), 8.0, stage=1),
    "optimizer": Fault(_workload(2), ("optimizer",), 60.0),
    "checkpoint": Fault(_workload(2), ("saving",), 800.0, every=20),
    "evaluation": Fault(_workload(2), ("evaluation",), every=10),
}


@dataclass(frozen=True)
class Outcome:
    """Milliseconds of a step: without the fault, with it, and what the report says about it; None: nothing."""

    fault: str
    without_ms: float
    with_ms: float
    error_ms: float
    price: float | None
    low: float | None
    high: float | None
    others: tuple[str, ...]

    @property
    def truth(self) -> float:
        return self.with_ms - self.without_ms

    @property
    def within(self) -> bool:
        return self.price is not None and abs(self.price - self.truth) <= WITHIN * self.with_ms

    @property
    def inside(self) -> bool | None:
        """None: there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low - 2 * self.error_ms <= self.truth <= self.high + 2 * self.error_ms


class _Switch:
    """Whether the fault is there."""

    def __init__(self) -> None:
        self.on = False


def _pace_between_all_reduces(layers: Sequence[Any], takes: Callable[[], tuple[float, float]]) -> None:
    """Lets every layer take a given time, half of it before each of its two all-reduces in each pass. In a layer that
    takes a given time as a whole, what it waits for its peers would be a part of that."""
    import torch
    from megatron.core import parallel_state

    all_reduce, half, begin = torch.distributed.all_reduce, 0.0, 0.0

    def begins(place: int | None) -> None:
        nonlocal half, begin
        half, begin = 0.0 if place is None else takes()[place] / 2e3, time.perf_counter()

    def reduced(tensor: Any, *args: Any, group: Any = None, **named: Any) -> Any:
        nonlocal begin
        if group is not parallel_state.get_tensor_model_parallel_group():
            return all_reduce(tensor, *args, group=group, **named)
        time.sleep(max(begin + half - time.perf_counter(), 0.0))
        work = all_reduce(tensor, *args, group=group, **named)
        if work is not None:
            work.wait()
        begin = time.perf_counter()
        return work

    torch.distributed.all_reduce = reduced  # type: ignore[assignment]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: begins(0))
        layer.register_forward_hook(lambda *_: begins(None))
        layer.register_full_backward_pre_hook(lambda *_: begins(1))


def _pace_beside(chunk: Any, takes: Callable[[], float]) -> None:
    """Lets every forward of a chunk take so many milliseconds."""
    begin = 0.0

    def begins(*_: Any) -> None:
        nonlocal begin
        begin = time.perf_counter()

    chunk.register_forward_pre_hook(begins)
    chunk.register_forward_hook(lambda *_: time.sleep(max(begin + takes() / 1e3 - time.perf_counter(), 0.0)))


def _break(name: str, gpt: Any, switch: _Switch) -> None:
    """Paces the layers, and puts the fault in, for as long as the switch is on."""
    import torch

    from megaprof.testing import faults

    fault, rank = FAULTS[name], torch.distributed.get_rank()
    workload, layers = fault.workload, faults.layers(gpt.chunks)
    usual = workload.layers / workload.pp / len(layers)  # of unevenly split layers, none is long

    def layer_ms() -> tuple[float, float]:
        factor = 1.0 if switch.on else usual
        slow = (
            fault.longer / LAYER_MS[0] if switch.on and rank == fault.rank and "data_wait" not in fault.kinds else 0.0
        )
        factor = (factor + slow) * workload.tp  # more ranks share the cores
        return LAYER_MS[0] * factor, LAYER_MS[1] * factor

    def wait() -> None:
        if switch.on:
            time.sleep(fault.longer / 1e3)

    def batches(step: int, own: Callable[[int], Any] = gpt.data_iterator) -> Any:
        for number, batch in enumerate(own(step)):
            if name != "data-eighth" or number % 8 == 0:
                wait()
            yield batch

    if name == "slow-link" and rank in (0, 1):
        faults.after_exchange(1 - rank, wait)
    if name == "optimizer":
        gpt.optimizer.register_step_pre_hook(lambda *_: wait())
    if name == "host" and rank == fault.stage:
        faults.before_forward(gpt.chunks[0], wait)
    if workload.tp > 1:
        _pace_between_all_reduces(layers, layer_ms)
    else:
        faults.pace(layers, layer_ms)
        _pace_beside(gpt.chunks[0], lambda: len(layers) * layer_ms()[0] + BESIDE_MS)
    # The first stage's ranks are the first ones.
    if name.startswith("data") and rank in ((fault.rank,) if fault.rank is not None else range(workload.dp or 1)):
        gpt.data_iterator = batches


def run_rank(name: str, out: Path) -> tuple[list[float], list[float]]:
    """One rank. Returns the milliseconds of the steps without the fault, and of those with it, on the slowest rank."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import ProfileConfig, add_profile_args, evaluation, install_hooks
    from megaprof.capture.process import process
    from megaprof.testing import build, cpu_megatron, init_distributed

    torch.set_num_threads(1)
    real_time()
    init_distributed()
    gc.disable()
    switch = _Switch()
    with cpu_megatron():
        gpt = build(FAULTS[name].workload)
        _break(name, gpt, switch)

        def between(part: str) -> None:
            with process.parts.inside(part):
                if part == "evaluation":
                    with evaluation():
                        gpt.log_probs_pass(get_forward_backward_func())
                else:
                    torch.save([chunk.state_dict() for chunk in gpt.chunks], out.with_suffix(f".{rank}.checkpoint"))
                    time.sleep(fault.longer / 1e3)

        fault, rank, steps = FAULTS[name], torch.distributed.get_rank(), itertools.count(1)

        def step(run: Callable[..., Any]) -> None:
            torch.distributed.barrier()
            gpt.train_step(run)
            if name in ("checkpoint", "evaluation") and switch.on and next(steps) % fault.every == 0:
                between(fault.kinds[0])

        def iterations(out: Path) -> None:
            """What a timeline records of the iterations: three times those with the fault."""
            config = ProfileConfig(("train_actor",), str(out), tool=("timeline",), select="all")
            with install_hooks(gpt.chunks, config):
                hooked = get_forward_backward_func()
                for _ in range(3 * max(fault.every, IN_A_ROW) + 1):
                    step(hooked)

        if fault.part is not None:
            twins: tuple[list[float], list[float]] = ([], [])
            step(forward_backward := get_forward_backward_func())
            for turn in range(TURNS):
                switch.on = turn % 4 in (1, 2)
                begin, count = time.perf_counter(), max(fault.every, IN_A_ROW)
                for _ in range(count):
                    step(forward_backward)
                torch.distributed.barrier()
                twins[switch.on].append(1e3 * (time.perf_counter() - begin) / count)
            switch.on = True
            iterations(out)
            return twins

        taken: list[float] = []
        forward_backward = get_forward_backward_func()

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = forward_backward(*args, **kwargs)
            taken.append(1e3 * (time.perf_counter() - begin))
            return result

        step(forward_backward)
        for turn in range(2 * TURNS):
            switch.on = turn % 4 in (1, 2)  # one, the other, the other, one: what drifts is in both
            for _ in range(IN_A_ROW):
                step(timed)
        longest = torch.tensor(taken, dtype=torch.float64)
        torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
        twins = ([], [])
        for number, ms in enumerate(longest.tolist()):
            twins[number // IN_A_ROW % 4 in (1, 2)].append(ms)
        switch.on = True
        flags = ["--profile-target", "train_actor", "--profile-dir", str(out), "--profile-select", "all"]
        flags += ["--profile-steps", f"train_actor={BEFORE}:{BEFORE + CAPTURED}"]
        args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
        with install_hooks(gpt.chunks, args):
            hooked = get_forward_backward_func()
            for _ in range(BEFORE + CAPTURED + BEHIND):
                step(hooked)
    return twins


def measure(name: str, out: Path) -> Outcome:
    """One job: its twins, and what the report of its capture says."""
    fault = FAULTS[name]
    env = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    without, faulty = run_ranks(run_rank, fault.workload.world_size, name, out, timeout=170.0, env=env)[0]
    said, found = (), None
    price = low = high = None
    if fault.part is None:
        said = report(out).named
        found = next((each for each in said if fault.is_named(each)), None)
        if found is not None:
            price, low, high = found.price, found.low, found.high
    else:
        target = analyze(out).targets[0]
        price = (target.iterations.ms_of(fault.part) or None) if target.iterations else None
    error = sum(statistics.variance(each) / len(each) for each in (without, faulty)) ** 0.5
    others = tuple(f"{each} {each.price:.0f} ms" for each in said if each is not found)
    return Outcome(name, statistics.fmean(without), statistics.fmean(faulty), error, price, low, high, others)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=tuple(FAULTS), nargs="*", default=tuple(FAULTS), help="only these (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="jobs with each fault (default: 1)")
    parser.add_argument("--keep", type=Path, help="write the captures here")
    given = parser.parse_args(arguments)
    load, begin, outcomes = os.getloadavg()[0], time.monotonic(), []
    with nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory() as folder, awake():
        for number in range(given.repeats):
            for name in given.only:
                one = measure(name, Path(folder) / f"{name}-{number}")
                outcomes.append(one)
                said = "not named"
                if one.price is not None:
                    said = f"priced at {one.price:.1f} ms"
                if one.low is not None:
                    said += f" ({one.low:.1f} to {one.high:.1f})"
                said += ("" if one.within else " WRONG") + (" OUTSIDE" if one.inside is False else "")
                print(
                    f"{name:12} {one.without_ms:6.0f} -> {one.with_ms:6.0f} ms: truth {one.truth:.1f} "
                    f"± {one.error_ms:.1f} ms, {said}"
                    f"{''.join(f'; {other}' for other in one.others)}",
                    flush=True,
                )
    bounded = [one.inside for one in outcomes if one.inside is not None]
    print(
        json.dumps(
            {
                "benchmark": "observer",
                "found": [sum(one.price is not None for one in outcomes), len(outcomes)],
                "within": [sum(one.within for one in outcomes), len(outcomes)],
                "inside": [sum(map(bool, bounded)), len(bounded)],
                "faults": [asdict(one) for one in outcomes],
                "load": load,
                "minutes": round((time.monotonic() - begin) / 60, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
