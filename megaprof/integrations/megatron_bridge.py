"""Megatron-Bridge: the step of its train state. Evaluation needs no adapter: ``evaluate`` is known by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaprof.integrations.contract import Facts, Hook


def _train_step(arguments: Mapping[str, Any]) -> Facts:
    return Facts(iteration=arguments["global_state"].train_state.step)


HOOKS = (Hook("megatron.bridge.training.train", "train_step", _train_step),)
