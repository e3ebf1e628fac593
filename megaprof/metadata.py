"""The ``megaprof`` object inside an artifact, as docs/trace-metadata.md lists it: plain data about one window."""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from megaprof.version import __version__

if TYPE_CHECKING:
    from megaprof.config import ProfileConfig
    from megaprof.recorders import Window
    from megaprof.session import Call


def describe(window: Window, call: Call, config: ProfileConfig, truncated: str | None) -> dict[str, Any]:
    """Metadata of a window that closes now; ``truncated`` says why, when it closes early."""
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


def describe_chunk(chunk: Any) -> dict[str, Any]:
    """What a model chunk consists of, read off the model: null where the model does not say.

    GPTModel, HybridModel and their kin share ``pre_process`` (owns the embedding), ``post_process`` (owns the output
    layer and the loss), ``decoder.layers`` and ``mtp``.
    """
    language = language_model(chunk)
    layers = getattr(getattr(language, "decoder", None), "layers", None)
    mtp = getattr(getattr(language, "mtp", None), "layers", None)
    return {
        "embedding": getattr(language, "pre_process", None),
        "layers": None if layers is None else len(layers),
        "layer_numbers": None if layers is None else [getattr(layer, "layer_number", None) for layer in layers],
        "kinds": None if layers is None else [_kind(layer) for layer in layers],
        "mtp": 0 if mtp is None else len(mtp),
        "loss": getattr(language, "post_process", None),
    }


def innermost(model: Any) -> Any:
    """The model inside its wrappers (DistributedDataParallel, Float16Module, ...), which all call it ``module``."""
    while (inner := getattr(model, "module", None)) is not None and callable(inner):
        model = inner
    return model


def language_model(chunk: Any) -> Any:
    """The module of a model chunk that has the decoder; multimodal models hold it one level down."""
    model = innermost(chunk)
    return model if hasattr(model, "decoder") else getattr(model, "language_model", model)


def _kind(layer: Any) -> str:
    """``moe`` or ``dense`` by the layer's MLP, else the layer's class name (Mamba and others have no MLP)."""
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        return type(layer).__name__
    return "moe" if hasattr(mlp, "router") else "dense"


def _ranges(call: Call, config: ProfileConfig) -> dict[str, Any]:
    if call.ran_forward:
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
