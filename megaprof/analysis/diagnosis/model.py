"""Models the time of a pass: content of its stage x work of its microbatch x slowness of its rank x (1 + disturbance).

Logarithms make this a sum. Disturbances only add, so contents are lower quartiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.policy import MINOR, MOST
from megaprof.analysis.samples import LEVEL, MAD
from megaprof.analysis.table.table import BESIDE, EMBEDDING, LOSS, QUARTILE, Floats, Table
from megaprof.parallel.peers import of_others


class Content(NamedTuple):
    """The times of undisturbed passes, [..., s, c, k] in milliseconds; leading axes are draws."""

    whole: Floats
    unit: Floats
    """[..., k]: one layer, or what all chunks have in common if the numbers of layers are not known."""
    fixed: Floats
    """[..., k]: what every pass takes beside its layers."""
    ends: Floats
    """Embedding on the first chunk, output layer and loss on the last, with the time that a usual stage would take."""
    stage: Floats
    """The factor by which everything on a stage takes longer than elsewhere, at least 1."""
    chunk: Floats
    """The additional factor of single chunks, at least 1."""
    slow_ends: npt.NDArray[np.bool_]
    """[..., s, c]: whether what a chunk takes beside its layers is no end but slowness of its stage, in this draw."""

    @property
    def layer(self) -> Floats:
        """[..., s, c, k]: what one layer more would take on each chunk, apart from ``stage`` and ``chunk``."""
        usual = self.whole / (self.stage * self.chunk)
        slow = np.where(self.slow_ends[..., None], usual / np.maximum(usual - self.ends, 1e-9), 1.0)
        return np.asarray(self.unit[..., None, None, :] * slow)


def fit(table: Table, steps: npt.NDArray[np.intp]) -> tuple[Content, Content, dict[str, Floats]]:
    """Fits the model of a run. Returns its contents; those in draws of its microbatches and of ``steps`` [draw, any
    number], of which each draw consists; the factors of passes by the names of `View`, and what is ``expected`` of each
    pass by all of these, [t, d, s, c, k, m] milliseconds."""
    took = table.passes - sum(table.delays.values())
    log = np.log(np.maximum(took, 1e-9))
    t, d, s, c, k, m = log.shape
    left, common, level = levels(log)
    work = common - level[..., None]
    spread = float(MAD * np.median(np.abs(left - common[:, :, None, None, None, :]))) ** 2
    work = _shrunk(work, spread * np.pi / 2 / (s * c * k))
    # If microbatches are uneven, their mean shows how long a rank takes: the median is another one in every step.
    own_work = _own(log - work[:, :, None, None, None, :])
    whose = work[:, :, None] + level[:, :, None, None] + own_work  # [t, d, s, m]
    # What is a rank's own may be slow, and the communication of its passes as quick as ever.
    own = took - sum(table.exposed.values())
    left_of_own, _, level_of_own = levels(np.log(np.maximum(own, 1e-9))) if table.exposed else (left, common, level)
    # A timeline knows how long a peer waited, and perhaps what all of them transferred; a trace knows it of kernels.
    shared = (table.compute - table.working).min(axis=3, keepdims=True)
    computed = table.compute - (shared if table.exposed else np.maximum(shared, 0.0))
    rank, peers = np.zeros((t, d, s)), _per_step(computed)
    if d > 1 and s == 1:
        rank = _own_of_replicas(level_of_own)[..., None]
    elif d > 1:
        alone = np.median(left_of_own - whose[:, :, :, None, None], axis=(3, 4, 5))
        rank = np.maximum(alone - of_others(alone, 1), 0.0)
    # Peers enter a collective together, so passes are longer by what the slowest works longer than is usual among them.
    lost = np.maximum(_per_step(own) * -np.expm1(-rank), peers.max(axis=3) - _quantile(peers, 0.5, -1))
    slow = -np.log1p(-np.minimum(lost / np.maximum(_per_step(took), 1e-9), 1.0 - 1e-9))
    if d > 1 and s == 1:
        whose, level = whose - slow[..., None], level - slow[:, :, 0]
    whose = whose + slow[..., None]
    pace = _pace(left - whose[:, :, :, None, None], spread)
    whose = whose + pace[..., None]
    log = log - whose[:, :, :, None, None, :]
    random = np.random.default_rng(0)
    chosen = zip(steps, blocks(len(steps), m, random), strict=True)
    often = [np.outer(np.bincount(rows, minlength=t), np.bincount(columns, minlength=m)) for rows, columns in chosen]
    content, *draws = _undisturbed(log, [np.ones((t, m), dtype=np.intp), *often])
    drawn = np.stack(draws)
    # Waits for a core beyond those that made single passes longer may be in all passes: each draw assumes that or not.
    # A rank also computes in them: where it waits for longer than they take, much of it was between steps.
    waits = table.core_waits_beside.mean((0, 1)).max(-1) / np.maximum(took.sum(axis=(3, 4, 5)).mean((0, 1)), 1e-9)
    inside = random.permuted(np.tile(np.arange(len(drawn))[:, None] % 2, s), axis=0) * np.minimum(waits, MOST)
    drawn *= 1.0 - inside[..., None, None]
    expected = content[..., None] * np.exp(whose[:, :, :, None, None, :])
    # Communication that names no group may go on behind its pass.
    least = np.minimum(np.minimum(computed.min(axis=3) - sum(table.delays.values()), own), expected)
    logarithms = {"level": level, "work": work, "rank": rank, "pace": pace, "lasting": slow + pace, "own": own_work}
    factors = {name: np.exp(values) for name, values in logarithms.items()}
    outside = outside_layers(table.part_ms, s, c)
    return (
        divided(content, table.layers, outside),
        divided(drawn, table.layers, outside, np.random.default_rng(1)),
        {**factors, "peers": peers, "least": least, "expected": expected},
    )


def levels(log: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns the logarithms of passes without their usual content, what all passes of a microbatch have in common of
    that, [t, d, m], and all microbatches of a replica, [t, d]."""
    t, d, s, c, k, m = log.shape
    usual = _quantile(np.median(log, axis=5).reshape(t * d, s, c, k), QUARTILE, 0)
    left = log - usual[:, :, :, None]
    # Their median: of all numbers between the two middle ones, the one nearest to 0.
    flat = np.moveaxis(left, 5, 2).reshape(t, d, m, -1)
    common = np.clip(0.0, *(np.quantile(flat, 0.5, axis=-1, method=method) for method in ("lower", "higher")))
    return left, common, np.median(common, axis=2)


def divided(
    content: Floats, layers: Floats, outside: Floats | None = None, free: np.random.Generator | None = None
) -> Content:
    """Divides ``content`` [..., s, c, k] into layers, ends, stages and chunks, with as much as possible in layers.
    ``layers`` [s, c] or [..., s, c]: how many layers each chunk holds. ``outside`` [s, c, k]: what passes take outside
    of their layers, if ranges measured it (`outside_layers`). Then a chunk whose layers take longer is slow.

    What a pass without ends has outside of its layers is in every pass. ``free`` draws what the data leave open. Of two
    chunks with an end each, every pass may have what both have outside. If nothing is measured, a stage with few layers
    may be slow, or all passes may take some time beside their layers, which is more for each of few; and with two
    stages of one chunk each, the time of an embedding may as well be that of layers: one of up to one layer is drawn.
    And what a chunk takes beside its layers may be an end, which stays there, or slowness, which more layers add to.
    """
    s, c = content.shape[-3:-1]
    layers, slow_ends = layers[..., None], np.zeros(content.shape[:-1], dtype=bool)
    counts = np.maximum(np.where(np.isfinite(layers).all(), layers, 1.0), 1e-9)
    most = counts.max(axis=(-3, -2))
    fixed, ends = np.zeros((*content.shape[:-3], content.shape[-1])), np.zeros_like(content)
    if outside is not None:
        fixed += outside.reshape(s * c, -1)[1] if s * c > 2 else 0.0
        ends += np.maximum(outside - fixed[..., None, None, :], 0.0)
    # A chunk without layers does not show how long a layer takes.
    beside = np.where(layers == 0, 0.0, ends + fixed[..., None, None, :])
    flat = (np.maximum(content - beside, 1e-9) / counts).reshape(*content.shape[:-3], s * c, -1)
    middle = flat[..., 1:-1, :]
    if s * c > 3:
        unit = _quantile(middle, 0.5, -2)
    else:
        # Of three chunks, two may be slow.
        unit = flat.min(axis=-2)
        if s * c == 2 and outside is None and free is not None and np.ptp(counts) > 0:
            unit = unit / (1.0 + free.uniform(0.0, 1.0, unit.shape[:-1])[..., None] / most)
    if free is not None and (outside is None or s * c == 2):
        shown = _of_fewer(content - counts * unit[..., None, None, :], counts) if outside is None else outside
        least, layer = shown.min(axis=(-3, -2)), unit * most / (most + 1.0)
        shared = np.where(np.isfinite(least), np.clip(least, 0.0, layer), 0.0)
        fixed = free.uniform(0.0, 1.0, unit.shape[:-1])[..., None] * shared
        if outside is None:
            unit = np.maximum(unit - fixed / most, 0.0)
        else:
            ends = outside - fixed[..., None, None, :]
    layers_ms = np.maximum(fixed[..., None, None, :] + counts * unit[..., None, None, :], 1e-9)
    stage = np.ones_like(content)
    if c > 1 or outside is not None:
        # An excess that all chunks of a stage have belongs to the stage.
        alone = np.maximum(np.where(layers == 0, np.inf, np.maximum(content - ends, 1e-9) / layers_ms), 1.0)
        alone = alone.min(axis=-2, keepdims=True)
        stage = np.broadcast_to(np.where(np.isfinite(alone), alone, 1.0), content.shape)
    if outside is not None:
        ends = np.minimum(ends / stage, content)
    elif s * c > 1:
        over = np.maximum(content / stage - layers_ms, 0.0)
        # Embedding and loss have a backward, too, so an excess of only one kind of pass is something else.
        over = np.where(of_both(over)[..., None], over, 0.0)
        ends[..., 0, 0, :] = over[..., 0, 0, :]
        ends[..., -1, -1, :] = over[..., -1, -1, :]
    if free is not None and outside is None:
        slow_ends = (free.integers(0, 2, content.shape[:-1]) == 0) & (layers[..., 0] != 0)
    rest = np.maximum(content / stage / (layers_ms + ends), 1.0)
    factors = (stage, rest) if c > 1 else (stage * rest, np.ones_like(rest))
    return Content(content, unit, fixed, ends, *factors, slow_ends)


def of_both(excess_ms: Floats) -> np.typing.NDArray[np.bool_]:
    """Returns whether all kinds of passes share ``excess_ms`` [..., k], instead of one having nearly all of it."""
    shared: np.typing.NDArray[np.bool_] = excess_ms.min(axis=-1) >= MINOR * excess_ms.max(axis=-1)
    return shared


def _of_fewer(over: Floats, counts: Floats) -> Floats:
    """Returns how long passes of each chunk may take beside their layers, [..., s, c, k], by what they take ``over``
    the layers of the chunks that hold most: inf for chunks with ends, and for those that hold as many."""
    fewer = 1.0 - counts / counts.max(axis=(-3, -2), keepdims=True)
    shown = np.where(fewer > 0, over / np.maximum(fewer, 1e-9), np.inf)
    shown[..., 0, 0, :] = shown[..., -1, -1, :] = np.inf
    return shown


def outside_layers(ms_by_part: Mapping[str, Floats], stages: int, chunks: int) -> Floats | None:
    """Returns what passes take outside of their layers by ranges (`Table.part_ms`), [s, c, k]; None if that was not
    measured of both ends, or on one chunk."""
    if not {EMBEDDING, LOSS} <= ms_by_part.keys() or stages * chunks == 1:
        return None
    outside = np.zeros((stages, chunks, len(ms_by_part[EMBEDDING])))
    outside += ms_by_part.get(BESIDE, 0.0)
    outside[0, 0], outside[-1, -1] = ms_by_part[EMBEDDING], ms_by_part[LOSS]
    return outside


def _undisturbed(log: Floats, often: Iterable[npt.NDArray[np.intp]]) -> Iterator[Floats]:
    """Yields contents, [s, c, k], from the logarithms of passes, once for each way to count the microbatches of a step
    that many times, [t, m]. Passes are sorted once for all ways."""
    by_pass = np.moveaxis(log, (2, 3, 4), (0, 1, 2)).reshape(*log.shape[2:5], -1)
    order = by_pass.argsort(axis=-1)
    for times in often:
        behind = np.repeat(times[:, None], log.shape[1], axis=1).ravel()[order].cumsum(axis=-1)
        place = (behind > int(QUARTILE * (behind[0, 0, 0, -1] - 1))).argmax(axis=-1)[..., None]
        yield np.exp(np.take_along_axis(by_pass, np.take_along_axis(order, place, axis=-1), axis=-1)[..., 0])


def _own(log: Floats) -> Floats:
    """Returns what the passes of one microbatch have in common on one stage only, as logarithms [t, d, s, m].

    Work makes the same microbatches long in forwards and backwards; a disturbance does not last that long. If there is
    only one series of passes, the stage with median variance shows how large the noise is. Disturbances only add, so
    values are clipped where they are further above the median than any value is below it.
    """
    t, d, s, c, k, m = log.shape
    flat = np.moveaxis(log, (3, 4), (0, 1)).reshape(c * k, t, d, s, m)
    flat = flat - np.median(flat, axis=-1, keepdims=True)
    least = flat.min(axis=(1, 2, 4), keepdims=True)
    flat = np.clip(flat, least, -least)
    mean = flat.mean(axis=0)
    variance = (mean**2).mean(axis=(0, 1, 3))
    several = c * k > 1
    noise = flat.var(axis=0, ddof=1).mean(axis=(0, 1, 3)) / (c * k) if several else _quantile(variance, 0.5, -1)
    kept = np.maximum(0.0, 1.0 - noise / np.maximum(variance, 1e-18))
    own_work: Floats = mean * kept[:, None]
    # Contents are those of an average microbatch.
    own_work -= np.log(np.exp(own_work).mean(axis=-1, keepdims=True))
    return own_work


def _own_of_replicas(level: Floats) -> Floats:
    """Returns how much longer a replica takes because its rank is slow, without a pipeline, as logarithms [t, d].

    Work is distributed anew in every step, so the rank is slow if its replica takes longer over all steps, by more than
    chance would explain.
    """
    longer = level - of_others(level, 1)
    n = len(longer)
    of_chance = LEVEL**2 * n * (longer.var(axis=0, ddof=1) if n > 1 else longer[0] ** 2)
    total = np.maximum(longer.sum(axis=0), 0.0)
    slower: Floats = np.maximum(longer, 0.0) * np.maximum(0.0, 1.0 - of_chance / np.maximum(total**2, 1e-18))
    return slower


def _pace(log: Floats, noise: float) -> Floats:
    """Returns how much longer a step of a stage is than its quicker ones, as logarithms [t, d, s], beyond what noise of
    this variance would show. Without a pipeline this is 0, because it is the work of the step."""
    t, d, s, c, k, m = log.shape
    if s == 1:
        return np.zeros((t, d, s))
    usual = _quantile(np.moveaxis(log, 2, 1).reshape(t, s, -1), 0.5, -1)
    longer = np.maximum(usual - _quantile(usual, QUARTILE, 0), 0.0)
    pace = _shrunk(longer, noise * np.pi / 2 / (d * c * k * m))
    return np.broadcast_to(pace[:, None], (t, d, s)).copy()


def _per_step(passes: Floats) -> Floats:
    """Returns how long all passes of a step take, [...], without what delays single ones of these [..., c, k, m]."""
    of_step: Floats = np.median(passes, axis=-1).sum(axis=(-2, -1)) * passes.shape[-1]
    return of_step


def _quantile(values: Floats, at: float, axis: int) -> Floats:
    """Returns the lower one of the values around a quantile; numpy's own takes twice as long."""
    place = int(at * (values.shape[axis] - 1))
    return np.asarray(np.partition(values, place, axis=axis).take(place, axis=axis))


def _shrunk(log: Floats, noise: float) -> Floats:
    """Shrinks logarithms by what noise of this variance alone would show (James and Stein)."""
    spread = float(np.mean(log**2))
    return log * max(0.0, 1.0 - noise / spread) if spread > 0 else log


def blocks(count: int, microbatches: int, random: np.random.Generator) -> npt.NDArray[np.intp]:
    """Draws microbatches with replacement, [count, microbatches], in blocks because disturbances last for several."""
    length = max(1, round(microbatches**0.5))
    first = random.integers(0, microbatches, (count, -(-microbatches // length)))
    return (first[:, :, None] + np.arange(length)).reshape(count, -1)[:, :microbatches] % microbatches
