"""Runs with a known answer, by what is wrong with them, written as the traces that a job would have left.

What is put into a run (slow layers, slow ranks, waiting, idle GPUs) is known, and so is what the report must say. It is
simulated and written as every other pipeline of the tests (`tests.analysis.truth`).
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.analysis.truth import files
from tests.analysis.truth.pipelines import Fault, Pipeline, Run, ran
from tests.analysis.truth.programs import FORWARD, KINDS
from tests.analysis.truth.simulation import Load, Times


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
    """The traces of every rank."""
    pipeline = _pipeline(scenario)
    files.write(pipeline, _run(scenario, pipeline), directory)


def _pipeline(scenario: Scenario) -> Pipeline:
    return Pipeline(
        seed=(scenario.seed, zlib.crc32(scenario.name.encode())),
        recording="gpu trace" if scenario.gpu else "cpu trace",
        stages=scenario.stages,
        chunks=scenario.chunks,
        replicas=scenario.dp,
        peers=scenario.peers,
        microbatches=scenario.microbatches,
        steps=scenario.steps,
        forward_only=scenario.target != "train_actor",
        layers=tuple(scenario.held),
        layer_ms=scenario.layer,
        ratio=2.0,
        noise=scenario.noise,
        adds=True,
        load=scenario.load,
        burst_ms=scenario.burst,
        together=True,
        apart=scenario.apart,
        buffered=True,
        link_ms=scenario.transfer,
        tail_ms=scenario.tail,
        jitter_ms=0.0,
        overlapped=scenario.chunks > 1,
        faults=tuple(Fault("communication", part, group=group) for group, part in scenario.exposed.items()),
        merged=scenario.merged,
        operators=scenario.operators,
        graphed=scenario.graphed,
        known=scenario.counted,
        mtp=bool(scenario.mtp),
    )


def _run(scenario: Scenario, pipeline: Pipeline) -> Run:
    p, v, m, t, d = pipeline.stages, pipeline.chunks, pipeline.microbatches, pipeline.steps, pipeline.replicas
    passes, share = np.empty((p, v, 2, m, t, d)), np.empty((p, pipeline.peers, v, m, t))
    # Communication and waiting for the host are parts of a whole pass there, and of what it computes here.
    whole = 1.0 - sum(scenario.exposed.values()) - scenario.idle
    for step in range(t):
        rng = random.Random(f"{scenario.name} {scenario.seed} {step}")
        own = np.array(_work(scenario, rng))
        # Stages run at the pace of their slowest rank; peers wait for it in a tensor-parallel collective.
        pace = own.max(axis=1)
        share[..., step] = own / np.maximum(pace[:, None], 1e-9)
        times = np.stack([pace, 2 * pace], axis=2) / whole
        _disturb(scenario, step, rng, times)
        passes[..., step, :] = times[..., None]
    enter, link = np.zeros((p, t, d)), np.full((p, t, d), scenario.transfer)
    for stage, ms in scenario.late.items():
        enter[stage] = ms
    for stage, ms in scenario.link.items():
        link[stage] = ms
    load = Load([[_bursts(scenario, step)] * d for step in range(t)]) if scenario.load else None
    exposed = {group: part / whole for group, part in scenario.exposed.items()}
    tail = np.full(t, scenario.tail)
    return ran(
        pipeline, passes, enter, link, tail, share, exposed, scenario.idle / whole, np.ones((p, t, d)), [load] * p
    )


def _disturb(scenario: Scenario, step: int, rng: random.Random, times: Times) -> None:
    """What is wrong with single passes, in place; ``[stage, chunk, kind, microbatch]``."""
    for (stage, kind, part), factor in scenario.stretched.items():
        times[stage, slice(None) if part is None else part, KINDS.index(kind)] *= factor
    for stage, (at, kind, microbatch) in scenario.hiccups.items():
        times[stage, 0, KINDS.index(kind), microbatch] *= 7 if at == step else 1
    times *= scenario.first_step if step == 0 else 1.0
    for stage, width in scenario.spread.items():
        for microbatch in range(scenario.microbatches):
            times[stage, ..., microbatch] *= 1 + width * rng.uniform(-1, 1)
    times[0, 0, FORWARD, 0] += scenario.data
    times[0, 0, FORWARD, 0] += scenario.opening
    times[1:, 0, FORWARD, 0] += 0.4 * scenario.opening


def _bursts(scenario: Scenario, step: int) -> list[tuple[float, float]]:
    """When another program keeps the machine busy, in milliseconds from the start of the step."""
    rng, now, found = random.Random(f"load {scenario.name} {scenario.seed} {step}"), 0.0, []
    while scenario.load and now < 20_000:
        start = now + rng.expovariate(scenario.load / (scenario.burst * (1 - scenario.load)))
        now = start + rng.expovariate(1 / scenario.burst)
        found.append((start, now))
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
