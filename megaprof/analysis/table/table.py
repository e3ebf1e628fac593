"""The table of passes: what every rank did in every step, in arrays with named axes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Floats as Floats
from megaprof.analysis.table.iterations import Iterations, Parts
from megaprof.analysis.trace.steps import RECOMPUTE, ModuleKey
from megaprof.formats import ranges
from megaprof.formats.facts import Arrivals
from megaprof.formats.metadata import Metadata, ModelChunk
from megaprof.formats.timeline import Memory
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.parallel.topology import ParallelSizes

#: Parts of a model besides its kinds of layers.
EMBEDDING, MTP, LOSS, BESIDE = "embedding", "mtp", "loss", "beside"
#: What remains of a pass after its layers, by whether its chunk has the embedding and the loss.
_REMAINS: Mapping[object, str] = {(True, False): EMBEDDING, (False, True): LOSS, (False, False): BESIDE}
GARBAGE, WAIT, DATA = ranges.GARBAGE, "processor_wait", ranges.DATA_WAIT
#: Quantile of the passes of one kind that shows what they take without delays, because delays only add. Reports call it
#: "the quicker passes": under a load that delays most passes, it contains delays, too.
QUARTILE = 0.25


class Unfit(Exception):
    """Raised if a recording cannot be laid out as a table of passes; the note says why."""

    def __init__(self, note: Note) -> None:
        super().__init__(note)
        self.note = note


@dataclass(frozen=True)
class Table:
    """One pipeline job. Times are in milliseconds; values that were not recorded are NaN.

    Axes: ``t`` step, ``d`` replica (pipelines that work side by side), ``s`` stage, ``p`` peer (ranks of one stage and
    replica that wait for each other inside a pass), ``c`` model chunk, ``k`` kind of pass (`PipelineSchedule.kinds`),
    ``m`` microbatch.
    """

    target: str
    role: str | None
    schedule: PipelineSchedule
    steps: npt.NDArray[np.int64]
    """[t]: numbers of the steps."""
    calls: npt.NDArray[np.int64]
    """[t]: the index of the call among those of its step."""
    offset_ns: npt.NDArray[np.int64]
    """[t, d, s, p]: nanoseconds to add to what the files of each rank that was read say, to have it on the clock of the
    table. Everything that shows or compares times of several ranks adds these."""
    ranks: npt.NDArray[np.int64]
    """[d, s, p]: global ranks, -1 for a stage that was not recorded. More than were recorded, if the passes of one rank
    stand for all its peers."""
    hosts: Mapping[int, str]
    """By rank: its host."""
    metadata: tuple[Metadata | None, ...]
    """[s]: metadata of one rank of the stage; None for a stage that was not recorded."""
    start: Floats
    """[t, d, s, c, k, m]: when each pass began, counted from the begin of the step: when the first rank entered it (the
    first one of the same replica, if replicas do not wait for each other). If another rank was still in the call
    before, from when the last one left that, but not after the first pass."""
    end: Floats
    """[t, d, s, c, k, m]: when each pass ended."""
    compute: Floats
    """[t, d, s, p, c, k, m]: how long each peer computed for the pass."""
    exposed: Mapping[str, Floats]
    """Exposed communication in each pass, by group, [t, d, s, c, k, m]. It only has what is certainly of that group."""
    working: Floats
    """[t, d, s, p, c, k, m]: each peer's pass without exposed communication and waiting for the host. This is more than
    ``compute`` by what held the pass up, or by gaps between kernels."""
    spent: Mapping[str, Floats]
    """[t, d, s, p]: the rest of each rank's step, by name. It has only the names that the recording shows; NaN in steps
    for which it does not. ``tp``, ``ep``, ``cp``, ``dp`` and ``unknown``: communication that nothing hid, until the
    rank's last pass ended (from a timeline: all communication). ``tp_waiting``, ``ep_waiting`` and ``cp_waiting``: the
    part of it before the last peer came. ``pp``: exchanges after both sides had come; ``pp_waiting``: before that.
    ``host_bound``: the GPU waited for the host. ``host_passes``, no time: the fraction of the passes at both ends of
    which it did so. ``gradients``: the GPU computed for no pass. ``host_forward`` and
    ``host_backward``: the host's time in these passes, which overlaps the other entries. ``data_wait``: the rank's
    forwards waited for its own data."""
    idle: Floats
    """[t, d, s, c, k, m]: how long the GPU waited for the host in the pass."""
    delays: Mapping[str, Floats]
    """[t, d, s, c, k, m]: what held each pass up, by cause. ``garbage_collection``: how long Python collected garbage,
    as far as that delayed the pass. ``processor_wait``: how long its thread had no processor core, as far as the pass
    took longer than others (`tabulate`). ``data_wait``: how long one of its ranks waited for data. A cause that never
    occurs is missing; ``data_wait`` only if no file says how long ranks waited."""
    core_waits: Floats
    """[t, d, s, p]: how long each rank's thread waited for a processor core in a step and since the step before; 0 if
    no file says."""
    entry: Floats
    """[t, d, s]: when each rank entered the step."""
    left: Floats
    """[t, d, s]: when each rank had left the call before, if that was after the begin of the step; else 0."""
    reduction: Floats
    """[t]: how long the step went on for gradients after the last pass of all ranks."""
    length: Floats
    """[t]: the step, from the first rank's entry to the end of the reduction. If replicas do not wait for each other,
    the longest of their steps."""
    profiled_length: Floats
    """[step that a profiler recorded]: as ``length``, which is the same if all times are from these steps. A profiler
    makes steps longer. Empty if all recorded steps ran without one."""
    captured: int
    """Number of data-parallel ranks that were captured. The table of a large job holds only some of them."""
    clocks: bool
    """True if all stages are on one clock. Otherwise there are no entries and no links."""
    aligned_ms: float | None = None
    """Uncertainty of that clock, if it follows from passes that wait for each other; None if hosts share a clock."""
    device: bool = False
    """True if it is the GPU's clock, on which steps begin later than on the host."""
    memory: tuple[Memory | None, ...] = ()
    """[s]: memory that the ranks of the stage had allocated; None if not recorded."""
    modules: tuple[Mapping[ModuleKey, tuple[int, ...]], ...] = ()
    """[s]: nanoseconds of every pass through a module, if modules have ranges."""
    work: Floats | None = None
    """[t, d, m, 3]: tokens, sequences, and the sum of their squared lengths, NaN if not known; None if no
    microbatch is known."""
    lengths_from: str | None = None
    """The source of ``work``, one of `megaprof.formats.facts.SOURCES`."""
    experts: Floats | None = None
    """[d, s, p]: tokens that the experts of each peer got in a captured step; None if not counted."""
    sequences: tuple[tuple[Floats, list[list[tuple[int, ...]]]], ...] = ()
    """Of each captured step whose sequences are all known, their work, [d, m, 3] as in ``work``, and their lengths by
    replica and microbatch."""
    iterations: Iterations | None = None
    """Where whole iterations of the host's loop go, over all steps of the ranks that were read; None if not known."""
    warnings: tuple[Note, ...] = ()

    def holds(self, stage: int, chunk: int) -> ModelChunk:
        """Returns what a model chunk of a stage holds."""
        metadata = self.metadata[stage]
        return ModelChunk() if metadata is None or chunk >= len(metadata.chunks) else metadata.chunks[chunk]

    @cached_property
    def part_ms(self) -> dict[str, Floats]:
        """Milliseconds of a microbatch, [k], by part: a kind of layer, one `MTP` layer, `EMBEDDING`, `LOSS` or
        `BESIDE`, averaged over the chunks that hold it, in the quicker passes. Parts without ranges are missing.

        The last three are what remains of a pass after all layers of their chunk: of one with the embedding, with the
        loss, and with neither. They include reading the batch, an encoder, and the loss function.
        """
        ms_by_part: dict[str, list[Floats]] = {}
        # A range holds the GPU's computing, or all of the time on a CPU. The rest of a pass is divided in proportion.
        on_gpu = any(metadata is not None and metadata.device not in (None, "cpu") for metadata in self.metadata)
        computed_ms = np.median(self.compute.max(axis=3) if on_gpu else self.passes, axis=(0, 1, 5))  # [s, c, k]
        factor = np.quantile(self.passes, QUARTILE, axis=(0, 1, 5)) / np.maximum(computed_ms, 1e-9)
        for stage, chunk in np.ndindex(*computed_ms.shape[:2]):
            holds, modules = self.holds(stage, chunk), self.modules[stage]
            parts = [(name, _times(modules, key)[: computed_ms.shape[2]]) for name, key in _parts(holds)]
            name = _REMAINS.get((holds.embedding, holds.loss))
            if name is not None and holds.layers is not None and len(parts) == holds.layers + (holds.mtp or 0):
                remaining_ms = computed_ms[stage, chunk] - sum(ms for _, ms in parts)
                parts.append((name, np.maximum(remaining_ms, 0.0)))
            for name, ms in parts:
                if np.isfinite(ms).all():
                    ms_by_part.setdefault(name, []).append(ms * factor[stage, chunk])
        return {name: np.mean(samples_ms, axis=0) for name, samples_ms in ms_by_part.items()}

    @cached_property
    def layers(self) -> Floats:
        """[s, c]: decoder layers; NaN if not known. If ranges measured all kinds of them, each counts as what its kind
        takes relative to the average layer; so does an MTP layer, if it was measured, too."""
        shape = len(self.metadata), self.schedule.chunks
        chunks = [self.holds(*place) for place in np.ndindex(shape)]
        kinds = Counter(kind for holds in chunks for kind in holds.kinds or ())
        ms = {kind: float(self.part_ms[kind].sum()) for kind in (*kinds, MTP) if kind in self.part_ms}
        counts: list[float | None] = [holds.layers for holds in chunks]
        if len(ms) > 1 and ms.keys() >= kinds.keys() and all(holds.kinds is not None for holds in chunks):
            average_ms = sum(ms[kind] * count for kind, count in kinds.items()) / kinds.total()
            of_chunks = [[*(holds.kinds or ()), *[MTP] * (holds.mtp or 0)] for holds in chunks]
            counts = [round(sum(ms.get(kind, 0.0) for kind in of) / average_ms, 9) for of in of_chunks]
        return np.array(counts, dtype=float).reshape(shape)  # None becomes NaN

    @property
    def profiled(self) -> bool:
        """True if its times are of steps that a profiler recorded, which take longer than others."""
        return len(self.profiled_length) > 0 and self.profiled_length is self.length

    def offset_of(self, rank: int, t: int) -> int:
        """Returns the nanoseconds to add to the times of ``rank`` in row ``t``, to have them on the table's clock."""
        return int(self.offset_ns[(t, *np.argwhere(self.ranks == rank)[0])])

    @property
    def first(self) -> Metadata:
        """The metadata of the first stage that was recorded."""
        return next(metadata for metadata in self.metadata if metadata is not None)

    @property
    def sizes(self) -> ParallelSizes:
        """Parallel sizes of the job."""
        return self.first.sizes

    @property
    def reduces(self) -> bool:
        """True if data-parallel ranks reduce gradients after the passes."""
        return "backward" in self.schedule.kinds and self.sizes.dp * self.sizes.cp > 1

    @property
    def waits_unseen(self) -> bool:
        """True if the reduction of gradients may have waited for a replica that was not captured."""
        return self.reduces and self.captured < self.sizes.dp

    @property
    def core_waits_beside(self) -> Floats:
        """[t, d, s, p]: the part of ``core_waits`` that is outside of passes."""
        inside = self.delays[WAIT].sum(axis=(3, 4, 5))[..., None] if WAIT in self.delays else 0.0
        return np.asarray(np.maximum(self.core_waits - inside, 0.0))

    @property
    def passes(self) -> Floats:
        """[t, d, s, c, k, m]: how long each pass took."""
        return self.end - self.start


Group = tuple[str, str, tuple[int, ...]]
"""A group whose ranks wait for each other inside a pass: its axis (``tp``, ``cp`` or ``ep``), its name in torch, and
its ranks."""


@dataclass(frozen=True)
class RankSteps:
    """The recording of one rank, in milliseconds on the clock of its host.

    ``start``, ``end``, ``compute``, ``working``, ``idle``, ``delays`` by cause, ``exposed`` by group: [t, c, k, m],
    NaN for passes that were not recorded. ``spent`` by name [t]: see `Table.spent`. ``left``, ``enter``, ``reduced``
    [t]: when the rank left the call before (NaN if not known), entered the step, and had finalised its gradients.
    ``steps`` [t] are numbers with the call of the step in their lowest `CALLS` bits.
    """

    names: tuple[tuple[int, str], ...]
    """Global rank and host of this rank, then of the peers that it stands for."""
    metadata: Metadata
    place: tuple[int, int, int]
    """Its replica, stage and peer."""
    steps: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    compute: Floats
    working: Floats
    spent: Mapping[str, Floats]
    idle: Floats
    delays: Mapping[str, Floats]
    exposed: Mapping[str, Floats]
    left: Floats
    enter: Floats
    reduced: Floats
    core_waits: Floats
    """[t]: see `Table.core_waits`; 0 if no file says."""
    work: Floats
    """[t, m, 3]: see `Table.work`."""
    lengths_from: str | None = None
    sequences: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Sequence lengths by step (an index of ``steps``) and microbatch."""
    experts: float = np.nan
    """Tokens that its experts got in a captured step, averaged over windows."""
    device: bool = False
    """True if its times are on the GPU's clock, on which a step begins later than on the host."""
    came: Mapping[int, Mapping[Group, Arrivals]] = field(default_factory=dict)
    """When the rank came to the collectives of each group, by step, if known."""
    memory: Memory | None = None
    modules: Mapping[ModuleKey, tuple[int, ...]] = field(default_factory=dict)
    parts: Sequence[Parts] = ()
    """The parts of its iterations, by file."""


def _parts(model_chunk: ModelChunk) -> Iterator[tuple[str, ModuleKey]]:
    """Yields the kind of every layer of a chunk, and the key of its forward."""
    kinds = model_chunk.kinds if model_chunk.kinds is not None else ("layer",) * (model_chunk.layers or 0)
    for kind, number in zip(kinds, model_chunk.layer_numbers or (), strict=False):
        yield kind, ModuleKey(ranges.LAYER, number, None, ranges.FORWARD)
    for number in range(1, (model_chunk.mtp or 0) + 1):
        yield MTP, ModuleKey(ranges.MTP_LAYER, number, None, ranges.FORWARD)


def _times(modules: Mapping[ModuleKey, Sequence[int]], forward: ModuleKey) -> Floats:
    """Returns milliseconds of a module's ranges, [forward, backward]; NaN without any."""
    pass_ms = np.full(2, np.nan)
    for row, kinds in enumerate(((ranges.FORWARD,), (ranges.BACKWARD, RECOMPUTE))):
        ranges_ns = [modules.get(forward._replace(kind=kind), ()) for kind in kinds]
        if ranges_ns[0]:
            pass_ms[row] = sum(statistics.median(ns) for ns in ranges_ns if ns) / 1e6
    return pass_ms
