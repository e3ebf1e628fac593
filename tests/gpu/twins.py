"""Jobs with and without one fault, in one process for each rank: what the fault costs, by steps that alternate with
and without it, and what reports on recordings of it say that it costs.

The order is that of what may disturb what follows: plain steps, the timeline, windows of the profiler, plain steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprof.recorders import flight
from megaprof.testing import faults
from megaprof.testing.gpt import BuiltGPT, GPTWorkload, build
from tests.gpu.found import Found, difference
from tests.gpu.job import WARM, Stopwatch, config, hooked
from tests.gpu.ranks import joined, together
from tests.gpu.said import Said, said

_STEPS = {"timeline": (6, 2), "torch": (2, 1)}
"""Steps of a recording, and of one in a rehearsal."""
_BEFORE, _BEHIND = 3, 7
"""Steps before and behind the windows, with the hooks in place: a capture keeps a timeline of them, of five behind it
that it does not disturb."""
_ROUNDS, _AGAIN = (4, 10), 4
"""The least and the most turns that every kind of step takes before anything is recorded, and those at the end."""
_TURNS_S = 6.0
"""Seconds for these turns; the same for those with and without the timeline."""
_OF_A_STAGE = ("layers", "unexplained", "slow_forward", "slow_backward", "slow_chunk", "embedding_or_loss")
_PLAIN = "plain"


@dataclass(frozen=True)
class Fault:
    """What one kind of step has and its twin has not. Times are milliseconds in each layer's forward; a backward has
    twice as much."""

    kinds: tuple[str, ...]
    """What a report may call it."""
    place: dict[str, Any] = field(default_factory=dict)
    """Fields of the report's cause that say where it is."""
    ranks: tuple[int, ...] | None = None
    """That it is on; None: all."""
    device_ms: float = 0.0
    """The GPU is busy with something else."""
    host_ms: float = 0.0
    """The host computes something else."""
    enters_late_ms: float = 0.0
    link: tuple[int, int] | None = None
    """Two ranks whose exchanges carry five times as much."""
    only: int | None = None
    """The microbatch that has the device's time of all of them."""
    twin: str = _PLAIN
    """The kind of step without it."""


@dataclass(frozen=True)
class Job:
    """Its ranks, and what can be wrong with it."""

    options: dict[str, Any]
    faults: dict[str, Fault]
    timeline: dict[str, Any] = field(default_factory=dict)
    """Options of its timeline."""

    @property
    def kinds(self) -> list[str]:
        """Of steps, each next to its twin."""
        twins = {fault.twin for fault in self.faults.values()} - {_PLAIN, *self.faults}
        return [_PLAIN, *sorted(twins), *self.faults]


_EVEN = Fault((), device_ms=0.25)
"""Not a fault: what the microbatches of `uneven_microbatches` have when they are even."""


def slow_rank(rank: int) -> dict[str, Fault]:
    """One rank of a group computes longer than the others."""
    return {"slow_rank": Fault(("slow_rank",), {"ranks": (rank,)}, (rank,), device_ms=0.6)}


def of_a_pipeline() -> dict[str, Fault]:
    """What can be wrong between four stages of one rank each."""
    return {
        "slow_stage": Fault(_OF_A_STAGE, {"stage": 2}, (2,), device_ms=0.6),
        "late_entry": Fault(("late_entry",), {"ranks": (1,)}, (1,), enters_late_ms=20.0),
        "slow_link": Fault(("slow_link",), {"link": (1, 2)}, (1, 2), link=(1, 2)),
        "uneven_microbatches": Fault(("uneven_microbatches",), device_ms=0.25, only=3, twin="even"),
        "starved_host": Fault(("host_bound",), host_ms=0.5),
    }


class Steps:
    """The steps of one rank, with a fault or without."""

    def __init__(self, gpt: BuiltGPT, job: Job, cpu: bool) -> None:
        self.gpt, self.cpu, self.rank = gpt, cpu, dist.get_rank()
        self.known = {_PLAIN: Fault(()), "even": _EVEN, **job.faults}
        self.now = self.known[_PLAIN]
        self.passes = [0, 0]
        self.watch = None if cpu else Stopwatch()
        mine = faults.layers(gpt.chunks)
        for layer in mine:
            layer.register_forward_pre_hook(lambda *_: self._wait(0, len(mine)))
            layer.register_full_backward_pre_hook(lambda *_: self._wait(1, len(mine)))
        exchange = dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda operations: exchange([*operations, *self._more(operations)])

    def _wait(self, backward: int, layers: int) -> None:
        fault, microbatch = self.now, self.passes[backward] // layers
        self.passes[backward] += 1
        if fault.ranks is not None and self.rank not in fault.ranks:
            return
        share = 1 if fault.only is None else self.gpt.workload.microbatches * (microbatch == fault.only)
        device_ms, host_ms = ((1 + backward) * each for each in (share * fault.device_ms, fault.host_ms))
        if device_ms and not self.cpu:
            torch.cuda._sleep(int(device_ms * 1.6e6))  # in cycles
        elif device_ms:
            time.sleep(device_ms / 1e3)
        ends = time.perf_counter() + host_ms / 1e3
        while time.perf_counter() < ends:
            pass

    def _more(self, operations: Sequence[Any]) -> Iterator[Any]:
        link = self.now.link
        peer = None if link is None or self.rank not in link else sum(link) - self.rank
        for each in operations:
            if each.peer == peer:
                more = torch.zeros(4 * each.tensor.numel(), dtype=each.tensor.dtype, device=each.tensor.device)
                yield dist.P2POp(each.op, more, each.peer, each.group)

    def step(self, kind: str) -> tuple[float, float]:
        """When it began and ended, in seconds of the machine's clock. All ranks begin together."""
        self.now, self.passes = self.known[kind], [0, 0]
        if self.cpu:
            dist.barrier()
        else:
            dist.barrier(device_ids=[0])
            torch.cuda.synchronize()
        began = time.monotonic()
        if self.now.enters_late_ms and self.rank in (self.now.ranks or ()):
            time.sleep(self.now.enters_late_ms / 1e3)
        self.gpt.train_step(self.watch)
        if not self.cpu:
            torch.cuda.synchronize()
        return began, time.monotonic()

    def steps(self, kinds: Iterable[str]) -> list[tuple[float, float]]:
        return [self.step(kind) for kind in kinds]

    def schedule_calls(self) -> list[float]:
        """Milliseconds by events of the schedule's calls since this was asked last, which is what a report calls a
        step."""
        return self.watch.take() if self.watch else []

    def turns(self, kinds: int) -> int:
        """How many turns ``kinds`` kinds of steps can take, the same on all ranks."""
        took = torch.tensor([end - began for began, end in self.steps([_PLAIN] * 3)]).median()
        longest = took.to("cpu" if self.cpu else "cuda")
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        least, most = (1, 1) if self.cpu else _ROUNDS
        return min(max(int(_TURNS_S / (kinds * longest.item())), least), most)


def one_rank(directory: str, job: Job, cpu: bool) -> dict[str, Any]:
    """Begins and ends of the steps, by what they were for, and how long the schedule's calls before any recording
    took."""
    out = Path(directory)
    with joined(cpu) as device:
        gpt = build(_workload(job, cpu), device)
        run = Steps(gpt, job, cpu)
        run.steps([_PLAIN] * (1 if cpu else WARM) + job.kinds)
        rounds = run.turns(len(job.kinds))
        run.schedule_calls()
        found: dict[str, Any] = {"before": run.steps(job.kinds * rounds)}
        found["calls"] = run.schedule_calls()
        with_and_without = partial(_with_and_without, run, out, job, run.turns(4))
        found["timeline_before"] = with_and_without("timeline-before")
        for tool, counts in _STEPS.items():
            steps = counts[cpu]
            given = job.timeline if tool == "timeline" else {}
            before, behind = (0, 0) if tool == "timeline" or cpu else (_BEFORE, _BEHIND)
            for kind in job.kinds:
                first = gpt.step + before
                wanted = config(
                    out / kind / tool, cpu, **{"tool": (tool,), "steps": f"{first}:{first + steps}", **given}
                )
                with hooked(gpt, wanted):
                    found[f"{tool}/{kind}"] = run.steps([kind] * (before + steps + behind))
        found["after"] = run.steps(job.kinds * (1 if cpu else _AGAIN))
        found["timeline_after"] = with_and_without("timeline-after")
        return found


def _with_and_without(run: Steps, out: Path, job: Job, rounds: int, name: str) -> list[tuple[float, float]]:
    """Plain steps, one with the timeline and one without, in turn. The first after each change does not count."""
    found = []
    for _ in range(rounds):
        for given in (config(out / name, run.cpu, tool=("timeline",), **job.timeline), None):
            with hooked(run.gpt, given) if given else contextlib.nullcontext():
                found.append(run.steps([_PLAIN] * 2)[1])
    return found


def _workload(job: Job, cpu: bool) -> GPTWorkload:
    sizes = {"layers": 8, "hidden": 2048, "heads": 16, "seq_length": 1024, "microbatches": 8, "vocab": 8192}
    if cpu:
        sizes |= {"layers": 4, "hidden": 32, "heads": 2, "seq_length": 16, "microbatches": 4, "vocab": 64}
    return GPTWorkload(**{**sizes, "dtype": "bfloat16", **job.options})


def compare(work: Path, cpu: bool, name: str, job: Job) -> Found:
    """Every fault of a job: what it costs, and what reports say."""
    env = {flight.TIMING: "1", flight.SIZE: str(flight.USUAL)} if job.timeline else None  # as `megaprof run` does
    ranks = together(one_rank, _workload(job, cpu).world_size, str(work), job, cpu, cpu=cpu, env=env)
    calls = list(map(max, zip(*(rank.pop("calls") for rank in ranks), strict=True)))
    took = {phase: _milliseconds([rank[phase] for rank in ranks]) for phase in ranks[0]}
    took["calls"] = calls or took["before"]
    before, after, usual = (_by_kind(job, took[phase]) for phase in ("before", "after", "calls"))
    kept = work / "keep"
    _keep(kept, work, name, job, cpu, took)
    found = Found({"plain_ms": statistics.median(before[_PLAIN])})
    plain = found.figures["plain_ms"]
    for when in ("before", "after"):
        steps = took[f"timeline_{when}"]
        found.figures[f"timeline_costs_{when}_ms"] = difference(steps[::2], steps[1::2])
    found.nothing(cpu, "the timeline (ms) costs nothing", found.figures["timeline_costs_before_ms"], plain, 0.005)
    count = len(after[_PLAIN])
    found.figures["after_windows_ms"] = difference(after[_PLAIN], before[_PLAIN][-count:])
    found.nothing(cpu, "steps after the windows (ms) are as before", found.figures["after_windows_ms"], plain, 0.01)
    recordings = [(kind, tool) for kind in job.kinds for tool in _STEPS]
    reports = dict(zip(recordings, _reports([work / kind / tool for kind, tool in recordings], cpu), strict=True))
    for (kind, tool), one in reports.items():
        found.expect(f"{kind}, {tool}: what the report raises", one.failed, None)
        expected = statistics.median(usual[kind])
        found.within(cpu, f"{kind}, {tool}: the report's step (ms) is that of plain steps", one.step_ms, expected, 0.05)
        found.figures[f"{kind}_{tool}_replay_error"] = one.replay_error
        if job.options.get("tp"):
            found.on_a_gpu(
                cpu, f"{kind}, {tool}: exposed tp (ms)", one.exposed_ms, "a number", one.exposed_ms is not None
            )
    for name, fault in job.faults.items():
        cost = difference(before[name], before[fault.twin])
        found.figures[f"{name}_costs_ms"] = cost
        for tool in _STEPS:
            _priced(found, cpu, name, fault, tool, cost, reports[name, tool], reports[fault.twin, tool])
    return found


def _priced(
    found: Found, cpu: bool, name: str, fault: Fault, tool: str, cost: list[float], with_it: Said, without: Said
) -> None:
    """Compare what a report says more of a job with the fault than of its twin with what the fault costs."""
    with_ms, twin_ms = (
        [sum(cause["price"][bound] for cause in _its(fault, one)) for bound in ("value", "low", "high")]
        for one in (with_it, without)
    )
    found.figures[f"{name}_{tool}_says_ms"] = with_ms
    found.figures[f"{name}_{tool}_says_of_its_twin_ms"] = twin_ms
    ms, low, high = (each - twin_ms[0] for each in with_ms)
    expected = f"{cost[0]:.3g} give or take {cost[1]:.2g}"
    shown = f"{ms:.3g} ({low:.3g} to {high:.3g}); names {', '.join(_named(with_it.causes))}"
    held = abs(ms - cost[0]) <= 0.2 * cost[0] + 2 * cost[1] or low <= cost[0] <= high
    found.on_a_gpu(cpu, f"{name}, {tool}: its price (ms) is what it costs", shown, expected, held)
    if name != "starved_host":  # any job may wait for its host
        certain = [cause for cause in _its(fault, without) if cause["price"]["low"] > 0.02 * (without.step_ms or 0.0)]
        found.on_a_gpu(cpu, f"{name}, {tool}: not named in its twin", _named(certain), [])


def _its(fault: Fault, one: Said) -> list[dict[str, Any]]:
    return [
        cause
        for cause in one.causes
        if cause["kind"] in fault.kinds and all(cause[key] == value for key, value in fault.place.items())
    ]


def _named(causes: Iterable[Mapping[str, Any]]) -> list[str]:
    where = ("stage", "ranks", "link", "group")
    return [
        " ".join([cause["kind"], *(f"{key}={cause[key]}" for key in where if cause[key] not in (None, ()))])
        + f" {cause['price']['value']:.3g} ms"
        for cause in causes
    ]


def _milliseconds(ranks: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Of each step, from when the last rank began to when the last one ended."""
    return [1e3 * (max(end for _, end in step) - max(began for began, _ in step)) for step in zip(*ranks, strict=True)]


def _by_kind(job: Job, steps: list[float]) -> dict[str, list[float]]:
    return {kind: steps[number :: len(job.kinds)] for number, kind in enumerate(job.kinds)}


def _reports(directories: Sequence[Path], cpu: bool) -> list[Said]:
    if cpu:
        return list(map(said, directories))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(said, directories))


def _keep(kept: Path, work: Path, name: str, job: Job, cpu: bool, took: Mapping[str, list[float]]) -> None:
    """One step of each recording's traces, and its timeline, what was measured, and what was built."""
    built = asdict(_workload(job, cpu)) | {"faults": {kind: asdict(fault) for kind, fault in job.faults.items()}}
    for kind in job.kinds:
        own = kept / f"{name}-{kind}"
        shutil.copytree(work / kind / "timeline", own / "timeline")
        (own / "torch").mkdir()
        traces = sorted((work / kind / "torch").iterdir())
        windows = [path for path in traces if path.name.endswith(".pt.trace.json.gz")]
        steps = {path.name.split(".")[1] for path in windows}
        for path in traces:
            if path.is_file() and (path not in windows or path.name.split(".")[1] == max(steps)):
                shutil.copy(path, own / "torch")
        (own / "measured.json").write_text(json.dumps({"kinds": job.kinds, "kind": kind, "ms": dict(took)}))
        (own / "built.json").write_text(json.dumps(built))
