"""What a fleet's numbers say, in sentences: who is slow, since when, by how much, and what would tell more."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from megaprof.analysis.fleet.fleet import Fleet
from megaprof.analysis.fleet.slow import Straggler
from megaprof.analysis.fleet.trends import EXCESS, LASTING_BUCKETS, LASTING_STEPS, Shift
from megaprof.analysis.report.words import sentence
from megaprof.parallel.selectors import Selector, join_spans, spans_of

_MOST = 8


def findings_of(fleet: Fleet) -> Iterator[str]:
    """What is slow or gone, the worst first; one sentence that nothing is, where nothing is. Commands are in backticks
    at the end."""
    found = [
        *(_straggler(fleet, s) for s in fleet.stragglers),
        *(_stage(fleet, pp, shift) for pp, shift in _slower(fleet)),
        *(
            f"gradient synchronisation {_went(fleet, s)}, also where nobody is waited for: the collective is slow, not "
            "a rank's compute"
            for s in fleet.synchronisation_shifts
        ),
        *(
            f"gradient synchronisation of stage {pp} {_went(fleet, s)}, beside that of the other stages: the "
            "collective is slow, or one of its ranks in it, not a rank's compute"
            + (
                " (with tied embeddings the first and the last stage wait for each other in it)"
                if _ends(fleet, pp)
                else ""
            )
            + f"; which, a capture tells: {_trigger(fleet, f'pp={pp}')}"
            for pp, s in fleet.stage_synchronisation
        ),
    ]
    if not found:
        yield "no rank, no stage and no gradient synchronisation is lastingly slower than those beside it"
    yield from found
    for shift in fleet.step_shifts:
        if shift.change > EXCESS:
            yield f"the step {_went(fleet, shift)}"
    if not fleet.step_shifts and fleet.drift is not None and abs(fleet.drift) > EXCESS:
        yield f"step times drift: from the first step to the last by {fleet.drift:+.0%}"
    if fleet.ended:
        listed = ", ".join(
            f"rank {e.rank} (stage {e.stage}{_at(e.host)}) after step {e.last_step}" for e in fleet.ended[:_MOST]
        )
        more = f" and {len(fleet.ended) - _MOST} more" if len(fleet.ended) > _MOST else ""
        last = f"the others' last step is {fleet.steps[1]}"
        yield f"data end early, as of processes that died or hung: {listed}{more}; {last}"


def parted(finding: str) -> tuple[str, str]:
    """A finding as a sentence, and the command behind it, or nothing."""
    said, _, command = finding.partition("`")
    said = said.rstrip()
    return (said[:1].upper() + said[1:] if said.endswith(":") else sentence(said)), command.rstrip("`")


def notes_of(fleet: Fleet) -> Iterator[str]:
    """What a reader of the numbers must know."""
    sizes = fleet.key.sizes
    if fleet.missing:
        world = sizes.tp * sizes.cp * sizes.dp * sizes.pp
        yield f"timelines of {fleet.ranks} of {world} ranks; missing: {_short(fleet.missing)}"
    if fleet.single.count:
        worst = ", ".join(f"step {step} ({factor:.1f} times)" for step, factor in fleet.single.worst)
        every = f", one every {fleet.single.every} steps" if fleet.single.every else ""
        yield (
            f"{fleet.single.count} single step{'s' * (fleet.single.count > 1)} took much longer than the steps around "
            f"(checkpoints, garbage collection){every}: {worst}"
        )
    inside = [name for axis, name in _INSIDE.items() if getattr(sizes, axis) > 1]
    if inside:
        yield f"compute contains {' and '.join(inside)} communication, which a timeline does not tell apart"
    if fleet.clock == "device":
        yield "phases are on the GPU's clock; exchanges between stages are in the gaps between them"
    if fleet.left_out:
        yield f"up to {fleet.left_out} steps of a rank are left out: a window was open in them, or they failed"
    if fleet.again:
        yield f"up to {fleet.again} steps of a rank ran twice, as after a restart from a checkpoint: the later count"
    if fleet.calls < LASTING_STEPS:
        yield f"{fleet.calls} steps are too few to call anything lastingly slow: {LASTING_STEPS} are needed"
    yield f"recording cost {fleet.own_us:.0f} µs per step on the training thread, {fleet.own_fraction:.3%} of it"


_INSIDE = {"tp": "tensor-parallel", "ep": "expert-parallel", "cp": "context-parallel"}


def milliseconds(ms: float) -> str:
    if ms >= 10_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def title(straggler: Straggler) -> str:
    """``rank 37``, ``ranks 32-39``."""
    return f"rank{'s' * (len(straggler.ranks) > 1)} {_short(straggler.ranks)}"


def when(fleet: Fleet, from_step: int, until: int | None, since_start: bool = False) -> str:
    if until is not None:
        return f"from {'the first step' if since_start else _about(fleet, from_step)} to {_about(fleet, until)}"
    return "since the first step" if since_start else f"since {_about(fleet, from_step)}"


def _straggler(fleet: Fleet, s: Straggler) -> str:
    several, over = len(s.ranks) > 1, s.until is not None
    where = f"stage {s.stage}" + (f", {s.hosts[0]}" if len(s.hosts) == 1 else "")
    time = when(fleet, s.from_step, s.until, s.since_start)
    which = f"; which of them it is, a capture tells: {_trigger(fleet, s.capture)}" if s.capture else ""
    if s.what == "arrival":
        come = "came" if over else "have come" if several else "has come"
        they, none = ("they", "none of them was") if several else ("it", "it was not")
        return (
            f"{title(s)} {come} last to the gradient synchronisation {time}: the others spend "
            f"{milliseconds(s.peers_ms)} in it, {they} {milliseconds(s.own_ms)}; {none} found to compute longer: "
            "it may be exchanges, data or what runs between steps, as a capture tells: "
            + _trigger(fleet, str(Selector.of_ranks(s.ranks)))
        )
    if s.what != "compute":
        others = "the other group of its stage" if s.peers == 1 else f"the {s.peers} other groups of its stage"
        verb = "took" if over else "has taken"
        return (
            f"gradient synchronisation among {title(s)} ({where}) {verb} {milliseconds(s.own_ms)} {time}, in {others} "
            f"{milliseconds(s.peers_ms)}{which}"
        )
    verb = ("were" if several else "was") if over else ("have been" if several else "has been")
    others = (
        ("its peer" if s.peers == 1 else f"its {s.peers} peers")
        if not several
        else ("the other such group of the stage" if s.peers == 1 else f"the {s.peers} other such groups of the stage")
    )
    waiting = ", which wait for each other inside a microbatch," if several else ""
    slower = f"{s.factor - 1:.0%} slower than" if s.factor < 2 else f"{s.factor:.1f} times as slow as"
    sentence = f"{title(s)} ({where}){waiting} {verb} {slower} {others} {time}"
    facts = f"computing {milliseconds(s.own_ms)} per step instead of {milliseconds(s.peers_ms)}"
    cost = next((c for c in fleet.step_shifts if c.change > 0 and _together(fleet, c.step, s.from_step)), None)
    grown = f"; the step takes {cost.change:.0%} longer since then" if cost and not s.since_start else ""
    return f"{sentence}, {facts}{grown}{which}"


def evidence(fleet: Fleet, s: Straggler) -> str:
    """The same in short, for the list of causes."""
    return (
        f"{title(s)} of stage {s.stage} compute{'s' * (len(s.ranks) == 1)} {milliseconds(s.own_ms)} per step "
        f"{when(fleet, s.from_step, s.until, s.since_start)}, where others of the stage compute "
        f"{milliseconds(s.peers_ms)} for the same work"
    )


def _slower(fleet: Fleet) -> list[tuple[int, Shift]]:
    return [(stage.pp, shift) for stage in fleet.stages for shift in stage.shifts if shift.change > EXCESS]


def _stage(fleet: Fleet, pp: int, shift: Shift) -> str:
    if fleet.key.sizes.pp == 1:
        return f"a step's compute {_went(fleet, shift)}, on all ranks alike"
    return (
        f"stage {pp} {'was' if shift.until is not None else 'has been'} {shift.change:.0%} slower "
        f"{when(fleet, shift.step, shift.until)}, beside the other stages: most of its ranks compute "
        f"{milliseconds(shift.after_ms)} per step instead of {milliseconds(shift.before_ms)}; what it is, a capture "
        f"tells: {_trigger(fleet, f'pp={pp}')}"
    )


def _went(fleet: Fleet, shift: Shift) -> str:
    verb = "took" if shift.until is not None else "has taken"
    return (
        f"{verb} {milliseconds(shift.after_ms)} instead of {milliseconds(shift.before_ms)} ({shift.change:+.0%}) "
        f"{when(fleet, shift.step, shift.until)}"
    )


def _trigger(fleet: Fleet, selection: str) -> str:
    where, target = shlex.quote(str(fleet.directory)), shlex.quote(fleet.key.target)
    return f"`megaprof trigger {where} --target {target} --steps 2 --select {shlex.quote(selection)}`"


def _together(fleet: Fleet, one: int, other: int) -> bool:
    return abs(one - other) <= 2 * fleet.width + LASTING_BUCKETS


def _about(fleet: Fleet, step: int) -> str:
    return f"step {step}" if fleet.width == 1 else f"about step {step}"


def _ends(fleet: Fleet, pp: int) -> bool:
    return pp in (0, fleet.key.sizes.pp - 1)


def _at(host: str | None) -> str:
    return f", {host}" if host else ""


def _short(numbers: Sequence[int]) -> str:
    listed = join_spans(spans_of(numbers), ",").split(",")
    return ", ".join(listed[:_MOST]) + (f" and {len(listed) - _MOST} more" if len(listed) > _MOST else "")
