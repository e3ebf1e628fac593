"""Timelines of jobs that never ran: files as the timeline recorder writes them, for any number of ranks.

The schedule is replayed once for every combination of slow stages that occurs in a pipeline, so that exchanges fit
together; the ranks that share it get the same events, encoded once. Totals per step carry noise of their own, rank by
rank, which the events do not. Gradient synchronisation ends when the slowest replica has come to it.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.names import artifact_name, shard
from megaprof.parallel.topology import WorldLayout
from tests.analysis.synthetic import chunk
from tests.analysis.truth.files import code, described
from tests.analysis.truth.programs import programs_of
from tests.analysis.truth.simulation import simulate
from tests.formats.step_records import StepRecord, step_record

START_NS = 1_790_000_000_000_000_000
#: Ranks per host, as on most machines with GPUs.
RANKS_PER_HOST = 8
#: Replays of one combination of slow stages, which steps take in turn.
VARIANTS = 4
_HEAD, _CHECK = struct.Struct("<BI"), struct.Struct("<I")

_Floats = npt.NDArray[np.float64]


def coupled(layout: WorldLayout, rank: int) -> frozenset[int]:
    """The ranks that wait for ``rank`` inside a microbatch, itself included: its tensor- and context-parallel peers,
    its expert-parallel group, and theirs in turn."""
    sizes, stride = layout.sizes, layout.strides
    axes = [(stride[axis], getattr(sizes, axis)) for axis in ("tp", "cp", "ep") if getattr(sizes, axis) > 1]
    found, new = {rank}, [rank]
    while new:
        own = new.pop()
        for step, size in axes:
            start = own - own // step % size * step
            peers = set(range(start, start + size * step, step)) - found
            found |= peers
            new += peers
    return frozenset(found)


@dataclass(frozen=True)
class Slow:
    """Something that takes ``factor`` times as long from ``from_step`` to ``until_step`` (None: for good).

    ``compute``: the passes of ``rank``, and so those of the ranks that wait for it inside a microbatch (`coupled`); of
    all ranks of ``stage``; or of everybody. ``finalize``: the gradient synchronisation of the data-parallel group of
    ``rank``, of ``stage``, or everybody's.
    """

    rank: int | None = None
    stage: int | None = None
    from_step: int = 0
    factor: float = 1.0
    kind: Literal["compute", "finalize"] = "compute"
    until_step: int | None = None

    def at(self, step: int) -> bool:
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)


def write_timelines(
    directory: Path,
    layout: WorldLayout,
    *,
    steps: int,
    microbatches: int = 8,
    forward_ms: float | Sequence[float] = 10.0,
    backward_ms: float | Sequence[float] = 20.0,
    chunk_layers: Sequence[int] | None = None,
    p2p_ms: float = 0.1,
    finalize_ms: float = 5.0,
    slow: Sequence[Slow] = (),
    noise: float = 0.02,
    tails: float = 0.0,
    seed: int = 0,
    start_ns: int = START_NS,
    first_step: int = 0,
    target: str = "train_actor",
    role: str | None = None,
    ranks: Collection[int] | None = None,
    last_step: Mapping[int, int] | None = None,
    device_clock: bool = False,
    skew_ms: float = 0.0,
    events: bool = True,
    between: float = 0.05,
    around_windows: bool = False,
    run: str | None = None,
) -> list[Path]:
    """Write one file per rank of ``layout`` and return their paths.

    ``forward_ms``, ``backward_ms``: of one microbatch on all chunks of a stage, one number or one per stage;
    ``chunk_layers``: layers of one chunk, per stage. ``noise``: standard deviation of the logarithm of a time;
    ``tails``: the fraction of a rank's steps that take 1.5 to 3 times as long. ``ranks``: only these; ``last_step``:
    ranks whose data end early. ``skew_ms``: standard deviation of the hosts' clocks. ``events``: False leaves the
    times of single events out. ``between``: what comes between steps, as a part of them.
    ``around_windows``: they are said to be only the steps around windows. ``run``: their process. Raises ValueError for
    times or microbatches that no schedule has.
    """
    job = _Job(
        layout,
        microbatches,
        _per_stage(layout, forward_ms),
        _per_stage(layout, backward_ms),
        p2p_ms,
        finalize_ms,
        tuple(slow),
        noise,
        seed,
        device_clock,
        events,
    )
    numbers = np.arange(first_step, first_step + steps)
    rng = np.random.default_rng(seed)
    job_noise = np.exp(rng.normal(0, noise / 2, steps))
    hosts = -(-layout.sizes.world // RANKS_PER_HOST)
    skew = (rng.normal(0, skew_ms, hosts) * 1e6).astype(np.int64)
    starts = (
        start_ns
        + np.concatenate(([0], np.cumsum(job.longest(numbers) * job_noise * (1 + between))[:-1])).astype(np.int64)
        * 1000
    )
    clock = {"clock": "device" if device_clock else "host", "around_windows": around_windows}
    paths, made = [], set()
    for rank in range(layout.sizes.world) if ranks is None else sorted(ranks):
        coords = layout.coords(rank)
        until = (last_step or {}).get(rank)
        shown = steps if until is None else int(np.count_nonzero(numbers <= until))
        own = np.random.default_rng((seed, rank))
        factor = np.exp(own.normal(0, noise, (2, steps)))
        if tails:
            factor *= np.where(own.random(steps) < tails, own.uniform(1.5, 3.0, steps), 1.0)
        body = job.records(rank, numbers[:shown], starts[:shown] + skew[rank // RANKS_PER_HOST], factor, job_noise)
        metadata = _metadata(layout, rank, first_step, microbatches, chunk_layers, target=target, role=role)
        head = format.metadata_record(metadata | {"forward_only": False, "timeline": clock, "run": run})
        folder = directory / shard(coords.rank, coords.sizes.world)
        if folder not in made:
            folder.mkdir(parents=True, exist_ok=True)
            made.add(folder)
        path = folder / artifact_name("timeline", role, first_step, coords, format.SUFFIX)
        path.write_bytes(b"".join((format.MAGIC, head, job.shape(coords.pp), *body)))
        paths.append(path)
    return paths


class _Template(NamedTuple):
    """One stage of a replayed step: its encoded events and its totals in microseconds."""

    tail: bytes
    forward: int
    backward: int
    finalize: int
    p2p: int
    duration: int


_Factors = tuple[float, ...]  # of compute, by stage of a pipeline


class _Job:
    def __init__(
        self,
        layout: WorldLayout,
        microbatches: int,
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        p2p_ms: float,
        finalize_ms: float,
        slow: tuple[Slow, ...],
        noise: float,
        seed: int,
        device_clock: bool,
        events: bool,
    ) -> None:
        self.layout, self.microbatches = layout, microbatches
        self.forward_ms, self.backward_ms = forward_ms, backward_ms
        self.p2p_ms, self.finalize_ms, self.slow = p2p_ms, finalize_ms, slow
        self.noise, self.seed, self.device_clock, self.events = noise, seed, device_clock, events
        # Who is hit, worked out once.
        self._hit = [coupled(layout, s.rank) if s.rank is not None else None for s in slow]
        self._replay = functools.cache(self._replay_uncached)
        self._template = functools.cache(self._template_uncached)
        self._factors = functools.cache(self._factors_uncached)
        self._group = functools.cache(self._group_uncached)

    def longest(self, steps: npt.NDArray[np.int64]) -> _Floats:
        """Microseconds of every step, of the slowest pipeline and its synchronisation."""
        columns = self._columns()
        found = []
        for step in steps.tolist():
            active, variant = self._active(step), step % VARIANTS
            vectors = {self._factors(active, *column) for column in columns}
            ends = max(max(end) for vector in vectors for end in [self._replay(vector, variant)[1]])
            found.append(ends + self.finalize_ms * 1000 * max([1.0, *self._finalize_factors(active)]))
        return np.array(found, dtype=np.float64)

    def shape(self, stage: int) -> bytes:
        return format.shape_record(self._replay((1.0,) * self.layout.sizes.pp, 0)[0][stage][0] if self.events else ())

    def records(
        self,
        rank: int,
        steps: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        noise: _Floats,
        job_noise: _Floats,
    ) -> list[bytes]:
        if not len(steps):
            return []
        templates = [self._of(rank, step) for step in steps.tolist()]
        fixed = np.zeros(len(steps), dtype=format.STEP_TYPE)
        columns = np.array([t[1:] for t in templates], dtype=np.float64)
        count = len(steps)
        fixed["flags"] = (format.DEVICE_CLOCK if self.device_clock else 0) | (0 if self.events else format.INCOMPLETE)
        fixed["step"], fixed["start_ns"] = steps, starts
        fixed["forward"], fixed["backward"] = columns[:, 0] * noise[0, :count], columns[:, 1] * noise[1, :count]
        fixed["finalize"], fixed["p2p"] = columns[:, 2] * job_noise[:count], columns[:, 3] * job_noise[:count]
        fixed["duration"] = columns[:, 4] * job_noise[:count]
        fixed["own"] = 40 + 20 * noise[0, :count]
        data, size = fixed.tobytes(), format.STEP_TYPE.itemsize
        out: list[bytes] = []
        pack_head, pack_check, crc32 = _HEAD.pack, _CHECK.pack, zlib.crc32
        for place, template in zip(range(0, len(data), size), templates, strict=True):
            tail, payload = template.tail, data[place : place + size]
            head = pack_head(format.STEP, size + len(tail))
            out += (head, payload, tail, pack_check(crc32(tail, crc32(payload, crc32(head)))))
        return out

    def _of(self, rank: int, step: int) -> _Template:
        active, stride, sizes = self._active(step), self.layout.strides, self.layout.sizes
        tp, cp, dp, pp = (rank // stride[axis] % getattr(sizes, axis) for axis in ("tp", "cp", "dp", "pp"))
        finalize = 1.0
        for number in active:
            s = self.slow[number]
            if s.kind == "finalize" and s.stage in (None, pp):
                own = None if s.rank is None else self.layout.coords(s.rank)
                if own is None or (own.pp, own.tp) == (pp, tp):
                    finalize = max(finalize, s.factor)
        return self._template(pp, self._factors(active, tp, cp, dp), self._group(active, tp), finalize, step % VARIANTS)

    def _active(self, step: int) -> tuple[int, ...]:
        return tuple(number for number, s in enumerate(self.slow) if s.at(step))

    def _finalize_factors(self, active: tuple[int, ...]) -> list[float]:
        return [self.slow[number].factor for number in active if self.slow[number].kind == "finalize"]

    def _columns(self) -> list[tuple[int, int, int]]:
        """Pipelines that may differ from each other, by (tp, cp, dp): those that something slow passes through, and
        one other."""
        sizes = self.layout.sizes
        hit = {
            (c.tp, c.cp, c.dp) for members in self._hit if members is not None for c in map(self.layout.coords, members)
        }
        for number in range(min(len(hit) + 1, sizes.tp * sizes.cp * sizes.dp)):
            hit.add((number % sizes.tp, number // sizes.tp % sizes.cp, number // sizes.tp // sizes.cp))
        return sorted(hit)

    def _factors_uncached(self, active: tuple[int, ...], tp: int, cp: int, dp: int) -> _Factors:
        factors = [1.0] * self.layout.sizes.pp
        for number in active:
            s, members = self.slow[number], self._hit[number]
            for pp in range(len(factors)) if s.kind == "compute" else ():
                where = s.stage in (None, pp) if members is None else None
                if where or (members is not None and self.layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) in members):
                    factors[pp] *= s.factor
        return tuple(factors)

    def _group_uncached(self, active: tuple[int, ...], tp: int) -> frozenset[_Factors]:
        """Of the pipelines that synchronise gradients with each other: all context- and data-parallel ones."""
        sizes = self.layout.sizes
        return frozenset(self._factors(active, tp, cp, dp) for cp in range(sizes.cp) for dp in range(sizes.dp))

    def _template_uncached(
        self, stage: int, own: _Factors, group: frozenset[_Factors], finalize: float, variant: int
    ) -> _Template:
        stages, ends = self._replay(own, variant)
        events = stages[stage]
        last = max(self._replay(other, variant)[1][stage] for other in group)
        end = round(last + self.finalize_ms * 1000 * finalize)
        shape, starts, stops = events
        starts, stops = [*starts, round(ends[stage])], [*stops, end]
        totals = dict.fromkeys(codes.KINDS.values(), 0)
        for each, begin, stop in zip(shape, starts, stops, strict=True):
            if (kind := codes.KINDS.get(each & codes.KIND_MASK)) is not None:
                totals[kind] += stop - begin
        record = StepRecord(0, 0, 0, 0, 0, end, starts, stops, totals)
        encoded = step_record(record)
        tail = encoded[_HEAD.size + format.STEP_TYPE.itemsize : -_CHECK.size] if self.events else b""
        return _Template(tail, totals["forward"], totals["backward"], totals["finalize"], totals["p2p"], end)

    def _replay_uncached(
        self, factors: _Factors, variant: int
    ) -> tuple[list[tuple[list[int], list[int], list[int]]], list[float]]:
        """By stage: codes (the finalisation's last), starts and ends of the events before it; and when it begins."""
        sizes, rng = self.layout.sizes, np.random.default_rng((self.seed, variant))
        own = np.array(factors)[:, None] * np.array([self.forward_ms, self.backward_ms]).T / sizes.vpp
        work = own[:, None, :, None] * np.exp(rng.normal(0, self.noise, (sizes.pp, sizes.vpp, 2, self.microbatches)))
        programs = programs_of(sizes.pp, sizes.vpp, self.microbatches, overlapped=sizes.vpp > 1)
        still, link = np.zeros((sizes.pp, 1, 1)), np.full((sizes.pp, 1, 1), self.p2p_ms)
        stages, ends = [], []
        for done in simulate(programs, work[..., None, None], still, link, buffered=True):
            starts, stops = (
                [round(1000 * float(at[0, 0])) for at in own]
                for own in zip(*((d.start, d.end) for d in done), strict=True)
            )
            stages.append(([*(code(each.what) for each in done), codes.FINALIZE], starts, stops))
            ends.append(float(stops[-1]))
        return stages, ends


def _per_stage(layout: WorldLayout, ms: float | Sequence[float]) -> tuple[float, ...]:
    given = tuple(ms) if isinstance(ms, Sequence) else (ms,) * layout.sizes.pp
    if len(given) != layout.sizes.pp:
        raise ValueError(f"{len(given)} times for {layout.sizes.pp} stages")
    return given


def _metadata(
    layout: WorldLayout, rank: int, step: int, microbatches: int, layers: Sequence[int] | None, **others: Any
) -> dict[str, Any]:
    coords, sizes = layout.coords(rank), layout.sizes
    held = (layers or (4,) * sizes.pp)[coords.pp]
    chunks = [
        chunk(
            held,
            embedding=(coords.pp, number) == (0, 0),
            loss=(coords.pp, number) == (sizes.pp - 1, sizes.vpp - 1),
            kind="moe" if sizes.ep > 1 else "dense",
        )
        for number in range(sizes.vpp)
    ]
    return described(
        coords,
        chunks,
        steps=(step, step),
        microbatches=microbatches,
        overlapped=sizes.vpp > 1,
        host=f"node-{rank // RANKS_PER_HOST:04d}",
        device="cuda",
        **others,
    )
