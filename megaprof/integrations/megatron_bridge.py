"""Megatron-Bridge: the step of its train state. Evaluation is known by the name of its function, ``evaluate``."""

from __future__ import annotations

from megaprof.integrations.contract import Facts, Hook, Host

_TRAINING = "megatron.bridge.training"
HOST = Host(
    name="megatron-bridge",
    package="megatron.bridge",
    hooks=(
        Hook(
            f"{_TRAINING}.train",
            "train_step",
            lambda given: Facts(iteration=given["global_state"].train_state.step),
        ),
        Hook(f"{_TRAINING}.eval", "evaluate", lambda given: Facts(host_step=given["state"].train_state.step)),
    ),
)
