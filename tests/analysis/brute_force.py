"""Schedules replayed without any cleverness: what the replay is judged by."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from megaprof.parallel.schedules import PassId, PipelineSchedule, SendReceive, phase_order, stage_program

Spans = dict[tuple[int, PassId], tuple[float, float]]
"""Start and end of every pass on every stage, in milliseconds."""

# Quarters of a millisecond: sums are exact in floating point, so results can be compared with ==.
milliseconds = st.integers(0, 40).map(lambda quarters: quarters / 4)


@st.composite
def runs(draw, min_stages=1, forward_only=None):
    """(arguments of simulate without the options on communication)."""
    stages = draw(st.integers(min_stages, 5))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    if chunks > 1:
        group = draw(st.integers(stages, stages + 2))
        microbatches = group * draw(st.integers(1, 2)) + draw(st.sampled_from([0, *range(stages, group)]))
    else:
        group, microbatches = None, draw(st.integers(1, 9))
    entry = milliseconds | st.lists(milliseconds, min_size=microbatches, max_size=microbatches)
    times = st.lists(st.lists(entry, min_size=chunks, max_size=chunks), min_size=stages, max_size=stages)
    without_backward = draw(st.booleans()) if forward_only is None else forward_only
    return {
        "forward_ms": draw(times),
        "backward_ms": None if without_backward else draw(times),
        "microbatches": microbatches,
        "microbatch_group_size": group,
    }


def schedule_of(run, overlap: str = "all") -> PipelineSchedule:
    return PipelineSchedule.checked(
        len(run["forward_ms"]),
        len(run["forward_ms"][0]),
        run["microbatches"],
        group_size=run["microbatch_group_size"],
        forward_only=run["backward_ms"] is None,
        overlap=overlap,
    )


def duration(run: dict[str, Any], stage: int, phase: PassId) -> float:
    entry = run["forward_ms" if phase.kind == "forward" else "backward_ms"][stage][phase.chunk]
    return entry[phase.microbatch] if isinstance(entry, list) else entry


def producer(schedule: PipelineSchedule, stage: int, phase: PassId) -> tuple[int, PassId] | None:
    """Which phase computes the input of this one; pieces are the chunks of the model in the order of its layers."""
    piece = phase.chunk * schedule.stages + stage
    if phase.kind == "forward":
        piece -= 1
        return (piece % schedule.stages, phase._replace(chunk=piece // schedule.stages)) if piece >= 0 else None
    if piece == schedule.stages * schedule.chunks - 1:
        return stage, phase._replace(kind="forward")
    piece += 1
    return piece % schedule.stages, phase._replace(chunk=piece // schedule.stages)


def link_between(stages: int, *neighbours: int) -> int:
    """The link's number: that of the stage before it, in a ring that two stages do not make."""
    low, high = sorted(neighbours)
    return low if high - low == 1 else stages - 1


def brute_force_buffered(run, link: Sequence[float], entry: Sequence[float]) -> Spans:
    """Raise start times until no rule is broken any more."""
    schedule = schedule_of(run)
    rules = []
    for stage in range(schedule.stages):
        order = phase_order(schedule, stage)
        for before, phase in zip([None, *order], order, strict=False):
            rules.append((stage, before, phase, producer(schedule, stage, phase)))
    spans = {(stage, phase): (entry[stage], entry[stage] + duration(run, stage, phase)) for stage, _, phase, _ in rules}
    changed = True
    while changed:
        changed = False
        for stage, before, phase, source in rules:
            start = spans[stage, before][1] if before else entry[stage]
            if source:
                there = link[link_between(schedule.stages, source[0], stage)] if source[0] != stage else 0.0
                start = max(start, spans[source][1] + there)
            if start != spans[stage, phase][0]:
                spans[stage, phase] = (start, start + duration(run, stage, phase))
                changed = True
    return spans


def brute_force_programs(
    schedule: PipelineSchedule, run, link: Sequence[float], entry: Sequence[float], rendezvous: bool = True
) -> Spans:
    """Play the stages' programs. Like NCCL it matches the n-th send from a to b with b's n-th receive from a, whatever
    is in them: that the right tensors meet is a result here, not an assumption."""
    programs = [deque(stage_program(schedule, stage)) for stage in range(schedule.stages)]
    posts = defaultdict(list)  # (from, to, kind of pass, whether it is the sender's): tensors, and since when
    clock, spans, moved = list(entry), {}, True

    def posted(stage: int, step: SendReceive) -> Iterator[tuple[tuple[int, int, str, bool], PassId]]:
        after, previous = (stage + 1) % schedule.stages, (stage - 1) % schedule.stages
        ends = ((stage, after), True), ((previous, stage), False), ((stage, previous), True), ((after, stage), False)
        for (channel, sends), tensor in zip(ends, step, strict=True):
            if tensor is not None:
                yield (*channel, tensor.kind, sends), tensor

    def done(side: tuple[int, int, str, bool], tensor: PassId) -> float | None:
        """When a transfer is through; None if its other end has not begun it."""
        number = [each for each, _ in posts[side]].index(tensor)
        other = posts[(*side[:3], not side[3])]
        if side[3] and not rendezvous:
            return 0.0
        if number >= len(other):
            return None
        (there, came), (_, own) = other[number], posts[side][number]
        assert there == tensor
        return (max(came, own) if rendezvous else came) + link[link_between(schedule.stages, *side[:2])]

    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while program:
                step = program[0]
                if isinstance(step, PassId):
                    spans[stage, step] = (clock[stage], clock[stage] + duration(run, stage, step))
                    clock[stage] = spans[stage, step][1]
                elif isinstance(step, SendReceive):
                    for side, tensor in posted(stage, step):
                        posts[side].append((tensor, clock[stage]))
                else:
                    ends = [done(*each) for each in posted(stage, step.transfers)]
                    if None in ends:
                        break
                    clock[stage] = max(clock[stage], *ends)
                program.popleft()
                moved = True
    assert not any(programs), "deadlock"
    return spans


def no_rendezvous(run) -> bool:
    """The interleaved schedule on two stages, for which Megatron demands overlapped communication."""
    return len(run["forward_ms"]) == 2 and len(run["forward_ms"][0]) > 1
