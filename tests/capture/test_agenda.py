"""Which calls get a window, as a table: calls in, windows out. No recorder runs."""

from __future__ import annotations

from typing import Any

import pytest

from megaprof.capture.agenda import Demand
from tests.capture.planning import ACTOR, EVALUATE, LOG_PROBS, OVERALL, Call, agenda, rl, train, windows_of


def in_words(windows: Any) -> list[str]:
    """``target[.role] step`` of each window."""
    steps = (step for step, _ in windows)
    return [f"{step.target}{'' if step.role is None else f'.{step.role}'} {step.number}" for step in steps]


def planned(calls: list[Call], *targets: str, demand: Demand | None = None, **options: Any) -> list[str]:
    return in_words(windows_of(agenda(*(targets or (ACTOR,)), **options), calls, demand))


def captures(*numbers: int) -> list[Call]:
    return [call._replace(graph=True) for call in train(*numbers)]


NOT_NUMBERED = [Call(ACTOR)] * 8
#: What it shows, the calls, and what is asked for -> the windows.
TABLE: dict[str, tuple[list[Call], tuple[str, ...], dict[str, Any], list[str]]] = {
    "the steps that are named": (train(0, 1, 2, 3), (ACTOR,), {"steps": "1,3"}, ["train_actor 1", "train_actor 3"]),
    "a rank that is not selected": (train(0, 1, 2), (ACTOR,), {"steps": "1", "select": "0"}, []),
    "a host that continues from a checkpoint": (train(100, 101), (ACTOR,), {"steps": "1,101"}, ["train_actor 101"]),
    "without numbers, calls are counted": (NOT_NUMBERED, (ACTOR,), {"steps": "2"}, ["train_actor 2"]),
    "a step that runs again is captured once": (train(1, 1, 2, 1), (ACTOR,), {"steps": "1"}, ["train_actor 1"]),
    "of mini-batches of one number, the first": (train(4, 4, 4), (ACTOR,), {"steps": "4"}, ["train_actor 4"]),
    "also where the host went back to an earlier step": (
        train(1, 2, 1, 1),
        (ACTOR,),
        {"steps": "1,2"},
        ["train_actor 1", "train_actor 2", "train_actor 1"],
    ),
    "warm-up calls are none": (
        NOT_NUMBERED,
        (ACTOR,),
        {"schedule": "1:0:1:2:2"},
        ["train_actor 2", "train_actor 3", "train_actor 5", "train_actor 6"],
    ),
    "a schedule counts calls, whatever their numbers": (
        train(4, 4, 4, 5, 5, 5),
        (ACTOR,),
        {"schedule": "1:0:0:3"},
        ["train_actor 4", "train_actor 4", "train_actor 5"],
    ),
    "the host's step with all that is in it": (
        rl(6, 7, 8, mini_batches=3),
        (OVERALL,),
        {"steps": "7"},
        ["train_overall 7"],
    ),
    "host's steps are counted once, whatever is in them": (
        rl(*range(10, 17), mini_batches=2),
        (OVERALL,),
        {"schedule": "1:1:0:1:2"},
        ["train_overall 12", "train_overall 14"],
    ),
    "without numbers, a host's step is a training step": (
        [Call(EVALUATE), *NOT_NUMBERED],
        (OVERALL,),
        {"steps": "1,2"},
        ["train_overall 1", "train_overall 2"],
    ),
    "the host's step begins with the first role that this rank captures": (
        [Call(LOG_PROBS, "ref", host_step=1), Call(LOG_PROBS, "actor", host_step=1), *train(1, 2, role="actor")],
        (OVERALL,),
        {"steps": "1", "role_select": {"ref": [], "actor": [1]}},
        ["train_overall.actor 1"],
    ),
    "what another window holds has none of its own": (
        rl(3, 4, 5, 6),
        (OVERALL, ACTOR, LOG_PROBS),
        {"steps": "4,5;train_actor=4,6;train_log_probs=0"},
        ["train_log_probs 0", "train_overall 4", "train_overall 5", "train_actor 6"],
    ),
    "a step that captures a CUDA graph": (
        [*train(0, 1), *captures(2), *train(3, 4)],
        (ACTOR,),
        {"steps": "2,4"},
        ["train_actor 4"],
    ),
    "a schedule does not count it": (
        [*train(0, 1), *captures(2), *train(3, 4)],
        (ACTOR,),
        {"schedule": "2"},
        ["train_actor 3"],
    ),
    "nor where it begins the host's step": (
        [*train(0, 1), *captures(2), *train(3, 4)],
        (OVERALL,),
        {"schedule": "2"},
        ["train_overall 3"],
    ),
    "the steps of every role": (
        [call for number in range(3) for role in ("actor", "critic") for call in train(number, role=role)],
        (ACTOR,),
        {"steps": "1"},
        ["train_actor.actor 1", "train_actor.critic 1"],
    ),
    "annotated work": (
        [Call("annotated", "rollout"), *train(0), Call("annotated", "rollout"), *train(1)],
        (ACTOR,),
        {"steps": "train_actor=9;annotated=1", "discrete": True},
        ["annotated.rollout 1"],
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_which_calls_get_a_window(row: str) -> None:
    calls, targets, options, expected = TABLE[row]
    assert planned(calls, *targets, **{"select": "all", **options}) == expected


@pytest.mark.parametrize(
    ("demand", "expected", "reason"),
    [
        (Demand(ACTOR, None, 2, 2, []), ["train_actor 12", "train_actor 13"], None),
        (Demand(OVERALL, None, 1, 2, []), ["train_overall 11", "train_overall 12"], None),
        (Demand(LOG_PROBS, None, 9, 1, []), [], None),
    ],
)
def test_windows_on_demand_are_counted_by_calls(demand: Demand, expected: list[str], reason: str | None) -> None:
    assert planned(rl(*range(10, 16)), ACTOR, demand=demand, steps="none") == expected
    assert (demand.reason, demand.closed) == (reason, len(expected))


def test_a_rank_that_hears_of_it_too_late_captures_nothing() -> None:
    demand, run = Demand(ACTOR, None, -1, 1, []), agenda(ACTOR, steps="none")
    assert windows_of(run, train(10, 11), demand) == []
    assert (demand.over, demand.seen) == (False, False), "the first call is not chosen"
    demand.first = 1
    assert windows_of(run, train(12), demand) == []
    assert demand.reason == "the call came too early"


def test_a_call_of_another_target_is_not_the_one_that_a_rank_waits_for() -> None:
    demand = Demand(ACTOR, None, 1, 2, [])
    run = agenda(ACTOR, steps="none")
    assert windows_of(run, [*train(0), Call(LOG_PROBS)], demand) == []
    assert (demand.over, demand.seen) == (False, False)
    assert in_words(windows_of(run, train(1, 2, 3), demand)) == ["train_actor 1", "train_actor 2"]
    assert demand.over


def test_a_window_of_the_hosts_step_on_demand_opens_where_that_step_begins() -> None:
    """Two mini-batches a step, log-probs first: training call 1 is in the middle of a step, call 2 begins the next
    one."""
    demand = Demand(OVERALL, None, 1, 2, [])
    assert planned(rl(10, 11, 12, 13, mini_batches=2), demand=demand, steps="none") == [
        "train_overall 11",
        "train_overall 12",
    ]
    assert demand.over
    late, run = Demand(OVERALL, None, 0, 2, []), agenda(ACTOR, steps="none")
    assert windows_of(run, rl(10)) == windows_of(run, rl(11), late) == []
    assert late.over


def test_a_step_that_falls_into_a_window_on_demand_is_in_that_one() -> None:
    demand = Demand(ACTOR, None, 1, 1, [])
    run = agenda(ACTOR, steps="1", select="all")
    assert in_words(windows_of(run, train(0, 1, 2, 3), demand)) == ["train_actor 1"]
    assert run.wish(ACTOR, None).wanted[1, 1] == "a window of train_actor was open"


STEPS = train(*range(6)), (ACTOR,)
SIX = "steps 0-5 ran"
ROLES = [Call(EVALUATE, "actor")]


@pytest.mark.parametrize(
    ("calls", "targets", "options", "said"),
    [
        (*STEPS, {"steps": "5"}, []),
        (*STEPS, {"steps": "500"}, [f"train_actor: step 500 never came: {SIX}"]),
        (*STEPS, {"steps": "4:9"}, [f"train_actor: steps 6-8 never came: {SIX}"]),
        (*STEPS, {"steps": "4:11"}, [f"train_actor: steps 6-10 never came: {SIX}"]),
        (*STEPS, {"steps": "3:1000000"}, [f"train_actor: steps 6-10, ... never came: {SIX}"]),
        (
            *STEPS,
            {"schedule": "5:0:0:2"},
            ["train_actor: 1 of 2 steps of the schedule came: it needs 7 calls, and 6 ran"],
        ),
        (
            train(*[4] * 6),
            (ACTOR,),
            {"schedule": "0:0:0:3"},
            [],
        ),
        (train(0), (ACTOR, LOG_PROBS), {"steps": "0"}, ["train_log_probs never ran"]),
        (train(0), (ACTOR,), {"steps": "0", "discrete": True}, ["annotated never ran"]),
        (train(0), (ACTOR,), {"steps": "train_actor=0;annotated=none", "discrete": True}, []),
        (
            train(0) + [Call("annotated", "rollout")] * 3,
            (ACTOR,),
            {"steps": "train_actor=0;annotated=2,5", "discrete": True},
            ["annotated of rollout: step 5 never came: steps 0-2 ran"],
        ),
        (train(0), (ACTOR, LOG_PROBS), {"steps": "train_actor=0;train_log_probs=none"}, []),
        (
            rl(0, 1),
            (OVERALL, ACTOR),
            {"steps": "0,1"},
            ["train_actor: steps 0-1 were not captured: a window of train_overall was open"],
        ),
        (
            rl(0, 1, role="ref") + rl(1, 2, role="actor"),
            (OVERALL,),
            {"steps": "1:5"},
            ["train_overall: steps 3-4 never came: steps 0-2 ran"],
        ),
        (
            train(0) + ROLES,
            (ACTOR,),
            {"role_select": "actr=0", "steps": "0"},
            ["actr never ran in this process (roles that ran: actor)"],
        ),
        (
            train(1),
            (ACTOR,),
            {"role_select": "actor=1", "steps": "1"},
            ["actor never ran in this process (no role ran)"],
        ),
    ],
)
def test_what_never_came(calls: list[Call], targets: tuple[str, ...], options: dict[str, Any], said: list[str]) -> None:
    run = agenda(*targets, **{"select": "all", **options})
    windows_of(run, calls)
    assert list(run.never_came()) == said
