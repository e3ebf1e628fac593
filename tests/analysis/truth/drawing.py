"""Draws pipelines and faults: any size, schedule, noise and recording, with no fault, one or two, anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.analysis.truth.files import BEFORE, BEHIND
from tests.analysis.truth.pipelines import Fault, Pipeline, Priced

#: Most passes of all ranks and steps: files of traces are a hundred times as large as timelines.
MOST_PASSES = {"gpu trace": 5000, "nsys": 5000, "cpu trace": 5000, "timeline": 160_000, "device timeline": 160_000}
#: Beside the drawn faults nothing is worth as much, as a part of the step; a fault that is worth less is drawn again.
NOTHING = 0.01
_TRIES = 30
#: Of the pipelines, this part gets a slow loader beside what else was drawn.
LOADERS = 0.25
#: Of the time that a pass takes a GPU: how long its host launches.
HOST = 0.6


def draw(seed: int, number: int) -> Pipeline:
    """The pipeline of this number: the same for the same seed, whatever the others are."""
    rng = np.random.default_rng([seed, number])
    healthy = draw_healthy(rng, (seed, number))
    wanted = int(rng.choice(3, p=[0.25, 0.5, 0.25]))
    found = healthy
    for _ in range(wanted):
        for _ in range(_TRIES):
            changed = with_fault(found, rng)
            if changed is not None and _worth(changed):
                found = changed
                break
    # Numbers of its own, so that all other pipelines are as they were.
    rng = np.random.default_rng([seed, number, 19])
    if rng.random() < LOADERS and (changed := _loader(found, rng)) is not None and _worth(changed):
        return changed
    return found


def observed(pipeline: Pipeline) -> tuple[Pipeline, Pipeline | None]:
    """The pipeline as it is graded and, if it is recorded as traces, what a profiled step of it is like: the profiler
    makes the host's work longer by a factor, so the GPU waits for the host, or a CPU computes for longer."""
    if pipeline.recording not in ("gpu trace", "cpu trace"):
        return pipeline, None
    factor = float(np.random.default_rng([*pipeline.seed, 5]).uniform(1.2, 2.5))
    if pipeline.recording == "gpu trace":
        host_bound = sum(f.size for f in pipeline.faults if f.kind == "host_bound")
        # The host launches a pass in a part of the time that its kernels take, unless they wait for it.
        kernels = 1.0 + sum(f.size for f in pipeline.faults if f.kind == "communication" and f.group != "dp")
        launches = kernels + host_bound if host_bound else HOST * kernels
        waits = Fault("host_bound", max(0.0, factor * launches - kernels))
        others = (f for f in pipeline.faults if f.kind != "host_bound")
        profiled = replace(pipeline, faults=(*others, waits))
    else:
        # A part of what it computes; what it exchanges takes as long as ever.
        own = {"embedding_or_loss": factor, "communication": 1 / factor}
        profiled = replace(
            pipeline,
            layer_ms=factor * pipeline.layer_ms,
            faults=tuple(
                f if f.group == "dp" else replace(f, size=own.get(f.kind, 1.0) * f.size) for f in pipeline.faults
            ),
        )
    return replace(pipeline, steps=BEFORE + BEHIND), profiled


def _worth(pipeline: Pipeline) -> bool:
    """Whether all drawn faults are worth something, the dearest mended first."""
    priced = Priced(pipeline)
    left = [f for f in pipeline.faults if f not in incidental(pipeline)]
    mended: list[Fault] = []
    while left:
        gains = {fault: float(priced.price(fault, mended).mean()) for fault in left}
        dearest = max(left, key=lambda fault: gains[fault])
        if gains[dearest] < NOTHING * float(priced.length(priced.all).mean()):
            return False
        left.remove(dearest)
        mended.append(dearest)
    return True


def incidental(pipeline: Pipeline) -> tuple[Fault, ...]:
    """Embedding and loss that are there without being a fault: every model has them."""
    return tuple(f for f in pipeline.faults if f.kind == "embedding_or_loss" and f.size <= 0.1 * pipeline.layer_ms)


def draw_healthy(rng: np.random.Generator, seed: tuple[int, ...]) -> Pipeline:
    recording = str(rng.choice(["timeline", "device timeline", "gpu trace", "cpu trace"], p=[0.4, 0.15, 0.3, 0.15]))
    if recording == "gpu trace" and seed[-1] % 5 == 0:
        recording = "nsys"
    lines = recording.endswith("timeline")
    stages = 1 if rng.random() < 0.07 else int(rng.integers(2, 9))
    chunks = int(rng.integers(2, 4)) if stages > 1 and rng.random() < 0.25 else 1
    forward_only = bool(rng.random() < 0.12)
    replicas = int(rng.choice([1, 2, 3, 4], p=[0.3, 0.3, 0.2, 0.2] if lines else [0.75, 0.25, 0.0, 0.0]))
    if stages == 1 and lines:
        replicas = max(2, replicas)
    peers = 2 if not lines and replicas == 1 and rng.random() < 0.3 else 1
    most = MOST_PASSES[recording]
    steps = int(np.exp(rng.uniform(np.log(3), np.log(61)))) if lines else int(rng.integers(1, 6))
    each = stages * chunks * replicas * peers * (1 if forward_only else 2)
    # Most jobs have several microbatches for each stage; few of them are a fault that nobody drew.
    microbatches = int(np.exp(rng.uniform(np.log(max(4, 3 * stages)), np.log(65))))
    microbatches = max(4, min(microbatches, most // (each * steps)))
    if stages > 1 and microbatches < 2 * stages:
        steps, microbatches = max(1, steps // 3), 2 * stages
    if chunks > 1:
        microbatches = -(-microbatches // stages) * stages
    layers = int(rng.integers(1, 5)) if chunks > 1 else int(rng.integers(2, 9))
    layer_ms = float(np.exp(rng.uniform(np.log(0.5), np.log(6.0))))
    forward_ms = layer_ms * layers * chunks
    gpu = recording in ("gpu trace", "nsys", "device timeline")
    loaded = rng.random() < 0.2
    pipeline = Pipeline(
        seed=seed,
        recording=recording,
        stages=stages,
        chunks=chunks,
        replicas=replicas,
        peers=peers,
        microbatches=microbatches,
        steps=steps,
        forward_only=forward_only,
        layers=((layers,) * chunks,) * stages,
        layer_ms=layer_ms,
        ratio=float(rng.uniform(1.7, 2.3)),
        noise=float(np.exp(rng.uniform(np.log(0.003), np.log(0.05)))),
        adds=bool(rng.random() < 0.5),
        load=float(rng.uniform(0.02, 0.15)) if loaded else 0.0,
        burst_ms=float(forward_ms * rng.uniform(2, 20)),
        together=bool(rng.random() < 0.5),
        apart=bool(rng.random() < 0.4),
        buffered=not gpu and bool(rng.random() < 0.5),
        link_ms=float(forward_ms * rng.uniform(0.002, 0.02)),
        tail_ms=0.0 if forward_only else float(forward_ms * rng.uniform(0.05, 0.5)),
        jitter_ms=float(forward_ms * rng.uniform(0.001, 0.02)),
        overlapped=chunks > 1 and (stages == 2 or sum(seed) % 2 == 0),
    )
    if stages == 1:
        return pipeline
    ends = [rng.uniform(0.0, 1.0) * min(0.1 * layer_ms, 0.012 * forward_ms) for _ in range(2)]
    return replace(
        pipeline,
        faults=tuple(
            Fault("embedding_or_loss", float(ms), stage=at) for ms, at in zip(ends, (0, stages - 1), strict=True)
        ),
    )


def with_fault(one: Pipeline, rng: np.random.Generator) -> Pipeline | None:
    """The pipeline with one fault more; None where it cannot have what was drawn."""
    kind = str(rng.choice(sorted(_DRAWN)))
    own = {f.kind for f in one.faults if f not in incidental(one)}
    if kind in own or (kind in _OF_STAGE and one.stages == 1):
        return None
    taken = {f.stage for f in one.faults if f.kind in _OF_STAGE and f not in incidental(one)}
    stage = int(rng.integers(one.stages))
    if kind in _OF_STAGE and stage in taken:
        return None
    return _DRAWN[kind](one, rng, stage)


#: What makes a stage long: two of them on one stage could not be told apart by anybody.
_OF_STAGE = {
    *("layers", "embedding_or_loss", "recomputation", "slow_forward", "slow_backward", "slow_stage", "slow_chunk"),
    *("slow_rank", "uneven_stage"),
}


def _with(one: Pipeline, fault: Fault, instead: tuple[Fault, ...] = ()) -> Pipeline:
    return replace(one, faults=(*(f for f in one.faults if f not in instead), fault))


def _layers(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline:
    usual = one.layers[0][0]
    more = int(rng.integers(1, max(2, 1 + usual // 2)))
    layers = tuple(tuple(n + more * (s == stage) for n in own) for s, own in enumerate(one.layers))
    return replace(_with(one, Fault("layers", float(more), stage=stage)), layers=layers)


def _ends(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    at = 0 if rng.random() < 0.35 else one.stages - 1
    before = tuple(f for f in one.faults if f.kind == "embedding_or_loss" and f.stage == at)
    if any(f.stage == at and f.kind in _OF_STAGE for f in one.faults if f not in before):
        return None
    size = one.forward_ms / one.chunks * rng.uniform(0.15, 0.8)
    return _with(one, Fault("embedding_or_loss", float(max(size, 0.2 * one.layer_ms)), stage=at), before)


def _factor(kind: str, least: float, most: float) -> Callable[[Pipeline, np.random.Generator, int], Pipeline | None]:
    def drawn(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
        if kind in ("slow_backward", "recomputation", "slow_forward") and one.forward_only:
            return None
        chunk = int(rng.integers(one.chunks)) if kind == "slow_chunk" else None
        if kind == "slow_chunk" and one.chunks == 1:
            return None
        return _with(one, Fault(kind, float(rng.uniform(least, most)), stage=stage, chunk=chunk))

    return drawn


def _slow_rank(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.replicas * one.peers == 1:
        return None
    when = str(rng.choice(["always", "now and then", "since"]))
    steps, size = None, float(rng.uniform(1.08, 1.6))
    if when == "now and then" and one.steps >= 20:
        chosen = rng.choice(one.steps, size=max(3, int(one.steps * rng.uniform(0.15, 0.4))), replace=False)
        steps, size = tuple(sorted(chosen.tolist())), float(rng.uniform(1.25, 2.0))
    elif when == "since" and one.steps >= 16:
        steps = tuple(range(int(one.steps * rng.uniform(0.3, 0.6)), one.steps))
    peer = int(rng.integers(one.peers)) if one.peers > 1 else None
    return _with(
        one, Fault("slow_rank", size, stage=stage, replica=int(rng.integers(one.replicas)), peer=peer, steps=steps)
    )


def _slow_link(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.stages == 1 or one.recording == "device timeline":
        return None
    return _with(
        one, Fault("slow_link", one.forward_ms * float(rng.uniform(0.1, 0.8)), stage=int(rng.integers(one.stages - 1)))
    )


def _late_entry(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.stages * one.replicas == 1 or one.steps < 2 or one.recording == "nsys":  # of profiled steps, only possible
        return None
    size = one.about_ms * float(rng.uniform(0.04, 0.3))
    return _with(one, Fault("late_entry", size, stage=stage, replica=int(rng.integers(one.replicas))))


def _data_wait(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.steps < 2 or one.recording == "device timeline" or (one.stages == 1 and one.forward_only):
        return None
    return _with(one, Fault("data_wait", one.about_ms * float(rng.uniform(0.04, 0.25)), stage=0))


def _loader(one: Pipeline, rng: np.random.Generator) -> Pipeline | None:
    if one.recording == "nsys" or any(f.kind in ("data_wait", "processor_wait") for f in one.faults):
        return None
    every = 8 if one.microbatches >= 16 and rng.random() < 0.4 else 1
    replica = int(rng.integers(one.replicas)) if one.replicas > 1 and rng.random() < 0.5 else None
    stage = 0 if rng.random() < 0.8 else one.stages - 1
    each = one.about_ms * float(rng.uniform(0.05, 0.4)) / -(-one.microbatches // every)
    return _with(one, Fault("loader", each, stage=stage, replica=replica, every=every))


def _uneven(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.stages == 1 or one.microbatches < 8:
        return None
    return _with(one, Fault("uneven_microbatches", float(rng.uniform(0.15, 0.6))))


def _uneven_stage(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.microbatches < 8 or any(f.kind == "uneven_microbatches" for f in one.faults):
        return None
    return _with(one, Fault("uneven_microbatches", float(rng.uniform(0.2, 0.7)), stage=stage))


def _communication(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.recording.endswith("timeline"):
        if one.forward_only or one.replicas == 1:
            return None
        group = "dp"
    else:
        group = str(rng.choice(["tp", "cp", "ep"] + ["dp"] * (one.replicas > 1 and not one.forward_only)))
    size = one.about_ms * rng.uniform(0.04, 0.3) if group == "dp" else rng.uniform(0.05, 0.5)
    return _with(one, Fault("communication", float(size), group=group))


def _host_bound(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.recording != "gpu trace":  # files of Nsight Systems are of profiled steps, which do not show it
        return None
    return _with(one, Fault("host_bound", float(rng.uniform(0.05, 0.6))))


def _stalls(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.steps < 25 or one.stages * one.replicas < 3:
        return None
    return _with(one, Fault("stalls", one.about_ms * float(rng.uniform(0.3, 1.2))))


def _unequal(one: Pipeline, rng: np.random.Generator, stage: int) -> Pipeline | None:
    if one.replicas < 2 or one.steps < 10 or one.forward_only:
        return None
    return _with(one, Fault("unequal_replicas", float(rng.uniform(0.08, 0.35))))


_DRAWN: dict[str, Callable[[Pipeline, np.random.Generator, int], Pipeline | None]] = {
    "layers": _layers,
    "embedding_or_loss": _ends,
    "recomputation": _factor("recomputation", 1.0, 1.0001),
    "slow_forward": _factor("slow_forward", 1.2, 2.0),
    "slow_backward": _factor("slow_backward", 1.15, 1.7),
    "slow_stage": _factor("slow_stage", 1.08, 1.5),
    "slow_chunk": _factor("slow_chunk", 1.2, 1.9),
    "slow_rank": _slow_rank,
    "slow_link": _slow_link,
    "late_entry": _late_entry,
    "data_wait": _data_wait,
    "uneven_microbatches": _uneven,
    "uneven_stage": _uneven_stage,
    "communication": _communication,
    "host_bound": _host_bound,
    "stalls": _stalls,
    "unequal_replicas": _unequal,
}
