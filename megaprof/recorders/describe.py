"""The ``megaprof`` object inside an artifact, as docs/trace-metadata.md lists it: plain data about one window."""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from megaprof.parallel.chunks import describe_chunk, innermost
from megaprof.version import __version__

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig
    from megaprof.recorders import Window
    from megaprof.recorders.call import RecordedCall


def describe(window: Window, call: RecordedCall, config: ProfileConfig, truncated: str | None) -> dict[str, Any]:
    """The metadata of ``window``, which closes now, as docs/trace-metadata.md lists it: plain data for JSON.

    ``call`` is the window's first call; ``truncated`` says why the window closes early, None when it does not.
    """
    facts = call.facts
    coords = window.coords.as_dict()
    sizes = coords.pop("sizes")
    if facts.chunks:
        sizes["vpp"] = len(facts.chunks)  # hooks that were installed without a model did not know
    model_config = getattr(innermost(facts.chunks[0]), "config", None) if facts.chunks else None
    group = (
        getattr(model_config, "microbatch_group_size_per_vp_stage", None) if facts.schedule == "interleaved" else None
    )
    return {
        "version": __version__,
        "target": window.target,
        "role": window.role,
        "steps": [window.step, window.step],
        "coords": coords,
        "sizes": sizes,
        "schedule": facts.schedule,
        "forward_only": facts.forward_only,
        "microbatches": facts.microbatches,
        "microbatch_group_size": group,
        "seq_length": facts.seq_length,
        "micro_batch_size": facts.micro_batch_size,
        "chunks": [describe_chunk(chunk) for chunk in facts.chunks],
        "p2p": {
            name: getattr(model_config, name, None) for name in ("batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm")
        },
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # A checkout on the path is not what is installed.
        "megatron_core": getattr(sys.modules.get("megatron.core"), "__version__", None) or _version("megatron-core"),
        "torch": _version("torch"),
        "ranges": _ranges(call, config),
        "truncated": truncated is not None,
        "truncated_reason": truncated,
    }


def _ranges(call: RecordedCall, config: ProfileConfig) -> dict[str, Any]:
    if call.tape.ran_forward:
        return {"microbatch": True}
    if call.facts.graph is not None:
        return {"microbatch": False, "reason": "the step was replayed from a full-iteration CUDA graph"}
    if config.ranges == "step":
        return {"microbatch": False, "reason": "captured with --profile-ranges step"}
    if call.facts.schedule is None:
        return {"microbatch": False, "reason": "no schedule ran in this window"}
    return {"microbatch": False, "reason": "no microbatch passed through megatron-core's forward_step"}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
