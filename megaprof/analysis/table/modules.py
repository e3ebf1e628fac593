"""Measures the times of the parts of model chunks by their ranges: kinds of layers, MTP layers, embedding and loss."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.trace.steps import RECOMPUTE, ModuleKey
from megaprof.formats import ranges
from megaprof.formats.metadata import ModelChunk

EMBEDDING, MTP, LOSS = "embedding", "mtp", "loss"


def measured(table: Table) -> dict[str, Floats]:
    """Returns the milliseconds of a microbatch, [k], by part: a kind of layer, one `MTP` layer, `EMBEDDING` or `LOSS`.
    They are averages over the chunks that hold the part. Parts without ranges are missing.

    Embedding and loss are what remains of a pass after all layers of their chunk. They include reading the batch, an
    encoder, and the loss function.
    """
    ms_by_part: dict[str, list[Floats]] = {}
    # A range holds the GPU's computing, or all of the time on a CPU. Delays of a pass are added in proportion.
    pass_ms, computing_ms = table.passes, table.compute.max(axis=3) if _on_gpu(table) else table.passes
    delay_factor = pass_ms.mean(axis=(0, 1, 5)) / np.maximum(computing_ms.mean(axis=(0, 1, 5)), 1e-9)  # [s, c, k]
    computed_ms = np.median(computing_ms, axis=(0, 1, 5))
    for stage, chunk in np.ndindex(*table.layers.shape):
        metadata = table.metadata[stage]
        if metadata is None or chunk >= len(metadata.chunks):
            continue
        model_chunk = metadata.chunks[chunk]
        parts = [(name, _times(table.modules[stage], key)[: computed_ms.shape[2]]) for name, key in _parts(model_chunk)]
        remaining_ms = computed_ms[stage, chunk] - sum(ms for _, ms in parts)
        if (
            model_chunk.layers is not None
            and len(parts) == model_chunk.layers + (model_chunk.mtp or 0)
            and model_chunk.embedding != model_chunk.loss
        ):
            parts.append((EMBEDDING if model_chunk.embedding else LOSS, np.maximum(remaining_ms, 0.0)))
        for name, ms in parts:
            if np.isfinite(ms).all():
                ms_by_part.setdefault(name, []).append(ms * delay_factor[stage, chunk])
    return {name: np.mean(samples_ms, axis=0) for name, samples_ms in ms_by_part.items()}


def _on_gpu(table: Table) -> bool:
    return any(metadata is not None and metadata.device not in (None, "cpu") for metadata in table.metadata)


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
