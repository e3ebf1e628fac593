"""Reads the contents of a model's chunks: layers and their kinds, embedding, MTP layers, loss."""

from __future__ import annotations

from typing import Any


def describe_chunk(chunk: Any) -> dict[str, Any]:
    """Returns the contents of a model chunk, with None for each item that the model does not say.

    GPTModel, HybridModel and similar models share ``pre_process`` (owns the embedding), ``post_process`` (owns the
    output layer and the loss), ``decoder.layers`` and ``mtp``; T5 has ``encoder.layers``, too, and BERT has them alone.
    """
    language = language_model(chunk)
    encoder = getattr(getattr(language, "encoder", None), "layers", None)
    decoder = getattr(getattr(language, "decoder", None), "layers", None)
    layers = None if encoder is decoder is None else [*(encoder or ()), *(decoder or ())]
    kinds = [*("encoder" for _ in (encoder or ())), *map(_kind, decoder or ())]
    mtp = getattr(getattr(language, "mtp", None), "layers", None)
    return {
        "embedding": getattr(language, "pre_process", None),
        "layers": None if layers is None else len(layers),
        "layer_numbers": None if layers is None else [getattr(layer, "layer_number", None) for layer in layers],
        "kinds": None if layers is None else kinds,
        "mtp": 0 if mtp is None else len(mtp),
        "loss": getattr(language, "post_process", None),
    }


def innermost(model: Any) -> Any:
    """Returns the model inside its wrappers (DistributedDataParallel, Float16Module, ...), which all call it
    ``module``."""
    while (inner := getattr(model, "module", None)) is not None and callable(inner):
        model = inner
    return model


def language_model(chunk: Any) -> Any:
    """Returns the module of a model chunk that has the decoder. Multimodal models hold it one level down, and LLaVA
    exposes the decoder itself."""
    model = innermost(chunk)
    inner = getattr(model, "language_model", None)
    return model if inner is None else inner


def _kind(layer: Any) -> str:
    """Returns ``moe`` or ``dense`` by the layer's MLP; ``attention`` or ``mlp`` for the half layers of a hybrid stack;
    else the layer's class name (Mamba and others have no MLP)."""
    mlp, attention = getattr(layer, "mlp", None), getattr(layer, "self_attention", None)
    if mlp is None:
        return type(layer).__name__
    if hasattr(mlp, "router"):
        return "moe"
    if _is_nothing(mlp) and not _is_nothing(attention):
        return "attention"
    return "mlp" if attention is not None and _is_nothing(attention) and not _is_nothing(mlp) else "dense"


def _is_nothing(module: Any) -> bool:
    """Returns whether ``module`` is the placeholder for a part that the layer does not have."""
    return type(module).__name__ == "IdentityOp"
