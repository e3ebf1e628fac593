"""A rehearsal: the stages of a command one after another on this machine, and the pipeline that they would make.

Its result, rehearsal.json, is what the command prints with ``--json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import msgspec
import numpy as np

from megaprof.analysis.report.report import Report, analyze
from megaprof.analysis.report.text.what_if import layout_advice
from megaprof.analysis.samples import Interval, Spread
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.contents import in_flight_layers
from megaprof.analysis.what_if.layouts import options_of, parse_layout
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.inputs import read_input
from megaprof.formats.names import appearing
from megaprof.formats.phrases import Unanswerable, json_of
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.rehearse.links import Link, between, defaults
from megaprof.rehearse.pipeline import Pipeline, Stage, alike, record, together, write
from megaprof.tune.command import with_layout
from megaprof.version import __version__

NAME, PREDICTED = "rehearsal.json", "predicted"
_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_EXPERTS, _BALANCED = "--num-experts", "--moe-router-force-load-balancing"


@dataclass(frozen=True)
class Rehearsal:
    """What a command is predicted to do on all its ranks."""

    command: tuple[str, ...]
    """The command as it was given."""
    sizes: ParallelSizes
    """Parallel sizes of the job."""
    step_ms: Interval
    """Predicted step in milliseconds, with a 90 % interval from what was measured and from what is assumed."""
    measured_ms: float
    """Milliseconds of the step that were measured: those of the same step if no exchange took any time."""
    links: tuple[Link, ...]
    """The links over which each stage sends to the next one."""
    sent_bytes: tuple[int, ...]
    """Bytes that each stage sends for a microbatch."""
    what_if: WhatIf
    """Memory of the stages, and other layouts of the predicted pipeline, each with its flags."""
    too_large: tuple[int, ...]
    """Stages that need more memory than there is; empty also if their memory is not known."""
    best: Prediction | None
    """The quickest layout; if the command's does not fit, of those that do and recomputation. None if that is the
    command's, or if none is known to fit."""
    best_command: tuple[str, ...] | None
    """The command with that change."""
    assumes: tuple[str, ...]
    """What the prediction rests on besides measurement, as clauses."""
    version: str = field(default=__version__)
    """The version of megaprof."""


def rehearsed(
    command: Sequence[str],
    run_words: Sequence[str],
    out: Path,
    world: int,
    steps: int,
    links: Mapping[str, Link],
    per_host: int,
    limit: int | None = None,
) -> tuple[Rehearsal, Report]:
    """Runs the stages of ``command`` one after another, and returns what the pipeline would do, with the report on it.

    ``run_words``: the words that are run, which save nothing; ``out``: a new directory for all files; ``links``: those
    that the user gives; ``per_host``: ranks on each host of the job; ``limit``: bytes that a stage may allocate, if
    that is less than its device has. Raises Unanswerable, and OSError if the command cannot be started.
    """
    alone = partial(_alone, world=world, steps=steps)
    by_stage = {0: alone(run_words, out / "alone", 0, 0)}
    first, known = by_stage[0].metadata, defaults(by_stage[0].device)
    if unknown := links.keys() - known.keys():
        raise Unanswerable(f"--links {min(unknown)}=...: here they are {', '.join(known)}")
    links, sizes, layout = {**known, **links}, first.sizes, WorldLayout(first.sizes)
    put_together = partial(together, layout=layout, links=links, per_host=per_host)
    stages = _all_stages(partial(alone, run_words, out / "alone"), by_stage, layout)
    pipeline = put_together(stages)
    write(pipeline, out / PREDICTED)
    report = analyze(out / PREDICTED, memory_limit=limit)
    target, what_if, now_ms = report.targets[0], report.targets[0].what_if, pipeline.step_ms.value
    over = tuple(between(pair, per_host, links) for pair in pairwise(layout.rank_of(pp=at) for at in range(sizes.pp)))
    memory = zip(what_if.allocated or (), what_if.allowed or (), strict=False)
    too_large = tuple(stage for stage, (size, allowed) in enumerate(memory) if size > allowed)
    sent = [max((each.size for each in stage.exchanges if each.kind == "send"), default=0) for stage in stages]
    changes = [
        replace(each, fits=False) if too_large and each.kind == "overlap" else each for each in what_if.candidates
    ]
    if too_large and not any("recompute" in word for word in command):
        changes.append(_recomputed(stages, what_if, now_ms, max(sent), put_together))

    def as_it_runs(change: Prediction) -> Prediction:
        print(f"With {change.layout}:", file=sys.stderr, flush=True)
        words = with_layout(run_words, change.flags, first.framework, first.role, sizes.pp)
        try:
            own = _all_stages(partial(alone, words, out / "alone" / f"layout{changes.index(change)}"), {}, layout)
            ran = [each.layers for each in chain(*zip(*(stage.metadata.chunks for stage in own), strict=True))]
            if ran != [piece.count("t") for piece in parse_layout(change.layout or "", sizes.pp)]:
                raise Unanswerable("It ran with another layout: the command does not take the options")
        except Unanswerable as fault:
            print(fault, file=sys.stderr, flush=True)
            return replace(change, fits=False)
        step_ms, needed = put_together(own).step_ms, [each.memory.peak for each in own if each.memory is not None]
        fits = change.fits and all(size <= most for size, most in zip(needed, what_if.allowed or (), strict=False))
        speedup = Interval.of(now_ms).over(step_ms)
        return replace(change, step_ms=step_ms, speedup=speedup, fits=fits, needed=tuple(needed) or None)

    changes, best = _best_of(changes, as_it_runs, 0.0 if too_large else 1.0)
    what_if = replace(what_if, candidates=tuple(changes))
    target = replace(target, what_if=what_if, advice=layout_advice(what_if, target.framework))
    report = replace(report, targets=(target, *report.targets[1:]))
    best_words = None if best is None else with_layout(command, best.flags, first.framework, first.role, sizes.pp)
    if best is not None and best.layout is None:  # the command's stays
        best_words = [*command, *(options_of(first.framework, first.role, best.flags, sizes.pp) or best.flags)]
    assumes = [
        f"{link.name} moves {link.bandwidth / 1e9:.4g} GB/s after {link.latency * 1e6:.4g} us ({link.source})"
        for link in dict.fromkeys(over)
    ]
    if len(by_stage) < sizes.pp:
        assumes.append(f"the stages that were not run take as long as stage {sizes.pp // 2}")
    if any("moe" in (chunk.kinds or ()) for stage in stages for chunk in stage.metadata.chunks):
        assumes.append("experts get as many tokens as from random numbers: uneven routing is not in the interval")
    result = Rehearsal(
        command=tuple(command),
        sizes=sizes,
        step_ms=pipeline.step_ms,
        measured_ms=float(pipeline.step[-1].mean()),
        links=over,
        sent_bytes=tuple(sent),
        what_if=what_if,
        too_large=too_large,
        best=best,
        best_command=None if best_words is None else tuple(best_words),
        assumes=tuple(assumes),
    )
    with appearing(out / NAME) as file:
        file.write(msgspec.json.format(json_of(result), indent=2))
    return result, report


def _alone(words: Sequence[str], place: Path, stage: int, rank: int, world: int, steps: int) -> Stage:
    print(f"Stage {stage}: rank {rank}, alone", file=sys.stderr, flush=True)
    found = record(words, place / f"stage{stage}", rank, world, steps)
    if (own := found.metadata.coords.pp) != stage:
        raise Unanswerable(f"rank {rank} is of stage {own}, not {stage}: ranks are not in Megatron-Core's order")
    return found


def _all_stages(run: Callable[[int, int], Stage], by_stage: dict[int, Stage], layout: WorldLayout) -> list[Stage]:
    """Returns all stages. Those that differ ``run`` (a stage, as which rank), unless they are in ``by_stage``, which
    gets them, too."""
    count, middle = layout.sizes.pp, layout.sizes.pp // 2
    ranks = [layout.rank_of(pp=stage) for stage in range(count)]
    for stage in sorted({0, middle, count - 1} - by_stage.keys()):
        by_stage[stage] = run(stage, ranks[stage])
    if not alike(by_stage):
        by_stage.update({stage: run(stage, ranks[stage]) for stage in range(count) if stage not in by_stage})
    return [by_stage.get(stage) or _like(by_stage[middle], stage, layout) for stage in range(count)]


def _best_of(
    changes: Sequence[Prediction], as_it_runs: Callable[[Prediction], Prediction], least: float
) -> tuple[list[Prediction], Prediction | None]:
    """Returns the changes, and the quickest one, if it is more than ``least`` times as fast.

    No layout runs on all ranks yet, so none is kept because another one is not certainly faster. One layout for each
    other number of chunks, if it may be the quickest, is predicted anew, ``as_it_runs``: nothing else shows what more
    passes take beside their layers.
    """
    found, best, seen = list(changes), None, set[int | None]()
    for at, change in sorted(enumerate(changes), key=lambda each: -each[1].speedup.value):
        if not change.flags or change.fits is False or change.speedup.value <= least or change.chunks in seen:
            continue
        if change.chunks is not None:
            found[at] = as_it_runs(change)
        if found[at].fits is not False:
            seen.add(change.chunks)
            if found[at].speedup.value > least:
                best, least = found[at], found[at].speedup.value
    return found, best


def _like(middle: Stage, stage: int, layout: WorldLayout) -> Stage:
    """Returns a stage that was not measured, from one in the middle. What a step allocates for a while is taken to be
    in proportion to the microbatches in flight."""
    coords, schedule, memory = layout.coords(layout.rank_of(pp=stage)), middle.schedule, middle.memory
    if memory is not None:
        in_flight = in_flight_layers(("t",) * schedule.chunks * schedule.stages, schedule)
        passing = (memory.peak - memory.allocated) * in_flight[stage] // max(in_flight[middle.metadata.coords.pp], 1)
        memory = memory._replace(peak=memory.allocated + passing)
    chunks = tuple(replace(chunk, layer_numbers=None) for chunk in middle.metadata.chunks)
    return replace(middle, metadata=replace(middle.metadata, coords=coords, chunks=chunks), memory=memory, layers=())


def _recomputed(
    stages: Sequence[Stage], what_if: WhatIf, now_ms: float, size: int, put_together: Callable[[list[Stage]], Pipeline]
) -> Prediction:
    """Returns the prediction of recomputation. Each backward runs the forwards of its layers once more. Of each layer
    and microbatch in flight, a stage keeps only what the layer got, which is as large as what stages send (``size``
    bytes), and of one layer all activations."""
    costs, longer, needed = what_if.costs.by_kind if what_if.costs else {}, [], []
    for stage, held, memory in zip(stages, what_if.in_flight or (), (each.memory for each in stages), strict=True):
        passes = stage.passes.copy()
        for chunk, holds in enumerate(stage.metadata.chunks):
            known = [costs[kind].forward_ms for kind in holds.kinds or () if kind in costs]
            passes[:, chunk, 1] += sum(known) if known else passes[:, chunk, 0]
        longer.append(replace(stage, passes=passes))
        if memory is not None and held:
            layer = (memory.peak - memory.allocated) / held
            needed.append(round(memory.allocated + held * min(size, layer) + layer))
    fits = len(needed) == len(stages) and bool((np.array(needed) <= what_if.allowed).all())
    prediction = Prediction.of("recompute", now_ms, put_together(longer).step_ms)
    return replace(prediction, flags=_RECOMPUTE, fits=fits, needed=tuple(needed))


def balanced(words: Sequence[str]) -> list[str]:
    """Returns the words of a command; one of Megatron-LM with experts routes to all of them alike."""
    names = {word.partition("=")[0] for word in words}
    return [*words, _BALANCED] if _EXPERTS in names and _BALANCED not in names else [*words]


def compared(out: Path, directory: Path) -> tuple[Interval, Spread, dict[str, Link]]:
    """Returns the step that the rehearsal in ``out`` predicts for the layout of a real capture of the same job in
    ``directory``, the step of that, and its links: those of the rehearsal, as much slower or faster as transfers
    between stages were. Raises Unanswerable."""
    try:
        rehearsal = msgspec.json.decode(read_input(out / NAME), type=Rehearsal)
    except (OSError, msgspec.MsgspecError) as fault:
        raise Unanswerable(f"{out}: no rehearsal is there: {fault}") from None
    of_layouts = {rehearsal.what_if.layout: rehearsal.step_ms}
    of_layouts |= {each.layout: each.step_ms for each in rehearsal.what_if.candidates if each.layout is not None}
    report, sizes = analyze(directory), replace(rehearsal.sizes, vpp=1)
    for target, run in zip(report.targets, report.by_hand, strict=True):
        if replace(target.sizes, vpp=1) == sizes and run is not None and target.step_time_ms is not None:
            break
    else:
        raise Unanswerable(f"{directory}: no capture of a job with {sizes} whose passes are known")
    if (step_ms := of_layouts.get(target.what_if.layout)) is None:
        raise Unanswerable(f"{directory}: no step was predicted for its layout, {target.what_if.layout}")
    # A capture shows a transfer together with what its receiver does until the next pass, which stages alone do, too.
    runs = (each for each in (run, *analyze(out / PREDICTED).by_hand) if each is not None)
    took, predicted = (np.median(each.baseline.view.link, axis=(0, 1)) for each in runs)
    kept, source = {}, f"transfers between stages, {directory}"
    for link in dict.fromkeys(rehearsal.links):
        at = [number for number, each in enumerate(rehearsal.links) if each == link]
        expected = [link.ms("send", rehearsal.sent_bytes[number], 2)[0] for number in at]
        by = max(1.0 + float(np.median((took - predicted)[at] / expected)), 1e-3)
        kept[link.name] = Link(link.name, link.bandwidth / by, link.latency * by, "measured", source)
    return step_ms, target.step_time_ms, kept
