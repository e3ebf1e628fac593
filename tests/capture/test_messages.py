"""What is said at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from megaprof.capture.messages import never_came
from tests.capture.planning import ACTOR, EVALUATE, LOG_PROBS, OVERALL, Call, agenda, rl, train, windows_of

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
            ["train_actor: 1 of 3 steps of the schedule came: further calls had the number of a captured step"],
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
    assert list(never_came(run._config, run)) == said
