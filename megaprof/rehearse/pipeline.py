"""Runs stages of a user's command alone, one after another, and puts them together to the pipeline.

How long passes take is from steps without a profiler, and what they consist of from a profiled one. The pipeline is a
replay of its schedule, with the exchanges that were not made.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from megaprof.analysis.diagnosis.policy import RERUN
from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.samples import LEVEL, Interval, errors_of_mean
from megaprof.analysis.simulation import compiled
from megaprof.analysis.table.recorded import tables_of_timelines
from megaprof.analysis.table.table import QUARTILE, Floats, Table
from megaprof.analysis.table.tabulate import modules_of
from megaprof.analysis.trace.reading import recordings_in
from megaprof.analysis.trace.steps import ModuleKey, steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats import codes, ranges
from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata
from megaprof.formats.names import artifact_name
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.schedules import PipelineSchedule, phase_order
from megaprof.parallel.topology import AXES, WorldLayout
from megaprof.rehearse import alone
from megaprof.rehearse.links import CASES, Link, between
from megaprof.tune import trial

#: Seconds after which a stage is ended that waits for others, or is slow. Steps under a profiler.
_TIME_LIMIT, PROFILED = 1800.0, 3


@dataclass(frozen=True)
class Exchange:
    """Equal exchanges that a rank asked for and did not make: ``count`` of ``size`` bytes in an average step.

    ``kind`` is ``send``, ``recv`` or the name of a collective; ``backward`` says that a backward asks for it,
    ``beside`` that the program goes on meanwhile; ``ranks`` are those of the group.
    """

    kind: str
    size: int
    backward: bool
    beside: bool
    ranks: tuple[int, ...]
    count: float


@dataclass(frozen=True)
class Stage:
    """One stage, measured alone, in milliseconds.

    ``schedule`` is that of the whole pipeline. ``passes`` [t, c, k, m] is how long each pass took, and ``before``, in
    the same shape, how long after the previous one it began; ``tail`` [t] goes on behind the last pass. ``layers`` has
    the layers of the profiled step, each with its chunk, the kind of pass, and its part of such a pass. ``device`` is
    the name of the GPU, None on the CPU.
    """

    metadata: Metadata
    schedule: PipelineSchedule
    passes: Floats
    before: Floats
    tail: Floats
    memory: format.Memory | None
    exchanges: tuple[Exchange, ...]
    layers: tuple[tuple[ModuleKey, int, int, float], ...] = ()
    device: str | None = None
    on_gpus_clock: bool = False


def record(command: Sequence[str], directory: Path, rank: int, world: int, steps: int) -> Stage:
    """Runs ``command`` as ``rank`` of ``world`` until it has made ``steps`` steps and profiled ones, and returns its
    stage. Raises Unanswerable, and OSError if the command cannot be started."""
    directory.mkdir(parents=True)
    before = trial.WARM_UP + steps + 1  # one more: the profiler is prepared behind it, which disturbs it
    several, windows = ("timeline", "torch"), f"{before}:0:0:{PROFILED}"
    config = replace(trial.config_of(directory), tool=several, select="all", ranges="layer", schedule=windows)
    env = {
        alone.VARIABLE: str(directory.absolute() / "exchanges"),
        "PYTHONPATH": str(Path(alone.__file__).parent / "path"),
        **{"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
        **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RAY_ADDRESS": "none: a driver of Ray cannot be rehearsed"},
    }
    # Behind the profiled steps comes one more, in which their files are finished.
    made = before + PROFILED + 1 - trial.WARM_UP
    ended = trial.run(command, directory.absolute(), made, _TIME_LIMIT, config=config, alone=env)
    if ended.outcome != "enough":
        how = ended.outcome.replace("_", " ") if ended.code is None else f"exit code {ended.code}"
        said = f"({how})" + (f": {ended.last_line}" if ended.last_line else "")
        needed = f"rank {rank} did not make its {made + trial.WARM_UP} steps"
        raise Unanswerable(f"{needed} {said} (its output: {directory / trial.LOG})")
    timelines = recordings_in(directory)[1]
    tables = tables_of_timelines(read_fleet(timelines)).values()
    table = next((table for table in tables if isinstance(table, Table) and table.target == trial.TARGET), None)
    if table is None:
        raise Unanswerable(f"no training step was recorded whole; to see why: megaprof report {directory}")
    if table.schedule.combined:
        raise Unanswerable("forwards and backwards run as one (combined 1F1B): single stages do not show their order")
    stage, metadata = next((number, each) for number, each in enumerate(table.metadata) if each is not None)
    rows = timelines.read(timelines.paths[0], events=False).steps  # a host may begin with another number
    kept = np.flatnonzero(table.steps >= rows["step"].min() + trial.WARM_UP)[:steps]
    start, end, enter = (times[kept, 0, stage] for times in (table.start, table.end, table.entry))
    before, previous = np.zeros_like(start), enter
    for phase in phase_order(table.schedule, stage):
        where = (slice(None), phase.chunk, table.schedule.kinds.index(phase.kind), phase.microbatch)
        before[where], previous = start[where] - previous, end[where]
    first, last = table.steps[kept[0]], table.steps[kept[-1]]
    begins = rows["start_ns"][(rows["step"] >= first) & (rows["step"] <= last + 1)].tolist()
    device, exchanges = _exchanged(directory / "exchanges", begins)
    return Stage(
        metadata=metadata,
        schedule=table.schedule,
        passes=end - start,
        before=np.maximum(before, 0.0),
        tail=np.maximum(table.length[kept] - (previous - enter), 0.0),
        memory=table.memory[stage],
        exchanges=exchanges,
        layers=tuple(_layers(directory, metadata)),
        device=device,
        on_gpus_clock=table.device,
    )


def _layers(directory: Path, metadata: Metadata) -> Iterator[tuple[ModuleKey, int, int, float]]:
    """Yields `Stage.layers`: nothing if no step was profiled whole."""
    steps = [each for path in find_traces(directory) for each in steps_of(read_trace(path)) if not each.incomplete]
    chunk_of = {number: at for at, chunk in enumerate(metadata.chunks) for number in chunk.layer_numbers or ()}
    took = defaultdict[tuple[int, int], list[int]](list)  # by chunk and kind of pass
    for passes, on_gpu in ((each.passes, each.on_gpu) for each in steps):
        of_passes = passes.compute if on_gpu else passes.end - passes.spans[:, 0]
        for chunk, kind, ns in zip(passes.ids[:, 0].tolist(), passes.kind.tolist(), of_passes.tolist(), strict=True):
            took[chunk, kind].append(ns)
    for key, of_layer in modules_of(steps).items():
        if key.mtp is None and key.label in (ranges.LAYER, ranges.MTP_LAYER):
            kind, last = int(key.kind != ranges.FORWARD), len(metadata.chunks) - 1
            chunk = chunk_of.get(key.number or 0, last) if key.label == ranges.LAYER else last
            yield key, chunk, kind, float(np.quantile(of_layer, QUARTILE) / np.quantile(took[chunk, kind], QUARTILE))


def _exchanged(path: Path, begins: Sequence[int]) -> tuple[str | None, tuple[Exchange, ...]]:
    """Returns the name of the GPU, and the exchanges of an average step. ``begins``: nanoseconds of the steps. Since a
    GPU is behind its host, all exchanges from the first begin to the last one count."""
    lines, steps = [line.split() for line in path.read_text().splitlines()], len(begins) - 1
    device = next((" ".join(name) for _, kind, *name in lines if kind == "device"), None)
    counts = Counter(tuple(facts) for time, *facts in lines if begins[0] <= int(time) < begins[-1])
    return device, tuple(
        Exchange(kind, int(size), backward == "1", beside == "1", tuple(map(int, ranks.split(","))), count / steps)
        for (kind, size, backward, beside, ranks), count in counts.items()
    )


def alike(by_stage: Mapping[int, Stage]) -> bool:
    """Returns whether the stages that were not measured are like the one in the middle, as far as the first, the
    middle and the last one say: all layers are of one kind, and their numbers leave as many to each stage between."""
    last = max(by_stage)
    places = (last + 1) // 2, last
    seen = [by_stage[stage].metadata.chunks for stage in (0, *places)]
    if len({kind for chunks in seen for chunk in chunks for kind in chunk.kinds or ()}) > 1:
        return False
    for chunks in zip(*seen, strict=True):
        first, *others = (chunk.layer_numbers or (0,) for chunk in chunks)
        if [numbers[0] for numbers in others] != [first[-1] + 1 + (stage - 1) * len(others[0]) for stage in places]:
            return False
    return True


#: No prediction is more certain than this, as a fraction of the step, besides what two runs of one layout differ by: a
#: stage alone has its host for itself (`make bench-rehearse`: up to 2.3 %).
_ALONE = 0.02
#: The part of an exchange beside compute that makes a step longer, in every case: anything from nothing to all of it.
_SHOWN = np.array([0.5, 0.0, 1.0, 0.0])


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
        measured = Interval.of(likely, float(np.hypot(RERUN, _ALONE)) * likely / LEVEL, errors_of_mean(self.step[0]))
        return measured + Interval(0.0, best - likely, worst - likely)


def together(stages: Sequence[Stage], layout: WorldLayout, links: Mapping[str, Link], per_host: int) -> Pipeline:
    """Returns the pipeline of ``stages``. ``layout`` says which ranks exchange, ``per_host`` how many are on a host.
    Raises Unanswerable."""
    schedule = stages[0].schedule
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
    ends = compiled(schedule, rendezvous=True).ends(lengths + before, link=link[:, None])
    over = ends.max(axis=(3, 4, 5)) + tail + behind[:, None]
    return Pipeline(tuple(stages), ends[0] - lengths[0], ends[0], over[0], over.max(axis=2))


def _place(exchange: Exchange, layout: WorldLayout) -> str | None:
    """Returns where an exchange takes time: on a ``link`` between stages, in a ``pass``, or ``behind`` the last one.
    None if it does not make a step longer: the other end of one that counts, and parameters gathered between steps."""
    if exchange.kind in ("send", "recv"):
        return "link" if exchange.kind == "send" else None
    coords = [layout.coords(rank) for rank in exchange.ranks]
    axes = {axis for axis in AXES if len({getattr(each, axis) for each in coords}) > 1}
    if "pp" not in axes and ("dp" not in axes or ("ep" in axes and exchange.kind != "all_reduce")):
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
        kind = {"forward": codes.FORWARD, "backward": codes.BACKWARD}
        shape = [codes.phase(kind[each.kind], each.microbatch, each.chunk) for each in order] + [codes.FINALIZE]
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
                records.append(format.fact_record(step, format.MEMORY, stage.memory.pack()))
            if step == 0 and stage.layers:
                usual_ns = 1e6 * np.median((pipeline.ends - pipeline.starts)[:, number], axis=(0, -1))
                layers = [(key, round(part * usual_ns[chunk, kind])) for key, chunk, kind, part in stage.layers]
                records.append(format.fact_record(step, format.MODULES, msgspec.json.encode(layers)))
        name = artifact_name("timeline", None, 0, metadata.coords, format.SUFFIX)
        (directory / name).write_bytes(b"".join(records))
