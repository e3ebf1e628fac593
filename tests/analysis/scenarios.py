"""Runs with a known answer, written as the traces that a GPU (or a CPU) job would have left.

The timeline of a step comes from the schedule simulator; what is put into it (slow layers, slow ranks, waiting, idle
GPUs) is known, and so is what the report must say. A phase becomes a host range, launches in it (a backward's on
another thread, as autograd's are), kernels on the compute stream, communication on streams of its own with the metadata
of NCCL, and send-receive kernels that last until both ends are there.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaprof.formats.graphs import KEY
from megaprof.parallel.schedules import PipelineSchedule, phase_order
from tests.analysis.kineto import launched, replayed
from tests.analysis.synthetic import TraceBuilder, chunk

GROUPS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP_WITH_CP",
}
COLLECTIVES = {
    "tp": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ep": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "cp": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "dp": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE_STREAM, NCCL_STREAM, RECEIVE_STREAM, SEND_STREAM = 7, 20, 24, 28
AUTOGRAD = 99
GAP = 0.004
#: Numbers of launches in a step at most: within a process none comes twice.
_CORRELATIONS = 2_000_000


class Event(NamedTuple):
    """A pass of a run, as the simulation has it."""

    stage: int
    chunk: int
    microbatch: int
    phase: str
    start_ms: float
    end_ms: float


_Times = list[list[list[float]]]  # milliseconds, [stage][chunk][microbatch]


@dataclass(frozen=True)
class Scenario:
    """One run. ``expected``: the causes that must be named, in their order, as ``kind``, ``kind:stage`` or
    ``kind:group``, with what they cost in percent of the step; nothing else may be. Times in milliseconds; a backward
    takes twice a forward.

    ``layers``: per stage, or per stage and chunk. ``slow``: factor by stage, on its rank with tp=1 where ``peers`` of
    them are captured. ``uneven``: microbatches take 1 - uneven to 1 + uneven times the mean. ``exposed``: communication
    that nothing hides, as a fraction of a pass, by group. ``idle``: of every pass the fraction in which the GPU waits
    for the host. ``transfer``: milliseconds between two stages. ``tail``: of gradient reduction behind the passes.
    ``apart``: every stage on a host of its own, with a clock of its own. ``operators``: False where only the GPU was
    recorded, as ``--profile-activities cuda`` does.

    ``stretched``: factor by stage, kind of pass and chunk (None: all). ``spread``: by stage, as ``uneven``, of it
    alone. ``link``: milliseconds that exchanges between a stage and the next take. ``late``: milliseconds by stage that
    it enters a step late. ``data``: milliseconds that the first microbatch waits on the first stage. ``hiccups``: by
    stage the step, kind and microbatch of a pass that takes 7 times as long. ``first_step``: factor of the whole first
    step. ``counted``: False leaves the numbers of layers out. ``merged``: all steps in one file.

    ``graphed``: a step is one replay of a full-iteration CUDA graph. Not with ``merged``.

    ``load``: the part of the time in which another program makes all passes on all stages take twice as long, in bursts
    of ``burst`` on average. ``opening``: milliseconds that the profiler's start adds to the first forward of a step on
    the first stage; on the others, which wait for it meanwhile, 0.4 of that.
    """

    name: str
    expected: dict[str, float] = field(default_factory=dict)
    layers: tuple[Any, ...] = (4, 4, 4, 4)
    layer: float = 5.0
    loss: float = 0.0
    embedding: float = 0.0
    mtp: float = 0.0
    microbatches: int = 16
    peers: int = 1
    slow: dict[int, float] = field(default_factory=dict)
    uneven: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    idle: float = 0.0
    transfer: float = 0.05
    tail: float = 0.0
    dp: int = 1
    noise: float = 0.02
    target: str = "train_actor"
    gpu: bool = True
    apart: bool = False
    operators: bool = True
    steps: int = 1
    seed: int = 0
    stretched: dict[tuple[int, str, int | None], float] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)
    link: dict[int, float] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    data: float = 0.0
    hiccups: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    first_step: float = 1.0
    counted: bool = True
    merged: bool = False
    load: float = 0.0
    burst: float = 300.0
    opening: float = 0.0
    graphed: bool = False

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def held(self) -> list[tuple[int, ...]]:
        """Layers per stage and chunk."""
        return [each if isinstance(each, tuple) else (each,) for each in self.layers]

    @property
    def chunks(self) -> int:
        return len(self.held[0])


def write(scenario: Scenario, directory: Path) -> None:
    """The traces of every captured rank."""
    files: dict[tuple[int, int], TraceBuilder] = {}
    for step in range(scenario.steps):
        rng = random.Random(f"{scenario.name} {scenario.seed} {step}")
        works = _work(scenario, rng)
        # Stages run at the pace of their slowest rank; peers wait for it in a tensor-parallel collective.
        pace = [[[max(w) for w in zip(*ranks, strict=True)] for ranks in zip(*stage, strict=True)] for stage in works]
        whole = 1.0 - sum(scenario.exposed.values()) - scenario.idle
        forward = [[[ms / whole for ms in c] for c in stage] for stage in pace]
        backward = None if scenario.target != "train_actor" else [[[2 * ms for ms in c] for c in s] for s in forward]
        _disturb(scenario, step, rng, forward, backward)
        schedules = _replayed(scenario, forward, backward, _bursts(scenario, step))
        length = max(e.end_ms for own in schedules for e in own)
        for pp, peer in itertools.product(range(scenario.stages), range(scenario.peers)):
            share = [
                [own / slowest for own, slowest in zip(works[pp][peer][c], pace[pp][c], strict=True)]
                for c in range(scenario.chunks)
            ]
            trace = _rank(scenario, pp, peer, step, schedules, share, length, rng)
            if not scenario.merged:
                trace.write(directory)
            elif (first := files.setdefault((pp, peer), trace)) is not trace:
                first.events += trace.events
                first.metadata["steps"] = [first.step, trace.step]
    for trace in files.values():
        trace.write(directory)


def _disturb(scenario: Scenario, step: int, rng: random.Random, forward: _Times, backward: _Times | None) -> None:
    """What is wrong with single passes, in place."""
    for kind, times in (("forward", forward), ("backward", backward or [])):
        for (pp, which, part), factor in scenario.stretched.items():
            for c in range(scenario.chunks) if which == kind else ():
                if part in (None, c):
                    times[pp][c] = [ms * factor for ms in times[pp][c]]
        for pp, (at, which, microbatch) in scenario.hiccups.items():
            if which == kind and at == step:
                times[pp][0][microbatch] *= 7
        if step == 0:
            times[:] = [[[ms * scenario.first_step for ms in c] for c in stage] for stage in times]
    for pp, width in scenario.spread.items():
        for microbatch in range(scenario.microbatches):
            factor = 1 + width * rng.uniform(-1, 1)
            for times in (forward, backward) if backward else (forward,):
                for part_times in times[pp]:
                    part_times[microbatch] *= factor
    forward[0][0][0] += scenario.data
    for pp, of_stage in enumerate(forward):
        of_stage[0][0] += scenario.opening * (0.4 if pp else 1.0)


def _bursts(scenario: Scenario, step: int) -> list[tuple[float, float]]:
    """When another program keeps the machine busy, in milliseconds from the start of the step."""
    rng, now, found = random.Random(f"load {scenario.name} {scenario.seed} {step}"), 0.0, []
    while scenario.load and now < 20_000:
        start = now + rng.expovariate(scenario.load / (scenario.burst * (1 - scenario.load)))
        now = start + rng.expovariate(1 / scenario.burst)
        found.append((start, now))
    return found


def _end(start: float, work: float, bursts: list[tuple[float, float]]) -> float:
    """When a pass is through that takes ``work`` milliseconds on a quiet machine and twice as long in bursts."""
    now = start
    for begin, end in bursts:
        if now + work <= begin:
            break
        if now < end:
            work -= max(0.0, begin - now)
            now = max(now, begin)
            done = min(work, (end - now) / 2)
            now, work = now + 2 * done, work - done
    return now + work


def _replayed(
    scenario: Scenario, forward: _Times, backward: _Times | None, bursts: list[tuple[float, float]]
) -> list[list[Event]]:
    """The passes of every stage, each as soon as its stage is free and its input is there."""
    name = "no_pipelining" if scenario.stages == 1 else "interleaved" if scenario.chunks > 1 else "1f1b"
    schedule = PipelineSchedule.checked(
        scenario.stages, scenario.chunks, scenario.microbatches, name=name, forward_only=backward is None
    )
    orders = [list(phase_order(schedule, pp)) for pp in range(scenario.stages)]
    done: dict[tuple[int, str, int, int], float] = {}
    free = [scenario.late.get(pp, 0.0) for pp in range(scenario.stages)]
    found: list[list[Event]] = [[] for _ in orders]
    while any(orders):
        for pp, order in enumerate(orders):
            while order:
                kind, chunk_, microbatch = order[0]
                start = free[pp]
                if (source := _producer(scenario, pp, kind, chunk_)) is not None:
                    if (source[0], kind, source[1], microbatch) not in done:
                        break
                    lag = scenario.link.get(min(pp, source[0]), scenario.transfer)
                    start = max(start, done[source[0], kind, source[1], microbatch] + lag)
                times = forward if kind == "forward" else backward or []
                free[pp] = _end(start, times[pp][chunk_][microbatch], bursts)
                done[pp, kind, chunk_, microbatch] = free[pp]
                found[pp].append(Event(pp, chunk_, microbatch, kind, start, free[pp]))
                order.pop(0)
    return found


def _work(scenario: Scenario, rng: random.Random) -> list[list[list[list[float]]]]:
    """Milliseconds that a forward computes: [stage][peer][chunk][microbatch]."""
    size = [1.0] * scenario.microbatches
    if scenario.uneven:
        size = [1 + scenario.uneven * (2 * mb / (scenario.microbatches - 1) - 1) for mb in range(scenario.microbatches)]
        rng.shuffle(size)
    works = []
    for pp, held in enumerate(scenario.held):
        ranks = []
        for peer in range(scenario.peers):
            factor = scenario.slow.get(pp, 1.0) if peer == scenario.peers - 1 else 1.0
            chunks = []
            for c, layers in enumerate(held):
                beside = scenario.embedding * (pp == 0 and c == 0)
                if pp == scenario.stages - 1 and c == scenario.chunks - 1:
                    beside += scenario.loss + scenario.mtp
                once = (layers * scenario.layer + beside) * factor
                chunks.append([once * s * (1 + abs(rng.gauss(0, scenario.noise))) for s in size])
            ranks.append(chunks)
        works.append(ranks)
    return works


def _rank(
    scenario: Scenario,
    pp: int,
    peer: int,
    step: int,
    schedules: list[list[Any]],
    share: list[list[float]],
    length: float,
    rng: random.Random,
) -> TraceBuilder:
    last = scenario.stages - 1
    held = [
        chunk(n, embedding=pp == 0 and c == 0, loss=pp == last and c == scenario.chunks - 1)
        | {"mtp": int(bool(scenario.mtp) and pp == last and c == scenario.chunks - 1)}
        for c, n in enumerate(scenario.held[pp])
    ]
    tp = max(scenario.peers, 2 if "tp" in scenario.exposed else 1)
    sizes = {"tp": tp, "dp": scenario.dp} | {axis: 2 for axis in ("cp", "ep") if axis in scenario.exposed}
    host = f"node-{pp}" if scenario.apart else "node-1"
    schedule = "no_pipelining" if last == 0 else "interleaved" if scenario.chunks > 1 else "1f1b"
    trace = TraceBuilder(
        pp=pp,
        pp_size=scenario.stages,
        step=5 + step,
        target=scenario.target,
        microbatches=scenario.microbatches,
        chunks=held,
        sizes=sizes,
        coords={"rank": pp * tp + peer, "tp": peer},
        metadata={
            "host": host,
            "schedule": schedule,
            "microbatch_group_size": scenario.stages,
            "device": "cuda" if scenario.gpu else "cpu",
        },
    )
    # The clock of every host is off by some seconds; nothing in a trace says by how many.
    origin = 4000.0 * step + 10.0 + (1700.0 * pp if scenario.apart else 0.0)
    gpu = _Gpu(trace, origin, _CORRELATIONS * step, scenario.operators)
    rank = gpu if scenario.gpu else _Cpu(trace, origin)
    end = 0.0
    for each in held if not scenario.counted else ():
        each |= {"layers": None, "kinds": None}
    for event in schedules[pp]:
        rank.phase(scenario, event, share[event.chunk][event.microbatch], rng)
        end = event.end_ms
    if scenario.gpu and last:
        _exchanges(trace, origin, pp, schedules, scenario)
    if scenario.tail:
        rank.finalize(length, scenario.tail)
    late = scenario.late.get(pp, 0.0)
    trace.call(origin + late - 0.5, (max(end, length) if scenario.gpu else length) + scenario.tail + 1.0 - late)
    if scenario.graphed:
        trace.beside[KEY] = replayed(trace.events, _CORRELATIONS)
        trace.metadata["ranges"] = {"microbatch": False, "reason": "replayed"}
    return trace


@dataclass
class _Gpu:
    """Writes passes as host ranges, launches and kernels."""

    trace: TraceBuilder
    origin: float
    correlation: int = 0
    operators: bool = True

    def phase(self, scenario: Scenario, event: Any, share: float, rng: random.Random) -> None:
        start, end, backward = self.origin + event.start_ms, self.origin + event.end_ms, event.phase == "backward"
        length = end - start
        hosted = length * (0.95 if scenario.idle else 0.6)
        name = f"megaprof/{event.phase} mb={event.microbatch} chunk={event.chunk}"
        self.trace.event(name, start - 2 * GAP, hosted)
        pieces = 4
        thread = AUTOGRAD if backward else 1
        piece, now = length / pieces, start
        for number in range(pieces):
            compute = piece * (1 - sum(scenario.exposed.values()) - scenario.idle)
            # With an idle GPU the host launches each kernel when the one before it has long ended.
            launch = now - GAP if scenario.idle else start - GAP + number * hosted * 0.9 / pieces
            busy = compute * share
            split = rng.uniform(0.3, 0.7) * busy
            self.kernel(f"gemm_{number % 2}", now, split, launch, thread)
            self.kernel("void at::native::elementwise_kernel", now + split, busy - split, launch, thread)
            now += compute
            waited = compute - busy
            for group, fraction in scenario.exposed.items():
                self.collective(group, now - waited, waited + fraction * piece, launch, thread)
                now, waited = now + fraction * piece, 0.0
            if waited > 0:
                self.collective("tp", now - waited, waited, launch, thread)
            now += scenario.idle * piece

    def finalize(self, after: float, length: float) -> None:
        start = self.origin + after
        self.trace.event("megaprof/finalize_grads", start - GAP, length)
        self.collective("dp", start, length, start - GAP / 2, 1)

    def collective(self, group: str, start: float, duration: float, launch: float, thread: int) -> None:
        self.kernel(COLLECTIVES[group], start, duration, launch, thread, group=group)

    def kernel(
        self, name: str, start: float, duration: float, launch: float, thread: int, *, group: str | None = None
    ) -> None:
        self.correlation += 1
        stream = COMPUTE_STREAM if group is None else NCCL_STREAM
        description = None if group is None else GROUPS[group]
        times = start, duration, launch
        launched(
            self.trace.events,
            self.correlation,
            name,
            *times,
            thread,
            stream,
            group=description,
            operators=self.operators,
        )


@dataclass
class _Cpu:
    """Writes passes as ranges that take the whole time, with gloo's collectives in them."""

    trace: TraceBuilder
    origin: float

    def phase(self, scenario: Scenario, event: Any, share: float, rng: random.Random) -> None:
        start, length = self.origin + event.start_ms, event.end_ms - event.start_ms
        name = f"megaprof/{event.phase} mb={event.microbatch} chunk={event.chunk}"
        self.trace.event(name, start, length)
        compute = length * (1 - sum(scenario.exposed.values()))
        now = start + compute * share
        self.trace.event("aten::mm", start, compute * share, cat="cpu_op")
        if share < 1:
            self.trace.event("gloo:all_reduce", now, compute * (1 - share), tid=2)
        now = start + compute
        for group, fraction in scenario.exposed.items():
            operation = "all_to_all" if group == "ep" else "all_reduce"
            self.trace.event(f"gloo:{operation}", now, fraction * length, tid=2)
            now += fraction * length

    def finalize(self, after: float, length: float) -> None:
        self.trace.event("megaprof/finalize_grads", self.origin + after, length)
        self.trace.event("gloo:all_reduce", self.origin + after, length, tid=2)


def _exchanges(trace: TraceBuilder, origin: float, pp: int, schedules: list[list[Any]], scenario: Scenario) -> None:
    """Send-receive kernels of one rank: a receive is posted when its stage has nothing else to do, and each end lasts
    until the other is there and the bytes have gone over."""
    by_phase = {
        (e.stage, e.phase, e.chunk, e.microbatch): (e, before)
        for own in schedules
        for before, e in zip([None, *own], own, strict=False)
    }
    correlation = _CORRELATIONS * (trace.step - 5) + _CORRELATIONS // 2
    for (stage, kind, part, microbatch), (event, before) in by_phase.items():
        source = _producer(scenario, stage, kind, part)
        if source is None or pp not in (stage, source[0]):
            continue
        produced = by_phase[source[0], kind, source[1], microbatch][0].end_ms
        posted = before.end_ms if before else 0.0
        arrived = max(event.start_ms, posted + 0.001) - 0.0005
        if stage == pp:
            name, start, stream, at = f"recv_{kind}", posted, RECEIVE_STREAM, origin + posted - 3 * GAP
        else:
            name, start, stream, at = f"send_{kind}", produced, SEND_STREAM, origin + produced - 4 * GAP
        correlation += 1
        trace.event(f"megaprof/{name}", at - GAP / 4, GAP / 2)
        times = origin + start, max(arrived, start + 0.0001) - start, at
        operators, group = scenario.operators, GROUPS["pp"]
        launched(trace.events, correlation, SEND_RECV, *times, 1, stream, group=group, operators=operators)


def _producer(scenario: Scenario, stage: int, kind: str, part: int) -> tuple[int, int] | None:
    last, last_chunk = scenario.stages - 1, scenario.chunks - 1
    if kind == "forward":
        return (stage - 1, part) if stage else (last, part - 1) if part else None
    return (stage + 1, part) if stage < last else (0, part + 1) if part < last_chunk else None
