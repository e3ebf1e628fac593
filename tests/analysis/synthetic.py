"""Builds traces in Kineto's format with times known to the nanosecond."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaprof.analysis.notes import Note
from megaprof.parallel.schedules import PipelineSchedule, phase_order
from tests.analysis.kineto import PID, annotated

BASE = 1_790_000_000_000_000_000


def kinds(notes: Iterable[Note]) -> set[str]:
    return {note.kind for note in notes}


def chunk(
    layers: int | None, *, embedding: bool = False, loss: bool = False, kind: str = "dense", first: int | None = None
) -> dict[str, Any]:
    """``first``: the number of its first layer, where it is known."""
    kinds = None if layers is None else [kind] * layers
    numbers = None if layers is None or first is None else [*range(first, first + layers)]
    return {"embedding": embedding, "layers": layers, "layer_numbers": numbers, "mtp": 0, "loss": loss, "kinds": kinds}


@dataclass
class TraceBuilder:
    """One rank's trace; times are given in milliseconds and written in Kineto's microseconds."""

    pp: int = 0
    pp_size: int = 1
    step: int = 5
    target: str = "train_actor"
    role: str | None = None
    microbatches: int = 4
    chunks: list[dict[str, Any]] = field(default_factory=lambda: [chunk(4)])
    sizes: dict[str, int] = field(default_factory=dict)
    coords: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)

    def event(self, name: str, start: float, duration: float, *, cat: str = "user_annotation", tid: int = 1) -> None:
        number = len(self.events)
        self.events.append(annotated(name, start, duration, category=cat, thread=tid, number=number))

    def call(self, start: float, duration: float, *, label: str | None = None, step: int | None = None) -> None:
        step = self.step if step is None else step
        self.event(f"megaprof/{label or self.target} step={step} pp={self.pp} tp=0 cp=0 ep=0 dp=0", start, duration)

    def forward(self, mb: int | str, start: float, duration: float, chunk: int | str = 0) -> None:
        self.event(f"megaprof/forward mb={mb} chunk={chunk}", start, duration)

    def backward(self, mb: int | str, start: float, duration: float, chunk: int | str = 0) -> None:
        self.event(f"megaprof/backward mb={mb} chunk={chunk}", start, duration)

    def document(self) -> dict[str, Any]:
        described = {
            "version": "0.1.0",
            "target": self.target,
            "role": self.role,
            "steps": [self.step, self.step],
            "coords": {"rank": self.pp, "pp": self.pp, "tp": 0, "cp": 0, "ep": 0, "dp": 0} | self.coords,
            "sizes": {"tp": 1, "pp": self.pp_size, "cp": 1, "ep": 1, "dp": 1, "vpp": len(self.chunks), "etp": 1}
            | self.sizes,
            "schedule": "1f1b" if self.pp_size > 1 else "no_pipelining",
            "forward_only": self.target != "train_actor",
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "host": "node-1",
            "pid": 7,
            "ranges": {"microbatch": True},
            "truncated": False,
        } | self.metadata
        process = {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0.0, "args": {"name": "python"}}
        return {
            "schemaVersion": 1,
            "megaprof": described,
            **self.beside,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE,
            "traceEvents": [process, *self.events],
            "traceName": "trace.json",
        }

    @property
    def name(self) -> str:
        c = self.document()["megaprof"]["coords"]
        place = f"pp{c['pp']}-tp{c['tp']}-cp{c['cp']}-ep{c['ep']}-dp{c['dp']}.rank{c['rank']:05d}"
        return f"{self.target}{'.' + self.role if self.role else ''}.step{self.step:06d}.{place}.pt.trace.json.gz"

    def write(self, directory: Path, name: str | None = None) -> Path:
        path = directory / (name or self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
        return path


def plain_stage(
    pp: int, pp_size: int, forward: float, backward: float, *, start: float = 0.0, jitter: float = 0.0, **options: Any
) -> TraceBuilder:
    """A stage whose passes follow each other in Megatron's order without a gap from ``start``; microbatch i is
    ``i * jitter`` longer."""
    trace = TraceBuilder(pp=pp, pp_size=pp_size, **options)
    name = "1f1b" if pp_size > 1 else "no_pipelining"
    schedule = PipelineSchedule.checked(pp_size, 1, trace.microbatches, name=name, forward_only=not backward)
    now = start
    for kind, _, mb in phase_order(schedule, pp):
        add, length = (trace.forward, forward) if kind == "forward" else (trace.backward, backward)
        add(mb, now, length + mb * jitter)
        now += length + mb * jitter
    trace.call(start, now - start)
    return trace


def pipeline(
    directory: Path,
    layers: list[int],
    *,
    per_layer: float = 10.0,
    loss: float = 0.0,
    kind: str = "dense",
    **options: Any,
) -> list[Path]:
    """One trace per stage, `layers` on each; a forward takes ``per_layer`` per layer, a backward twice that."""
    paths, last = [], len(layers) - 1
    for pp, n in enumerate(layers):
        extra = loss if pp == last else 0.0
        holds = chunk(n, embedding=pp == 0, loss=pp == last, kind=kind)
        stage = plain_stage(
            pp,
            len(layers),
            n * per_layer + extra,
            2 * (n * per_layer + extra),
            start=pp * 1.0,
            chunks=[holds],
            **options,
        )
        paths.append(stage.write(directory))
    return paths
