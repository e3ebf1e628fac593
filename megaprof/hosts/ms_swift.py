"""ms-swift's Megatron trainers: the trainer's iteration, and whose log-probs are computed.

ms-swift computes log-probs without Megatron's schedule, so such a pass is annotated work and never a
``train_log_probs`` step. Evaluation needs no adapter: ``evaluate`` is known by its name.

Shortest way in, no edit: ``--external_plugins`` with the file of ``megaprof.autoload.plugin``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaprof import roles
from megaprof.hosts.adapter import Facts, Hook

_TRAINERS = "swift.megatron.trainers"


def _train_step(arguments: Mapping[str, Any]) -> Facts:
    return Facts(iteration=arguments["self"].state.iteration)


def _log_probs(arguments: Mapping[str, Any]) -> Facts:
    return Facts(role=roles.current().role or "actor")


HOOKS = (
    Hook(f"{_TRAINERS}.base", "BaseMegatronTrainer.train_step", _train_step),
    Hook(f"{_TRAINERS}.rlhf_mixin", "MegatronRLHFTrainer.null_ref_context", lambda _: Facts(role="ref"), context=True),
    Hook(f"{_TRAINERS}.rlhf_mixin", "MegatronRLHFTrainer.compute_per_token_logps", _log_probs),
    Hook(f"{_TRAINERS}.grpo_trainer", "MegatronGRPOTrainer._compute_teacher_logps", lambda _: Facts(role="teacher")),
)
