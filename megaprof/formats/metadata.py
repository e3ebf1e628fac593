"""The `megaprof` object inside an artifact, as it is written and as it is read (docs/trace-metadata.md), and the bounds
of its numbers.

Nsight Systems writes its own files, which cannot hold it. So megaprof writes a ``.nsys.json`` beside them for every
window: ``{"megaprof": {...}}``. nsys numbers its files by session, so the two are matched by host, process and step
range.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec

from megaprof.parallel.schedules import Placement
from megaprof.parallel.topology import AXES, ParallelSizes, RankCoords

#: Suffix of the file with the metadata of a window of Nsight Systems.
NSYS_SUFFIX = ".nsys.json"
#: The variable that nsys sets in the processes that it profiles.
SESSION_VARIABLE = "NSYS_PROFILING_SESSION_ID"
#: The range in our NVTX domain that is open while a window is: ``--capture-range=nvtx`` waits for it.
NSYS_WINDOW = "megaprof/window"

#: What of a model's configuration says when stages wait for each other.
P2P = (
    *("batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"),
    "deallocate_pipeline_outputs",
)

#: No job has more ranks along an axis, microbatches, layers or chunks: a hostile file must not make us count forever.
MOST = 1 << 20
#: No job reaches this step. Steps are packed with other numbers into 64 bits.
MOST_STEPS = 1 << 40

#: Sizes and counts of a job; numbers of anything else; numbers of steps.
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Step = Annotated[int, msgspec.Meta(ge=0, lt=MOST_STEPS)]
Many = msgspec.Meta(max_length=MOST)


@dataclass(frozen=True)
class ModelChunk:
    """The contents of one model chunk. A field is None if the model does not say."""

    embedding: bool | None = None
    """True if it holds the embedding."""
    layers: Count | None = None
    """Number of transformer layers, including T5's encoder layers."""
    layer_numbers: tuple[Count | None, ...] | None = None
    """Megatron's number of each layer, from 1 in the encoder and in the decoder."""
    mtp: Count | None = None
    """Number of multi-token prediction layers."""
    loss: bool | None = None
    """True if it holds the output layer and the loss."""
    kinds: tuple[str, ...] | None = None
    """Kind of each layer: ``dense``, ``moe``, ``encoder``, or its class."""


@dataclass(frozen=True)
class WithoutRange:
    """Modules of one kind that have no ranges although they were asked for."""

    module: str
    """Their label: ``layer``, ``attention``, ``mlp``, ..."""
    layers: tuple[int | None, ...]
    """The number of each one's layer, from 1; null for a module outside the layers."""
    reason: str
    """Why they have no ranges."""


@dataclass(frozen=True)
class MicrobatchRanges:
    """The ranges that a step lacks."""

    microbatch: bool = True
    """True if the step has a range for every microbatch."""
    reason: str | None = None
    """The reason that it has not; None if it has."""
    without: tuple[WithoutRange, ...] = ()
    """Modules without ranges although ``--profile-ranges`` asked for them."""


@dataclass(frozen=True)
class Profiler:
    """The torch profiler's recording of a window."""

    asked: tuple[str, ...]
    """The activities that ``--profile-activities`` asks for: ``cpu``, ``cuda``."""
    recorded: tuple[str, ...]
    """The activities of these that this process could record."""
    start_ns: Number | None = None
    """Nanoseconds by which the first step of the window began late, because the profiler was started before it."""
    prepared: bool = False
    """True if it was prepared at the end of the call before, and only had to be switched on."""
    waited_ns: Number | None = None
    """Nanoseconds of the window in which the training thread could have run but had no processor core; None if the
    system does not count that."""
    cupti: str | None = None
    """In the last window of a process with a GPU: ``detached`` if CUPTI was detached behind it, else ``attached: `` and
    why. Else None."""


@dataclass(frozen=True)
class Metadata:
    """The content of an artifact, and where and how that ran."""

    target: str
    """The captured target, such as ``train_actor``."""
    coords: RankCoords
    """The rank, with the sizes of the run."""
    steps: tuple[Step, Step]
    """First and last step, inclusive, in the host's own numbering if it has one."""
    call: Count = 0
    """Number of calls with the number of the first step before it; 0 in timelines."""
    version: str | None = None
    """Version of megaprof that wrote it."""
    run: str | None = None
    """The process that wrote it: host, process id, start time. A restarted job has others."""
    role: str | None = None
    """The role of the model; None without one."""
    framework: str | None = None
    """The host framework: ``megatron-lm``, ``slime``, ``verl``, ``skyrl``, ``ms-swift`` or ``megatron-bridge``; None
    for another one."""
    schedule: str | None = None
    """``no_pipelining``, ``1f1b`` or ``interleaved``; None if no schedule ran."""
    forward_only: bool = False
    """True for log-prob and evaluation passes."""
    microbatches: Count | None = None
    """Microbatches of the step."""
    microbatch_group_size: Count | None = None
    """Microbatches that pass through one chunk before the next chunk; of the interleaved schedule only."""
    tokens: tuple[Number | None, ...] | None = None
    """Tokens that each microbatch of the window's first call really had, including padding; None if this rank's model
    gets none, and in timelines."""
    lengths: Annotated[tuple[tuple[Number, ...] | None, ...], Many] | None = None
    """For each of these microbatches, the lengths of its sequences, each of which attends to itself only."""
    lengths_from: str | None = None
    """The source of the lengths, one of `megaprof.formats.facts.SOURCES`."""
    expert_tokens: Annotated[tuple[Number, ...], Many] | None = None
    """Tokens that each of this rank's experts got in the window's first call, all MoE layers together; None without
    experts, and in timelines."""
    chunks: Annotated[tuple[ModelChunk, ...], Many] = ()
    """This rank's model chunks, in their order."""
    p2p: dict[str, Any] | None = None
    """`P2P` of the model's configuration."""
    host: str = ""
    """Host name."""
    pid: Number | None = None
    """Process id on the host."""
    device: str | None = None
    """The device of the model's parameters when the window closes: ``cuda``, ``cpu``, ...; None if that is not
    known."""
    megatron_core: str | None = None
    """Version of megatron-core."""
    torch: str | None = None
    """Version of torch."""
    ranges: MicrobatchRanges = MicrobatchRanges()
    """The ranges that it lacks."""
    truncated: bool = False
    """True if the window was closed early."""
    truncated_reason: str | None = None
    """Why it was closed early; None if it was not."""
    profiler: Profiler | None = None
    """The torch profiler's recording of it; None for another tool."""
    timeline: dict[str, Any] | None = None
    """Properties of a timeline, such as its ``clock`` (``host`` or ``device``), and ``around_windows`` if it holds only
    the steps around windows of another tool; None for another tool."""

    @property
    def around_windows(self) -> bool:
        """True if it is of a timeline that holds only the steps around windows, and not those of the whole run."""
        return bool((self.timeline or {}).get("around_windows"))

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes of the run."""
        return self.coords.sizes

    @property
    def placement(self) -> Placement:
        """The places of the model's chunks in the pipeline."""
        return Placement(self.sizes.pp, max(len(self.chunks), 1))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, as docs/trace-metadata.md lists it: ``sizes`` are beside ``coords``."""
        fields = asdict(self)
        for tool in ("profiler", "timeline"):
            if fields[tool] is None:
                del fields[tool]
        sizes = fields["coords"].pop("sizes")
        ranges = {key: value for key, value in fields["ranges"].items() if value not in (None, ())}
        return {**fields, "sizes": sizes, "steps": list(self.steps), "chunks": list(fields["chunks"]), "ranges": ranges}


def read_metadata(data: bytes) -> Metadata:
    """Reads the JSON of `Metadata.as_dict`. It may be of any origin: every value's type and bounds are checked.

    Unknown keys are left out. Raises ValueError, which says what is impossible.
    """
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
        coordinates = msgspec.convert(raw.get("coords"), dict[str, Any])
        metadata = msgspec.convert({**raw, "coords": {**coordinates, "sizes": raw.get("sizes")}}, Metadata)
    except (RecursionError, OverflowError):
        raise ValueError("it is nested too deeply, or has too large a number") from None
    coords = metadata.coords
    if not 0 <= coords.rank <= MOST or max(vars(coords.sizes).values()) > MOST:
        raise ValueError(f"coords: no job has more than {MOST} ranks")
    for axis in AXES:
        if not 0 <= getattr(coords, axis) < getattr(coords.sizes, axis):
            raise ValueError(f"coords: {axis}={getattr(coords, axis)} is outside its size")
    return metadata
