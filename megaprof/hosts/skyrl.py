"""SkyRL: roles by the worker's class, and the trainer's global step, which travels with the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaprof.hosts.adapter import Facts, Hook

_WORKER = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker"


def _train(arguments: Mapping[str, Any]) -> Facts:
    """All mini-batches of one global step have its number; the first of them is the one that is captured."""
    metadata = getattr(arguments["data"], "metadata", None) or {}
    return Facts(role="actor", iteration=metadata.get("global_step"))


def _forward(arguments: Mapping[str, Any]) -> Facts:
    """A forward pass with a loss is the evaluation of an SFT run; without one it computes log-probs."""
    return Facts(role="actor", evaluation=arguments.get("loss_fn") is not None)


HOOKS = (
    Hook(_WORKER, "MegatronPolicyWorkerBase.forward_backward", _train),
    Hook(_WORKER, "MegatronPolicyWorkerBase.forward", _forward),
    Hook(_WORKER, "MegatronRefWorkerBase.forward", lambda _: Facts(role="ref")),
)
