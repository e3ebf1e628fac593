"""Finds the causes of lost time, most expensive first. A term's price is how much shorter a replay is without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megaprof.analysis.diagnosis.examine import Examined, Term, more_steps
from megaprof.analysis.diagnosis.lengths import Lengths, explain, explained, fit
from megaprof.analysis.diagnosis.model import Content, divided, levels, of_both, outside_layers
from megaprof.analysis.diagnosis.policy import CERTAIN, FILLED, LEAST, MINOR, MOST, TOGETHER
from megaprof.analysis.diagnosis.stages import shown
from megaprof.analysis.diagnosis.view import EXCHANGE, View
from megaprof.analysis.samples import Interval
from megaprof.analysis.simulation import compiled
from megaprof.analysis.table.iterations import Iterations
from megaprof.analysis.table.table import DATA, GARBAGE, WAIT, Floats
from megaprof.analysis.trace.groups import INSIDE
from megaprof.formats.facts import PARTS
from megaprof.parallel.peers import began, of_others


@dataclass(frozen=True)
class Cause:
    """Something that costs time. Fields that do not apply are None or empty."""

    kind: str
    """``layers``, ``slow_rank``, ... (docs/report.md)."""
    price: Interval
    """The time that a step would gain without this cause, averaged over all steps, with more expensive causes already
    fixed."""
    share: float
    """Fraction of the steps in which it is present; 1 if it is at least a quarter as large in the others, or if it is
    only possible."""
    while_ms: float
    """Milliseconds that it costs in these steps, on average."""
    steps: int
    """Number of steps that were examined."""
    since: int | None
    """First step from which it is almost always present, after being rarely or never present; None otherwise."""
    stage: int | None = None
    """Stage that it is on."""
    stages: tuple[int, ...] = ()
    """All stages that it is on, if there are several."""
    chunk: int | None = None
    """Model chunk of that stage, from 0."""
    ranks: tuple[int, ...] = ()
    """Ranks that it is on. Several ranks mean that they wait for each other and one of them is slow; for
    ``processor_wait``, all ranks whose waits for a core are in the price, the longest first."""
    hosts: tuple[str, ...] = ()
    """Hosts of these ranks."""
    link: tuple[int, int] | None = None
    """The two stages that exchange; None if it is about all links, or about none."""
    group: str | None = None
    """Process group that communicates: ``tp``, ``cp``, ``ep``, ``dp``, ``pp`` or ``unknown``."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further facts. For a stage with its own excess, ``forward_ms`` and ``backward_ms`` of one microbatch. While the
    cause is present: ``factor``: compute of a slow rank over that of its peers, as in the table of stages, or of the
    longest microbatch or replica over the average; ``explained``, ``explained_low``
    and ``explained_high``: the fraction of the difference between microbatches or replicas that the lengths of their
    sequences explain, with its 90 % interval; for a slow rank or stage in a captured step, ``expert_tokens``,
    ``usual_expert_tokens`` of the others, and in ``explained`` the largest fraction of its slowness that these can
    explain; ``transfer_ms`` of a slow link and ``usual_ms`` of the others; ``late_ms`` of a late entry; ``longest_ms``
    of garbage collection, or of a microbatch's wait for data; ``waited_ms`` for a processor core by the rank that
    waited longest, per step, inside passes and between them, averaged over all steps, or for data in passes, averaged
    over the steps in which it waits; ``spread``: the fraction of the forwards that would have to wait for data, all as
    long as each other, for the same total and the same variance: 1 if all do."""
    alone_ms: float = 0.0
    """Milliseconds that a step would gain, on average, if this cause alone were fixed; 0 if it is only possible."""
    more_steps: int = 0
    """Number of further steps that would show whether it costs `policy.LEAST`; 0 if it certainly does, or if that would
    take too many."""
    reason: str | None = None
    """Why microbatches or replicas differ: ``data`` (the lengths of their sequences) or ``machine`` (not explained by
    these). Why a rank or a stage is slow: ``expert_load`` (the tokens of its experts) or ``machine``. Why a rank
    enters late: the part of its iterations that is dear on it (`PartOfIteration`). None if not known."""


@dataclass(frozen=True)
class Diagnosis:
    """The lost time of a step by its causes, in milliseconds."""

    step_ms: float
    """Average step."""
    steps: int
    """Number of steps it is based on."""
    replayed_ms: float
    """The same step, replayed from its passes."""
    causes: tuple[Cause, ...]
    """Causes that certainly cost enough, in the order in which to fix them: each is the most expensive of what is left,
    and its price assumes that those before it are fixed, so no millisecond counts twice. A cause that hides another
    one may gain little alone, and comes first."""
    perhaps: tuple[Cause, ...]
    """Causes that may cost enough; more steps would show."""
    rest_ms: float
    """Time that single passes took beyond all of these, without a known reason."""
    lengths: Lengths | None = None
    """Sequence lengths of the microbatches, and what they explain; None if they are not known for all."""
    sure: bool = True
    """True if certainly nothing else costs enough: the interval of every other term ends below the limit, and
    ``clocks`` is true."""
    clocks: bool = True
    """True if the clocks of the stages can be compared. Otherwise late entries and exchanges have no price."""


def diagnose(run: Examined) -> Diagnosis:
    """Returns the causes of one job's lost time."""
    if run.table.profiled:  # a profiler slows down launches, so the host's delays are not those of the job
        run = run.mended(*(term for term in run.terms if term.kind == "host_bound"))
    left = [term for term in run.terms if term not in run.left_out]
    asked = run
    causes, perhaps = list[Cause](), list[Cause]()
    # Terms that gain enough only together. They become causes as soon as another term gains enough without them.
    hiding: list[Term] = []
    while True:
        beside = run.mended(*hiding) if hiding else run
        gains = beside.gains([term for term in left if term not in hiding])
        # What takes too little out of the passes does not take more out of those that are left later.
        left = [*hiding, *(term for term, _, _ in gains)]
        dearest, doubtful = _dearest(beside, gains)
        if dearest is not None:
            fixed = [*_needed(run, hiding, dearest), dearest]
            together = _causes_together(run, fixed)
            if together[-1].price.low <= LEAST * run.step_ms:
                perhaps = _causes_together(run, fixed, sure=False)
                break
            alone = [float(asked.gain(term).mean()) for term in fixed]
            causes += (replace(cause, alone_ms=ms) for cause, ms in zip(together, alone, strict=True))
            left = [term for term in left if term not in fixed]
            run, hiding = run.mended(*fixed), []
        else:
            perhaps = perhaps if hiding else doubtful
            masked = _masked(beside, gains)
            if masked is None:
                break
            hiding.append(masked)
    gain = _gain_of_filling(run)
    price = run.interval(gain)
    if price.low > LEAST * run.step_ms:
        alone_ms = float(_gain_of_filling(asked).mean())
        causes.append(Cause("few_microbatches", price, 1.0, price.value, len(gain), None, alone_ms=alone_ms))
    table, slow = asked.table, [slow_ranks(causes, every=every) for every in (False, True)]
    replica, peer = shown(table, *slow)
    # As in the table of microbatches.
    usual_ms = np.median(table.working[:, replica, :, peer], axis=(0, 4))
    computed = divided(usual_ms, table.layers, outside_layers(table.part_ms, *table.layers.shape))
    of_lengths = fit(asked)
    causes, perhaps = (
        [_explained(asked, of_lengths, _by_experts(asked, _by_content(computed, cause))) for cause in some]
        for some in (causes, perhaps)
    )
    clocks = run.table.clocks or run.table.schedule.stages == 1
    # Disturbances of single passes that belong to no term: a replay with passes as usual for their work is that much
    # shorter.
    work = np.exp(levels(np.log(np.maximum(run.view.passes, 1e-9)))[1])[:, :, None, None, None]
    usual = np.minimum(run.view.passes, work * np.median(run.view.passes / work, axis=(0, 5), keepdims=True))
    return Diagnosis(
        step_ms=run.step_ms,
        steps=len(run.table.steps),
        replayed_ms=run.replayed_ms,
        causes=tuple(causes),
        perhaps=tuple(perhaps),
        rest_ms=float(np.mean(run.view.step_ms - replace(run.view, passes=usual).step_ms)),
        lengths=None if of_lengths is None else explain(asked, *of_lengths),
        clocks=clocks,
        sure=not perhaps
        and clocks
        and all(beside.price(term, gain).high <= LEAST * beside.step_ms for term, gain, _ in gains),
    )


def _explained(run: Examined, of_lengths: tuple[Floats, Floats] | None, cause: Cause) -> Cause:
    """Adds to a cause why microbatches or replicas differ, by what passes take by their lengths (`lengths.fit`)."""
    if of_lengths is None or cause.kind not in ("uneven_microbatches", "unequal_replicas"):
        return cause
    of = explained(run, of_lengths[1], cause.stage, replicas=cause.kind == "unequal_replicas")
    reason = "data" if of.low >= MOST else "machine" if of.high < MOST else None
    parts = {"explained": of.value, "explained_low": of.low, "explained_high": of.high}
    return replace(cause, reason=reason, parts={**cause.parts, **parts})


def _by_experts(run: Examined, cause: Cause) -> Cause:
    """Adds to a cause why a rank or a stage is slow, by the tokens that its experts got in a captured step. Their time
    is at most proportional to these: a rank with 1.1 times the tokens of its peers is at most 1.1 times as slow."""
    tokens = run.table.experts  # [d, s, p]
    if tokens is None or cause.stage is None or cause.kind not in ("slow_rank", "unexplained"):
        return cause
    if cause.kind == "slow_rank":
        factor = cause.parts["factor"]
        replica, _, peer = np.argwhere(np.isin(run.table.ranks[..., : tokens.shape[2]], cause.ranks))[0]
        if len(cause.ranks) == 1 and tokens.shape[2] > 1:
            of_each, place = tokens[replica, cause.stage], peer
        else:  # ranks that wait for each other: those of other replicas do as well
            of_each, place = tokens[:, cause.stage].max(axis=1), replica
        usual = np.delete(of_each, place).mean() if len(of_each) > 1 else None
        # The peers get the tokens that the rank loses, so it does not become as quick as they are now.
        evened = 1.0 - 1.0 / len(of_each)
    else:  # the others of a stage wait for its busiest rank, and each stage has its own tokens
        factor = float(run.view.content.stage[0, cause.stage].mean())
        of_each, place, evened = tokens.max(axis=2).mean(axis=0), cause.stage, 1.0
        usual = np.median(np.delete(of_each, place)) if len(of_each) > 1 else None
    if usual is None:
        return cause
    explains = float(np.clip((of_each[place] / max(usual, 1.0) - 1.0) / max(factor - 1.0, 1e-9), 0.0, 1.0))
    of_experts = {"expert_tokens": float(of_each[place]), "usual_expert_tokens": float(usual), "explained": explains}
    cause = replace(cause, reason="machine", parts={**cause.parts, **of_experts})
    if explains < MOST:
        return cause
    return replace(cause, reason="expert_load", price=cause.price * evened, while_ms=cause.while_ms * evened)


def _by_content(computed: Content, cause: Cause) -> Cause:
    """Adds to a cause of the contents of passes which of them compute longer, and names it by that. ``computed``: the
    contents by the table of microbatches in the report."""
    if cause.kind not in ("ends", "stage", "chunk"):
        return cause
    whole, ends = computed.whole, computed.ends
    part = ends if cause.kind == "ends" else whole * (1.0 - 1.0 / getattr(computed, cause.kind))
    more = whole * (1.0 - 1.0 / (computed.stage * computed.chunk)) + ends
    where = cause.stage, slice(None) if cause.chunk is None else cause.chunk
    whole_ms, part_ms, more_ms, ends_ms = (
        ms[where].reshape(-1, ms.shape[-1]).sum(axis=0) for ms in (whole, part, more, ends)
    )
    excess_ms = part_ms if part_ms.any() else more_ms
    # What the quicker passes show of one kind of pass only may be an embedding or a loss in the table.
    kind = "embedding_or_loss"
    if cause.kind != "ends" and (part_ms.any() or not ends_ms.any()):
        kind = "slow_chunk" if cause.kind == "chunk" else "unexplained"
        if not of_both(excess_ms):
            # A backward that is longer by one forward recomputes it.
            one_more = abs(excess_ms[1] - whole_ms[0]) < MINOR * whole_ms[0]
            longer = "recomputation" if one_more else "slow_backward"
            kind = "slow_forward" if excess_ms[0] > excess_ms[1] else longer
    parts = {f"{name}_ms": float(ms) for name, ms in zip(("forward", "backward"), excess_ms, strict=False)}
    return replace(cause, kind=kind, parts=parts, chunk=cause.chunk if kind == "slow_chunk" else None)


def slow_ranks(causes: Iterable[Cause], *, every: bool = False) -> set[int]:
    """Returns the slow ranks of a job; with ``every``, the ranks of all other causes as well."""
    return {rank for cause in causes if every or cause.kind == "slow_rank" for rank in cause.ranks}


def _needed(run: Examined, hiding: list[Term], last: Term) -> list[Term]:
    """Returns, of the terms that were mended to find the ``last`` one, those without which it would not certainly cost
    enough."""
    needed = hiding
    for term in hiding:
        others = [other for other in needed if other is not term]
        beside = run.mended(*others)
        if beside.price(last, beside.gain(last)).low > LEAST * run.step_ms:
            needed = others
    return needed


def _causes_together(run: Examined, terms: Sequence[Term], *, sure: bool = True) -> list[Cause]:
    """Returns a cause, or several that gain enough only together. If mending one of them alone makes the step longer,
    its price is 0, and that loss is subtracted from the price of the last one."""
    causes, debt = [], 0.0
    for term in terms:
        gain = run.gain(term)
        price, lost = run.price(term, gain), 0.0
        if term is terms[-1]:
            lost = debt
            price += Interval.of(debt)
        else:
            debt += min(price.value, 0.0)
            price = price.clipped(0.0)
        cause = _cause(run, term, price, gain, sure=sure)
        causes.append(replace(cause, while_ms=cause.while_ms + lost))
        run = run.mended(term)
    return causes


def _dearest(run: Examined, gains: Sequence[tuple[Term, Floats, float]]) -> tuple[Term | None, list[Cause]]:
    """Returns the most expensive term that certainly costs enough; if there is none, those that may."""
    doubtful: list[Cause] = []
    for term, gain, _ in sorted(gains, key=lambda each: -float(each[1].mean())):
        if float(gain.mean()) <= LEAST * run.step_ms:
            break
        price = run.price(term, gain)
        if price.low > LEAST * run.step_ms:
            return term, []
        doubtful.append(_cause(run, term, price, gain, sure=False))
    return None, doubtful


def _masked(run: Examined, gains: Sequence[tuple[Term, Floats, float]]) -> Term | None:
    """Returns, of the terms that cost enough only if others are mended, the one that gains most by itself.

    If two stages are equally slow, mending one of them gains nothing, and mending the other one then gains everything.
    """
    worth = sorted(((most, place) for place, (_, _, most) in enumerate(gains)), reverse=True)[:TOGETHER]
    chosen = [gains[place][0] for _, place in worth]
    hidden: list[Term] = []
    for term in chosen if len(chosen) > 1 else ():
        beside = run.mended(*(other for other in chosen if other is not term))
        if any(beside.price(term, gain).low > LEAST * run.step_ms for _, gain, _ in beside.gains([term])):
            hidden.append(term)
    return max(hidden, key=lambda term: float(run.gain(term).mean()), default=None)


def _cause(run: Examined, term: Term, price: Interval, gain: Floats, *, sure: bool = True) -> Cause:
    """Returns a term as a cause. ``sure``: False if it is only possible; then it is not said in which steps it is
    present, because a size that differs between steps by chance looks the same."""
    table, kind = run.table, term.kind
    size, facts = _size(term, run.view)
    there, begins = np.ones(len(gain), dtype=bool), None
    if sure and (size is not None or term.once or term.ranks):
        if size is None:  # not its gain, which also depends on what else happened in a step
            before, after = run.view, term.change(run.view)
            size = (before.passes - after.passes).sum(axis=(1, 2, 3, 4, 5)) + before.tail - after.tail
        # It is present where its size is above half of the 90th percentile.
        there = size > MOST * np.quantile(size, CERTAIN)
        there = there if there.any() else np.ones(len(size), dtype=bool)
        begins = began(there)
        if begins:
            there = np.arange(len(there)) >= begins  # facts are averages over all steps since then
        if not there.all() and size[~there].mean() > MINOR * size[there].mean():
            there, begins = np.ones(len(gain), dtype=bool), None  # it is present in the other steps too, only smaller
    parts = {name: float(of_step[there].mean()) for name, of_step in facts.items()}
    waits_inside = any(f"{axis}_waiting" in table.spent and axis not in table.spent for axis in INSIDE)
    if kind == "slow_rank" and not waits_inside:  # as in the table of stages, with what delays single passes
        compute_ms = table.working[there][:, :, term.stage].sum(axis=(3, 4, 5)).mean(axis=0)  # [d, p]
        is_named = np.isin(table.ranks[:, term.stage, : compute_ms.shape[1]], term.ranks).ravel()
        parts["factor"] = float((compute_ms.ravel() / of_others(compute_ms.ravel()))[is_named].max())
    if kind == GARBAGE:
        parts["longest_ms"] = float(run.view.delays[GARBAGE][there].max())
    if kind == WAIT:
        parts["waited_ms"] = float(table.core_waits.mean(axis=0).max())
    if kind == DATA and DATA in table.delays:
        waits = run.view.delays[DATA][there, :, term.stage, :, 0]  # [step, d, c, m]
        waits = waits[:, waits.sum(axis=(0, 2, 3)).argmax()]  # of the replica that waits longest
        parts["waited_ms"] = float(np.nan_to_num(table.spent[DATA][there, :, term.stage]).mean(axis=0).max())
        parts |= {"longest_ms": float(waits.max()), "spread": float(waits.mean() ** 2 / (waits**2).mean())}
    since = int(table.steps[begins]) if begins else None
    doubt, most = term.doubt_ms(price.value), price.value - LEAST * run.step_ms
    hosts = tuple(dict.fromkeys(table.hosts[rank] for rank in term.ranks))
    return Cause(
        kind,
        price,
        float(there.mean()),
        float(gain[there].mean()),
        len(gain),
        since,
        term.stage,
        term.stages,
        term.chunk,
        term.ranks,
        hosts,
        term.link,
        term.group,
        parts,
        more_steps=0 if sure else more_steps(len(gain), price.value - price.low - doubt, most - doubt),
        reason=_dear_part(table.iterations, term.ranks) if kind == "late_entry" else None,
    )


def _dear_part(iterations: Iterations | None, ranks: Sequence[int]) -> str | None:
    """Returns the part between the steps that takes longer on one of these ranks than on average, by most; None if none
    does."""
    if iterations is None:
        return None
    between = [part for part in iterations.parts if part.name in PARTS and part.rank in ranks]
    dearest = max(between, key=lambda part: part.rank_ms - part.ms, default=None)
    known = dearest is not None and dearest.rank_ms - dearest.ms > LEAST * iterations.ms
    return dearest.name if dearest is not None and known else None


def _size(term: Term, view: View) -> tuple[Floats | None, dict[str, Floats]]:
    """Returns how large a term is in every step, [t], None if that is what it takes; and further facts, [t] each, by
    the names of `Cause.parts`."""
    affected = view if term.replica is None else view.of(term.replica)
    without = term.change(affected)
    if term.kind == "slow_link":
        transfer_ms, usual_ms = (each.link[..., term.stage].mean(axis=1) for each in (affected, without))
        return transfer_ms - usual_ms, {"transfer_ms": transfer_ms, "usual_ms": usual_ms}
    if term.kind == "late_entry":
        late_ms = (affected.entry - without.entry)[..., term.stage].mean(axis=1)
        return late_ms, {"late_ms": late_ms}
    some = slice(None) if term.stage is None else slice(term.stage, term.stage + 1)
    if term.kind in ("slow_rank", "unequal_replicas"):
        factor = (affected.peers / np.maximum(without.peers, 1e-9))[:, :, some].max(axis=(1, 2, 3))
        return factor - 1.0, {"factor": factor}
    if term.kind != "uneven_microbatches":
        return None, {}
    exchanged = affected.delays[EXCHANGE]
    ratio = ((affected.passes - exchanged) / np.maximum(without.passes - exchanged, 1e-9))[:, :, some]
    return None, {"factor": np.median(ratio, axis=(2, 3, 4)).max(axis=-1)}


def _gain_of_filling(run: Examined) -> Floats:
    """Returns how many milliseconds shorter every step would be, with as much work, in a pipeline that has enough
    microbatches, [step]; 0 if this one has."""
    schedule = run.table.schedule
    wanted = -(-FILLED * schedule.stages // schedule.chunks)
    if schedule.stages == 1 or schedule.microbatches >= wanted:
        return np.zeros(len(run.table.steps))
    if schedule.name == "interleaved":
        wanted = -(-wanted // schedule.group_size) * schedule.group_size
    view = run.view
    longer = compiled(schedule._replace(microbatches=wanted), view.replay.rendezvous)
    again = view.passes[..., np.arange(wanted) % schedule.microbatches]
    many = longer.step_ms(again, entry=view.entry, link=view.link).max(axis=1)
    gain: Floats = view.pipelines_ms.max(axis=1) - many * schedule.microbatches / wanted
    return gain
