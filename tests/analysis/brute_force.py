"""Schedules replayed without any cleverness: what the replay is judged by."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from megaprof.parallel.schedules import PassId, PipelineSchedule, phase_order, stage_program

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


def schedule_of(run) -> PipelineSchedule:
    return PipelineSchedule.checked(
        len(run["forward_ms"]),
        len(run["forward_ms"][0]),
        run["microbatches"],
        group_size=run["microbatch_group_size"],
        forward_only=run["backward_ms"] is None,
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


def brute_force_rendezvous(run, link: Sequence[float], entry: Sequence[float]) -> Spans:
    """Play the stages' programs on a clock. Like NCCL it matches the n-th send from a to b with b's n-th receive
    from a, whatever is in them: that the right tensors meet is a result here, not an assumption."""
    schedule = schedule_of(run)
    programs = [deque(stage_program(schedule, stage)) for stage in range(schedule.stages)]
    channels = defaultdict(lambda: (deque(), deque()))  # (from, to): posted sends, posted receives
    unfinished: dict[int, int] = {}  # transfers that the stage's current exchange still waits for
    spans: Spans = {}
    clock = [(entry[stage], stage) for stage in range(schedule.stages)]
    heapq.heapify(clock)
    while clock:
        now, stage = heapq.heappop(clock)
        if stage in unfinished:
            unfinished[stage] -= 1
            if unfinished[stage]:
                continue
            del unfinished[stage]
        if not programs[stage]:
            continue
        step = programs[stage].popleft()
        if isinstance(step, PassId):
            spans[stage, step] = (now, now + duration(run, stage, step))
            heapq.heappush(clock, (spans[stage, step][1], stage))
            continue
        after, previous = (stage + 1) % schedule.stages, (stage - 1) % schedule.stages
        transfers = [
            ((stage, after), 0, step.send_next),
            ((previous, stage), 1, step.recv_prev),
            ((stage, previous), 0, step.send_prev),
            ((after, stage), 1, step.recv_next),
        ]
        unfinished[stage] = sum(tensor is not None for _, _, tensor in transfers)
        for channel, side, tensor in transfers:
            if tensor is not None:
                channels[channel][side].append((stage, tensor))
                sends, receives = channels[channel]
                if sends and receives:
                    (sender, sent), (receiver, expected) = sends.popleft(), receives.popleft()
                    assert sent == expected
                    done = now + link[link_between(schedule.stages, sender, receiver)]
                    heapq.heappush(clock, (done, sender))
                    heapq.heappush(clock, (done, receiver))
    assert not any(programs), "deadlock"
    return spans


def no_rendezvous(run) -> bool:
    """The interleaved schedule on two stages, for which Megatron demands overlapped communication."""
    return len(run["forward_ms"]) == 2 and len(run["forward_ms"][0]) > 1
