"""Runs one stage of a user's command alone, and reads what it recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megaprof.analysis.fleet.reading import read_fleet
from megaprof.analysis.report.text.notes import clause
from megaprof.analysis.table.recorded import tables_of_timelines
from megaprof.analysis.table.table import Floats, Table, Unfit
from megaprof.analysis.trace.gpu import Peak
from megaprof.analysis.trace.reading import find_timelines
from megaprof.formats.faults import Unanswerable
from megaprof.formats.metadata import Metadata
from megaprof.parallel.schedules import PipelineSchedule, phase_order
from megaprof.rehearse import alone
from megaprof.tune import trial

_EXCHANGES = "exchanges"
_ENDED = {
    "exited": "ended before it had made its steps",
    "out_of_memory": "ran out of memory",
    "time_limit": "did not make its steps within the time limit: it waits for other ranks, or is slow",
}


class NotRehearsed(Unanswerable):
    """The command cannot be rehearsed; the message says why."""


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
    the same shape, how long after the previous one it began; ``tail`` [t] goes on behind the last pass, and
    ``between_ms`` until the next step. ``device`` is the name of the GPU, None on the CPU; ``like`` the stage that was
    measured in this one's place, None if it was measured itself.
    """

    metadata: Metadata
    schedule: PipelineSchedule
    passes: Floats
    before: Floats
    tail: Floats
    between_ms: float
    memory: Peak | None
    exchanges: tuple[Exchange, ...]
    device: str | None = None
    on_gpus_clock: bool = False
    like: int | None = None


def record(
    command: Sequence[str],
    directory: Path,
    rank: int,
    world: int,
    steps: int,
    time_limit: float,
    advance: Callable[[int], None],
) -> Stage:
    """Runs ``command`` as ``rank`` of ``world`` until it has made ``steps`` steps, and returns its stage. Raises
    NotRehearsed, and OSError if the command cannot be started."""
    directory.mkdir(parents=True)
    env = {
        alone.VARIABLE: str(directory.absolute() / _EXCHANGES),
        "PYTHONPATH": str(Path(alone.__file__).parent / "path"),
        **{"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
    }
    ended = trial.run(command, directory.absolute(), steps, time_limit, advance, env)
    if ended.outcome != "enough":
        said = f": {ended.last_line}" if ended.last_line else ""
        raise NotRehearsed(f"rank {rank} {_ENDED[ended.outcome]}{said} (its output: {directory / trial.LOG})")
    return read(directory)


def read(directory: Path) -> Stage:
    """Returns the stage that was recorded in ``directory``. Raises NotRehearsed."""
    timelines = find_timelines(directory)
    tables = [*tables_of_timelines(read_fleet(timelines)).values()]
    table = next((table for table in tables if isinstance(table, Table) and table.target == trial.TARGET), None)
    if table is None:
        reasons = "; ".join(clause(table.note) for table in tables if isinstance(table, Unfit))
        raise NotRehearsed(f"{directory}: no training step was recorded whole. {reasons}".rstrip(". "))
    if table.schedule.combined:
        raise NotRehearsed("forwards and backwards run as one (combined 1F1B): single stages do not show their order")
    stage, metadata = next((number, each) for number, each in enumerate(table.metadata) if each is not None)
    start, end, enter = (times[:, 0, stage] for times in (table.start, table.end, table.entry))
    before, previous = np.zeros_like(start), enter
    for phase in phase_order(table.schedule, stage):
        where = (slice(None), phase.chunk, table.schedule.kinds.index(phase.kind), phase.microbatch)
        before[where], previous = start[where] - previous, end[where]
    steps = timelines.read(timelines.paths[0], events=False).steps
    steps = steps[np.isin(steps["step"], table.steps)]
    begins, lengths = steps["start_ns"].astype(np.int64), steps["duration"].astype(np.int64) * 1000
    device, exchanges = _exchanged(directory / _EXCHANGES, begins, None if table.device else begins + lengths)
    return Stage(
        metadata=metadata,
        schedule=table.schedule,
        passes=end - start,
        before=np.maximum(before, 0.0),
        tail=np.maximum(table.length - (previous - enter), 0.0),
        between_ms=float(np.median(np.diff(begins) - lengths[:-1])) / 1e6 if len(begins) > 1 else 0.0,
        memory=table.memory[stage],
        exchanges=exchanges,
        device=device,
        on_gpus_clock=table.device,
    )


def _exchanged(
    path: Path, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64] | None
) -> tuple[str | None, tuple[Exchange, ...]]:
    """Returns the name of the GPU, and the exchanges of an average step. ``begins``, ``ends``: nanoseconds of the
    steps; without ends, since a GPU is behind its host, all exchanges from the first begin to the last one count."""
    device, counts = None, Counter[tuple[str, int, bool, bool, tuple[int, ...]]]()
    for line in path.read_text().splitlines():
        time, kind, rest = line.split(maxsplit=2)
        if kind == "device":
            device = rest
            continue
        step = int(np.searchsorted(begins, int(time), side="right")) - 1
        if step >= 0 and (step < len(begins) - 1 if ends is None else int(time) <= ends[step]):
            size, backward, beside, ranks = rest.split()
            counts[kind, int(size), backward == "1", beside == "1", tuple(map(int, ranks.split(",")))] += 1
    spans = max(len(begins) - (ends is None), 1)
    return device, tuple(Exchange(*key, count / spans) for key, count in counts.items())


def differing(stages: int, words: Sequence[str]) -> list[int]:
    """Returns the stages, besides the first, that may differ: the last and one in the middle; all of them, if an option
    in ``words`` may give each stage layers of its own."""
    options = [word.partition("=")[0].replace("_", "-") for word in words if word[:1] == "-" or "=" in word]
    each_its_own = any(name in option for option in options for name in ("layout", "pattern", "layer-freq"))
    return [*range(1, stages)] if each_its_own else sorted({stages - 1, stages // 2} - {0})


def alike(by_stage: Mapping[int, Stage]) -> bool:
    """Returns whether the stages that were not measured hold as many layers as the one in the middle, as the numbers of
    the layers around them say."""
    stages = max(by_stage) + 1
    seen = [by_stage[stage].metadata.chunks for stage in (0, stages // 2, stages - 1)]
    for chunks in zip(*seen, strict=True):
        numbers = [(chunk.layer_numbers or (None,))[0] for chunk in chunks]
        layers = [chunk.layers for chunk in chunks]
        if None in numbers or None in layers:
            return False
        begin = (numbers[0] or 0) + (layers[0] or 0)
        if numbers[1:] != [begin + (stage - 1) * (layers[1] or 0) for stage in (stages // 2, stages - 1)]:
            return False
    return True
