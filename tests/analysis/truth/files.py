"""What a simulated run would have left on disk: one writer for each format, of the same run.

Timelines are as the recorder writes them, on the host's clock with every exchange, or on the GPU's without. Traces are
as Kineto writes them, of a GPU (launches, kernels on the compute stream, communication on streams of its own with the
metadata of NCCL) or of a CPU (operators, gloo's collectives); those of a GPU also as Nsight Systems exports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaprof.formats import codes, ranges
from megaprof.formats import timeline as format
from megaprof.formats.facts import pack_collections, pack_data
from megaprof.formats.names import artifact_name
from megaprof.formats.ranges import GRAPHS_KEY as KEY
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout
from tests.analysis.kineto import launched, replayed
from tests.analysis.synthetic import TraceBuilder, chunk
from tests.analysis.truth.pipelines import STALLED, Pipeline, Priced, Run, loads, numbers
from tests.analysis.truth.programs import BACKWARD, FORWARD, KINDS, Exchange, Pass
from tests.analysis.truth.simulation import Done, Times
from tests.nsys.written import write_nsys

START_NS = 1_790_000_000_000_000_000
FIRST_STEP = 5
#: Steps without a profiler that a capture also records, before its window and behind it.
BEFORE, BEHIND = 20, 5
#: Milliseconds between two steps: the optimizer.
BETWEEN = 3.0
GROUPS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP_WITH_CP",
}
_COLLECTIVES = {
    "tp": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ep": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "cp": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "dp": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "pp": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
_AXES = ("pp", "tp", "cp", "ep", "dp")
_COMPUTE, _NCCL, _EXCHANGES, _RECEIVES, _MAIN, AUTOGRAD = 7, 20, 24, 28, 1, 99
#: Exchanges that overlap with computing: the kind of pass whose input is waited for.
_AWAITED = {"wait_recv_prev": "forward", "wait_recv_next": "backward"}
_GAP = 0.004
#: Of the host, in an exchange.
_CALL = _GAP / 8
#: Launches in a step at most: within a process none has the number of another.
_LAUNCHES = 2_000_000
#: Steps from one reading of what a thread waits to the next.
_READ = 3


def write(pipeline: Pipeline, run: Run, directory: Path, numbers: Sequence[int] | None = None) -> None:
    """The files of every rank. ``numbers``: of the steps, ascending; None: from `FIRST_STEP` on."""
    directory.mkdir(parents=True, exist_ok=True)
    layout = WorldLayout(sizes_of(pipeline))
    # Steps follow each other; a step begins when the optimizer is through with the one before.
    begin = np.concatenate(([0.0], np.cumsum(run.length + BETWEEN)[:-1]))
    for replica in range(pipeline.replicas):
        for stage in range(pipeline.stages):
            for peer in range(pipeline.peers):
                number = layout.rank_of(tp=peer, dp=replica, pp=stage)
                steps = tuple(range(FIRST_STEP, FIRST_STEP + pipeline.steps) if numbers is None else numbers)
                rank = _Rank(pipeline, run, layout.coords(number), replica, stage, peer, begin, steps)
                if pipeline.recording.endswith("timeline"):
                    _timeline(rank, directory)
                else:
                    _trace(rank, directory)


def write_observed(pipeline: Pipeline, profiled: Pipeline, directory: Path) -> None:
    """The files of a capture: traces of the ``profiled`` steps, and beside them the timeline of the ``pipeline``'s
    steps without a profiler, of which those behind the window are the last `BEHIND`."""
    first, last = FIRST_STEP + pipeline.steps - BEHIND, FIRST_STEP + pipeline.steps - BEHIND + profiled.steps
    of_trace = Priced(profiled)
    write(profiled, of_trace.run(of_trace.all), directory, range(first, last))
    timeline = "device timeline" if pipeline.recording == "gpu trace" else "timeline"
    priced = Priced(pipeline)
    numbers = (*range(FIRST_STEP, first), *range(last, last + BEHIND))
    write(replace(pipeline, recording=timeline), priced.run(priced.all), directory, numbers)


def sizes_of(pipeline: Pipeline) -> ParallelSizes:
    groups = {f.group for f in pipeline.faults if f.kind == "communication"}
    tp, cp, ep = (2 if axis in groups else 1 for axis in ("tp", "cp", "ep"))
    tp = max(tp, pipeline.peers)
    # Expert-parallel ranks are context- and data-parallel ones: where there is one replica, another was not captured.
    beside = pipeline.replicas * cp % ep
    return ParallelSizes(tp=tp, pp=pipeline.stages, cp=cp, ep=ep, dp=pipeline.replicas + beside, vpp=pipeline.chunks)


def described(
    coords: RankCoords,
    chunks: list[dict[str, Any]],
    *,
    target: str,
    steps: tuple[int, int],
    microbatches: int,
    host: str,
    device: str,
    overlapped: bool = False,
    batched: bool = False,
    role: str | None = None,
) -> dict[str, Any]:
    """The metadata of a rank."""
    place, stages = asdict(coords), coords.sizes.pp
    sizes = place.pop("sizes")
    return {
        "version": "0.0.0",
        "target": target,
        "role": role,
        "steps": list(steps),
        "coords": place,
        "sizes": sizes,
        "schedule": "no_pipelining" if stages == 1 else "interleaved" if len(chunks) > 1 else "1f1b",
        "forward_only": target != "train_actor",
        "microbatches": microbatches,
        "microbatch_group_size": stages if len(chunks) > 1 else None,
        "seq_length": 4096,
        "micro_batch_size": 1,
        "chunks": chunks,
        "p2p": {
            "batch_p2p_comm": batched,
            "batch_p2p_sync": False,
            "overlap_p2p_comm": overlapped,
            "overlap_p2p_comm_warmup_flush": overlapped,
        },
        "host": host,
        "pid": 1000 + coords.rank,
        "ranges": {"microbatch": True},
        "truncated": False,
        "device": device,
    }


@dataclass(frozen=True)
class _Rank:
    pipeline: Pipeline
    run: Run
    coords: RankCoords
    replica: int
    stage: int
    peer: int
    begin: Times  # [step]
    numbers: tuple[int, ...]  # of the steps

    @property
    def done(self) -> list[Done]:
        return self.run.done[self.stage]

    @property
    def target(self) -> str:
        return "train_log_probs" if self.pipeline.forward_only else "train_actor"

    @property
    def enter(self) -> Times:
        """By step, since the step began on the first rank."""
        return self.run.enter[self.stage, :, self.replica]

    @property
    def finish(self) -> Times:
        return self.run.finish[self.stage, :, self.replica]

    def collected(self, what: Pass, step: int) -> float:
        """Milliseconds at the end of a pass in which Python collects garbage."""
        ms = sum(fault.size for fault in self.pipeline.faults if fault.kind == "garbage_collection")
        if not ms or (what.kind, what.chunk) != (BACKWARD, 0):
            return 0.0
        random, at = numbers(self.pipeline), (self.stage, step, self.replica)
        return ms * (random.stalled[at] < STALLED and what.microbatch == random.where[at])

    def loaded(self, what: Pass) -> float:
        """Milliseconds at the beginning of a pass in which its replica waits for data."""
        return sum(
            fault.size
            for fault in self.pipeline.faults
            if (fault.kind, fault.stage, what.kind, what.chunk) == ("loader", self.stage, FORWARD, 0)
            and fault.replica in (None, self.replica)
            and what.microbatch % fault.every == 0
        )

    @property
    def forwards(self) -> list[Done]:
        return [each for each in self.done if isinstance(each.what, Pass) and each.what.kind == FORWARD]

    @property
    def loads(self) -> bool:
        """Whether its file says how long it waited for data: the other peers get theirs from the first one."""
        ends = self.stage in (0, self.pipeline.stages - 1)
        return any(fault.kind == "loader" for fault in self.pipeline.faults) and ends and self.peer == 0

    @property
    def waited(self) -> Times:
        """By step, milliseconds in which it had no processor core."""
        load, shared = loads(self.pipeline)[self.stage], 1.0
        for fault in self.pipeline.faults:
            if (fault.kind, fault.stage, fault.replica) == ("processor_wait", self.stage, self.replica):
                shared /= fault.size
        found = np.zeros(self.pipeline.steps)
        for each in self.done:
            if isinstance(each.what, Pass):
                start, end = (at[:, self.replica] for at in (each.start, each.end))
                ran = end - start if load is None else load.work(start, end, self.replica)
                found += end - start - shared * ran
        return found

    @property
    def ahead(self) -> float:
        """Milliseconds by which the clock of this rank's host is."""
        if not self.pipeline.apart:
            return 0.0
        return float(np.random.default_rng([*self.pipeline.seed, 3, self.stage, self.replica]).uniform(0, 3000))

    def metadata(self) -> dict[str, Any]:
        one = self.pipeline
        return described(
            self.coords,
            [self.holds(number) for number in range(one.chunks)],
            target=self.target,
            steps=(self.numbers[0], self.numbers[-1]),
            microbatches=one.microbatches,
            overlapped=one.overlapped,
            batched=not one.overlapped,
            host=f"node-{self.stage}-{self.replica}" if one.apart else "node-1",
            device="cpu" if one.recording == "cpu trace" else "cuda",
        )

    def holds(self, number: int) -> dict[str, Any]:
        """What a model chunk has."""
        one = self.pipeline
        first, last = self.stage == 0 and number == 0, (self.stage, number) == (one.stages - 1, one.chunks - 1)
        layers = one.layers[self.stage][number] if one.known else None
        return chunk(layers, embedding=first, loss=last) | {"mtp": int(one.mtp and last)}


# ------------------------------------------------------------------------------------------------ timelines


def code(what: Pass | Exchange) -> int:
    if isinstance(what, Pass):
        return codes.phase(what.kind + 1, what.microbatch, what.chunk)
    if what.name.startswith(ranges.WAIT):
        return codes.wait(what.name.removeprefix(ranges.WAIT))
    return codes.exchange(what.name)


def _timeline(rank: _Rank, directory: Path) -> None:
    one = rank.pipeline
    device = one.recording == "device timeline"
    metadata = rank.metadata() | {"timeline": {"clock": "device" if device else "host", "unit_cost_ns": 400.0}}
    shape, times = [], []
    for each in rank.done:
        if isinstance(each.what, Pass) or not device:
            shape.append(code(each.what))
            times.append((each.start[:, rank.replica], each.end[:, rank.replica]))
    if not one.forward_only:
        shape.append(codes.FINALIZE)
        times.append((rank.done[-1].end[:, rank.replica], rank.finish))
    rows = (np.array(times).transpose(2, 0, 1) - rank.enter[:, None, None]) * 1000
    rows = np.rint(rows).astype(np.int64)  # [step, event, 2]
    kinds = np.array([code & codes.KIND_MASK for code in shape])
    spent = {kind: (rows[:, kinds == kind, 1] - rows[:, kinds == kind, 0]).sum(axis=1) for kind in codes.KINDS}
    packed = format.pack_times(rows)
    # The host begins a step while the GPU still has work of the one before.
    lag = np.random.default_rng([*one.seed, 4, rank.coords.rank]).uniform(0, 10, one.steps) * device
    starts = START_NS + ((rank.begin + rank.enter + rank.ahead - lag) * 1e6).astype(np.int64)
    duration = np.rint((rank.finish - rank.enter) * 1000).astype(np.int64)
    out = [format.MAGIC, format.metadata_record(metadata), format.shape_record(shape)]
    for step in range(one.steps):
        begun = (0, format.DEVICE_CLOCK if device else 0, rank.numbers[step], int(starts[step]))
        totals = (int(duration[step]), *(int(spent[kind][step]) for kind in codes.KINDS), 60)
        out.append(format.step_record(0, 0, begun, totals, packed[step]))
        if rank.loads:
            waits = [(codes.DATA | code(e.what) & ~codes.KIND_MASK, rank.loaded(e.what)) for e in rank.forwards]
            spans = [(place, 0, round(1e6 * ms)) for place, ms in waits]
            out.append(format.fact_record(step, format.DATA, pack_data(spans)))
        for each in rank.done:
            if isinstance(each.what, Pass) and (ms := rank.collected(each.what, step)):
                end = int(starts[step] + 1e6 * (each.end[step, rank.replica] - rank.enter[step]))
                found = pack_collections([(int(end - 1e6 * ms), end)], int(starts[step]))
                out.append(format.fact_record(step, format.COLLECTIONS, found))
    for step in range(_READ - 1, one.steps, _READ) if one.counted else ():
        own = slice(step - _READ + 1, step + 1)
        since, until = int(starts[own][0]), int(starts[step]) + int(duration[step]) * 1000
        of = (since - int(starts[step])) // 1000, (until - since) // 1000, round(1000 * float(rank.waited[own].sum()))
        out.append(format.fact_record(step, format.WAITED, format.Waited(*of).pack() or b""))
    path = directory / artifact_name("timeline", None, rank.numbers[0], rank.coords, format.SUFFIX)
    path.write_bytes(b"".join(out))


# ------------------------------------------------------------------------------------------------ traces


def _trace(rank: _Rank, directory: Path) -> None:
    one, numbers = rank.pipeline, range(rank.pipeline.steps)
    for steps in [numbers] if one.merged else [[number] for number in numbers]:
        trace = _recorded(rank, steps)
        if one.recording == "nsys":
            write_nsys(trace, directory)
        else:
            trace.write(directory)


def _recorded(rank: _Rank, steps: Sequence[int]) -> TraceBuilder:
    one = rank.pipeline
    metadata = rank.metadata() | {"steps": [rank.numbers[steps[0]], rank.numbers[steps[-1]]]}
    if one.counted:
        waited = round(1e6 * float(rank.waited[steps].sum()))
        metadata["profiler"] = {"asked": ["cpu"], "recorded": ["cpu"], "waited_ns": waited}
    trace = TraceBuilder(
        pp=rank.stage,
        pp_size=one.stages,
        step=rank.numbers[steps[0]],
        target=rank.target,
        microbatches=one.microbatches,
        chunks=metadata["chunks"],
        metadata=metadata,
    )
    writer = _Cpu(rank, trace) if one.recording == "cpu trace" else _Gpu(rank, trace, _LAUNCHES * steps[0])
    for step in steps:
        origin = 10.0 + float(rank.begin[step]) + rank.ahead
        writer.step(step, origin)
        start, end = origin + float(rank.enter[step]), origin + float(rank.finish[step])
        fields = {"step": rank.numbers[step]} | {axis: getattr(rank.coords, axis) for axis in _AXES}
        trace.event(str(ranges.RangeName(rank.target, fields)), start - 0.2, end - start + 0.4)
    if one.graphed:
        trace.beside[KEY] = replayed(trace.events, _LAUNCHES)
        metadata["ranges"] = {"microbatch": False, "reason": "replayed"}
    return trace


class _Cpu:
    """Passes are ranges that take the whole time, with gloo's collectives in them."""

    def __init__(self, rank: _Rank, trace: TraceBuilder) -> None:
        self.rank, self.trace = rank, trace

    def step(self, step: int, origin: float) -> None:
        for each in self.rank.done:
            start, end = (origin + float(at[step, self.rank.replica]) for at in (each.start, each.end))
            if isinstance(each.what, Pass):
                self.computed(each.what, step, start, end)
                if ms := self.rank.collected(each.what, step):
                    self.trace.event(f"megaprof/{ranges.GARBAGE}", end - ms, ms)
            else:
                self.exchanged(each.what.name, start, end, any((each.what.sends, each.what.receives)))
        if not self.rank.pipeline.forward_only:
            last = origin + float(self.rank.done[-1].end[step, self.rank.replica])
            self.finalized(last, origin + float(self.rank.finish[step]))

    def parts(self, what: Pass, step: int, length: float) -> tuple[float, float, list[tuple[str, float]], float]:
        """Of a pass: what this rank computes, what it waits for its peers, communication by group, and idling. What it
        waits for data is part of what it computes; no communication takes longer for it."""
        run, stage = self.rank.run, self.rank.stage
        first = stage == 0 and what == Pass(FORWARD, 0, 0)
        wait = sum(fault.size for fault in self.rank.pipeline.faults if fault.kind == "data_wait") if first else 0.0
        length -= self.rank.loaded(what)
        slow = float(run.slow[stage, step, self.rank.replica])
        one = (length - wait) / (slow + sum(run.exposed.values()) + run.idle)
        share = float(run.share[stage, self.rank.peer, what.chunk, what.microbatch, step])
        own = slow * one * (share if self.rank.pipeline.peers > 1 else 1.0)
        return (
            own + wait,
            slow * one - own,
            [(group, part * one) for group, part in run.exposed.items()],
            run.idle * one,
        )

    def computed(self, what: Pass, step: int, start: float, end: float) -> None:
        self.trace.event(f"megaprof/{KINDS[what.kind]} mb={what.microbatch} chunk={what.chunk}", start, end - start)
        own, waits, exposed, _ = self.parts(what, step, end - start)
        start += self.awaited(what, start)
        self.trace.event("aten::mm", start, own, cat="cpu_op")
        now = start + own
        if waits:
            self.trace.event("gloo:all_reduce", now, waits, tid=2)
            now += waits
        for group, ms in exposed:
            self.trace.event("gloo:all_to_all" if group == "ep" else "gloo:all_reduce", now, ms, tid=2)
            now += ms

    def awaited(self, what: Pass, start: float) -> float:
        """Milliseconds that a pass waits for data, or for the peer that does."""
        ms = self.rank.loaded(what)
        if self.rank.loads and what.kind == FORWARD:
            place = f"mb={what.microbatch} chunk={what.chunk}"
            self.trace.event(f"megaprof/{ranges.DATA_WAIT} {place}", start, ms)
        elif ms:
            self.trace.event("gloo:broadcast", start, ms, tid=2)
        return ms

    def exchanged(self, name: str, start: float, end: float, messages: bool) -> None:
        self.trace.event(f"megaprof/{name}", start, end - start)

    def finalized(self, start: float, end: float) -> None:
        self.trace.event("megaprof/finalize_grads", start, end - start)
        if self.rank.pipeline.replicas > 1:
            self.trace.event("gloo:all_reduce", start, end - start, tid=2)


class _Gpu(_Cpu):
    """Passes are host ranges, launches in them (a backward's on autograd's thread), and kernels."""

    def __init__(self, rank: _Rank, trace: TraceBuilder, launches: int) -> None:
        """``launches``: that were before."""
        super().__init__(rank, trace)
        self.correlation = launches
        self.called = 0.0
        self.free: dict[int, float] = {}  # by stream of exchanges: when its last kernel ended
        self.posted: dict[str, tuple[float, float]] = {}  # by kind of pass: when its last input was asked for

    def step(self, step: int, origin: float) -> None:
        self.posted.clear()
        super().step(step, origin)

    def computed(self, what: Pass, step: int, start: float, end: float) -> None:
        own, waits, exposed, idle = self.parts(what, step, end - start)
        begun, start = start, start + self.awaited(what, start - 2 * _GAP)
        # The host is ahead of the GPU, except where the GPU waits for it.
        hosted = (end - start) * (0.95 if idle else 0.6)
        self.trace.event(
            f"megaprof/{KINDS[what.kind]} mb={what.microbatch} chunk={what.chunk}",
            begun - 2 * _GAP,
            start - begun + hosted,
        )
        pieces, thread, now = 2, (_MAIN, AUTOGRAD)[what.kind], start
        for number in range(pieces):
            launch = now - _GAP if idle else start - _GAP + number * 0.9 * hosted / pieces
            self.kernel("gemm", now, 0.6 * own / pieces, launch, thread)
            self.kernel(
                "void at::native::elementwise_kernel", now + 0.6 * own / pieces, 0.4 * own / pieces, launch, thread
            )
            now += own / pieces
            parts = [*([("tp", waits)] if waits else []), *exposed]
            for group, ms in parts:
                self.kernel(_COLLECTIVES[group], now, ms / pieces, launch, thread, group)
                now += ms / pieces
            now += idle / pieces

    def exchanged(self, name: str, start: float, end: float, messages: bool) -> None:
        kind = _AWAITED.get(name)
        if kind is not None and kind not in self.posted:
            self.exchanged(f"recv_{kind}", start, start, False)
        # One call behind the other, also where none takes time.
        at = max(start - 3 * _GAP, self.called)
        self.called = at + 1.5 * _CALL
        self.trace.event(f"megaprof/{name}", at, _CALL)
        if kind is not None:  # the kernel was launched in the call behind the pass before
            posted, launch = self.posted[kind]
            self.exchange(posted, end, launch, _RECEIVES)
        elif messages:
            self.exchange(start, end, at + _CALL / 4, _EXCHANGES)
        self.posted[name.rpartition("_")[2]] = start, at + _CALL / 2

    def exchange(self, start: float, end: float, launch: float, stream: int) -> None:
        start = max(start, self.free.get(stream, start))
        self.free[stream] = end = max(end, start + 0.001)
        self.kernel(_COLLECTIVES["pp"], start, end - start, launch, _MAIN, "pp", stream)

    def finalized(self, start: float, end: float) -> None:
        self.trace.event("megaprof/finalize_grads", start - _GAP, end - start)
        if self.rank.pipeline.replicas > 1:
            self.kernel(_COLLECTIVES["dp"], start, end - start, start - _GAP / 2, _MAIN, "dp")
        elif end > start:
            self.kernel("void at::native::multi_tensor_apply_kernel", start, end - start, start - _GAP / 2, _MAIN)

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        launch: float,
        thread: int,
        group: str | None = None,
        stream: int | None = None,
    ) -> None:
        """A kernel and the call that launched it, tied by their correlation as Kineto does."""
        self.correlation += 1
        stream = stream or (_COMPUTE if group is None else _NCCL)
        description = None if group is None else GROUPS[group]
        times = start, duration, launch
        operators = self.rank.pipeline.operators
        launched(
            self.trace.events, self.correlation, name, *times, thread, stream, group=description, operators=operators
        )
