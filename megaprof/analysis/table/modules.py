"""Measures the times of the parts of model chunks by their ranges: kinds of layers, MTP layers, embedding and loss."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megaprof.analysis.table.table import Floats, Table
from megaprof.analysis.trace.calls import RECOMPUTE, ModuleKey
from megaprof.formats import ranges
from megaprof.formats.metadata import ModelChunk

EMBEDDING, MTP, LOSS = "embedding", "mtp", "loss"


def measured(table: Table) -> dict[str, Floats]:
    """Returns the milliseconds of a microbatch, [k], by part: a kind of layer, one `MTP` layer, `EMBEDDING` or `LOSS`.
    They are averages over the chunks that hold the part. Parts without ranges are missing.

    Embedding and loss are what remains of a pass after all layers of their chunk. They include reading the batch, an
    encoder, and the loss function.
    """
    found: dict[str, list[Floats]] = {}
    # A range holds the GPU's computing, or all of the time on a CPU. Delays of a pass are added in proportion.
    whole, computing = table.passes, table.compute.max(axis=3) if _on_gpu(table) else table.passes
    longer = whole.mean(axis=(0, 1, 5)) / np.maximum(computing.mean(axis=(0, 1, 5)), 1e-9)  # [s, c, k]
    computed = np.median(computing, axis=(0, 1, 5))
    for stage, chunk in np.ndindex(*table.layers.shape):
        metadata = table.metadata[stage]
        if metadata is None or chunk >= len(metadata.chunks):
            continue
        held = metadata.chunks[chunk]
        parts = [(name, _times(table.modules[stage], key)[: computed.shape[2]]) for name, key in _parts(held)]
        left = computed[stage, chunk] - sum(ms for _, ms in parts)
        if held.layers is not None and len(parts) == held.layers + (held.mtp or 0) and held.embedding != held.loss:
            parts.append((EMBEDDING if held.embedding else LOSS, np.maximum(left, 0.0)))
        for name, ms in parts:
            if np.isfinite(ms).all():
                found.setdefault(name, []).append(ms * longer[stage, chunk])
    return {name: np.mean(each, axis=0) for name, each in found.items()}


def _on_gpu(table: Table) -> bool:
    return any(each is not None and each.device not in (None, "cpu") for each in table.metadata)


def _parts(held: ModelChunk) -> Iterator[tuple[str, ModuleKey]]:
    """Yields the kind of every layer of a chunk, and the key of its forward."""
    kinds = held.kinds if held.kinds is not None else ("layer",) * (held.layers or 0)
    for kind, number in zip(kinds, held.layer_numbers or (), strict=False):
        yield kind, ModuleKey(ranges.LAYER, number, None, ranges.FORWARD)
    for number in range(1, (held.mtp or 0) + 1):
        yield MTP, ModuleKey(ranges.MTP_LAYER, number, None, ranges.FORWARD)


def _times(modules: Mapping[ModuleKey, Sequence[int]], forward: ModuleKey) -> Floats:
    """Returns milliseconds of a module's ranges, [forward, backward]; NaN without any."""
    found = np.full(2, np.nan)
    for k, kinds in enumerate(((ranges.FORWARD,), (ranges.BACKWARD, RECOMPUTE))):
        each = [modules.get(forward._replace(kind=kind), ()) for kind in kinds]
        if each[0]:
            found[k] = sum(statistics.median(ns) for ns in each if ns) / 1e6
    return found
