"""A job in the form that causes and advice are computed from: its table, the model of its steps, draws of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from megaprof.analysis.diagnosis.model import fit
from megaprof.analysis.diagnosis.policy import DRAWS, LEAST, REPLAYED
from megaprof.analysis.diagnosis.terms import Term, terms
from megaprof.analysis.diagnosis.view import View, viewed
from megaprof.analysis.notes import Note
from megaprof.analysis.samples import MANY, Interval, errors_of_mean
from megaprof.analysis.table.recorded import STEPS
from megaprof.analysis.table.table import Floats, Table, Unfit
from megaprof.parallel.schedules import phase_order


@dataclass(frozen=True)
class Examined:
    """The steps of a job, as they were or without some causes: all of them, and one for each draw."""

    table: Table
    view: View
    """All steps."""
    draws: View
    """One step for each draw, with the contents of that draw, as it was."""
    rows: np.typing.NDArray[np.intp]
    """[draw]: the step of each draw."""
    often: np.typing.NDArray[np.int64]
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
        several = None
        if term.fitted and len(gain) == 1:
            with_it, without = (view.in_other_blocks(len(self.rows)) for view in (self.view, mended(self.view, term)))
            several = with_it.step_ms - without.step_ms
        price = self.interval(gain, of_one**2 + of_content**2, several)
        # No step is shorter than the passes that are left; those of the term's own stage may be estimated.
        left = np.minimum(self.view.passes, mended(self.view, term).passes).sum(axis=(3, 4, 5))
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
    _check_order(table)
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


def _check_order(table: Table) -> None:
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
