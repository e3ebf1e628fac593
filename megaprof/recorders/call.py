"""One call of ``forward_backward_func``: the facts in its arguments, its state while it is recorded, the work that its
models were given, and the object ``megaprof`` that describes it all in an artifact (docs/trace-metadata.md).

The training thread keeps only references to a few numbers (`recorders.tape.PythonTape.given`). They are read after the
step. If they are on a device, the reader copies them once the device has finished the step that they belong to, and
never waits for it.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from megaprof.config.values import ANNOTATED
from megaprof.formats import codes
from megaprof.formats.facts import MASK, PACKED, SHAPES, SOURCES, Work
from megaprof.formats.metadata import P2P, Metadata, MicrobatchRanges, ModelChunk, WithoutRange
from megaprof.formats.names import host
from megaprof.parallel.megatron import describe_chunk, innermost
from megaprof.version import __version__


class CallFacts(NamedTuple):
    """The facts that the arguments of one ``forward_backward_func`` call state."""

    target: str
    """``train_actor``, ``train_log_probs`` or ``evaluate``."""
    schedule: str | None
    """``no_pipelining``, ``1f1b`` or ``interleaved``; None: no schedule ran."""
    forward_only: bool
    """True if it has no backward. A training step has none if all layers of the model are frozen."""
    microbatches: int | None
    """Their number; None if it is not given as one."""
    chunks: tuple[Any, ...]
    """The model chunks of this rank, in the order of the call."""
    graph: str | None = None
    """``capture`` or ``replay`` when the step is a full-iteration CUDA graph."""


@dataclass(slots=True)
class RecordedCall:
    """A recorded call while it runs."""

    facts: CallFacts
    tape: Any
    """The `recorders.tape.Tape` that matches backwards to forwards and takes the events of the timeline."""
    models: tuple[Any, ...] = ()
    """The models inside the wrappers of its chunks."""
    timed: bool = False
    """True: the call is in the timeline; its tape is a `recorders.timeline_steps.RecordedStep`."""
    level: str | None = None
    """The finest ranges that an open window wants around the functions that the schedule calls (``--profile-ranges``);
    None if it wants none."""
    outermost: ExitStack = field(default_factory=ExitStack)
    """Closes the ranges around the whole call, and before these what is still open inside. A window has some."""
    ran: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    """The number of its forwards and backwards so far, if it has ranges."""
    backward: int = 0
    """The microbatch and chunk of the last backward, as the position part of a code; 0: not known."""
    experts: list[Any] = field(default_factory=list)
    """The tokens that each local expert got: one small tensor per pass through a MoE layer while a window is open."""
    without: tuple[WithoutRange, ...] = ()
    """The modules that should have had ranges but got none. Known when the call is over."""


#: Stands in for the call in a window in which no schedule ran.
NO_CALL = CallFacts(ANNOTATED, None, False, None, ())


@dataclass(frozen=True)
class Batch:
    """A method that runs the microbatches of one call, one after the other, without Megatron's schedule. Each has a
    forward, and in training a backward by ``Tensor.backward``."""

    model: Callable[[Any], Any]
    """Gets the object that has the method, and returns the object's model."""
    forward: str | None = None
    """The name of the object's method that runs one microbatch forward; None if calling the model does that."""
    forward_only: Callable[[Mapping[str, Any]], bool] = lambda arguments: False
    """Gets the call's arguments by name, and returns whether the call has no backward."""


if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig
    from megaprof.recorders import Window


def describe(
    window: Window, call: RecordedCall, config: ProfileConfig, truncated: str | None, framework: str | None
) -> dict[str, Any]:
    """Returns the metadata of ``window``, which is closing now: plain data for JSON, listed in docs/trace-metadata.md.

    ``call`` is the window's first call. ``truncated`` says why the window closes early; None if it does not.
    ``framework`` names the host.
    """
    facts = call.facts
    coords = window.coords
    if facts.chunks:  # hooks that were installed without a model could not know
        coords = replace(coords, sizes=replace(coords.sizes, vpp=len(facts.chunks)))
    # Nothing is read that a device may not have finished: that would wait for the device.
    given, experts = ((), []) if truncated is not None else (call.tape.given, call.experts)
    by_pass = [tuple(map(int, counts.tolist())) for counts in experts]
    work = read_work(given, coords.sizes.cp, lambda tensor: list(tensor.tolist()))
    count = facts.microbatches or 0
    model_config = getattr(innermost(facts.chunks[0]), "config", None) if facts.chunks else None
    parameters: Iterable[Any] = getattr(facts.chunks[0], "parameters", tuple)() if facts.chunks else ()
    device = getattr(next(iter(parameters), None), "device", None)  # the type of device that holds the model
    group = "microbatch_group_size_per_vp_stage" if facts.schedule == "interleaved" else ""
    return Metadata(
        target=window.target,
        coords=coords,
        steps=(window.step, window.step),
        call=window.call,
        # A name of this process alone: every rank of a job has its own.
        run=f"{host()}-{os.getpid()}-{_started(os.getpid())}",
        version=__version__,
        role=window.role,
        framework=framework,
        schedule=facts.schedule,
        forward_only=facts.forward_only,
        microbatches=facts.microbatches,
        microbatch_group_size=getattr(model_config, group, None),
        # None for a microbatch that is not known.
        tokens=tuple(work[n].tokens if n in work else None for n in range(count)) if work and count else None,
        lengths=tuple(work[n].lengths if n in work else None for n in range(count)) if work and count else None,
        lengths_from=max((microbatch.source for microbatch in work.values()), key=SOURCES.index, default=None),
        # Summed over all passes. None if there are none, or if layers have different numbers of experts.
        expert_tokens=tuple(map(sum, zip(*by_pass, strict=True))) if len({*map(len, by_pass)}) == 1 else None,
        chunks=tuple(ModelChunk(**describe_chunk(chunk)) for chunk in facts.chunks),
        p2p={name: getattr(model_config, name, None) for name in P2P},
        host=socket.gethostname(),
        pid=os.getpid(),
        device=getattr(device, "type", None),
        # A checkout on the path is used instead of an installed one, and may have another version.
        megatron_core=getattr(sys.modules.get("megatron.core"), "__version__", None) or _version("megatron-core"),
        torch=_version("torch"),
        ranges=_ranges(call, config),
        truncated=truncated is not None,
        truncated_reason=truncated,
    ).as_dict()


@functools.cache
def _started(pid: int) -> int:
    """Returns the time of the first call in process ``pid``, in milliseconds since the epoch. A forked child has its
    own time."""
    return time.time_ns() // 1_000_000


def _ranges(call: RecordedCall, config: ProfileConfig) -> MicrobatchRanges:
    if call.tape.ran_forward and config.ranges != "step":
        return MicrobatchRanges(without=call.without)
    if call.facts.graph is not None:
        return MicrobatchRanges(False, "the step was replayed from a full-iteration CUDA graph")
    if config.ranges == "step":
        return MicrobatchRanges(False, "captured with --profile-ranges step")
    if call.facts.schedule is None:
        return MicrobatchRanges(False, "no schedule ran in this window")
    return MicrobatchRanges(False, "no microbatch passed through megatron-core's forward_step")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


#: The most sequences that are read from the positions of a microbatch. If there are more, its lengths count as unknown,
#: so that little is kept of it.
MOST_SEQUENCES = 1024
#: Takes a tensor on a device, and returns its numbers.
Fetch = Callable[[Any], list[Any]]


def read_work(given: Iterable[Sequence[Any]], context: int, fetch: Fetch | None) -> dict[int, Work]:
    """Returns the work of every microbatch whose work is known. With several chunks, the first one that saw it counts.

    ``context``: the number of ranks over which a sequence is divided. The shapes that a model sees cover only one
    rank's part. ``fetch``: None if the device cannot be asked.
    """
    works: dict[int, Work] = {}
    for position, *inputs in given:
        microbatch = None if position is None else codes.microbatch_and_chunk(position)[0]
        if microbatch is None or microbatch in works:
            continue
        work = None
        if len(inputs) == 1:
            (shape,) = inputs
            if len(shape) == 2 and all(shape):  # every sequence counts in full, even if a mask removes some of it
                sequences, length = int(shape[0]), int(shape[1]) * context
                work = Work(sequences * length, (length,) * sequences, SHAPES)
        else:
            first, second, third = inputs
            read = _of_mask_or_positions if isinstance(first, str) else _packed
            work = read(first, second, third, fetch)
        if work is not None:
            works[microbatch] = work
    return works


def _packed(boundaries: Any, padded: Any, version: int | None, fetch: Fetch | None) -> Work | None:
    """Returns the lengths from ``cu_seqlens``: the places where sequences begin, and where the last one ends.
    ``padded``: the same boundaries with padding."""
    if version is not None and boundaries._version != version:
        return None  # it has been written to
    ends = _numbers(boundaries, fetch)
    if ends is None or (lengths := _between(ends)) is None:
        return None
    with_padding = None if padded is None else _numbers(padded, fetch)
    return Work(max(with_padding[-1] if with_padding else 0, ends[-1]), lengths, PACKED)


def _of_mask_or_positions(source: str, tensor: Any, tokens: int, fetch: Fetch | None) -> Work | None:
    """Returns the lengths from the sums of a mask, or from the places where positions start again. Those places are in
    order, and the list is filled up with ``tokens``."""
    numbers = _numbers(tensor, fetch)
    if numbers is None:
        return None
    if source == MASK:
        lengths = tuple(number for number in numbers if number > 0)
        return Work(tokens, lengths, source) if lengths else None
    begins = [number for number in numbers if number < tokens]
    if len(begins) > MOST_SEQUENCES:
        return None
    gaps = _between([*begins, tokens])
    return None if gaps is None else Work(tokens, gaps, source)


def _between(ends: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the lengths between boundaries. Leaves out empty sequences, with which a host fills up its list. None if
    the numbers cannot be boundaries."""
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    if not lengths or min(lengths) < 0 or max(lengths) == 0:
        return None
    return tuple(length for length in lengths if length)


def _numbers(tensor: Any, fetch: Fetch | None) -> list[int] | None:
    on_device = getattr(getattr(tensor, "device", None), "type", "cpu") != "cpu"
    if on_device and fetch is None:
        return None
    flat = tensor.reshape(-1)
    return list(map(int, fetch(flat) if on_device and fetch is not None else flat.tolist()))
