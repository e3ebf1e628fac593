"""The kinds of causes, one row for each: its name, what was measured and where, what to do, and what it is about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from megaprof.analysis.diagnosis.diagnose import Cause
from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.diagnosis.stages import TargetStages
from megaprof.analysis.words import (
    capital,
    counted,
    milliseconds,
    number,
    percent,
    ranks,
    stages,
)
from megaprof.formats.metadata import ModelChunk

#: How to make all ranks collect garbage at once, between steps, by framework, in the versions of docs/hosts.
_AT_ONCE = "all ranks collect at once, between steps."
_MANUAL_GC = {
    "": f"With Megatron's --manual-gc --manual-gc-interval 100 {_AT_ONCE}",
    "slime": "With --manual-gc all ranks collect at once, before the steps of a rollout.",
    "ms-swift": f"With --manual_gc true --manual_gc_steps 100 {_AT_ONCE}",
    "megatron-bridge": f"With train.manual_gc=True train.manual_gc_interval=100 {_AT_ONCE}",
    "verl": "verl has no option for it: gc.disable() in its workers and gc.collect() at the same steps do it.",
    "skyrl": "SkyRL has no option for it: gc.disable() in its workers and gc.collect() at the same steps do it.",
}
#: Options that distribute the sequences of a step over replicas by length. Other frameworks have no such option.
_EVENLY = "Spread long sequences evenly over the replicas of a step"
_OVER_REPLICAS = {
    "": f"{_EVENLY}.",
    "verl": f"{_EVENLY}: verl does with trainer.balance_batch=True.",
    "slime": f"{_EVENLY}: slime does with --balance-data.",
    "ms-swift": f"{_EVENLY}: ms-swift does with --sequence_packing_scheduler dp_balanced.",
}
_CORES = (
    "Something else runs on the cores: dataloader workers, another job, or more ranks than there are cores. Give each "
    "rank cores of its own (numactl, taskset), start fewer workers, or allow the job more cores (cgroup)."
)
#: The option for the number of a data loader's processes.
_WORKERS = {
    "megatron-lm": " (--num-workers)",
    "megatron-bridge": " (dataset.num_workers)",
    "ms-swift": " (--dataloader_num_workers)",
}
#: The option for the size of a microbatch, where it is not Megatron's.
_MICRO_BATCH = {
    "verl": "ppo_micro_batch_size_per_gpu",
    "skyrl": "trainer.micro_train_batch_size_per_gpu",
    "ms-swift": "--micro_batch_size",
    "megatron-bridge": "train.micro_batch_size",
}
_EXPERTS = (
    "Megatron's --moe-aux-loss-coeff (larger), --moe-router-load-balancing-type (global_aux_loss), "
    "--moe-router-enable-expert-bias and --moe-expert-capacity-factor even them."
)

#: Groups whose ranks wait for each other inside a pass.
_INSIDE = {"tp": "tensor-parallel", "ep": "expert-parallel", "cp": "context-parallel"}
#: What hides communication, by group.
_OVERLAP = {
    "tp": "If it is off, Megatron's --tp-comm-overlap hides a part of it (with --sequence-parallel).",
    "ep": "If it is off, Megatron's --overlap-moe-expert-parallel-comm hides it behind other microbatches.",
    "dp": "If they are off, Megatron's --overlap-grad-reduce and --overlap-param-gather (the latter with "
    "--use-distributed-optimizer) hide most of it.",
}

_Say = Callable[[Cause, TargetStages], str]


class Kind(NamedTuple):
    """One kind of cause. Words are text with the facts of a cause in braces (`_facts`), or a function that returns
    it."""

    name: str
    """A few words, for a table."""
    evidence: str | _Say
    """What was measured, and where: a sentence or two."""
    advice: str | _Say = ""
    """What to do: sentences; may be empty."""
    about: Literal["", "stage", "machine"] = ""
    """``stage``: what a stage holds or computes. ``machine``: the machine or its load; another one might not have it,
    and no layout changes it."""


def name_of(cause: Cause) -> str:
    """Returns the name of a cause in a few words, for a table: ``slow rank 5``, ``layers of stage 0``."""
    return KINDS[cause.kind].name.format_map(_facts(cause))


def evidence(cause: Cause, measured: TargetStages) -> str:
    """Returns what was measured and where, and what to do about it."""
    kind = KINDS[cause.kind]
    told = [part if isinstance(part, str) else part(cause, measured) for part in (kind.evidence, kind.advice)]
    return " ".join(filter(None, told)).format_map(_facts(cause))


def of_steps(cause: Cause) -> bool:
    """Returns whether the cause is that some steps of a stage are slow, rather than what the stage holds."""
    return cause.kind == "unexplained" and "forward_ms" not in cause.parts


def costs_only_there(cause: Cause) -> bool:
    """Returns whether a cause costs next to nothing in the steps without it."""
    return abs(cause.price.value - cause.share * cause.while_ms) <= LEAST * cause.price.value


def _facts(cause: Cause) -> Mapping[str, object]:
    """Returns what the words of a cause may name."""
    several, of = len(cause.ranks) > 1, cause.stages or (() if cause.stage is None else (cause.stage,))
    link = cause.link or (cause.stage or 0, (cause.stage or 0) + 1)
    where = [f"stage {cause.stage}"] if cause.stage is not None else []
    who = ranks(cause.ranks) if cause.ranks else ""
    if where := [*where, *(cause.hosts if len(cause.hosts) == 1 else ())]:
        who += f" ({', '.join(where)})"
    when = ""
    if cause.since is not None and cause.share < 1.0:
        when = f" since step {cause.since}"
    elif cause.share < 1.0:
        when = f" in {round(cause.share * cause.steps)} of {counted(cause.steps, 'step')}"
    passes = {kind: cause.parts[f"{kind}_ms"] for kind in ("forward", "backward") if f"{kind}_ms" in cause.parts}
    excess = milliseconds(sum(passes.values()))
    if len(passes) > 1:
        excess += f" ({', '.join(f'{number(ms)} {kind}' for kind, ms in passes.items())})"
    between = "all stages" if cause.link is None else "stages {} and {}".format(*link)
    facts = {
        "of": f" of {ranks(cause.ranks)}" if cause.ranks else f" of {stages(of)}" if of else "",
        "of_ranks": f" of {ranks(cause.ranks)}" if cause.ranks else "",
        "ranks": ranks(cause.ranks) if cause.ranks else "",
        "who": who,
        "Who": capital(who),
        "s": "" if several else "s",
        "it": "them" if several else "it",
        "its": "their" if several else "its",
        "stage": cause.stage,
        "stages": ("steps of " if of_steps(cause) else "") + (stages(of) if of else ""),
        "chunk": cause.chunk,
        "one": link[0],
        "other": link[1],
        "end": "output layer and loss" if cause.stage else "embedding",
        "exchanges": f"exchanges between {between}" if cause.group == "pp" else f"exposed {cause.group} communication",
        "when": when,
        "average": "" if cause.share == 1.0 else " on average",
        "longest": f"; rank {cause.ranks[0]} waits longest," if several else ",",
        "excess": excess,
        **{name: milliseconds(ms) for name, ms in cause.parts.items() if name.endswith("_ms")},
    }
    return defaultdict(lambda: milliseconds(0.0), facts)


def _layers(cause: Cause, measured: TargetStages) -> str:
    counts = {stage.pp: [c.holds.layers if c.holds else None for c in stage.chunks] for stage in measured.stages}
    most = cause.stages or (() if cause.stage is None else (cause.stage,))
    whole = {pp: sum(count or 0 for count in layers) for pp, layers in counts.items() if None not in layers}
    others = sorted({count for pp, count in whole.items() if pp not in most})
    # Layers of several kinds count as what they take; and of equal stages, it is the chunks that differ.
    if not most or len(whole) < len(counts) or not others or whole[most[0]] <= others[-1]:
        return "The layers are not spread evenly over the model chunks."
    who = "the other holds" if len(whole) - len(most) == 1 else "the others hold"
    than = " to ".join(map(str, dict.fromkeys(others[:1] + others[-1:])))
    hold, apiece = ("holds", "") if len(most) == 1 else ("hold", " each")
    return f"{capital(stages(most))} {hold} {counted(whole[most[0]], 'layer')}{apiece}, and {who} {than}."


def _ends(cause: Cause, measured: TargetStages) -> str:
    contents = [content for content in _contents(measured, cause.stage) if content is not None]
    names = {
        "the embedding": any(content.embedding for content in contents),
        "MTP layers": any(content.mtp for content in contents),
        "the output layer and loss": any(content.loss for content in contents),
    }
    there = [name for name, is_there in names.items() if is_there]
    if not there or any(content.layers is None for content in contents):
        return "Each microbatch takes {excess} longer on stage {stage} than elsewhere. What it holds is not known."
    return f"Stage {{stage}} holds {' and '.join(there)} beside its layers, which takes {{excess}} of each microbatch."


def _contents(measured: TargetStages, stage: int | None = None) -> Iterable[ModelChunk | None]:
    """Returns what each chunk of a stage, or of all stages, holds; None for a chunk if it is not known."""
    return (chunk.holds for each in measured.stages if stage in (None, each.pp) for chunk in each.chunks)


def _slow_rank(cause: Cause, measured: TargetStages) -> str:
    longer = f"{cause.parts['factor']:.1f} times"  # as `megaprof watch` says it
    if len(cause.ranks) > 1:
        who = "{Who}, which wait for each other inside a microbatch, compute"
        return f"{who} {longer} as long as the other ranks of their stage{{when}}."
    return f"{{Who}} computes {longer} as long as its peers{{when}}."


def _late(cause: Cause, measured: TargetStages) -> str:
    longer = "something between the steps takes longer on {it}, such as data loading or other work of the host"
    if cause.reason is not None:
        longer = f"{cause.reason.replace('_', ' ')} takes longer on {{it}} (where an iteration goes)"
    return f"{{Who}} enter{{s}} the step later than the others{{when}}: {longer}."


def _why_slow(cause: Cause, measured: TargetStages) -> str:
    """Returns why a rank or a stage is slow if that is known; else what the slowness looks like, or nothing."""
    tokens, usual = cause.parts.get("expert_tokens"), cause.parts.get("usual_expert_tokens")
    if tokens is None or usual is None:
        if cause.share < 1.0 and cause.since is None and costs_only_there(cause):
            return "It comes and goes: another program may run on its host at times."
        if cause.kind == "unexplained":
            return "Nothing that was recorded says why."
        return "Look at the clocks and the temperature of {its} GPU, and at what else runs on {its} host."
    got = f"In the captured steps its experts got {tokens:,.0f} tokens, the others' {usual:,.0f}"
    if cause.reason == "machine":
        return f"{got}: that explains at most {percent(cause.parts['explained'])} of it, and the rest is the machine."
    return f"{got}: the reason is expert load, and the price is what even experts would gain. {_EXPERTS}"


def _uneven(cause: Cause, measured: TargetStages) -> str:
    if cause.stage is not None:
        text = "On stage {stage} some microbatches take longer than others, and the pipeline waits for them."
    else:
        text = "Microbatches differ in their work, alike on all stages, and the pipeline waits for the long ones."
    return f"{text} {_because(cause, measured)}"


def _unequal(cause: Cause, measured: TargetStages) -> str:
    wait = "all wait in the gradient reduction for the slowest one"
    if measured.forward_only:
        wait = "the step lasts until the slowest one is done"
    return f"Some replicas take longer than others{{when}}, and {wait}. {_because(cause, measured)}"


def _because(cause: Cause, measured: TargetStages) -> str:
    """Returns whether the data are the reason that some microbatches or replicas take longer."""
    if "explained" not in cause.parts:
        return "Nothing that was recorded says whether their sequences differ in length."
    low, at, high = (cause.parts[f"explained{end}"] for end in ("_low", "", "_high"))
    share = (
        f"The lengths of their sequences explain {percent(at)} ({percent(low)} to {percent(high)}) of the difference"
    )
    experts = any(chunk is None or chunk.kinds is None or "moe" in chunk.kinds for chunk in _contents(measured))
    why = "a machine, or experts that get more tokens than others" if experts else "a machine"
    if high == 0.0:
        return f"The lengths of their sequences explain nothing of it, so the reason is {why}."
    if cause.reason is None:
        return f"{share}: whether it is the data is not certain."
    return f"{share}: it is the data." if cause.reason == "data" else f"{share}: it is not the data, but {why}."


def _communication(cause: Cause, measured: TargetStages) -> str:
    if cause.group == "pp":
        return "Exchanges between stages take time in which the stage that waits for them computes nothing."
    if cause.group == "dp":
        return "The gradient reduction goes on behind the last pass, where no compute hides it{when}."
    name = _INSIDE.get(cause.group or "")
    which = f"{name} communication" if name else "communication of a group that the recording does not name"
    waiting = "part of which may be waiting for the last rank of a group"
    # So removing it may gain more than the exposed time of any single stage.
    others = ", and while the pipeline fills and drains, stages wait for that of the others, too"
    others *= measured.sizes.pp > 1
    return f"{capital(which)}, {waiting}, is exposed: no compute hides it{others}."


def _data(cause: Cause, measured: TargetStages) -> str:
    if "waited_ms" not in cause.parts:
        return (
            "The first forward takes longer than the others{when}, on the first stage alone: it seems to wait for its "
            "data."
        )
    one_in = round(1.0 / cause.parts["spread"])
    which = f", mostly one microbatch in {one_in}" * (one_in > 1)
    longest = " on the one that waits longest" * (len(cause.ranks) > 1)
    return (
        f"{{Who}} wait{{s}} for data{{when}}: {{waited_ms}} a step{longest}{which}, for up to {{longest_ms}} at a time."
    )


def _workers(cause: Cause, measured: TargetStages) -> str:
    if "waited_ms" not in cause.parts:
        return ""
    look = "To shorten this, " if len(cause.ranks) > 1 else "Look at its disk, network and loader processes, or "
    option = _WORKERS.get(measured.framework or "", "")
    return f"{look}give the data loader more workers{option}, or let it prefetch more."


def _few_microbatches(cause: Cause, measured: TargetStages) -> str:
    count, option = measured.microbatches or 1, _MICRO_BATCH.get(measured.framework or "", "--micro-batch-size")
    few = f"{counted(count, 'microbatch')} {'is' if count == 1 else 'are'} few"
    more = f"A smaller {option} or a larger global batch makes more (megaprof what-if DIR --microbatches {2 * count})"
    if count % measured.sizes.pp == 0:  # Megatron deals them to model chunks in groups of as many
        option = "--num-virtual-stages-per-pipeline-rank"
        more += f", and more model chunks fill it sooner ({option}; what-if --chunks {2 * measured.sizes.vpp})"
    return f"{few} for {counted(measured.sizes.pp, 'stage')}: filling and draining the pipeline takes long. {more}."


_LONGER = "longer for each microbatch than its layers need"
#: Every kind of cause that a diagnosis names.
KINDS: dict[str, Kind] = {
    "layers": Kind("layers{of}", _layers, about="stage"),
    "embedding_or_loss": Kind("{end}{of}", _ends, about="stage"),
    "recomputation": Kind(
        "recomputation{of}",
        f"The backwards of stage {{stage}} take {{backward_ms}} {_LONGER}, about as long as one forward: this stage "
        "seems to recompute activations, and the others do not.",
        about="stage",
    ),
    **{
        f"slow_{one}": Kind(
            f"slow {one}{{of}}", f"The {one}s of stage {{stage}} take {{{one}_ms}} {_LONGER}.", about="stage"
        )
        for one in ("forward", "backward")
    },
    "unexplained": Kind(
        "slow {stages}",
        lambda cause, measured: (
            "Stage {stage} takes longer than in its quicker steps{when}."
            if of_steps(cause)
            else f"Stage {{stage}} is slow{{when}}: it takes {{excess}} {_LONGER}."
        ),
        _why_slow,
        about="stage",
    ),
    "slow_chunk": Kind(
        "slow chunk {chunk}{of}",
        "Chunk {chunk} of stage {stage} takes {excess} longer for each microbatch than other chunks with as many "
        "layers.",
        about="stage",
    ),
    "slow_rank": Kind("slow {ranks}", _slow_rank, _why_slow, about="machine"),
    "slow_link": Kind(
        "slow link {one}-{other}",
        "Exchanges between stages {one} and {other} take {transfer_ms} once both stages are there{when}, and those of "
        "other links {usual_ms}.",
        "Between GPUs, NCCL_DEBUG=INFO logs NCCL's way there (P2P, NET/IB, NET/Socket), and nccl-tests' sendrecv_perf "
        "measures it.",
        about="machine",
    ),
    "late_entry": Kind("late entry{of}", _late, about="machine"),
    "data_wait": Kind("data wait{of_ranks}", _data, _workers, about="machine"),
    "uneven_microbatches": Kind("uneven microbatches{of}", _uneven),
    "unequal_replicas": Kind(
        "unequal replicas{of}",
        _unequal,
        lambda cause, measured: (
            "" if cause.reason == "machine" else _OVER_REPLICAS.get(measured.framework or "", _OVER_REPLICAS[""])
        ),
    ),
    "communication": Kind("{exchanges}", _communication, lambda cause, measured: _OVERLAP.get(cause.group or "", "")),
    "host_bound": Kind(
        "host bound{of}",
        "The GPU waits for the host inside passes: it has nothing to do, because nothing was launched in time.",
        "CUDA graphs (Megatron's --cuda-graph-impl) need less of the host; larger microbatches give a GPU more to do.",
        about="machine",
    ),
    "stalls": Kind(
        "stalls{of}",
        "Single passes stall{when}, on one rank or another: the recording does not name what holds the host up.",
        about="machine",
    ),
    "garbage_collection": Kind(
        "garbage collection{of}",
        "Python collects garbage inside passes{when}, on one rank or another while the others wait, for up to "
        "{longest_ms} at a time.",
        lambda cause, measured: _MANUAL_GC.get(measured.framework or "", _MANUAL_GC[""]),
        about="machine",
    ),
    "processor_wait": Kind(
        "processor wait{of}",
        "{Who} wait{s} for a processor core{when}{longest} {waited_ms} a step{average}, inside passes and "
        "between them.",
        _CORES,
        about="machine",
    ),
    "few_microbatches": Kind("few microbatches{of}", _few_microbatches),
}
