"""Describes where time is lost and what was measured there: a sentence or two for each kind of cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.report.text.words import (
    INSIDE,
    both,
    capital,
    counted,
    milliseconds,
    number,
    percent,
    ranks,
    stages,
)
from megaprof.formats.metadata import ModelChunk

#: A cause comes and goes if it costs less than this fraction in the other steps of what it costs while it is present.
_HARDLY = 0.1
#: How to make all ranks collect garbage at once, between steps, by framework, in the versions of docs/hosts.
_AT_ONCE = "all ranks collect at once, between steps"
_MANUAL_GC = {
    None: f"With Megatron's --manual-gc --manual-gc-interval 100 {_AT_ONCE}",
    "slime": "With --manual-gc all ranks collect at once, before the steps of a rollout",
    "ms-swift": f"With --manual_gc true --manual_gc_steps 100 {_AT_ONCE}",
    "megatron-bridge": f"With train.manual_gc=True train.manual_gc_interval=100 {_AT_ONCE}",
    "verl": "verl has no option for it: gc.disable() in its workers and gc.collect() at the same steps do it",
    "skyrl": "SkyRL has no option for it: gc.disable() in its workers and gc.collect() at the same steps do it",
}
#: Options that distribute the sequences of a step over replicas by length, by framework, in the versions of docs/hosts.
#: Other frameworks have no such option.
_OVER_REPLICAS = {
    "verl": "trainer.balance_batch=True",
    "slime": "--balance-data",
    "ms-swift": "--sequence_packing_scheduler dp_balanced",
}


def evidence(cause: Cause, measured: TargetStages) -> str:
    """Returns what was measured, and where: a sentence or two."""
    sentence = _SENTENCES[cause.kind]
    return sentence if isinstance(sentence, str) else sentence(cause, measured)


def when(cause: Cause) -> str:
    """Returns in which steps the cause is present; empty if it is present in all."""
    if cause.share == 1.0:
        return ""
    mostly = ", mainly" if elsewhere(cause) else ""
    begins = f" since step {cause.since}" if cause.since is not None else ""
    return mostly + (begins or f" in {round(cause.share * cause.steps)} of {counted(cause.steps, 'step')}")


def elsewhere(cause: Cause) -> float:
    """Returns the milliseconds that a cause costs in a step without it. The average over all steps includes both the
    steps with the cause and those without it.

    Returns 0 if the average, as printed, does not show a cost in the steps without it.
    """
    there = cause.share * cause.while_ms
    if cause.share == 1.0 or cause.price.value <= there or number(cause.price.value) == number(there):
        return 0.0
    return (cause.price.value - there) / (1.0 - cause.share)


def of_steps(cause: Cause) -> bool:
    """Returns whether the cause is that some steps of a stage are slow, rather than what the stage holds."""
    return cause.kind == "unexplained" and "forward_ms" not in cause.parts


def _layers(cause: Cause, measured: TargetStages) -> str:
    held = {stage.pp: [c.holds.layers if c.holds else None for c in stage.chunks] for stage in measured.stages}
    most = cause.stages or (() if cause.stage is None else (cause.stage,))
    whole = {pp: sum(count or 0 for count in layers) for pp, layers in held.items() if None not in layers}
    if not most or len(whole) < len(held) or any(pp not in whole for pp in most):
        return "The layers are not spread evenly over the model chunks."
    others = sorted({count for pp, count in whole.items() if pp not in most})
    who = "the other holds" if len(whole) - len(most) == 1 else "the others hold"
    against = f", and {who} {' to '.join(map(str, dict.fromkeys(others[:1] + others[-1:])))}" * bool(others)
    hold, apiece = ("holds", "") if len(most) == 1 else ("hold", " each")
    return f"{capital(stages(most))} {hold} {counted(whole[most[0]], 'layer')}{apiece}{against}."


def _ends(cause: Cause, measured: TargetStages) -> str:
    contents = [content for content in _held(measured, cause.stage) if content is not None]
    names = {
        "the embedding": any(content.embedding for content in contents),
        "MTP layers": any(content.mtp for content in contents),
        "the output layer and loss": any(content.loss for content in contents),
    }
    held = [name for name, there in names.items() if there] or ["an embedding, or an output layer and loss"]
    return f"Stage {cause.stage} holds {both(held)} beside its layers, which takes {_parts(cause)} of each microbatch."


def _held(measured: TargetStages, stage: int | None = None) -> Iterable[ModelChunk | None]:
    """Returns what each chunk of a stage, or of all stages, holds; None for a chunk if it is not known."""
    return (
        chunk.holds
        for measured_stage in measured.stages
        if stage in (None, measured_stage.pp)
        for chunk in measured_stage.chunks
    )


def _one_kind(cause: Cause, measured: TargetStages) -> str:
    slow = cause.kind.removeprefix("slow_")
    return (
        f"The {slow}s of stage {cause.stage} take {_part(cause, f'{slow}_ms')} longer for each microbatch than its "
        "layers need."
    )


def _unexplained(cause: Cause, measured: TargetStages) -> str:
    why = _why_slow(cause) or " Nothing that was recorded says why."
    if of_steps(cause):
        return f"Stage {cause.stage} takes longer than in its quicker steps{when(cause)}.{why}"
    longer = f"it takes {_parts(cause)} longer for each microbatch than its layers need"
    return f"Stage {cause.stage} is slow{when(cause)}: {longer}.{why}"


def _slow_rank(cause: Cause, measured: TargetStages) -> str:
    several = len(cause.ranks) > 1
    peers = "the other ranks of their stage" if several else "its peers"
    waiting = ", which wait for each other inside a microbatch," if several else ""
    factor = cause.parts.get("factor")
    longer = f"{_times(factor)} as long as" if factor is not None else "longer than"
    # The tables also include what delays single passes, like waits for a core; the factor does not.
    who = f"Apart from delays of single passes, {_who(cause)}{waiting} {'compute' if several else 'computes'}"
    text = f"{who} {longer} {peers}{when(cause)}."
    if cause.share < 1.0 and cause.steps == len(measured.steps):
        text += " The tables have the average of all steps."
    return text + _why_slow(cause)


def _why_slow(cause: Cause) -> str:
    """Returns why a rank or a stage is slow if that is known; else what the slowness looks like, or nothing."""
    tokens, usual = cause.parts.get("expert_tokens"), cause.parts.get("usual_expert_tokens")
    if tokens is None or usual is None:
        goes = elsewhere(cause) <= _HARDLY * cause.while_ms
        comes_and_goes = cause.share < 1.0 and cause.since is None and goes
        return " It comes and goes: another program may run on its host at times." * comes_and_goes
    got = f" In the captured steps its experts got {tokens:,.0f} tokens, the others' {usual:,.0f}"
    if cause.reason == "machine":
        return f"{got}: that explains at most {percent(cause.parts['explained'])} of it, and the rest is the machine."
    return (
        f"{got}: it is expert load, and even experts gain what it costs. Megatron's --moe-aux-loss-coeff (larger), "
        "--moe-router-load-balancing-type (global_aux_loss), --moe-router-enable-expert-bias and "
        "--moe-expert-capacity-factor even them."
    )


def _late_entry(cause: Cause, measured: TargetStages) -> str:
    enter, there = ("enter", "them") if len(cause.ranks) > 1 else ("enters", "it")
    return (
        f"{capital(_who(cause))} {enter} the step later than the others{when(cause)}: something between the steps "
        f"takes longer on {there}, such as data loading or other work of the host."
    )


def _slow_link(cause: Cause, measured: TargetStages) -> str:
    one, other = cause.link or (cause.stage or 0, (cause.stage or 0) + 1)
    there = f"{_part(cause, 'transfer_ms')} once both stages are there{when(cause)}"
    return (
        f"Exchanges between stages {one} and {other} take {there}, and those of other links {_part(cause, 'usual_ms')}."
    )


def _uneven(cause: Cause, measured: TargetStages) -> str:
    if cause.stage is not None:
        text = f"On stage {cause.stage} some microbatches take longer than others, and the pipeline waits for them."
    else:
        text = "Microbatches differ in their work, alike on all stages, and the pipeline waits for the long ones."
    return f"{text} {_because(cause, measured)}"


def _unequal(cause: Cause, measured: TargetStages) -> str:
    wait = "the step lasts until the slowest one is done"
    if not measured.forward_only:
        wait = "all wait in the gradient reduction for the slowest one"
    text = f"Some replicas take longer than others{when(cause)}, and {wait}. {_because(cause, measured)}"
    if cause.reason == "machine":
        return text
    switch = _OVER_REPLICAS.get(measured.framework or "")
    how = f": {measured.framework} does with {switch}" if switch else ""
    return f"{text} Spread long sequences evenly over the replicas of a step{how}."


def _because(cause: Cause, measured: TargetStages) -> str:
    """Returns whether the data are the reason that some microbatches or replicas take longer."""
    if "explained" not in cause.parts:
        return "Nothing that was recorded says whether their sequences differ in length."
    low, at, high = (cause.parts[f"explained{end}"] for end in ("_low", "", "_high"))
    share = (
        f"The lengths of their sequences explain {percent(at)} ({percent(low)} to {percent(high)}) of the difference"
    )
    experts = any(chunk is None or chunk.kinds is None or "moe" in chunk.kinds for chunk in _held(measured))
    why = "a machine, or experts that get more tokens than others" if experts else "a machine"
    if high == 0.0:
        return f"The lengths of their sequences explain nothing of it, so the reason is {why}."
    if cause.reason == "data":
        return f"{share}: it is the data."
    if cause.reason == "machine":
        return f"{share}: it is not the data, but {why}."
    return f"{share}: whether it is the data is not sure."


def _communication(cause: Cause, measured: TargetStages) -> str:
    if cause.group == "pp":
        return "Exchanges between stages take time in which the stage that waits for them computes nothing."
    if cause.group == "dp":
        return f"The gradient reduction goes on behind the last pass, where no compute hides it{when(cause)}."
    name = INSIDE.get(cause.group or "")
    which = f"{name} communication" if name else "communication of a group that the recording does not name"
    waiting = "part of which may be waiting for the last rank of a group"
    text = f"{capital(which)}, {waiting}, is exposed: no compute hides it"
    # So removing it may gain more than the exposed time of any single stage.
    others = ", and while the pipeline fills and drains, stages wait for that of the others, too"
    return f"{text}{others if measured.sizes.pp > 1 else ''}."


def _garbage(cause: Cause, measured: TargetStages) -> str:
    return (
        f"Python collects garbage inside passes{when(cause)}, on one rank or another while the others wait, for up to "
        f"{_part(cause, 'longest_ms')} at a time. {_MANUAL_GC.get(measured.framework, _MANUAL_GC[None])}."
    )


def _data(cause: Cause, measured: TargetStages) -> str:
    if "waited_ms" not in cause.parts:
        return (
            f"The first forward takes longer than the others{when(cause)}, on the first stage alone: it seems to wait "
            "for its data."
        )
    one_in = round(1.0 / cause.parts["spread"])
    several, which = len(cause.ranks) > 1, f", mostly one microbatch in {one_in}" * (one_in > 1)
    most = f"{_part(cause, 'waited_ms')} a step{' on the one that waits longest' * several}"
    text = f"{capital(_who(cause))} wait{'' if several else 's'} for data{when(cause)}: {most}{which}, for up to "
    workers = f"give the data loader more workers{_WORKERS.get(measured.framework, '')}, or let it prefetch more"
    if several:
        return f"{text}{_part(cause, 'longest_ms')} at a time. To shorten this, {workers}."
    return (
        f"{text}{_part(cause, 'longest_ms')} at a time. Look at its disk, network and loader processes, or {workers}."
    )


#: The option for the number of a data loader's processes.
_WORKERS: dict[str | None, str] = {
    "megatron-lm": " (--num-workers)",
    "megatron-bridge": " (dataset.num_workers)",
    "ms-swift": " (--dataloader_num_workers)",
}
_CORES = (
    "Something else runs on the cores: dataloader workers, another job, or more ranks than there are cores. Give each "
    "rank cores of its own (numactl, taskset), start fewer workers, or allow the job more cores (cgroup)."
)


def _processor(cause: Cause, measured: TargetStages) -> str:
    several = len(cause.ranks) > 1
    wait = "wait" if several else "waits"
    whose = f"; rank {cause.ranks[0]} waits longest, " if several else ", "
    average = "" if cause.share == 1.0 else " on average"
    text = f"{capital(_who(cause))} {wait} for a processor core{when(cause)}"
    return f"{text}{whose}{_part(cause, 'waited_ms')} a step{average}, inside passes and between them. {_CORES}"


_SENTENCES: dict[str, str | Callable[[Cause, TargetStages], str]] = {
    "layers": _layers,
    "embedding_or_loss": _ends,
    "recomputation": lambda cause, _: (
        f"The backwards of stage {cause.stage} take {_part(cause, 'backward_ms')} longer for each microbatch than its "
        "layers need, about as long as one forward: this stage seems to recompute activations, and the others do not."
    ),
    "slow_forward": _one_kind,
    "slow_backward": _one_kind,
    "unexplained": _unexplained,
    "slow_chunk": lambda cause, _: (
        f"Chunk {cause.chunk} of stage {cause.stage} takes {_parts(cause)} longer for each microbatch than other "
        "chunks with as many layers."
    ),
    "slow_rank": _slow_rank,
    "slow_link": _slow_link,
    "late_entry": _late_entry,
    "data_wait": _data,
    "uneven_microbatches": _uneven,
    "unequal_replicas": _unequal,
    "communication": _communication,
    "host_bound": (
        "The GPU waits for the host inside passes: it has nothing to do, because nothing was launched in time."
    ),
    "stalls": lambda cause, _: (
        f"Single passes stall{when(cause)}, on one rank or another: the recording does not name what holds the host up."
    ),
    "garbage_collection": _garbage,
    "processor_wait": _processor,
    "few_microbatches": lambda _, measured: (
        f"{counted(measured.microbatches or 0, 'microbatch')} are few for {counted(measured.sizes.pp, 'stage')}: "
        "filling and draining the pipeline takes long."
    ),
}
#: All kinds of causes that a diagnosis names.
KINDS = frozenset(_SENTENCES)


def _who(cause: Cause) -> str:
    """Returns the ranks of a cause with their place: ``rank 37 (stage 2, node-0004)``."""
    where = [f"stage {cause.stage}"] if cause.stage is not None else []
    where += cause.hosts if len(cause.hosts) == 1 else ()
    return ranks(cause.ranks) + (f" ({', '.join(where)})" if where else "")


def _times(factor: float) -> str:
    """Returns a factor: ``about 1.3 times``. Factors from 100 on are in words: ``hundreds of times``."""
    if factor < 100:
        return f"about {factor:.2g} times"
    return "hundreds of times" if factor < 1000 else "thousands of times"


def _parts(cause: Cause) -> str:
    """Returns the forward and backward excess of a cause: ``9.1 ms (3.0 forward, 6.1 backward)``."""
    parts = {kind: cause.parts[f"{kind}_ms"] for kind in ("forward", "backward") if f"{kind}_ms" in cause.parts}
    text = milliseconds(sum(parts.values()))
    return text if len(parts) < 2 else f"{text} ({', '.join(f'{number(ms)} {kind}' for kind, ms in parts.items())})"


def _part(cause: Cause, name: str) -> str:
    return milliseconds(cause.parts.get(name, 0.0))
