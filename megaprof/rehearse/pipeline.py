"""Puts stages that ran alone together to the pipeline: replays its schedule with the exchanges that were not made."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path

import msgspec
import numpy as np

from megaprof.analysis.diagnosis.policy import RERUN
from megaprof.analysis.samples import LEVEL, Interval, errors_of_mean
from megaprof.analysis.simulation.replay import compiled
from megaprof.analysis.table.job import rendezvous_of
from megaprof.analysis.table.table import Floats
from megaprof.formats import timeline as format
from megaprof.formats.faults import Unanswerable
from megaprof.formats.names import artifact_name
from megaprof.formats.steps import codes
from megaprof.parallel.schedules import phase_order
from megaprof.parallel.topology import AXES, WorldLayout
from megaprof.rehearse.links import CASES, Link, between
from megaprof.rehearse.stages import Exchange, Stage

#: No prediction is more certain than this, as a fraction of the step, besides what two runs of one layout differ by: a
#: stage alone has its host for itself (`make bench-rehearse`: up to 2.3 %).
_ALONE = 0.02
#: The part of an exchange beside compute that makes a step longer, in every case: anything from nothing to all of it.
_SHOWN = np.array([0.5, 0.0, 1.0, 0.0])
_CODES = {"forward": codes.FORWARD, "backward": codes.BACKWARD}


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of ``stages``, put together, in milliseconds.

    ``starts`` and ``ends`` [t, s, c, k, m] of passes, and ``over`` [t, s], when a stage is through with the step, are
    of the likely case. ``step`` [case, t] has every case of `links`.
    """

    stages: tuple[Stage, ...]
    starts: Floats
    ends: Floats
    over: Floats
    step: Floats

    @property
    def step_ms(self) -> Interval:
        """The step, with an interval from what was measured and what was assumed."""
        likely, best, worst, _ = self.step.mean(axis=1).tolist()
        measured = Interval.of(likely, hypot(RERUN, _ALONE) * likely / LEVEL, errors_of_mean(self.step[0]))
        return measured + Interval(0.0, best - likely, worst - likely)


def together(stages: Sequence[Stage], layout: WorldLayout, links: Mapping[str, Link], per_host: int) -> Pipeline:
    """Returns the pipeline of ``stages``. ``layout`` says which ranks exchange, ``per_host`` how many are on a host.
    Raises Unanswerable."""
    first, schedule = stages[0], stages[0].schedule
    if any(stage.schedule != schedule for stage in stages):
        raise Unanswerable("its stages do not run the same schedule")
    count = min(len(stage.passes) for stage in stages)
    # Each has its steps in another order: what disturbed a stage that stands for several disturbs one at a time.
    passes, before, tail = (
        np.stack([np.roll(getattr(each, name)[:count], at, axis=0) for at, each in enumerate(stages)], axis=1)
        for name in ("passes", "before", "tail")
    )
    inside = np.zeros((CASES, len(stages), len(schedule.kinds)))
    behind, link = np.zeros((CASES, len(stages))), np.zeros((CASES, len(stages)))
    for number, stage in enumerate(stages):
        for exchange in stage.exchanges:
            sent, place = exchange.kind == "send", _place(exchange, layout)
            ranks = [layout.rank_of(pp=(number + ahead) % len(stages)) for ahead in (0, 1)] if sent else exchange.ranks
            took = between(ranks, per_host, links).ms(exchange.kind, exchange.size, len(ranks))
            took = took[0] * _SHOWN if exchange.beside and not sent else took
            if place == "link":
                link[:, number] = np.maximum(link[:, number], took)
            elif place == "pass":
                inside[:, number, int(exchange.backward)] += exchange.count * took
            elif place == "behind":
                behind[:, number] += exchange.count * took
    lengths = passes + inside[:, None, :, None, :, None] / (schedule.chunks * schedule.microbatches)
    rendezvous = first.on_gpus_clock and rendezvous_of(first.metadata, schedule.forward_only)
    overlaps = (first.metadata.p2p or {}).get("overlap_p2p_comm") is not False
    in_turn = not rendezvous and schedule.name == "interleaved" and len(stages) > 2 and not overlaps
    ends = compiled(schedule, rendezvous, in_turn).ends(lengths + before, link=link[:, None])
    over = ends.max(axis=(3, 4, 5)) + tail + behind[:, None]
    return Pipeline(tuple(stages), ends[0] - lengths[0], ends[0], over[0], over.max(axis=2))


def _place(exchange: Exchange, layout: WorldLayout) -> str | None:
    """Returns where an exchange takes time: on a ``link`` between stages, in a ``pass``, or ``behind`` the last one.
    None if it does not make a step longer: the other end of one that counts, and parameters gathered between steps."""
    if exchange.kind in ("send", "recv"):
        return "link" if exchange.kind == "send" else None
    coords = [layout.coords(rank) for rank in exchange.ranks]
    axes = {axis for axis in AXES if len({getattr(each, axis) for each in coords}) > 1}
    for_experts = "ep" in axes and exchange.kind != "all_reduce"
    if "pp" not in axes and ("dp" not in axes or for_experts):
        return "pass"
    return None if exchange.kind == "all_gather" else "behind"


def write(pipeline: Pipeline, directory: Path) -> None:
    """Writes the pipeline as the timelines that its ranks would have recorded, which every command reads."""
    directory.mkdir(parents=True, exist_ok=True)
    schedule, taken_ms = pipeline.stages[0].schedule, pipeline.step[0]
    begins = time.time_ns() + ((np.cumsum(taken_ms) - taken_ms) * 1e6).astype(np.int64)
    for number, stage in enumerate(pipeline.stages):
        order, over = phase_order(schedule, number), pipeline.over[:, number]
        cells = np.array([(each.chunk, schedule.kinds.index(each.kind), each.microbatch) for each in order]).T
        shape = [codes.phase(_CODES[each.kind], each.microbatch, each.chunk) for each in order] + [codes.FINALIZE]
        times = np.stack([each[:, number][(slice(None), *cells)] for each in (pipeline.starts, pipeline.ends)], axis=-1)
        times = np.concatenate([times, np.stack([times[:, -1, 1], over], axis=-1)[:, None]], axis=1)
        rows, kinds = np.rint(times * 1e3).astype(np.int64), np.array(shape) & codes.KIND_MASK
        totals = [over * 1e3, *((rows[..., 1] - rows[..., 0])[:, kinds == kind].sum(axis=1) for kind in codes.KINDS)]
        metadata = replace(stage.metadata, steps=(0, len(rows) - 1), run=f"rehearsed-{number}", pid=number + 1)
        plain = msgspec.json.decode(msgspec.json.encode(metadata.as_dict()))
        records = [format.MAGIC, format.metadata_record(plain), format.shape_record(shape)]
        packed, flags = format.pack_times(rows), format.DEVICE_CLOCK if stage.on_gpus_clock else 0
        for step, of_step in enumerate(np.rint(np.stack(totals, axis=-1)).astype(int).tolist()):
            records.append(format.step_record(0, 0, (0, flags, step, int(begins[step])), (*of_step, 0), packed[step]))
            if step == 0 and stage.memory is not None:
                memory = format.Memory(stage.memory.least, stage.memory.most, stage.memory.capacity or 0)
                records.append(format.fact_record(step, format.MEMORY, memory.pack()))
        name = artifact_name("timeline", None, 0, metadata.coords, format.SUFFIX)
        (directory / name).write_bytes(b"".join(records))
