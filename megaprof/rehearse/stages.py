"""Runs one stage of a user's command alone, and reads what it recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.table.recorded import tables_of_timelines
from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.trace.gpu import Peak
from megaprof.analysis.trace.reading import find_timelines
from megaprof.formats.faults import Unanswerable
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PipelineSchedule, phase_order
from megaprof.rehearse import alone
from megaprof.tune import trial

_EXCHANGES = "exchanges"
#: Seconds after which a stage is ended that has not made its steps: it waits for others, or is slow.
_TIME_LIMIT = 1800.0


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
    the same shape, how long after the previous one it began; ``tail`` [t] goes on behind the last pass. ``device`` is
    the name of the GPU, None on the CPU; ``like`` the stage that was measured in this one's place, None if it was
    measured itself.
    """

    metadata: Metadata
    schedule: PipelineSchedule
    passes: Floats
    before: Floats
    tail: Floats
    memory: Peak | None
    exchanges: tuple[Exchange, ...]
    device: str | None = None
    on_gpus_clock: bool = False
    like: int | None = None


def record(command: Sequence[str], directory: Path, rank: int, world: int, steps: int) -> Stage:
    """Runs ``command`` as ``rank`` of ``world`` until it has made ``steps`` steps, and returns its stage. Raises
    Unanswerable, and OSError if the command cannot be started."""
    directory.mkdir(parents=True)
    env = {
        alone.VARIABLE: str(directory.absolute() / _EXCHANGES),
        "PYTHONPATH": str(Path(alone.__file__).parent / "path"),
        **{"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
    }
    ended = trial.run(command, directory.absolute(), steps, _TIME_LIMIT, alone=env)
    if ended.outcome != "enough":
        said = f": {ended.last_line}" if ended.last_line else ""
        how = ended.outcome.replace("_", " ")
        raise Unanswerable(f"rank {rank} did not make its steps ({how}){said} (its output: {directory / trial.LOG})")
    return read(directory)


def read(directory: Path) -> Stage:
    """Returns the stage that was recorded in ``directory``. Raises Unanswerable."""
    timelines = find_timelines(directory)
    tables = tables_of_timelines(read_fleet(timelines)).values()
    table = next((table for table in tables if isinstance(table, Table) and table.target == trial.TARGET), None)
    if table is None:
        raise Unanswerable(f"no training step was recorded whole; to see why: megaprof report {directory}")
    if table.schedule.combined:
        raise Unanswerable("forwards and backwards run as one (combined 1F1B): single stages do not show their order")
    stage, metadata = next((number, each) for number, each in enumerate(table.metadata) if each is not None)
    start, end, enter = (times[:, 0, stage] for times in (table.start, table.end, table.entry))
    before, previous = np.zeros_like(start), enter
    for phase in phase_order(table.schedule, stage):
        where = (slice(None), phase.chunk, table.schedule.kinds.index(phase.kind), phase.microbatch)
        before[where], previous = start[where] - previous, end[where]
    steps = timelines.read(timelines.paths[0], events=False).steps
    steps = steps[np.isin(steps["step"], table.steps)]
    device, exchanges = _exchanged(directory / _EXCHANGES, steps["start_ns"].astype(np.int64))
    return Stage(
        metadata=metadata,
        schedule=table.schedule,
        passes=end - start,
        before=np.maximum(before, 0.0),
        tail=np.maximum(table.length - (previous - enter), 0.0),
        memory=table.memory[stage],
        exchanges=exchanges,
        device=device,
        on_gpus_clock=table.device,
    )


def _exchanged(path: Path, begins: npt.NDArray[np.int64]) -> tuple[str | None, tuple[Exchange, ...]]:
    """Returns the name of the GPU, and the exchanges of an average step. ``begins``: nanoseconds of the steps. Since a
    GPU is behind its host, all exchanges from the first begin to the last one count."""
    device, counts = None, Counter[tuple[str, int, bool, bool, tuple[int, ...]]]()
    for line in path.read_text().splitlines():
        time, kind, rest = line.split(maxsplit=2)
        if kind == "device":
            device = rest
        elif begins[0] <= int(time) < begins[-1]:
            size, backward, beside, ranks = rest.split()
            counts[kind, int(size), backward == "1", beside == "1", tuple(map(int, ranks.split(",")))] += 1
    return device, tuple(Exchange(*key, count / (len(begins) - 1)) for key, count in counts.items())


def alike(by_stage: Mapping[int, Stage]) -> bool:
    """Returns whether the stages that were not measured are like the one in the middle, as far as the first, the
    middle and the last one say: all layers are of one kind, and their numbers leave as many to each stage between."""
    last = max(by_stage)
    seen = [by_stage[stage].metadata.chunks for stage in (0, (last + 1) // 2, last)]
    if len({kind for chunks in seen for chunk in chunks for kind in chunk.kinds or ()}) > 1:
        return False
    for chunks in zip(*seen, strict=True):
        numbers, layers = [(chunk.layer_numbers or (None,))[0] for chunk in chunks], [chunk.layers for chunk in chunks]
        if None in numbers or None in layers:
            return False
        begin = (numbers[0] or 0) + (layers[0] or 0)
        if numbers[1:] != [begin + (stage - 1) * (layers[1] or 0) for stage in ((last + 1) // 2, last)]:
            return False
    return True
