"""A rehearsal: the stages of a command one after another on this machine, and the pipeline that they would make.

Its result, rehearsal.json, is what the command prints with ``--json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from megaprof.analysis.samples import Interval
from megaprof.analysis.trace.gpu import Peak
from megaprof.analysis.what_if.memory import in_flight_layers
from megaprof.formats.files import appearing
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.rehearse.links import Link, defaults
from megaprof.rehearse.pipeline import Pipeline, together, write
from megaprof.rehearse.stages import NotRehearsed, Stage, alike, differing, record
from megaprof.tune.command import with_layout
from megaprof.tune.proposals import as_measured
from megaprof.tune.state import Proposal, Trial
from megaprof.version import __version__

NAME, PREDICTED, _ALONE = "rehearsal.json", "predicted", "alone"
#: Megatron-LM's option for another order of ranks, and that order.
_OTHER_ORDER, _ORDER = "--use-tp-pp-dp-mapping", "tp-cp-ep-pp-dp"
_EXPERTS, _BALANCED = "--num-experts", "--moe-router-force-load-balancing"


@dataclass(frozen=True)
class RehearsedStage:
    """One stage of the predicted pipeline."""

    stage: int
    """Its number."""
    rank: int
    """The rank of the job that stands for it."""
    like: int | None
    """The stage that was measured in its place; None if it was measured itself."""
    layers: tuple[int | None, ...]
    """Layers of each of its model chunks; None if not known."""
    forward_ms: float
    """Milliseconds of all its forwards of a step, with the exchanges inside them."""
    backward_ms: float
    """Milliseconds of all its backwards of a step, with the exchanges inside them."""
    bubble_fraction: float
    """The fraction of the step in which it runs no pass, from 0 to 1."""
    memory: int | None
    """Bytes that it has allocated at its peak; None if that is not recorded, as on the CPU."""
    capacity: int | None
    """Bytes that it may allocate; None if not known."""


@dataclass(frozen=True)
class Rehearsal:
    """What a command is predicted to do on all its ranks."""

    command: tuple[str, ...]
    """The command as it was given."""
    sizes: ParallelSizes
    """The parallel sizes of the job."""
    schedule: str
    """``1f1b``, ``interleaved`` or ``no_pipelining``."""
    microbatches: int
    """Microbatches of a step."""
    step_ms: Interval
    """The predicted step in milliseconds, with a 90 % interval from what was measured and from what is assumed."""
    measured_ms: float
    """The part of it that was measured: the same step if no exchange took any time."""
    links: tuple[Link, ...]
    """The links that the rest was computed from."""
    stages: tuple[RehearsedStage, ...]
    """Its stages."""
    limited_by: str | None
    """What makes the step as long as it is, in a sentence."""
    fits: bool | None
    """Whether every stage has enough memory; None if that is not known."""
    layouts: tuple[Proposal, ...]
    """Other layouts that fit, the surest gain first. The flags replace those that place layers."""
    best: Proposal | None
    """The layout to use instead of the command's: one that is surely faster, or that fits where the command's does not.
    None without one."""
    best_command: tuple[str, ...] | None
    """The command with that layout."""
    assumes: tuple[str, ...]
    """What the prediction rests on besides measurement, as clauses."""
    version: str = field(default=__version__)
    """The version of megaprof."""


def rehearsed(
    command: Sequence[str],
    run_words: Sequence[str],
    out: Path,
    world: int,
    *,
    steps: int,
    time_limit: float,
    links: Mapping[str, Link],
    per_host: int,
    memory_limit: int | None = None,
    begin: Callable[[int, int], None] = lambda stage, rank: None,
    advance: Callable[[int], None] = lambda steps: None,
) -> Rehearsal:
    """Runs the stages of ``command`` one after another, and returns what the pipeline would do.

    ``run_words``: the words that are run, which save nothing; ``out``: a new directory for all files; ``links``: those
    that the user gives; ``per_host``: ranks on each host of the job; ``begin(stage, rank)`` is called as a stage
    starts. Raises NotRehearsed, and OSError if the command cannot be started.
    """

    def measured(stage: int, rank: int) -> Stage:
        begin(stage, rank)
        found = record(run_words, out / _ALONE / f"stage{stage}", rank, world, steps, time_limit, advance)
        if found.metadata.coords.pp != stage:
            raise NotRehearsed(
                f"rank {rank} is of stage {found.metadata.coords.pp}, not {stage}: the command numbers its ranks "
                f"neither in Megatron-Core's order nor in that of {_OTHER_ORDER}"
            )
        return found

    first = measured(0, 0)
    layout = (
        WorldLayout(first.metadata.sizes, _ORDER) if _OTHER_ORDER in run_words else WorldLayout(first.metadata.sizes)
    )
    by_stage, stages = {0: first}, layout.sizes.pp
    for stage in differing(stages, run_words):
        by_stage[stage] = measured(stage, layout.rank_of(pp=stage))
    for stage in range(0 if alike(by_stage) else stages):
        if stage not in by_stage:
            by_stage[stage] = measured(stage, layout.rank_of(pp=stage))
    all_links = {**defaults(first.device), **links}
    all_stages = [by_stage.get(stage) or _like(by_stage[stages // 2], stage, layout) for stage in range(stages)]
    pipeline = together(all_stages, layout, all_links, per_host)
    write(pipeline, out / PREDICTED)
    result = _result(command, pipeline, tuple(all_links.values()), out, memory_limit)
    with appearing(out / NAME) as file:
        file.write(msgspec.json.format(msgspec.json.encode(result), indent=1))
    return result


def _like(middle: Stage, stage: int, layout: WorldLayout) -> Stage:
    """Returns a stage that was not measured, from one in the middle. What a step allocates for a while is taken to be
    in proportion to the microbatches in flight."""
    coords, schedule, memory = layout.coords(layout.rank_of(pp=stage)), middle.schedule, middle.memory
    own = middle.metadata.coords.pp
    if memory is not None:
        in_flight = in_flight_layers(("t",) * schedule.chunks * schedule.stages, schedule)
        passing = (memory.most - memory.least) * in_flight[stage] // max(in_flight[own], 1)
        memory = replace(memory, most=memory.least + passing)
    chunks = tuple(replace(chunk, layer_numbers=None) for chunk in middle.metadata.chunks)
    return replace(middle, metadata=replace(middle.metadata, coords=coords, chunks=chunks), memory=memory, like=own)


def _result(
    command: Sequence[str], pipeline: Pipeline, links: tuple[Link, ...], out: Path, memory_limit: int | None
) -> Rehearsal:
    trial = as_measured(Trial(1, tuple(command), PREDICTED), out / PREDICTED, memory_limit)
    first, step, busy = pipeline.stages[0], pipeline.step_ms, pipeline.busy_ms
    stages = tuple(
        RehearsedStage(
            stage=number,
            rank=stage.metadata.coords.rank,
            like=stage.like,
            layers=tuple(chunk.layers for chunk in stage.metadata.chunks),
            forward_ms=float(busy[number, 0]),
            backward_ms=float(busy[number, 1:].sum()),
            bubble_fraction=1.0 - float(busy[number].sum()) / step.value,
            memory=None if stage.memory is None else stage.memory.most,
            capacity=_least(memory_limit, stage.memory),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    known = all(stage.memory is not None and stage.capacity is not None for stage in stages)
    fits = all((stage.memory or 0) <= (stage.capacity or 0) for stage in stages) if known else None
    layouts = tuple(replace(each, step_ms=_wider(each.step_ms, step)) for each in trial.next)
    best = next((each for each in layouts if fits is False or each.step_ms.high < step.value), None)
    words = None
    if best is not None:
        metadata = first.metadata
        words = tuple(with_layout(command, best.flags, metadata.framework, metadata.role, best.stages))
    return Rehearsal(
        command=tuple(command),
        sizes=first.metadata.sizes,
        schedule=first.schedule.name,
        microbatches=first.schedule.microbatches,
        step_ms=step,
        measured_ms=float(pipeline.step[-1].mean()),
        links=links,
        stages=stages,
        limited_by=trial.verdict,
        fits=fits,
        layouts=layouts,
        best=best,
        best_command=words,
        assumes=tuple(_assumed(pipeline, links)),
    )


def _least(limit: int | None, memory: Peak | None) -> int | None:
    return min((size for size in (limit, memory.capacity if memory else None) if size is not None), default=None)


def _wider(layout: Interval, step: Interval) -> Interval:
    """Returns the step of another layout, which is at least as uncertain as the step that it is predicted from."""
    return layout + Interval(0.0, step.low - step.value, step.high - step.value) * (layout.value / step.value)


def _assumed(pipeline: Pipeline, links: Sequence[Link]) -> list[str]:
    clauses = [
        f"{link.name} moves {link.bandwidth / 1e9:.4g} GB/s after {link.latency * 1e6:.4g} us ({link.source})"
        for link in links
    ]
    if like := {stage.like for stage in pipeline.stages} - {None}:
        clauses.append(f"the stages that were not run take as long as stage {like.pop()}")
    if any("moe" in (chunk.kinds or ()) for stage in pipeline.stages for chunk in stage.metadata.chunks):
        clauses.append(
            "experts get as many tokens as here, where data mean nothing: the interval has no uneven routing"
        )
    return clauses


def balanced(words: Sequence[str]) -> list[str]:
    """Returns the words of a command; one of Megatron-LM with experts routes to all of them alike."""
    names = {word.partition("=")[0] for word in words}
    return [*words, _BALANCED] if _EXPERTS in names and _BALANCED not in names else [*words]
