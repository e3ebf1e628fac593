"""Makes the ``megaprof`` object inside an artifact: plain data about one window (docs/trace-metadata.md)."""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from megaprof.formats.metadata import Metadata, MicrobatchRanges, ModelChunk
from megaprof.formats.names import host
from megaprof.formats.steps.work import SOURCES
from megaprof.parallel.chunks import describe_chunk, innermost
from megaprof.parallel.machine import local_ranks, physical_cores
from megaprof.recorders.work import read_work
from megaprof.version import __version__

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig
    from megaprof.recorders import Window
    from megaprof.recorders.call import RecordedCall


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
    given = () if truncated is not None else call.tape.given
    work = read_work(given, coords.sizes.cp, lambda tensor: list(tensor.tolist()))
    count = facts.microbatches or 0
    model_config = getattr(innermost(facts.chunks[0]), "config", None) if facts.chunks else None
    device = _device(facts.chunks)
    local_ranks, cores = _shared_machine() if device == "cpu" else (None, None)
    group = "microbatch_group_size_per_vp_stage" if facts.schedule == "interleaved" else ""
    return Metadata(
        target=window.target,
        coords=coords,
        steps=(window.step, window.step),
        run=run_id(),
        version=__version__,
        role=window.role,
        framework=framework,
        schedule=facts.schedule,
        forward_only=facts.forward_only,
        microbatches=facts.microbatches,
        microbatch_group_size=getattr(model_config, group, None),
        seq_length=facts.seq_length,
        micro_batch_size=facts.micro_batch_size,
        tokens=_by_microbatch(count, {number: microbatch.tokens for number, microbatch in work.items()}),
        lengths=_by_microbatch(count, {number: microbatch.lengths for number, microbatch in work.items()}),
        lengths_from=max((microbatch.source for microbatch in work.values()), key=SOURCES.index, default=None),
        expert_tokens=None if truncated is not None else _expert_tokens(call.experts),
        chunks=tuple(ModelChunk(**describe_chunk(chunk)) for chunk in facts.chunks),
        p2p={
            name: getattr(model_config, name, None) for name in ("batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm")
        },
        host=socket.gethostname(),
        pid=os.getpid(),
        local_ranks=local_ranks,
        cores=cores,
        device=device,
        # A checkout on the path is used instead of an installed one, and may have another version.
        megatron_core=getattr(sys.modules.get("megatron.core"), "__version__", None) or _version("megatron-core"),
        torch=_version("torch"),
        ranges=_ranges(call, config),
        truncated=truncated is not None,
        truncated_reason=truncated,
    ).as_dict()


def _by_microbatch(count: int, values: dict[int, Any]) -> tuple[Any, ...] | None:
    """Returns the values of all microbatches in order, None for those that are missing. None if there are no values."""
    return tuple(map(values.get, range(count))) if values and count else None


def _expert_tokens(passes: Iterable[Any]) -> tuple[int, ...] | None:
    """Returns the tokens of each local expert, summed over all passes. None if there are no passes, or if layers have
    different numbers of experts."""
    by_pass = [tuple(map(int, counts.tolist())) for counts in passes]
    return tuple(map(sum, zip(*by_pass, strict=True))) if by_pass and len({*map(len, by_pass)}) == 1 else None


def _device(chunks: Iterable[Any]) -> str | None:
    """Returns the type of device that holds the model's first parameter. None if there is no parameter."""
    parameters = getattr(next(iter(chunks), None), "parameters", None)
    first = None if parameters is None else next(iter(parameters()), None)
    return getattr(getattr(first, "device", None), "type", None)


@functools.cache
def _shared_machine() -> tuple[int | None, int | None]:
    """Returns the number of ranks on this host, and the number of physical cores that this process may run on."""
    return local_ranks(), physical_cores()


def run_id() -> str:
    """Returns a name of this process alone: host, process id and start time. Every rank of a job has its own."""
    return f"{host()}-{os.getpid()}-{_started(os.getpid())}"


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
