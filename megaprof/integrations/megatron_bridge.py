"""Megatron-Bridge: the step of its train state. Evaluation is known by the name of its function, ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaprof.integrations.contract import Facts, Hook, Host


def _train_step(arguments: Mapping[str, Any]) -> Facts:
    return Facts(iteration=arguments["global_state"].train_state.step)


def _evaluate(arguments: Mapping[str, Any]) -> Facts:
    return Facts(host_step=arguments["state"].train_state.step)


HOST = Host(
    name="megatron-bridge",
    package="megatron.bridge",
    hooks=(
        Hook("megatron.bridge.training.train", "train_step", _train_step),
        Hook("megatron.bridge.training.eval", "evaluate", _evaluate),
    ),
)
