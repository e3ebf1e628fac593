"""verl: whose work a worker does. Its workers are not told the trainer's step, so steps are counted per role.

Shortest way in, no edit: ``actor_rollout_ref.model.external_lib=megaprof.autoload.plugin``, or Ray's set-up hook.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megaprof.hosts.adapter import Facts, Hook

_WORKERS = "verl.workers.engine_workers"


def _worker(arguments: Mapping[str, Any]) -> Facts:
    """A TrainingWorker by itself: the critic, or the one model of an SFT run. Inside an actor's or a reference's worker
    the role is known from outside."""
    worker = arguments["self"]
    return Facts(role="critic" if getattr(worker.config, "model_type", None) == "value_model" else None)


def _infer(arguments: Mapping[str, Any]) -> Facts:
    """An SFT trainer infers for nothing but its validation loss."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    trainer = "verl.trainer.sft_trainer"
    return _worker(arguments)._replace(evaluation=trainer in sys.modules or getattr(main, "name", None) == trainer)


HOOKS = (
    Hook(_WORKERS, "ActorRolloutRefWorker.compute_ref_log_prob", lambda _: Facts(role="ref")),
    Hook(_WORKERS, "ActorRolloutRefWorker.compute_log_prob", lambda _: Facts(role="actor")),
    Hook(_WORKERS, "ActorRolloutRefWorker.update_actor", lambda _: Facts(role="actor")),
    Hook(_WORKERS, "TrainingWorker.train_batch", _worker),
    Hook(_WORKERS, "TrainingWorker.infer_batch", _infer),
)
