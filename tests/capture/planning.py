"""Runs of calls, and the windows that an agenda plans for them. No recorder runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from megaprof import ProfileConfig
from megaprof.capture.agenda import Agenda, Demand, Planned
from megaprof.parallel.topology import ParallelSizes, WorldLayout

ACTOR, LOG_PROBS, EVALUATE, OVERALL = "train_actor", "train_log_probs", "evaluate", "train_overall"


class Call(NamedTuple):
    """The arguments of `Agenda.begins`."""

    target: str
    role: str | None = None
    number: int | None = None
    host_step: int | None = None
    graph: bool = False


def train(*numbers: int, **given: Any) -> list[Call]:
    return [Call(ACTOR, number=number, host_step=number, **given) for number in numbers]


def rl(*numbers: int, mini_batches: int = 1, role: str | None = None) -> list[Call]:
    """Steps of a host that numbers its own: log-probs, which have no number, and then training."""
    steps = ((Call(LOG_PROBS, role, host_step=n), *train(n, role=role) * mini_batches) for n in numbers)
    return [call for step in steps for call in step]


def agenda(*targets: str, role: str | None = None, **options: Any) -> Agenda:
    """Returns the agenda of the second of two ranks."""
    config = ProfileConfig(targets, "traces", **options)
    return Agenda(config, WorldLayout(ParallelSizes(dp=2)).coords(1), role)


def windows_of(agenda: Agenda, calls: Iterable[Call], demand: Demand | None = None) -> list[Planned]:
    """Returns the windows of a run with these calls, in order, if every one of them opens: what a session does, without
    recorders. Annotated work is a call that ends at once. A window that is open at the end closes there."""
    windows: list[Planned] = []
    opened: Planned | None = None

    def close() -> None:
        nonlocal opened
        if opened is not None and opened[1] is not None:
            opened[1].closed += 1
        opened = None

    for call in calls:
        steps, opens = agenda.begins(*call[:4], graph=call.graph, demand=demand)
        if opened is not None and not opened[0].goes_on(steps):
            close()
        for step, request in opens:
            if opened is not None or call.graph:
                agenda.lose(step, request, "a graph" if opened is None else f"a window of {opened[0].target} was open")
                continue
            opened = step, request
            windows.append(opened)
            if request is not None:
                request.taken.append(step.number)
                request.over = len(request.taken) >= request.steps
        if opened is not None and opened[0].target != OVERALL:
            close()
    close()
    return windows
