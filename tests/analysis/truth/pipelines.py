"""A pipeline with known faults: what it is made of, and how long its steps take with and without each of them.

All random numbers of a pipeline are drawn first, from its seed, whatever is wrong with it. So a fault's true price is
the step with it less the step without it, from the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.analysis.truth.programs import BACKWARD, FORWARD, programs_of
from tests.analysis.truth.simulation import Done, Load, Times, simulate

_Steps = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """Something that costs time. ``size`` and what it does, by ``kind``:

    ``layers``: the stage holds more layers than the others (`Pipeline.layers`). ``embedding_or_loss``: milliseconds of
    a forward beside the layers. ``recomputation``: a backward takes a forward longer. ``slow_forward``,
    ``slow_backward``, ``slow_stage``, ``slow_chunk``, ``slow_rank``, ``processor_wait``: factor of passes, the
    last one of a rank that shares its core. ``slow_link``, ``late_entry``,
    ``data_wait``: milliseconds, of every exchange with the next stage, of a step, of the first forward of a step, which
    no file says. ``loader``: milliseconds that a forward of the stage's first chunk waits for data, one in ``every``.
    ``uneven_microbatches``: spread of the logarithm, of all stages alike or of one alone. ``communication``: part of a
    pass that it takes longer, or, of ``dp``, milliseconds of a step. ``host_bound``: part of a pass that it takes
    longer. ``unequal_replicas``: spread of the logarithm of a replica's work from step to step. ``stalls``:
    milliseconds that single passes of all ranks take longer; ``garbage_collection``: the same, while Python collects.
    """

    kind: str
    size: float
    stage: int | None = None
    chunk: int | None = None
    replica: int | None = None
    peer: int | None = None
    group: str | None = None
    steps: _Steps | None = None
    """In which steps it is there; None: in all."""
    every: int = 1


@dataclass(frozen=True)
class Pipeline:
    """Times in milliseconds; ``layer_ms`` and the faults' milliseconds are of a forward.

    ``layers``: by stage and chunk. ``ratio``: of a backward to its forward. ``noise``: of a pass, as a part of
    it; ``adds``: noise only adds. ``load``: the part of the time in which another program makes everything take
    twice as long, in bursts of ``burst_ms``, on all stages at once where they are ``together``. ``recording``:
    ``gpu trace``, ``nsys``, ``cpu trace``, ``timeline`` or ``device timeline``. ``peers``: ranks that compute a
    pass together (tp). ``apart``: a host for each stage, with a clock of its own. ``buffered``: a message's
    sender does not wait. ``counted``: the system says how long a rank waited for a core, because of ``load`` or
    ``processor_wait``. ``overlapped``: with model chunks, exchanges overlap with computing; their sender
    never waits.

    Of the files: ``merged``: all steps in one. ``operators``: False where only the GPU was recorded, as
    ``--profile-activities cuda`` does. ``graphed``: a step is one replay of a full-iteration CUDA graph; not with
    ``merged``. ``known``: False leaves the numbers of layers out. ``mtp``: the last stage has such a layer.
    """

    seed: tuple[int, ...]
    recording: str
    stages: int
    chunks: int
    replicas: int
    peers: int
    microbatches: int
    steps: int
    forward_only: bool
    layers: tuple[tuple[int, ...], ...]
    layer_ms: float
    ratio: float
    noise: float
    adds: bool
    load: float
    burst_ms: float
    together: bool
    apart: bool
    buffered: bool
    link_ms: float
    tail_ms: float
    jitter_ms: float
    overlapped: bool = False
    counted: bool = False
    faults: tuple[Fault, ...] = ()
    merged: bool = True
    operators: bool = True
    graphed: bool = False
    known: bool = True
    mtp: bool = False

    @property
    def forward_ms(self) -> float:
        """A usual stage's forward of one microbatch."""
        return self.layer_ms * min(sum(own) for own in self.layers)

    @property
    def about_ms(self) -> float:
        """About a step."""
        each = self.forward_ms * (1.0 if self.forward_only else 1.0 + self.ratio)
        return each * (self.microbatches + (self.stages - 1) / self.chunks)


@dataclass(frozen=True)
class Run:
    """What happened: ``done`` by stage, ``enter`` and ``finish`` (behind the gradient reduction) ``[stage, step,
    replica]``, ``length`` ``[step]``. ``exposed``: by group, how long a pass communicates, as a part of what
    an equal rank computes in it, ``idle``: likewise. ``slow``: how much longer than an equal rank each computes,
    ``[stage, step, replica]``. ``share``: of what a pass computes, how much of it each peer computes, ``[stage, peer,
    chunk, microbatch, step]``."""

    done: list[list[Done]]
    enter: Times
    finish: Times
    length: Times
    exposed: dict[str, float]
    idle: float
    slow: Times
    share: Times


@dataclass(frozen=True)
class _Numbers:
    """Everything random, as if standard normal or uniform, whatever the faults."""

    passes: Times  # [stage, chunk, kind, microbatch, step, replica]
    sizes: Times  # [microbatch, step, replica]
    own: Times  # [stage, microbatch, step, replica]
    replicas: Times  # [step, replica]
    enter: Times  # [stage, step, replica]
    link: Times  # [stage, step, replica]
    tail: Times  # [step]
    stalled: Times  # [stage, step, replica], uniform
    where: npt.NDArray[np.int64]  # [stage, step, replica]: the microbatch that stalls
    peers: Times  # [stage, peer, step]


#: Part of its steps in which a rank stalls, where there are stalls.
STALLED = 0.04


@functools.lru_cache(maxsize=1)
def numbers(pipeline: Pipeline) -> _Numbers:
    p, v, m, t, d = (pipeline.stages, pipeline.chunks, pipeline.microbatches, pipeline.steps, pipeline.replicas)
    rng = np.random.default_rng([*pipeline.seed, 1])
    return _Numbers(
        rng.standard_normal((p, v, 2, m, t, d)),
        rng.standard_normal((m, t, d)),
        rng.standard_normal((p, m, t, d)),
        rng.standard_normal((t, d)),
        np.abs(rng.standard_normal((p, t, d))),
        rng.standard_normal((p, t, d)),
        np.abs(rng.standard_normal(t)),
        rng.random((p, t, d)),
        rng.integers(0, m, (p, t, d)),
        np.abs(rng.standard_normal((p, pipeline.peers, t))),
    )


@functools.lru_cache(maxsize=1)
def loads(pipeline: Pipeline) -> list[Load | None]:
    """By stage."""
    if not pipeline.load:
        return [None] * pipeline.stages
    rng = np.random.default_rng([*pipeline.seed, 2])

    def one() -> Load:
        bursts = [[_bursts(pipeline, rng) for _ in range(pipeline.replicas)] for _ in range(pipeline.steps)]
        return Load([[own[0]] * len(own) for own in bursts] if pipeline.together else bursts)

    return [one()] * pipeline.stages if pipeline.together else [one() for _ in range(pipeline.stages)]


def _bursts(pipeline: Pipeline, rng: np.random.Generator) -> list[tuple[float, float]]:
    now, found, quiet = 0.0, [], pipeline.burst_ms * (1 - pipeline.load) / pipeline.load
    while now < 4 * pipeline.about_ms:
        start = now + rng.exponential(quiet)
        now = start + rng.exponential(pipeline.burst_ms)
        found.append((start, now))
    return found


def content(pipeline: Pipeline, faults: Collection[Fault], layout: Times | None = None) -> Times:
    """Milliseconds of an undisturbed pass, ``[stage, chunk, kind]``; ``layout``: other layers, by stage and chunk.

    Work that has to be done somewhere is neutral when it is spread evenly: layers, embedding, loss.
    """
    held = np.array(pipeline.layers, dtype=float)
    if not any(f.kind == "layers" for f in faults):
        held[:] = held.mean()
    forward = pipeline.layer_ms * (held if layout is None else layout)
    for each in pipeline.faults:
        if each.kind == "embedding_or_loss":
            if each in faults:
                forward[each.stage, 0 if each.stage == 0 else -1] += each.size
            else:
                forward += each.size / forward.size
    both = np.stack([forward, pipeline.ratio * forward], axis=-1)
    for each in faults:
        if each.kind == "slow_forward":
            both[each.stage, :, FORWARD] *= each.size
        elif each.kind == "slow_backward":
            both[each.stage, :, BACKWARD] *= each.size
        elif each.kind == "recomputation":
            both[each.stage, :, BACKWARD] += both[each.stage, :, FORWARD]
        elif each.kind in ("slow_stage", "slow_chunk"):
            both[each.stage, slice(None) if each.chunk is None else each.chunk] *= each.size
    return both


def even(log: Times, axis: int) -> Times:
    """Factors with these logarithms whose mean along an axis is 1."""
    factors = np.exp(log)
    return factors / factors.mean(axis=axis, keepdims=True)


class Priced:
    """A pipeline, its random numbers, and its steps with any of its faults."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.numbers, self.loads = numbers(pipeline), loads(pipeline)
        self.length = functools.cache(self._length)
        # No fault, but a term with a price: what all messages take.
        self.links = Fault("communication", pipeline.link_ms, group="pp")
        self.all = frozenset((*pipeline.faults, self.links))

    def _length(self, faults: frozenset[Fault], spread: frozenset[Fault] = frozenset()) -> Times:
        """``spread``: of these what passes take longer is not where it was, but spread evenly over all stages."""
        passes = content(self.pipeline, faults)
        longer = [content(self.pipeline, faults | {each}) - passes for each in spread]
        even = sum(each.mean(axis=(0, 1)) for each in longer)
        return self.run(faults | spread, passes + even).length

    def price(
        self, fault: Fault, mended: Collection[Fault] = (), spread: Collection[Fault] = (), to_spread: bool = False
    ) -> Times:
        """Milliseconds by which every step is shorter without it, or if it were spread evenly (``to_spread``), where
        others are mended or spread already."""
        even = frozenset(spread)
        there = self.all - frozenset(mended) - even
        neutral = even | {fault} if to_spread else even - {fault}
        return self.length(there, even) - self.length(there - {fault}, neutral)

    def speedup(self, layout: Times) -> float:
        """Of other layers, by stage and chunk, with all faults but that layers are uneven."""
        other = self.run(self.all, content(self.pipeline, self.all, layout))
        return float(self.length(self.all).mean() / other.length.mean())

    def run(self, faults: Collection[Fault], passes: Times | None = None) -> Run:
        """``passes``: in the place of `content`, with any number of chunks."""
        one, random = self.pipeline, self.numbers
        t = one.steps
        base = content(one, faults) if passes is None else passes
        chunks = base.shape[1]
        # Other layouts may have more chunks than there are random numbers of: these are taken in turn.
        noise = one.noise * random.passes[:, np.arange(chunks) % one.chunks]
        work = base[..., None, None, None] * (1.0 + np.abs(noise) if one.adds else np.exp(noise))
        exposed: dict[str, float] = {}
        # A long reduction is gone with what it usually takes: of one collective nobody can tell that apart.
        long = any(each.group == "dp" for each in one.faults)
        there = not long or any(each.group == "dp" for each in faults)
        idle, tail, enter = 0.0, np.full(t, one.tail_ms * there), one.jitter_ms * random.enter
        usual = one.link_ms if self.links in faults else 0.0
        link = np.broadcast_to(usual * np.exp(0.1 * random.link), random.link.shape).copy()
        share = 1.0 - 0.01 * np.minimum(random.peers, 3.0)
        slow = np.ones((one.stages, t, one.replicas))
        for each in sorted(faults, key=repr):
            there = np.zeros((t, 1))
            there[slice(None) if each.steps is None else list(each.steps)] = 1.0
            if each.kind == "uneven_microbatches":
                of = random.sizes if each.stage is None else random.own[each.stage]
                own = slice(None) if each.stage is None else each.stage
                work[own] *= even(each.size * of, axis=0)
            elif each.kind == "unequal_replicas":
                work *= even(each.size * random.replicas, axis=1)
            elif each.kind in ("slow_rank", "processor_wait"):
                factor = 1.0 + (each.size - 1.0) * there
                if each.peer is not None:
                    slow[each.stage] *= factor
                    others = [peer for peer in range(one.peers) if peer != each.peer]
                    share[each.stage, others] /= factor[:, 0]
                else:
                    slow[each.stage, :, each.replica] *= factor[:, 0]
            elif each.kind == "slow_link":
                link[each.stage] += each.size * there
            elif each.kind == "late_entry":
                enter[each.stage, :, each.replica] += each.size
            elif each.kind == "communication" and each.group in ("tp", "cp", "ep"):
                exposed[each.group] = each.size
            elif each.kind == "communication" and each.group == "dp":
                tail = tail + each.size
            elif each.kind == "host_bound":
                idle = each.size
        tail = tail * (1.0 + 0.05 * random.tail)
        # A slow rank computes longer; messages are as quick as ever.
        work *= slow[:, None, None, None] + sum(exposed.values()) + idle
        for each in faults:
            if each.kind == "data_wait":
                work[0, 0, FORWARD, 0] += each.size
            elif each.kind == "loader":
                own = slice(None) if each.replica is None else each.replica
                work[each.stage, 0, FORWARD, :: each.every, :, own] += each.size
            elif each.kind in ("stalls", "garbage_collection"):
                kind = FORWARD if one.forward_only else BACKWARD
                for s, step, r in np.argwhere(random.stalled < STALLED):
                    work[s, 0, kind, random.where[s, step, r], step, r] += each.size
        shares = np.broadcast_to(share[:, :, None, None], (*share.shape[:2], chunks, one.microbatches, t))
        return ran(one, work, enter, link, tail, shares, exposed, idle, slow, self.loads)


def ran(
    one: Pipeline,
    work: Times,
    enter: Times,
    link: Times,
    tail: Times,
    share: Times,
    exposed: dict[str, float],
    idle: float,
    slow: Times,
    loads: Sequence[Load | None] = (),
) -> Run:
    """``work``, ``enter`` and ``link`` as `simulate` has them; ``tail``: of the gradient reduction, ``[step]``."""
    chunks = work.shape[1]
    # Chunks where there were none: as Megatron-LM has them unless it is told otherwise.
    overlapped = one.overlapped if one.chunks > 1 else "steady" if chunks > 1 else False
    buffered = one.buffered or overlapped is True
    programs = programs_of(one.stages, chunks, one.microbatches, one.forward_only, overlapped)
    done = simulate(programs, work, enter, link, buffered=buffered, loads=loads)
    ends = np.stack([own[-1].end for own in done])
    # A stage reduces its gradients when its last replica is there.
    finish = ends
    if not one.forward_only:
        finish = np.broadcast_to(ends.max(axis=2, keepdims=True) + tail[:, None], ends.shape)
    return Run(done, enter, finish, finish.max(axis=(0, 2)), exposed, idle, slow, share)
