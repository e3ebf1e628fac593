"""What a diagnosis says, in sentences: made here from data, for every output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.diagnosis.policy import LEAST
from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.notes import Note
from megaprof.analysis.report.text.sentences import Finding, trigger
from megaprof.analysis.report.text.words import counted, milliseconds, number, percent, ranks, steps
from megaprof.analysis.report.text.words import stages as stages_in_words
from megaprof.analysis.stages.stages import TargetStages
from megaprof.analysis.table.table import WAIT
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.formats.job.standstill import Standstill
from megaprof.formats.phrases import listed
from megaprof.parallel.selectors import Selector

#: Causes that are about what a stage holds or computes.
OF_A_STAGE = frozenset(
    ("layers", "embedding_or_loss", "recomputation", "slow_forward", "slow_backward", "unexplained", "slow_chunk")
)
_MOST = 8
#: Causes in a table of targets.
_IN_BRIEF = 3
#: What costs less than this part of what it costs where it is there costs nothing elsewhere.
_HARDLY = 0.1
#: Microbatches that differ by less than this factor are the same.
_ALIKE = 1.005
#: What has all ranks collect at once, between steps, in the versions of docs/hosts.
_AT_ONCE = "all ranks collect at once, between steps"
_MANUAL_GC = {
    "": f"With Megatron's --manual-gc --manual-gc-interval 100 {_AT_ONCE}",
    "slime": "With --manual-gc all ranks collect at once, before the steps of a rollout",
    "ms-swift": f"With --manual_gc true --manual_gc_steps 100 {_AT_ONCE}",
    "megatron-bridge": f"With train.manual_gc=True train.manual_gc_interval=100 {_AT_ONCE}",
    "verl": "verl has no option for it: gc.disable() in its workers and gc.collect() at the same steps do it",
    "skyrl": "SkyRL has no option for it: gc.disable() in its workers and gc.collect() at the same steps do it",
}
#: What deals the sequences of a step to replicas by their lengths, in the versions of docs/hosts; others have none.
_OVER_REPLICAS = {
    "verl": "trainer.balance_batch=True",
    "slime": "--balance-data",
    "ms-swift": "--sequence_packing_scheduler dp_balanced",
}
_SHARED = (
    "Something else runs on the cores: dataloader workers, another job, or more ranks than there are cores. Give each "
    "rank cores of its own (numactl, taskset), start fewer workers, or allow the job more cores (cgroup)."
)
#: Of a single rank; 0.18 and later have it. It runs on all GPUs of the host.
_TEST_GPU = "torchrun --nproc_per_node=gpu megatron/training/gpu_sniff_test.py"
_NO_CLOCKS = " The clocks of the stages cannot be compared, so what exchanges and late entries cost is not known."
_GROUPS = {"tp": "tensor-parallel", "ep": "expert-parallel", "cp": "context-parallel"}


def findings(
    measured: TargetStages,
    diagnosis: Diagnosis | None,
    withheld: Note | None,
    job: Path | None = None,
) -> tuple[Finding, ...]:
    """The verdict: the dearest cause first, then the others, what may be one, and what nobody can name.

    ``withheld``: why there is no diagnosis; ``job``: the directory in which its job can be asked for a capture.
    """
    if diagnosis is None:
        return (
            Finding(
                "no_verdict",
                "open",
                f"No cause of lost time is named: {withheld.text if withheld else 'nothing was recorded'}.",
            ),
        )
    beside = (None, *diagnosis.causes)
    found = [_finding(*each, measured, diagnosis, job) for each in zip(diagnosis.causes, beside, strict=False)]
    of_cores = [place for place, each in enumerate(diagnosis.causes) if WAIT in (each.kind, each.reason)]
    if of_cores:
        found.insert(of_cores[0] + 1, Finding("cores", "open", _SHARED))
    if not found:
        surely = "" if diagnosis.sure else " surely"
        text = f"No cause{surely} costs more than {percent(LEAST)} of the step."
        if not diagnosis.sure and not diagnosis.perhaps:
            text += " The steps differ too much to rule one out." if diagnosis.clocks else _NO_CLOCKS
        found.append(Finding("no_cause", "fine" if diagnosis.sure else "open", text))
    found += [_perhaps(cause, diagnosis) for cause in diagnosis.perhaps]
    if diagnosis.rest_ms > LEAST * diagnosis.step_ms:
        lost = f"{milliseconds(diagnosis.rest_ms)} ({percent(diagnosis.rest_ms / diagnosis.step_ms)} of the step)"
        text = f"{lost} is lost to single passes that took longer than usual, now here and now there."
        found.append(Finding("rest", "open", text))
    return tuple(found)


def in_brief(diagnosis: Diagnosis | None, fleet: Fleet | None, standstill: Standstill | None = None) -> Finding:
    """The verdict in a few words, for a table of targets; ``standstill``: where the job stands or was killed."""
    if standstill is not None:
        text = "stands still in" if standstill.outcome == "lasts" else "ended in the middle of"
        return Finding("in_brief", "slow", f"{text} step {standstill.step}")
    told = [f"stood still in {steps(sorted(fleet.stood_still))}"] if fleet is not None and fleet.standstills else []
    for cause in diagnosis.causes if diagnosis is not None else ():
        told.append(f"{name_of(cause)} ({percent(cause.price.ms / diagnosis.step_ms)})" if diagnosis else "")
    if told:
        return Finding("in_brief", "slow", listed(told, _IN_BRIEF))
    if diagnosis is None:
        return Finding("in_brief", "open", "no verdict")
    surely = "" if diagnosis.sure else " surely"
    return Finding(
        "in_brief", "fine" if diagnosis.sure else "open", f"nothing{surely} costs {percent(LEAST)} of the step"
    )


def name_of(cause: Cause) -> str:
    """``slow rank 5``, ``layers of stage 0``: a few words for a table."""
    waits = cause.reason == WAIT and cause.kind != "layers"  # these are there all the same
    return f"{_name(cause)} that waits for a core" if waits else _name(cause)


def _name(cause: Cause) -> str:
    kind = cause.kind.replace("_", " ")
    if cause.kind == "slow_rank":
        return f"slow {ranks(cause.ranks, _MOST)}"
    if cause.ranks:
        return f"{kind} of {ranks(cause.ranks, _MOST)}"
    if cause.link is not None:
        return f"{kind} {cause.link[0]}-{cause.link[1]}"
    if cause.group is not None:
        return "exchanges between stages" if cause.group == "pp" else f"exposed {cause.group} communication"
    if cause.kind == "slow_chunk":
        return f"slow chunk {cause.chunk} of stage {cause.stage}"
    of = cause.stages or (() if cause.stage is None or cause.kind == "data_wait" else (cause.stage,))
    if cause.kind == "unexplained":
        return f"slow {'steps of ' * _of_steps(cause)}{stages_in_words(of)}"
    return f"{kind} of {stages_in_words(of)}" if of else kind


def evidence(cause: Cause, measured: TargetStages) -> str:
    """What is so, and where: a sentence or two."""
    text = _SENTENCES[cause.kind](cause, measured)
    if cause.reason != WAIT:
        return text
    who = ranks(cause.ranks, _MOST) if cause.ranks else f"stage {cause.stage}"
    waited, usual = _part(cause, "waited_ms"), _part(cause, "usual_waited_ms")
    return f"{text} On average {who} waited {waited} a step for a processor core, and the others {usual}."


def price(cause: Cause, diagnosis: Diagnosis) -> str:
    """What that costs, a sentence."""
    at, whole = cause.price, diagnosis.step_ms
    if at.low <= LEAST * whole:
        most = f"no more than {milliseconds(at.high)} ({percent(at.high / whole)} of the step)"
        gains = most if at.high > 0.0 and at.ms > 0.0 else "nothing"
        return f"Mending it alone gains {gains}, because another cause here holds the step back nearly as much."
    if cause.share == 1.0:
        return f"It costs {milliseconds(at.ms)} ({percent(at.ms / whole)} of the step){_interval(at.low, at.high)}."
    others = _elsewhere(cause)
    of_others = f", {milliseconds(others)} of each other one" if others else ""
    there = f"{milliseconds(cause.while_ms)} of each of these steps{of_others}"
    return f"It costs {there}: {milliseconds(at.ms)} on average ({percent(at.ms / whole)}){_interval(at.low, at.high)}."


def basis(measured: TargetStages, diagnosis: Diagnosis, *, captured: bool) -> str:
    """Which steps causes are priced in, where these are others than those of the tables."""
    step, closed = milliseconds(diagnosis.step_ms), milliseconds(diagnosis.closing_ms)
    if not captured:
        return f"causes: from {counted(diagnosis.steps, 'step')} of the run, {step} on average"
    reduced = not measured.forward_only and measured.sizes.dp * measured.sizes.cp > 1
    until = "" if reduced else ", until its last pass"
    if diagnosis.step_ms > measured.step_ms:
        until = ", until its longest replica is done"
    without = f", without {closed} in which megaprof closed the previous window" if diagnosis.closing_ms else ""
    return f"causes and predictions: of {step} a step{until}{without}"


def _finding(
    cause: Cause, before: Cause | None, measured: TargetStages, diagnosis: Diagnosis, job: Path | None
) -> Finding:
    """``before``: what is mended before it, and stands above it."""
    text, command = f"{evidence(cause, measured)} {price(cause, diagnosis)}", None
    if before is not None and cause.price.ms > before.price.ms:
        text += " That is what it gains once what stands above is mended; before that it gains less."
    if len(cause.ranks) > 1 and cause.kind == "slow_rank" and job is not None:
        text += " While the job runs, a capture shows which of them it is:"
        command = trigger(job, measured.target, str(Selector.of_ranks(cause.ranks)))
    elif len(cause.ranks) == 1 and _of_machine(cause) and measured.framework == "megatron-lm":
        text += " On its host, while no job has the GPUs, this says whether one of them is slow (Megatron-LM 0.18 on):"
        command = _TEST_GPU
    return Finding(cause.kind, "slow", text, command)


def _of_machine(cause: Cause) -> bool:
    """Whether it is a slow rank, and nothing that it does explains why."""
    return cause.kind == "slow_rank" and cause.reason in (None, "machine")


def _perhaps(cause: Cause, diagnosis: Diagnosis) -> Finding:
    """What may be a cause, and how many steps would tell, where these are asked for."""
    at, whole = cause.price, diagnosis.step_ms
    costs = f"{milliseconds(at.ms)} ({percent(at.ms / whole)} of the step){_interval(at.low, at.high)}"
    if at.ms <= 0.0:
        costs = f"it may cost up to {milliseconds(at.high)} ({percent(at.high / whole)} of the step)"
    text = f"Perhaps {name_of(cause)}{_when(cause)}: {costs}"
    # Nothing here knows whether the job runs on: what it takes is said of any run like it.
    if _asks(cause, diagnosis):
        text += f"; {counted(diagnosis.steps + cause.more_steps, 'step')} would tell"
    return Finding("perhaps", "open", f"{text}.")


def _asks(perhaps: Cause, diagnosis: Diagnosis) -> bool:
    """Whether more steps are worth it: they would tell, and it may turn out to be what to mend first."""
    dearest = max((cause.price.ms for cause in diagnosis.causes), default=0.0)
    return perhaps.more_steps > 0 and perhaps.price.high > dearest


def more_steps(diagnosis: Diagnosis, predicted: WhatIf) -> int:
    """How many more steps would tell what to do first: what costs most, and which layout is quicker."""
    asked = [each.more_steps for each in diagnosis.perhaps if _asks(each, diagnosis)]
    return max([*asked, predicted.more_steps])


def to_tell(measured: TargetStages, diagnosis: Diagnosis | None, predicted: WhatIf, job: Path | None) -> Finding | None:
    """How so many steps are captured; None where no more of them would tell anything. ``job``: the directory in which
    a job can be asked for them; None: it is told when it begins."""
    if diagnosis is None or not measured.steps or not (more := more_steps(diagnosis, predicted)):
        return None
    wanted, begin = diagnosis.steps + more, measured.steps[0]
    command = f"--profile-steps {measured.target}={begin}:{begin + wanted}"
    if job is not None:
        command = trigger(job, measured.target, steps=wanted)
    return Finding("capture", "open", f"To capture {counted(wanted, 'step')} instead of {diagnosis.steps}:", command)


def _interval(low: float, high: float) -> str:
    """From where to where a price goes, in words where that is nearly anything."""
    if low <= 0.0:
        return f", and could be anything up to {milliseconds(high)}"
    return f", between {number(low)} and {milliseconds(high)}" if number(low) != number(high) else ""


def _layers(cause: Cause, measured: TargetStages) -> str:
    held = {stage.pp: [c.holds.layers if c.holds else None for c in stage.chunks] for stage in measured.stages}
    most = cause.stages or (() if cause.stage is None else (cause.stage,))
    whole = {pp: sum(each or 0 for each in own) for pp, own in held.items() if None not in own}
    if not most or len(whole) < len(held) or any(pp not in whole for pp in most):
        return "The layers are not spread evenly over the model chunks."
    others = [count for pp, count in whole.items() if pp not in most]
    hold, each = ("holds", "") if len(most) == 1 else ("hold", " each")
    against = f", and the others hold {_reach(others)}" if others else ""
    return f"{_capital(stages_in_words(most))} {hold} {counted(whole[most[0]], 'layer')}{each}{against}."


def _reach(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _ends(cause: Cause, measured: TargetStages) -> str:
    own = [c.holds for stage in measured.stages if stage.pp == cause.stage for c in stage.chunks if c.holds]
    names = {
        "the embedding": any(each.embedding for each in own),
        "MTP layers": any(each.mtp for each in own),
        "the output layer and loss": any(each.loss for each in own),
    }
    held = [name for name, there in names.items() if there] or ["an embedding, or an output layer and loss"]
    return f"Stage {cause.stage} holds {_and(held)} beside its layers, which takes {_parts(cause)} of each microbatch."


def _recomputation(cause: Cause, measured: TargetStages) -> str:
    return (
        f"The backwards of stage {cause.stage} take {_part(cause, 'backward_ms')} longer for each microbatch than its "
        "layers need, about as long as one forward: this stage seems to recompute activations, and the others do not."
    )


def _one_kind(own: str, other: str) -> Callable[[Cause, TargetStages], str]:
    def said(cause: Cause, measured: TargetStages) -> str:
        return (
            f"The {own}s of stage {cause.stage} take {_part(cause, f'{own}_ms')} longer for each microbatch than its "
            f"layers need; its {other}s take what they should."
        )

    return said


def _unexplained(cause: Cause, measured: TargetStages) -> str:
    longer = f"{_parts(cause)} longer for each microbatch"
    why = (
        ""
        if cause.reason == WAIT
        else _by_experts(cause) or _comes_and_goes(cause) or " Nothing that was recorded says why."
    )
    if _of_steps(cause):
        return f"Stage {cause.stage} takes longer than in its quicker steps{_when(cause)}.{why}"
    return f"Stage {cause.stage} is slow{_when(cause)}: it takes {longer} than its layers need.{why}"


def _of_steps(cause: Cause) -> bool:
    """Whether some steps of a stage are slow, and not what it holds."""
    return cause.kind == "unexplained" and "forward_ms" not in cause.parts


def _chunk(cause: Cause, measured: TargetStages) -> str:
    return (
        f"Chunk {cause.chunk} of stage {cause.stage} takes {_parts(cause)} longer for each microbatch than other "
        "chunks with as many layers."
    )


def _slow_rank(cause: Cause, measured: TargetStages) -> str:
    several = len(cause.ranks) > 1
    peers = "the other ranks of their stage" if several else "its peers"
    waiting = ", which wait for each other inside a microbatch," if several else ""
    factor = cause.parts.get("factor")
    longer = f"{_times(factor)} as long as" if factor is not None else "longer than"
    # The tables have what disturbs passes in them, too: waits for a core, garbage collection.
    who = f"Undisturbed, {_who(cause)}{waiting} {'compute' if several else 'computes'}"
    text = f"{who} {longer} {peers}{_when(cause)}."
    if cause.share < 1.0 and cause.steps == len(measured.steps):
        text += " The tables have the average of all steps."
    return text if cause.reason == WAIT else f"{text}{_by_experts(cause) or _comes_and_goes(cause)}"


def _by_experts(cause: Cause) -> str:
    """What experts have to do with it, where their tokens were counted."""
    tokens, usual = cause.parts.get("expert_tokens"), cause.parts.get("usual_expert_tokens")
    if tokens is None or usual is None:
        return ""
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
        f"{_capital(_who(cause))} {enter} the step later than the others{_when(cause)}: something between the steps "
        f"takes longer on {there}, such as data loading or other work of the host."
    )


def _slow_link(cause: Cause, measured: TargetStages) -> str:
    one, other = cause.link or (cause.stage or 0, (cause.stage or 0) + 1)
    longer = (
        f"take {_part(cause, 'transfer_ms')}{_when(cause)}, and those of the other links {_part(cause, 'usual_ms')}"
    )
    return f"Exchanges between stages {one} and {other} {longer}, once both stages are there."


def _data_wait(cause: Cause, measured: TargetStages) -> str:
    return (
        f"The first forward takes longer than the others{_when(cause)}, on the first stage alone: it seems to wait for "
        "its data."
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
    text = f"Some replicas take longer than others{_when(cause)}, and {wait}. {_because(cause, measured)}"
    if cause.reason == "machine":
        return text
    switch = _OVER_REPLICAS.get(measured.framework or "")
    how = f": {measured.framework} does with {switch}" if switch else ""
    return f"{text} Spread long sequences evenly over the replicas of a step{how}."


def _because(cause: Cause, measured: TargetStages) -> str:
    """Whether the data are why some take longer."""
    if "explained" not in cause.parts:
        return "Nothing that was recorded says whether their sequences differ in length."
    low, at, high = (cause.parts[f"explained{end}"] for end in ("_low", "", "_high"))
    share = (
        f"The lengths of their sequences explain {percent(at)} ({percent(low)} to {percent(high)}) of the difference"
    )
    held = [chunk.holds.kinds if chunk.holds else None for stage in measured.stages for chunk in stage.chunks]
    experts = any(kinds is None or "moe" in kinds for kinds in held)
    why = "a machine, or experts that get more tokens than others" if experts else "a machine"
    if high == 0.0:
        return f"The lengths of their sequences explain nothing of it, so the reason is {why}."
    if cause.reason == "data":
        return f"{share}: it is the data."
    if cause.reason == "machine":
        return f"{share}: it is not the data, but {why}."
    return f"{share}: whether it is the data is not sure."


def lengths(diagnosis: Diagnosis | None) -> str | None:
    """What microbatches consist of and what their lengths explain, in a line; None where nothing is known of them, or
    they are all the same."""
    found = None if diagnosis is None else diagnosis.lengths
    if found is None or max(found.squares, found.tokens_ratio) < _ALIKE:
        return None
    tokens, sequences = (_from_to(*each) for each in (found.tokens, found.sequences))
    of = found.explained
    return (
        f"microbatches: {tokens} tokens in {sequences} sequences; the longest has {found.squares:.2g} times the mean "
        f"sum of squared lengths and {found.tokens_ratio:.2g} times the mean tokens; lengths explain "
        f"{percent(of.share)} ({percent(of.low)} to {percent(of.high)}) of how long they take"
    )


def _from_to(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _communication(cause: Cause, measured: TargetStages) -> str:
    if cause.group == "pp":
        return "Exchanges between stages take time in which the stage that waits for them computes nothing."
    if cause.group == "dp":
        return f"The gradient reduction goes on behind the last pass, where no compute hides it{_when(cause)}."
    name = _GROUPS.get(cause.group or "")
    which = f"{name} communication" if name else "communication of a group that the recording does not name"
    text = f"{_capital(which)} is exposed: no compute hides it"
    # So removing it may gain more than any stage has of it.
    others = ", and while the pipeline fills and drains, stages wait for that of the others, too"
    return f"{text}{others if measured.sizes.pp > 1 else ''}."


def _host_bound(cause: Cause, measured: TargetStages) -> str:
    return "The GPU waits for the host inside passes: it has nothing to do, because nothing was launched in time."


def _stalls(cause: Cause, measured: TargetStages) -> str:
    return (
        f"Single passes stall{_when(cause)}, on one rank or another: something holds the host up that nothing recorded "
        "names."
    )


def _garbage(cause: Cause, measured: TargetStages) -> str:
    return (
        f"Python collects garbage inside passes{_when(cause)}, on one rank or another while the others wait, for up to "
        f"{_part(cause, 'longest_ms')} at a time. {_MANUAL_GC.get(measured.framework or '', _MANUAL_GC[''])}."
    )


def _processor(cause: Cause, measured: TargetStages) -> str:
    several, waited = len(cause.ranks) > 1, f"{_part(cause, 'waited_ms')} a step"
    average = "" if cause.share == 1.0 else " on average over all steps"
    longest = f"rank {cause.ranks[0]} longest, {waited}" if several else waited
    wait = "wait" if several else "waits"
    return f"{_capital(_who(cause))} {wait} for a processor core{_when(cause)}, {longest}{average}."


def _filling(cause: Cause, measured: TargetStages) -> str:
    count = counted(measured.microbatches or 0, "microbatch")
    return f"{count} are few for {counted(measured.sizes.pp, 'stage')}: filling and draining the pipeline takes long."


_SENTENCES: dict[str, Callable[[Cause, TargetStages], str]] = {
    "layers": _layers,
    "embedding_or_loss": _ends,
    "recomputation": _recomputation,
    "slow_forward": _one_kind("forward", "backward"),
    "slow_backward": _one_kind("backward", "forward"),
    "unexplained": _unexplained,
    "slow_chunk": _chunk,
    "slow_rank": _slow_rank,
    "slow_link": _slow_link,
    "late_entry": _late_entry,
    "data_wait": _data_wait,
    "uneven_microbatches": _uneven,
    "unequal_replicas": _unequal,
    "communication": _communication,
    "host_bound": _host_bound,
    "stalls": _stalls,
    "garbage_collection": _garbage,
    "processor_wait": _processor,
    "few_microbatches": _filling,
}
#: All that a diagnosis names.
KINDS = frozenset(_SENTENCES)


def _who(cause: Cause) -> str:
    """``rank 37 (stage 2, node-0004)``."""
    where = [f"stage {cause.stage}"] if cause.stage is not None else []
    where += cause.hosts if len(cause.hosts) == 1 else ()
    return ranks(cause.ranks, _MOST) + (f" ({', '.join(where)})" if where else "")


def _when(cause: Cause) -> str:
    """In which steps it is so, where not in all."""
    if cause.share == 1.0:
        return ""
    mostly = ", above all" if _elsewhere(cause) else ""
    begins = f" since step {cause.since}" if cause.since is not None else ""
    return mostly + (begins or f" in {round(cause.share * cause.steps)} of {counted(cause.steps, 'step')}")


def _elsewhere(cause: Cause) -> float:
    """Milliseconds that it costs in a step in which it is not there: the average over all steps is that of those and of
    the others. 0 where it costs hardly anything there."""
    if cause.share == 1.0:
        return 0.0
    others = (cause.price.ms - cause.share * cause.while_ms) / (1.0 - cause.share)
    return others if others > _HARDLY * cause.while_ms else 0.0


def _comes_and_goes(cause: Cause) -> str:
    """What that looks like, of a rank or a stage."""
    if cause.share == 1.0 or cause.since is not None or _elsewhere(cause):
        return ""
    return " It comes and goes, as when another program runs on its host now and then."


def _times(factor: float) -> str:
    """``1.3 times``; what is beyond all measure in words."""
    if factor < 100:
        return f"{factor:.2g} times"
    return "hundreds of times" if factor < 1000 else "thousands of times"


def _parts(cause: Cause) -> str:
    """``9.1 ms (3.0 forward, 6.1 backward)``."""
    known = {name.removesuffix("_ms"): ms for name, ms in cause.parts.items() if name in ("forward_ms", "backward_ms")}
    text = milliseconds(sum(known.values()))
    return text if len(known) < 2 else f"{text} ({', '.join(f'{number(ms)} {kind}' for kind, ms in known.items())})"


def _part(cause: Cause, name: str) -> str:
    return milliseconds(cause.parts.get(name, 0.0))


def _and(things: Sequence[str]) -> str:
    return things[0] if len(things) == 1 else f"{', '.join(things[:-1])} and {things[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
