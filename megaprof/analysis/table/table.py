"""The table of passes: what every rank did in every step, in arrays with named axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megaprof.analysis.collectives.arrivals import OfStep
from megaprof.analysis.notes import Note
from megaprof.analysis.trace.calls import ModuleKey
from megaprof.analysis.trace.gpu import Peak, together
from megaprof.formats.metadata import Metadata
from megaprof.formats.steps.work import SOURCES
from megaprof.parallel.schedules import PipelineSchedule

Floats = npt.NDArray[np.float64]

GARBAGE, WAIT = "garbage_collection", "processor_wait"
#: Quantile at which an undisturbed pass is taken, because disturbances only add.
QUARTILE = 0.25
#: Bits that tell the calls of one step apart: a step's number is above them.
CALLS = 16


class Unfit(Exception):
    """Raised if a recording cannot be laid out as a table of passes; the note says why."""

    @property
    def note(self) -> Note:
        """The reason."""
        return self.args[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Table:
    """One pipeline job. Times are in milliseconds; values that were not recorded are NaN.

    Axes: ``t`` step, ``d`` replica (pipelines that work side by side), ``s`` stage, ``p`` peer (ranks of one stage and
    replica that wait for each other inside a pass), ``c`` model chunk, ``k`` kind of pass (`PipelineSchedule.kinds`),
    ``m`` microbatch.
    """

    target: str
    """The target that ran, such as ``train_actor``."""
    role: str | None
    """The model's role; None if it has none."""
    schedule: PipelineSchedule
    """The order in which every stage runs its passes."""
    rendezvous: bool
    """True if a sender waits for its receiver, according to the metadata."""
    steps: npt.NDArray[np.int64]
    """[t]: numbers of the steps."""
    opening: npt.NDArray[np.bool_]
    """[t]: True if a profiler was opened for the step, which takes time at its beginning."""
    ranks: npt.NDArray[np.int64]
    """[d, s, p]: global ranks. More than were recorded, if the passes of one rank stand for all its peers."""
    hosts: tuple[tuple[tuple[str | None, ...], ...], ...]
    """[d][s][p]: their hosts."""
    metadata: tuple[Metadata | None, ...]
    """[s]: metadata of one rank of the stage; None for a stage that was not recorded."""
    layers: Floats
    """[s, c]: decoder layers; NaN if not known."""
    start: Floats
    """[t, d, s, c, k, m]: when each pass began, counted from when the first rank entered the step (the first one of the
    same replica, if replicas do not wait for each other)."""
    end: Floats
    """[t, d, s, c, k, m]: when each pass ended."""
    compute: Floats
    """[t, d, s, p, c, k, m]: how long each peer computed for the pass."""
    exposed: Mapping[str, Floats]
    """Exposed communication in each pass, by group, [t, d, s, c, k, m]. It only has what is certainly of that group."""
    working: Floats
    """[t, d, s, p, c, k, m]: each peer's pass without exposed communication and waiting for the host. This is more than
    ``compute`` by what held the pass up, or by gaps between kernels."""
    spent: Mapping[str, Floats]
    """[t, d, s, p]: the rest of each rank's step, by name. It has only the names that the recording shows; NaN in steps
    for which it does not. ``tp``, ``ep``, ``cp``, ``dp`` and ``unknown``: communication that nothing hid, until the
    rank's last pass ended (from a timeline: all communication). ``tp_waiting``, ``ep_waiting`` and ``cp_waiting``: the
    part of it before the last peer came. ``pp``: exchanges after both sides had come; ``pp_waiting``: before that.
    ``host_bound``: the GPU waited for the host. ``gradients``: the GPU computed for no pass. ``host_forward`` and
    ``host_backward``: the host's time in these passes, which overlaps the other entries."""
    idle: Floats
    """[t, d, s, c, k, m]: how long the GPU waited for the host in the pass."""
    held: Mapping[str, Floats]
    """[t, d, s, c, k, m]: what held each pass up, by cause. ``garbage_collection``: how long Python collected garbage,
    as far as that delayed the pass. ``processor_wait``: how long its thread had no processor core. A cause that never
    occurs is missing."""
    waited: Floats
    """[t, d, s, p]: how long each rank's thread waited for a processor core in a step and since the step before; 0 if
    no file says."""
    entry: Floats
    """[t, d, s]: when each rank entered the step."""
    reduction: Floats
    """[t]: how long the step went on for gradients after the last pass of all ranks."""
    length: Floats
    """[t]: the step, from the first rank's entry to the end of the reduction. If replicas do not wait for each other,
    the longest of their steps."""
    clocks: bool
    """True if all stages are on one clock. Otherwise there are no entries and no links."""
    aligned_ms: float | None = None
    """Uncertainty of that clock, if it follows from passes that wait for each other; None if hosts share a clock."""
    device: bool = False
    """True if it is the GPU's clock, on which steps begin later than on the host."""
    memory: tuple[Peak | None, ...] = ()
    """[s]: memory that the ranks of the stage had allocated; None if not recorded."""
    modules: tuple[Mapping[ModuleKey, tuple[int, ...]], ...] = ()
    """[s]: nanoseconds of every pass through a module, if modules have ranges."""
    work: Floats | None = None
    """[t, d, m, 3]: tokens, sequences, and the sum of their squared lengths, NaN if not known; None if no
    microbatch is known."""
    lengths_from: str | None = None
    """The source of ``work``, one of `megaprof.formats.steps.work.SOURCES`."""
    cold: tuple[int, ...] = ()
    """Steps at the beginning that were left out because everything takes longer in them."""
    experts: Floats | None = None
    """[d, s, p]: tokens that the experts of each peer got in a captured step; None if not counted."""
    sequences: Mapping[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    """The sequence lengths, if captured, by step, replica and microbatch (as indices of ``work``)."""
    warnings: tuple[Note, ...] = ()
    """Notes that a reader of the table must know."""

    @property
    def framework(self) -> str | None:
        """The framework that trains; None if unknown."""
        return next((each.framework for each in self.metadata if each is not None), None)

    @property
    def reduces(self) -> bool:
        """True if data-parallel ranks reduce gradients after the passes."""
        sizes = next(each.sizes for each in self.metadata if each is not None)
        return "backward" in self.schedule.kinds and sizes.dp * sizes.cp > 1

    @property
    def waited_beside(self) -> Floats:
        """[t, d, s, p]: the part of ``waited`` that is outside of passes."""
        inside = self.held.get(WAIT)
        return self.waited if inside is None else np.maximum(self.waited - inside.sum(axis=(3, 4, 5))[..., None], 0.0)

    @property
    def passes(self) -> Floats:
        """[t, d, s, c, k, m]: how long each pass took."""
        return self.end - self.start


@dataclass(frozen=True)
class RankSteps:
    """The recording of one rank, in milliseconds on the clock of its host.

    ``start``, ``end``, ``compute``, ``working``, ``idle``, ``held`` by cause and ``exposed`` by group are [t, c, k, m],
    NaN for passes that were not recorded. ``spent`` by name [t]: see `Table.spent`. ``enter``, ``reduced`` [t]: when
    the rank entered each step, and when it had finalised its gradients.
    ``steps`` [t] are numbers with the call of the step in their lowest `CALLS` bits.
    """

    names: tuple[tuple[int, str | None], ...]
    """Global rank and host of this rank, then of the peers that it stands for."""
    metadata: Metadata | None
    """None for a placeholder of a stage that was not recorded."""
    stage: int
    replica: int
    peer: int
    steps: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    compute: Floats
    working: Floats
    spent: Mapping[str, Floats]
    idle: Floats
    held: Mapping[str, Floats]
    exposed: Mapping[str, Floats]
    enter: Floats
    reduced: Floats
    opening: npt.NDArray[np.bool_]
    """[t]: True if the step is the first in its trace."""
    waited: Floats
    """[t]: see `Table.waited`; 0 if no file says."""
    work: Floats
    """[t, m, 3]: see `Table.work`."""
    lengths_from: str | None = None
    sequences: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Sequence lengths by step (an index of ``steps``) and microbatch."""
    experts: float = np.nan
    """Tokens that its experts got in a captured step, averaged over windows."""
    device: bool = False
    """True if its times are on the GPU's clock, on which a step begins later than on the host."""
    came: Mapping[int, OfStep] = field(default_factory=dict)
    """When the rank arrived at its collectives, by step, if known."""
    memory: Peak | None = None
    modules: Mapping[ModuleKey, tuple[int, ...]] = field(default_factory=dict)


def tabulate(
    ranks: Sequence[RankSteps],
    schedule: PipelineSchedule,
    *,
    target: str,
    role: str | None,
    rendezvous: bool,
) -> Table:
    """Puts the ranks of one job into a table. Raises Unfit if a stage is missing, or if no step is whole."""
    order, common, positions = _places(ranks, schedule.stages)

    def stacked(name: str) -> Floats:
        """Returns one array of every rank, [t, d, s, p, ...]."""
        rows = [_at(r, getattr(r, name), common) for r in order]
        return np.moveaxis(np.stack(rows), 1, 0).reshape(len(common), *positions, *rows[0].shape[1:])

    start, end = stacked("start"), stacked("end")
    there = np.array([r.metadata is not None for r in order]).reshape(positions)
    whole = np.isfinite(end - start)[:, there].reshape(len(common), -1).all(axis=1)
    if not whole.any():
        raise Unfit(Note("no_whole_step"))
    enter, reduced = stacked("enter"), stacked("reduced")
    shift, clocks, aligned_ms = _one_clock(order, positions, schedule, start, end, enter, reduced)
    wide = shift[..., None, None, None]
    start, end, enter, reduced = start + wide, end + wide, enter + shift, reduced + shift
    device = any(r.device for r in order)
    if device:  # the entry of the host says nothing about when the GPU begins
        enter = np.fmin.reduce(start, axis=(-3, -2, -1))
    # Replicas that reduce no gradients do not wait for each other, so the step of each begins with its own entry.
    first = np.fmin.reduce(enter, axis=(2, 3))
    if "backward" in schedule.kinds:
        first = np.broadcast_to(first.min(axis=1, keepdims=True), first.shape)
    since = first[:, :, None, None, None, None, None]
    start, end, enter, reduced = start - since, end - since, enter - since[..., 0, 0, 0], reduced - since[..., 0, 0, 0]
    last = np.fmax.reduce(end.reshape(len(common), -1), axis=1)
    done = np.fmax(last, np.fmax.reduce(reduced.reshape(len(common), -1), axis=1))

    def parts(name: str) -> dict[str, Floats]:
        """Returns the arrays of every rank by name, [t, d, s, p, c, k, m]."""
        found = {}
        for part in sorted({part for r in order for part in getattr(r, name)}):
            none = np.zeros((1, *order[0].start.shape[1:]))
            rows = [
                own[part][np.searchsorted(r.steps, common)]
                if part in (own := getattr(r, name))
                else np.repeat(none, len(common), axis=0)
                for r in order
            ]
            found[part] = np.moveaxis(np.stack(rows), 1, 0).reshape(len(common), *positions, *rows[0].shape[1:])
        return found

    held = {kind: np.nan_to_num(each)[whole] for kind, each in parts("held").items()}
    # Peers may have different data, and all wait for the one with the most. The first stage that knows its data counts:
    # later stages get an input that they do not read, in SkyRL with padding that the first stage does not have.
    by_stage = np.fmax.reduce(stacked("work"), axis=3)[whole]
    work = np.take_along_axis(by_stage, np.isfinite(by_stage).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    experts = np.array([r.experts for r in order]).reshape(positions)
    names = _names(order, positions)
    unknown = np.full(len(common), np.nan)
    spent = {
        name: np.stack([_at(r, r.spent[name], common) if name in r.spent else unknown for r in order], axis=1)
        for name in sorted({name for r in order for name in r.spent})
    }
    of_stage = [[r for r in order if r.stage == stage] for stage in range(schedule.stages)]
    entry = enter.max(axis=3) if clocks and not device else np.full(enter.shape[:3], np.nan)
    return Table(
        target=target,
        role=role,
        schedule=schedule,
        rendezvous=rendezvous,
        steps=np.array(common)[whole] >> CALLS,
        opening=stacked("opening").max(axis=(1, 2, 3))[whole].astype(np.bool_),
        ranks=np.array([[rank for rank, _ in own] for own in names]).reshape(*positions[:2], -1),
        hosts=_nested([[host for _, host in own] for own in names], positions[1]),
        metadata=tuple(own[0].metadata for own in of_stage),
        layers=np.array([_layers(own[0].metadata, schedule.chunks) for own in of_stage]),
        start=start.min(axis=3)[whole],
        end=end.max(axis=3)[whole],
        compute=stacked("compute")[whole],
        working=stacked("working")[whole],
        spent={name: each.reshape(len(common), *positions)[whole] for name, each in spent.items()},
        # The last peer to arrive waits for nobody, so the smallest time is communication alone.
        exposed={group: each.min(axis=3)[whole] for group, each in parts("exposed").items()},
        idle=stacked("idle").min(axis=3)[whole],
        # All peers wait for the one that is held up most.
        held={kind: each.max(axis=3) for kind, each in held.items()},
        waited=stacked("waited")[whole],
        entry=entry[whole],
        reduction=(done - last)[whole],
        length=done[whole],
        clocks=clocks,
        aligned_ms=aligned_ms,
        device=device,
        memory=tuple(together(r.memory for r in own) for own in of_stage),
        modules=tuple(_modules(own) for own in of_stage),
        work=work if np.isfinite(work).any() else None,
        lengths_from=max((r.lengths_from for r in order if r.lengths_from), key=SOURCES.index, default=None),
        experts=experts if np.isfinite(experts).all() else None,
        sequences=_sequences(order, positions, np.array(common)[whole]),
    )


def _at(rank: RankSteps, values: Floats, steps: Sequence[int]) -> Floats:
    """Returns the values of these steps."""
    found: Floats = values[np.searchsorted(rank.steps, steps)]
    return found


def _layers(metadata: Metadata | None, chunks: int) -> list[float]:
    """Returns the layers of every chunk; NaN if the model did not say."""
    held = [None] * chunks if metadata is None else [chunk.layers for chunk in metadata.chunks]
    return [np.nan if layers is None else float(layers) for layers in held]


def _modules(ranks: Sequence[RankSteps]) -> dict[ModuleKey, tuple[int, ...]]:
    found: dict[ModuleKey, tuple[int, ...]] = {}
    for rank in ranks:
        for key, each in rank.modules.items():
            found[key] = (*found.get(key, ()), *each)
    return found


def _sequences(
    order: Sequence[RankSteps], positions: tuple[int, int, int], steps: npt.NDArray[np.int64]
) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Returns `Table.sequences`, by the first rank of each replica that recorded them."""
    place = {int(step): t for t, step in enumerate(steps)}
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for n, rank in enumerate(order):
        replica = n // (positions[1] * positions[2])
        for (t, microbatch), lengths in rank.sequences.items():
            if (at := place.get(int(rank.steps[t]))) is not None:
                found.setdefault((at, replica, microbatch), lengths)
    return found


_Place = tuple[int, int]  # stage and peer


def _places(ranks: Sequence[RankSteps], stages: int) -> tuple[list[RankSteps], list[int], tuple[int, int, int]]:
    """Returns the ranks of whole replicas in the order of replica, stage and peer; the steps that all of them have; and
    how many replicas, stages and peers there are. If no replica is whole, the one with most stages is used. Raises
    Unfit if there is no common step."""
    by_replica: dict[int, dict[_Place, RankSteps]] = {}
    for each in ranks:
        by_replica.setdefault(each.replica, {})[each.stage, each.peer] = each
    peers = {place[1] for own in by_replica.values() for place in own}
    wanted = {(stage, peer) for stage in range(stages) for peer in peers}
    whole = {replica: own for replica, own in sorted(by_replica.items()) if set(own) == wanted}
    if not whole:
        # One peer of each stage is enough for a pipeline.
        for replica, own in sorted(by_replica.items()):
            whole[replica] = {(stage, 0): own[stage, peer] for stage, peer in sorted(own, reverse=True)}
        peers, most = {0}, max(map(len, whole.values()))
        whole = {replica: own for replica, own in whole.items() if len(own) == most}
        if most < stages:
            replica, own = next(iter(whole.items()))
            nobody = {(stage, 0): _nobody(next(iter(own.values())), stage) for stage in range(stages)}
            whole = {replica: nobody | own}
    kept, common = _with_steps(whole)
    if not common:
        raise Unfit(Note("no_step_of_all"))
    order = [whole[replica][place] for replica in kept for place in sorted(whole[replica])]
    return order, common, (len(kept), stages, len(peers))


def _nobody(like: RankSteps, stage: int) -> RankSteps:
    """Returns a placeholder for the rank of a stage that was not recorded."""
    lacking = ("start", "end", "compute", "working", "idle", "work")
    none = {name: np.full_like(getattr(like, name), np.nan) for name in lacking}
    never = np.full_like(like.enter, np.nan)
    return RankSteps(
        **none,
        names=((-1, None),),
        metadata=None,
        stage=stage,
        replica=like.replica,
        peer=like.peer,
        steps=like.steps,
        spent={},
        held={},
        exposed={},
        enter=never,
        reduced=never,
        opening=np.zeros_like(like.opening),
        waited=np.zeros_like(like.waited),
    )


def _with_steps(whole: Mapping[int, Mapping[_Place, RankSteps]]) -> tuple[list[int], list[int]]:
    """Returns the replicas with the largest number of common steps times replicas, and these steps. So a rank that
    ended early or began late does not take away the steps of all others."""
    own = {
        replica: set.intersection(*(set(rank.steps.tolist()) for rank in ranks.values()))
        for replica, ranks in whole.items()
    }
    best: tuple[list[int], set[int]] = [], set()
    chosen: list[int] = []
    common: set[int] = set()
    for replica in sorted(own, key=lambda each: -len(own[each])):
        common = common & own[replica] if chosen else own[replica]
        chosen.append(replica)
        if len(chosen) * len(common) > len(best[0]) * len(best[1]):
            best = list(chosen), common
    return sorted(best[0]), sorted(best[1])


def _names(order: Sequence[RankSteps], positions: tuple[int, int, int]) -> list[list[tuple[int, str | None]]]:
    """Returns the ranks of every replica and stage with their hosts, equally many for each."""
    p = positions[2]
    own = [[name for each in order[n : n + p] for name in each.names] for n in range(0, len(order), p)]
    if len({len(names) for names in own}) > 1:
        own = [[each.names[0] for each in order[n : n + p]] for n in range(0, len(order), p)]
    return own


def _nested(items: Sequence[Sequence[str | None]], stages: int) -> tuple[tuple[tuple[str | None, ...], ...], ...]:
    return tuple(tuple(map(tuple, items[n : n + stages])) for n in range(0, len(items), stages))


def _one_clock(
    order: Sequence[RankSteps],
    shape: tuple[int, int, int],
    schedule: PipelineSchedule,
    start: Floats,
    end: Floats,
    enter: Floats,
    reduced: Floats,
) -> tuple[Floats, bool, float | None]:
    """Returns what to add to the times of each rank, [t, d, s, p]; whether that puts all of them on one clock; and how
    uncertain it is, in milliseconds, if they did not share one before.

    No pass begins before its input was made: forwards bound the difference of two neighbours' clocks from one side,
    backwards from the other, or, without backwards, senders that wait for their receivers. Pipelines are put beside
    each other by the end of their gradient reduction, which is one collective; without one, each has a clock of its
    own.
    """
    d, s, p = shape
    shift = np.zeros((len(start), d, s, p))
    device = any(r.device for r in order)
    enter = np.full_like(enter, np.nan) if device else enter  # entries are the host's, which is ahead of the GPU
    names = [r.names[0] for r in order]
    hosts = np.array([f"rank {rank}" if host is None else host for rank, host in names], dtype=object).reshape(shape)
    there = np.array([r.metadata is not None for r in order]).reshape(shape)
    if not device and len(set(hosts[there])) == 1:
        return shift, True, None
    if p > 1:  # peers wait for each other, so they end their passes together
        axes = (4, 5, 6) if device else (0, 4, 5, 6)
        apart = np.nanmedian(end[:, :, :, :1] - end, axis=axes, keepdims=True)[..., 0, 0, 0]
        shift += np.where((hosts == hosts[:, :, :1]) & (not device), 0.0, apart)
    uncertain = 0.0
    one_way = "backward" not in schedule.kinds
    for stage in range(1, s):
        own = start[:, :, :, 0], end[:, :, :, 0]
        if one_way:
            between, width = _together(*own, shift[..., 0], stage, each_step=device)
        else:
            between, width = _between(*own, enter[:, :, :, 0], stage, each_step=device)
        same = (hosts[:, stage, 0] == hosts[:, stage - 1, 0]) & (not device)
        uncertain = max(uncertain, float(np.where(same[None, :], 0.0, width).max()) / 2)
        shift[:, :, stage] += (shift[:, :, stage - 1, 0] + np.where(same[None, :], 0.0, between))[..., None]
    if d > 1 and not one_way:  # without gradients, the steps of replicas begin independently
        ends = reduced[:, :, 0, 0] + shift[:, :, 0, 0]
        apart = ends[:, :1] - ends
        apart = apart if device else np.median(apart, axis=0, keepdims=True)
        same = (hosts[:, 0, 0] == hosts[0, 0, 0]) & (not device)
        shift += np.where(same[None, :], 0.0, apart)[..., None, None]
    if np.isfinite(shift).all():
        return shift, True, uncertain if s > 1 else None
    # Without a common clock each rank's step begins when it enters it itself.
    alone = -np.where(np.isfinite(enter), enter, np.fmin.reduce(start, axis=(-3, -2, -1)))
    return alone, False, None


def _between(start: Floats, end: Floats, enter: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns by how much the clock of a stage must be moved relative to the stage before, [t or 1, d], and how far
    apart its bounds are. ``start``, ``end``: [t, d, s, c, k, m]; ``enter``: [t, d, s], when each rank enters the
    step, or NaN.

    The quickest message of each direction is a bound. If its receiver was waiting, the bound is off by the transfer
    only; if not, it may be far off. So each bound is weighted by the wait of its receiver, and if both receivers waited
    for the transfers only, the clock is in the middle.
    """
    bounds, waits = [], []
    for kind, receiver, sender in ((0, stage, stage - 1), (1, stage - 1, stage)):
        slack = start[:, :, receiver, :, kind] - end[:, :, sender, :, kind]
        before = _free(start[:, :, receiver], end[:, :, receiver], enter[:, :, receiver])[:, :, :, kind]
        t, d = slack.shape[:2]
        slack, waited = slack.reshape(t, d, -1), (start[:, :, receiver, :, kind] - before).reshape(t, d, -1)
        if not each_step:
            slack, waited = (np.moveaxis(x, 0, 1).reshape(1, d, -1) for x in (slack, waited))
        order = np.argsort(slack, axis=2)[..., : max(1, round(QUARTILE * slack.shape[2]))]
        bounds.append(np.take_along_axis(slack, order[..., :1], axis=2)[..., 0])
        # Several messages are about as quick, and some of them met a receiver that had just arrived.
        waits.append(np.take_along_axis(waited, order, axis=2).max(axis=2))
    low, high = -bounds[0], bounds[1]
    width = np.maximum(high - low, 1e-9)
    of_low, of_high = (np.clip(wait, 1e-9, width / 2) for wait in waits)
    found: Floats = (low * of_low + high * of_high) / (of_low + of_high)
    return found, np.abs(high - low)


def _together(start: Floats, end: Floats, shift: Floats, stage: int, *, each_step: bool) -> tuple[Floats, Floats]:
    """Returns what `_between` does, for passes that go one way only. ``shift``: shifts of the stages before, [t, d, s].

    A sender that waits for its receiver leaves the exchange together with it, and then receives the input of its next
    pass. How long that takes is known from the stage before, if the input was ready. The clock is NaN if nothing shows
    that: the next pass of a sender that does not wait begins before the message arrives, so that the bounds contradict
    each other; and with model chunks, a sender exchanges with several stages at once.
    """
    t, d, _, chunks, _, microbatches = start.shape
    if chunks > 1 or microbatches == 1:
        return np.full((1, d), np.nan), np.zeros((1, d))
    start, end = start[:, :, :, 0, 0], end[:, :, :, 0, 0]
    low = -(start[:, :, stage] - end[:, :, stage - 1]).min(axis=2)
    left, received = start[:, :, stage - 1, 1:] - start[:, :, stage, :-1], np.zeros((t, d))
    if stage > 1:
        made = end[:, :, stage - 2] + (shift[:, :, stage - 2] - shift[:, :, stage - 1])[..., None]
        received = (start[:, :, stage - 1] - made).min(axis=2)
        left = np.where(made[..., 1:] <= end[:, :, stage - 1, :-1], left, np.inf)
    high = left.min(axis=2) - received
    if not each_step:
        low, high = low.max(axis=0, keepdims=True), np.median(high, axis=0, keepdims=True)
    known = np.isfinite(high) & (high >= low)
    return np.where(known, high, np.nan), np.where(known, high - low, 0.0)


def _free(start: Floats, end: Floats, enter: Floats) -> Floats:
    """Returns the time from which a rank had nothing to do before every pass, [t, d, c, k, m]. It is the end of the
    pass before or, for the first pass, the beginning of the step (or of the pass itself, if that is not known)."""
    t, d = start.shape[:2]
    flat, ends = start.reshape(t, d, -1), end.reshape(t, d, -1)
    order = np.argsort(flat, axis=2)
    first = np.take_along_axis(flat, order[..., :1], axis=2)
    shifted = np.take_along_axis(ends, order, axis=2)
    shifted = np.concatenate((np.fmin(first, enter[..., None]), shifted[..., :-1]), axis=2)
    found = np.empty_like(flat)
    np.put_along_axis(found, order, shifted, axis=2)
    return found.reshape(start.shape)
