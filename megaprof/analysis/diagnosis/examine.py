"""A job in the form that causes and advice are computed from: its table, the model of its steps, draws of both, and the
terms of a step, each with the change that makes it neutral."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import numpy as np
import numpy.typing as npt

from megaprof.analysis.diagnosis.model import fit
from megaprof.analysis.diagnosis.policy import DRAWS, LEAST, REPLAYED
from megaprof.analysis.diagnosis.view import EXCHANGE, View, receivers, viewed
from megaprof.analysis.notes import Note
from megaprof.analysis.samples import MANY, Interval, errors_of_mean
from megaprof.analysis.table.recorded import STEPS
from megaprof.analysis.table.table import DATA, WAIT, Floats, Table, Unfit
from megaprof.parallel.peers import of_others
from megaprof.parallel.schedules import phase_order


@dataclass(frozen=True)
class Term:
    """One term. ``change`` makes it neutral, only in one ``replica`` if that is given."""

    kind: str
    change: Callable[[View], View]
    stage: int | None = None
    stages: tuple[int, ...] = ()
    chunk: int | None = None
    replica: int | None = None
    ranks: tuple[int, ...] = ()
    group: str | None = None
    link: tuple[int, int] | None = None
    fitted: bool = False
    """True if it depends on contents, which are estimated."""
    once: bool = False
    """True if it appears once per step and not in every microbatch."""
    doubt: float = 0.0
    """Fraction of it that may have another cause, from 0 to 1."""
    core_ms: float = 0.0
    """Milliseconds of it that its ranks may have waited for a processor core, outside of passes."""

    def doubt_ms(self, gain_ms: float) -> float:
        """Returns how much of what a step gains without it may have another cause, however many steps there are."""
        return min(self.doubt * gain_ms + self.core_ms, max(gain_ms, 0.0))


@dataclass(frozen=True)
class Examined:
    """The steps of a job, as they were or without some causes: all of them, and one for each draw."""

    table: Table
    view: View
    """All steps."""
    draws: View
    """One step for each draw, with the contents of that draw, as it was."""
    rows: npt.NDArray[np.intp]
    """[draw]: the step of each draw."""
    often: npt.NDArray[np.int64]
    """[many draws, step]: how often each step is in a draw of all steps (`samples.errors_of_mean`)."""
    replayed_ms: float
    """The average step, replayed as it was, in milliseconds."""
    restless_ms: float
    """Variance of the disturbances of a rank, in square milliseconds per millisecond of work."""
    terms: tuple[Term, ...]
    """What may cost enough, in the steps as they were."""
    left_out: tuple[Term, ...] = ()
    """Those that ``view`` is without."""

    @property
    def step_ms(self) -> float:
        """The average step in milliseconds."""
        return float(self.table.length.mean())

    @property
    def missed(self) -> float:
        """The fraction by which the replay misses the average step."""
        return abs(self.replayed_ms / self.step_ms - 1.0)

    def mended(self, *terms: Term) -> Examined:
        """Returns the job without some terms."""
        return replace(self, view=reduce(mended, terms, self.view), left_out=(*self.left_out, *terms))

    @cached_property
    def drawn(self) -> View:
        """The draws without the same terms. Only terms that are priced need them."""
        return reduce(mended, self.left_out, self.draws)

    def gain(self, term: Term) -> Floats:
        """Returns how many milliseconds shorter every step is without a term, [step]."""
        return _gain(term, self.view, _alone(term, self.view))

    def gains(self, left: Sequence[Term]) -> list[tuple[Term, Floats, float]]:
        """Returns how many milliseconds shorter every step is without each term, and at most on average, for the terms
        that could matter."""
        gains = []
        for term, without in ((term, _alone(term, self.view)) for term in left):
            if (most := _most_gained(term, self.view, without)) >= LEAST * self.step_ms:
                gains.append((term, _gain(term, self.view, without), most))
        return gains

    def price(self, term: Term, gain: Floats) -> Interval:
        """Returns the price on average over all steps.

        Steps differ, contents are estimated, and a replay that misses the step misses the price.
        """
        of_content = 0.0
        if term.fitted:
            other = _gain(term, self.drawn, _alone(term, self.drawn))
            of_content = float(np.sqrt(np.mean((other - gain[self.rows]) ** 2)))
        mean = float(gain.mean())
        # A single step does not show whether what appears once in a step is there in others, too. Gradients, the only
        # communication that appears once, are reduced in all of them.
        of_one = mean * (term.once and term.group is None and len(gain) == 1)
        # Contents of a single step may contain a disturbance. That its microbatches or ranks differ is a fact.
        several, without = None, mended(self.view, term)
        if term.fitted and len(gain) == 1:
            more, shorter = (view.in_other_blocks(len(self.rows)).step_ms for view in (self.view, without))
            several = more - shorter
        price = self.interval(gain, of_one**2 + of_content**2, several)
        # No step is shorter than the passes that are left; those of the term's own stage may be estimated.
        left = np.minimum(self.view.passes, without.passes).sum(axis=(3, 4, 5))
        own = term.stage if term.stage is not None else slice(None if term.fitted else 0)
        most_ms = self.step_ms - float(np.delete(left, own, axis=2).max(axis=(1, 2), initial=0.0).mean())
        return replace(price, low=price.low - term.doubt_ms(mean), high=max(mean, min(price.high, most_ms)))

    def interval(self, gain: Floats, besides: float = 0.0, several: Floats | None = None) -> Interval:
        """Returns the average of what steps gain. ``besides``: its variance for other reasons than that steps differ.
        Two more are added here: disturbances come at random, so a shorter step would have met others; and a replay that
        misses the step also misses the price. ``several``: gains that differ as those of other steps would, for one."""
        mean = float(gain.mean())
        besides += 2.0 * self.restless_ms * abs(mean) / len(gain) + ((self.missed + REPLAYED) * mean) ** 2
        errors = errors_of_mean(gain, self.often) if several is None else errors_of_mean(several) * len(several) ** 0.5
        return Interval.of(mean, float(np.sqrt(besides)), errors)


def more_steps(steps: int, noise: float, room: float) -> int:
    """Returns how many more steps would make ``noise``, half the width of the interval, as small as ``room``: n times
    as many steps divide it by the square root of n. 0 if a report does not read that many (`table.recorded.STEPS`)."""
    wanted = steps * (noise / room) ** 2 if room > 0.0 else np.inf
    return 0 if wanted > STEPS else max(1, int(np.ceil(wanted)) - steps)


def examine(table: Table) -> Examined:
    """Fits the model of a job. Raises Unfit if stages are missing, or if passes ran in another order than planned."""
    missing = tuple(stage for stage, metadata in enumerate(table.metadata) if metadata is None)
    if missing:
        raise Unfit(Note("stages_missing", stages=missing, count=table.sizes.pp - len(missing), of=table.sizes.pp))
    for stage in range(table.schedule.stages):
        order = phase_order(table.schedule, stage)
        kinds = [table.schedule.kinds.index(which.kind) for which in order]
        chunks, microbatches = [which.chunk for which in order], [which.microbatch for which in order]
        begun = np.median(table.start[:, :, stage][:, :, chunks, kinds, microbatches], axis=(0, 1))
        place = int(np.argmin(begun == np.minimum.accumulate(begun[::-1])[::-1]))
        if begun[place] > begun[place:].min():
            ran, planned = order[place + int(begun[place:].argmin())], order[place]
            names = ran.kind, planned.kind, table.schedule.name
            raise Unfit(
                Note("schedule_differs", stages=(stage,), names=names, count=ran.microbatch, of=planned.microbatch)
            )
    steps = np.random.default_rng(0).integers(0, len(table.steps), (DRAWS, len(table.steps)))
    (content, of_draws, factors), rows = fit(table, steps), steps[:, 0]
    expected = factors.pop("expected")
    view = viewed(table, content, factors, expected)
    slow, replayed_ms = of_draws.stage * of_draws.chunk, float(np.mean(view.step_ms))
    draws = view.at(rows, tail=view.tail[rows], now=of_draws.whole, slow=slow, content=of_draws)
    every = tuple(terms(table, view, float(table.length.mean())))
    count = len(table.steps)
    often = np.random.default_rng(0).multinomial(count, np.full(count, 1.0 / count), size=MANY)
    return Examined(table, view, draws, rows, often, replayed_ms, _restless(table, view, expected), every)


def _restless(table: Table, view: View, expected: Floats) -> float:
    """Returns `Examined.restless_ms`, from quarters of a step: disturbances last for several passes, but not all."""
    over = view.steady - expected
    t, d, s = over.shape[:3]
    order = np.argsort(table.start.reshape(t, d, s, -1), axis=3)
    over, took = (np.take_along_axis(values.reshape(t, d, s, -1), order, axis=3) for values in (over, table.passes))
    length = over.shape[3] // 4
    if length == 0:
        return 0.0
    sums = over[..., : 4 * length].reshape(t, d, s, 4, length).sum(axis=4)
    return float(sums.var(axis=3, ddof=1).mean() / (took.mean() * length))


def _alone(term: Term, view: View) -> View:
    """Returns the view without a term; only one replica of it, if the term belongs to one."""
    return term.change(view if term.replica is None else view.of(term.replica))


def mended(view: View, term: Term) -> View:
    """Returns the view without a term."""
    without = _alone(term, view)
    return without if term.replica is None else view.joined(term.replica, without)


def _gain(term: Term, view: View, without: View) -> Floats:
    """Returns how many milliseconds shorter every step is ``without`` a term (see `_alone`), [n]."""
    took = without.pipelines_ms
    if term.replica is not None:
        took = np.concatenate((np.delete(view.pipelines_ms, term.replica, axis=1), took), axis=1)
    gain: Floats = view.step_ms - took.max(axis=1) - without.tail
    return gain


def _most_gained(term: Term, view: View, without: View) -> float:
    """Returns how many milliseconds a step can gain at most: what passes, entries, exchanges and tails lose."""
    a, b = view if term.replica is None else view.of(term.replica), without
    # A rank that becomes quicker may still wait for another slow one of its group.
    shorter = np.maximum(a.peers - b.peers, 0.0).max(axis=3).sum(axis=2).max(axis=1)
    if a.passes is not b.passes:
        shorter = np.maximum(shorter, np.maximum(a.passes - b.passes, 0.0).sum(axis=(2, 3, 4, 5)).max(axis=1))
    sooner = np.maximum(a.entry - b.entry, 0.0).max(axis=(1, 2)) + a.tail - b.tail
    _, _, _, c, k, m = a.passes.shape
    quicker = np.maximum(a.link - b.link, 0.0).sum(axis=2).max(axis=1) * c * k * m
    return float(np.mean(shorter + sooner + quicker))


def terms(table: Table, view: View, step_ms: float) -> list[Term]:
    """Returns every term that could cost enough. No change can gain more than it takes out of passes."""
    return [
        *_of_content(table),
        *_of_microbatches(table),
        *_of_ranks(table, view, step_ms),
        *_of_exchanges(table, view),
        *_of_entries(table, view, step_ms),
        *_of_passes(table, view, step_ms),
    ]


def _of_content(table: Table) -> Iterator[Term]:
    s, c = table.layers.shape
    if np.isfinite(table.layers).all() and np.ptp(table.layers) > 0:
        share = (table.layers.mean() - table.layers)[:, :, None]
        of_stage = table.layers.sum(axis=1)
        stage = int(of_stage.argmax()) if np.ptp(of_stage) > 0 else None
        most = tuple(np.flatnonzero(of_stage == of_stage.max()).tolist())

        def even(v: View) -> View:
            return v.holding(v.now + share * v.content.layer * v.slow)

        yield Term("layers", even, stage=stage, stages=most if len(most) > 1 else (), fitted=True)
    if s * c == 1:
        return
    for stage, chunk in ((0, 0), (s - 1, c - 1)):

        def spread(v: View, stage: int = stage, chunk: int = chunk) -> View:
            ends_ms = v.content.ends[:, stage, chunk]
            moved = np.zeros_like(v.now)
            moved[:, stage, chunk] = -ends_ms
            # Embedding and loss must be somewhere.
            moved += ends_ms[:, None, None, :] / (s * c)
            return v.holding(v.now + moved * v.slow)

        yield Term("ends", spread, stage=stage, chunk=chunk, fitted=True)
    for stage in range(s):
        yield Term("stage", partial(View.usual, kind="stage", place=(stage,)), stage=stage, fitted=True)
        for chunk in range(c) if c > 1 else ():
            change = partial(View.usual, kind="chunk", place=(stage, chunk))
            yield Term("chunk", change, stage=stage, chunk=chunk, fitted=True)


def _of_microbatches(table: Table) -> Iterator[Term]:
    d, s = table.entry.shape[1:]

    def even(v: View) -> View:
        factor = v.work.mean(axis=-1, keepdims=True) / v.work
        return v.scaled(factor[:, :, None, None, None, :])

    yield Term("uneven_microbatches", even)
    for stage in range(s):

        def alike(v: View, stage: int = stage) -> View:
            factor = np.ones_like(v.own)
            factor[:, :, stage] = v.own[:, :, stage].mean(axis=-1, keepdims=True) / v.own[:, :, stage]
            return v.scaled(factor[:, :, :, None, None, :])

        yield Term("uneven_microbatches", alike, stage=stage)
    if d > 1:

        def equal(v: View) -> View:
            factor = v.level.mean(axis=1, keepdims=True) / v.level
            return v.scaled(factor[:, :, None, None, None, None])

        yield Term("unequal_replicas", equal, once=True)


def _of_ranks(table: Table, view: View, step_ms: float) -> Iterator[Term]:
    d, p = table.compute.shape[1], table.compute.shape[3]
    of_rank = view.alone().sum(axis=(3, 4, 5))  # [n, d, s]
    least = LEAST * step_ms
    if d > 1:
        for replica, stage in np.argwhere((of_rank * (1.0 - 1.0 / view.rank)).mean(axis=0) >= least).tolist():
            ranks = tuple(table.ranks[replica, stage].tolist())
            change = partial(View.quick, factor="rank", stage=stage, only_own=True)
            yield Term("slow_rank", change, stage=stage, replica=replica, ranks=ranks)
    if p > 1:
        longer = view.peers - of_others(view.peers, 3)
        for replica, stage, peer in np.argwhere(longer.mean(axis=0) >= least).tolist():

            def like_peers(v: View, stage: int = stage, peer: int = peer) -> View:
                peers = v.peers.copy()
                peers[:, :, stage, peer] = of_others(v.peers, 3)[:, :, stage, peer]
                shorter = v.peers.max(axis=3) - peers.max(axis=3)
                factor = 1.0 - shorter / np.maximum(v.alone().sum(axis=(3, 4, 5)), 1e-9)
                return v.scaled(factor[..., None, None, None], only_own=True, peers=peers, least=v.least, idle=v.idle)

            ranks = (int(table.ranks[replica, stage, peer]),)
            yield Term("slow_rank", like_peers, stage=stage, replica=replica, ranks=ranks)
    of_stage = (view.passes.sum(axis=(3, 4, 5)) * (1.0 - 1.0 / view.pace)).mean(axis=(0, 1))
    for stage in np.flatnonzero(of_stage >= least).tolist():
        yield Term("unexplained", partial(View.quick, factor="pace", stage=stage), stage=stage, once=True)


def _of_exchanges(table: Table, view: View) -> Iterator[Term]:
    s = table.entry.shape[2]
    if s == 1 or not table.clocks:
        return
    wraps = table.schedule.chunks > 1 and s > 2
    count = s if wraps else s - 1
    received = receivers(table.schedule)[:count]
    ends = (np.arange(count)[:, None] + [0, 1]) % s
    # Nobody knows in which exchanges a rank waited: on each of its links alike.
    waits = table.core_waits_beside.mean(axis=(0, 1)).max(axis=-1) / np.bincount(ends.ravel())
    link_waits = waits[ends].sum(axis=1)

    for stage in range(count) if count > 1 else ():

        def quick(v: View, stage: int = stage) -> View:
            link, exchange = v.link.copy(), v.exchange.copy()
            for ms in (link, exchange):
                usual = np.median(np.delete(ms[..., :count], stage, axis=-1), axis=-1)
                ms[..., stage] = np.minimum(ms[..., stage], usual)
            longer = (v.exchange - exchange)[..., stage, None, None, None, None]
            held = np.minimum(v.delays[EXCHANGE], longer * received[stage][..., None])
            parts = {**v.delays, EXCHANGE: v.delays[EXCHANGE] - held}
            return v.less(held, delays=parts, exchange=exchange, link=link)

        # A link is slower than the others, so only what its ranks wait longer than theirs may explain it.
        core_ms = max(float(link_waits[stage] - np.median(np.delete(link_waits, stage))), 0.0)
        yield Term("slow_link", quick, stage=stage, link=(stage, (stage + 1) % s), core_ms=core_ms)
    # Communication at the end of a pass that names no group may belong to the pass or to the exchange after it.
    if "unknown" not in view.exposed:

        def at_once(v: View) -> View:
            # This is what all links have in common; a slow one among several has a term of its own.
            link, exchange = (
                np.maximum(ms - np.quantile(ms[..., :these], 0.5, axis=-1, keepdims=True, method="lower"), 0.0)
                for ms, these in ((v.link, s), (v.exchange, count))
            )
            longer = np.einsum("ndl,lsck->ndsck", exchange[..., :count], received)[..., None]
            left = np.minimum(v.delays[EXCHANGE], longer)
            parts = {**v.delays, EXCHANGE: left}
            return v.less(v.delays[EXCHANGE] - left, delays=parts, exchange=exchange, link=link)

        # Where a profiled GPU waits for its host in passes, it may also do so between them.
        doubt = float(table.profiled and table.idle.any())
        link = (0, 1) if count == 1 else None
        yield Term("communication", at_once, group="pp", link=link, doubt=doubt, core_ms=float(link_waits.sum()))


def _of_entries(table: Table, view: View, step_ms: float) -> Iterator[Term]:
    late = (view.entry - view.timely).mean(axis=0)
    for replica, stage in np.argwhere(late >= LEAST * step_ms).tolist():

        def timely(v: View, stage: int = stage) -> View:
            entry = v.entry.copy()
            entry[:, :, stage] = v.timely[:, :, stage]
            return replace(v, entry=entry)

        ranks = tuple(table.ranks[replica, stage].tolist())
        doubt = float(table.profiled)  # by what closing the window before took on this rank
        core_ms = float(table.core_waits_beside[:, replica, stage].mean(axis=0).max())
        yield Term("late_entry", timely, stage, replica=replica, ranks=ranks, once=True, doubt=doubt, core_ms=core_ms)


def _of_passes(table: Table, view: View, step_ms: float) -> Iterator[Term]:
    for group in view.exposed:

        def hidden(v: View, group: str = group) -> View:
            return v.less(v.exposed[group], exposed={**v.exposed, group: np.zeros_like(v.idle)})

        yield Term("communication", hidden, group=group)
    if view.idle.any():
        yield Term("host_bound", lambda v: v.less(v.idle, idle=np.zeros_like(v.idle)))
    if table.reduces and view.tail.any():
        yield Term(
            "communication",
            lambda v: replace(v, tail=np.zeros_like(v.tail)),
            group="dp",
            once=True,
            doubt=1.0 if table.waits_unseen else 0.0,
        )
    for stage in np.flatnonzero(view.delays[DATA].any(axis=(0, 1, 3, 4, 5))).tolist():
        waits = np.nan_to_num(table.spent[DATA][:, :, stage]) if DATA in table.delays else None
        ranks = () if waits is None else longest(waits, table.ranks[:, stage, : waits.shape[2]], step_ms)
        yield Term(DATA, partial(View.released, kind=DATA, stage=stage), stage=stage, ranks=ranks, once=True)
    for kind in [kind for kind in view.delays if kind not in (DATA, EXCHANGE)]:
        ranks = longest(table.core_waits, table.ranks, step_ms) if kind == WAIT else ()
        yield Term(kind, partial(View.released, kind=kind), ranks=ranks, once=True)


def longest(waits: Floats, ranks: npt.NDArray[np.int64], step_ms: float) -> tuple[int, ...]:
    """Returns those of ``ranks`` whose ``waits`` [t, ...] take `policy.LEAST` of the step, longest first; at least
    one."""
    waited = np.broadcast_to(waits.mean(axis=0), ranks.shape).ravel()
    order = np.argsort(-waited, kind="stable")
    return tuple(ranks.ravel()[order[waited[order] >= min(LEAST * step_ms, waited.max())]].tolist())
