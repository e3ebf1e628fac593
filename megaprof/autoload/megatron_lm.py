"""Megatron-LM: its global arguments, its iteration number, and its RL log-prob passes.

Imports nothing of it: it only looks at what is loaded. Evaluation is known by the name of its function, ``evaluate``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megaprof.autoload.contract import Facts, Hook
from megaprof.metrics.sinks import Writers

_RL = "megatron.rl.rl_utils"


def arguments() -> Any | None:
    """Returns its parsed arguments; None if its trainer is not loaded or has not parsed them yet."""
    return _global("_GLOBAL_ARGS")


def iteration() -> int | None:
    """Returns the number of the running training iteration, which ``train()`` keeps in ``args.curr_iteration``; None
    outside ``train()``. It continues across a resume, like the numbers of --profile-step-start.
    """
    value = getattr(_global("_GLOBAL_ARGS"), "curr_iteration", None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def writers() -> Writers:
    """Returns its writers. Those of TensorBoard and W&B exist on the last rank only; the meter is that of its telemetry
    (nemo-lens, head of August 2026), on the ranks that export."""
    telemetry = _global("_GLOBAL_TELEMETRY_HANDLE")
    meter = telemetry.meter if telemetry is not None and telemetry.is_exporting else None
    return _global("_GLOBAL_TENSORBOARD_WRITER"), _global("_GLOBAL_WANDB_WRITER"), meter


def _global(name: str) -> Any | None:
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)


class _LogProbs:
    """``prepare_data_for_update`` computes log-probs twice with the same model: the policy's own, then, with other
    weights loaded, the reference's (0.16 to the head of August 2026). Nothing in the calls tells them apart."""

    passes = 0

    def prepare(self, arguments: Mapping[str, Any]) -> Facts:
        self.passes = 0
        return Facts()

    def compute(self, arguments: Mapping[str, Any]) -> Facts:
        self.passes += 1
        return Facts(role="actor" if self.passes == 1 else "ref")


_log_probs = _LogProbs()
_TRAINING = "megatron.training.training"

HOOKS = (
    Hook(_TRAINING, "evaluate_and_print_results", part="evaluation"),
    Hook(_TRAINING, "save_checkpoint_and_time", part="saving"),
    Hook(_TRAINING, "maybe_finalize_async_save", part="saving"),
    Hook(_TRAINING, "training_log", part="logging"),
    Hook(_RL, "get_environment_rollouts", part="rollout"),
    Hook(_RL, "prepare_data_for_update", _log_probs.prepare),
    Hook(_RL, "_compute_logprobs_batch", _log_probs.compute),  # 0.16
    Hook(_RL, "compute_logprobs_batch", _log_probs.compute),
)
