"""Megatron-Bridge: the step of its train state. Evaluation is known by the name of its function, ``evaluate``."""

from __future__ import annotations

from megaprof.autoload.contract import Facts, Hook

_TRAINING = "megatron.bridge.training"
HOOKS = (
    Hook(
        f"{_TRAINING}.train",
        "train_step",
        lambda arguments: Facts(iteration=arguments["global_state"].train_state.step),
    ),
    Hook(f"{_TRAINING}.train", "evaluate_and_print_results", part="evaluation"),
    Hook(f"{_TRAINING}.train", "save_checkpoint_and_time", part="saving"),
    Hook(f"{_TRAINING}.checkpointing", "DefaultCheckpointManager.finalize_async_saves", part="saving"),
    Hook(f"{_TRAINING}.train", "training_log", part="logging"),
    Hook(f"{_TRAINING}.eval", "evaluate", lambda arguments: Facts(host_step=arguments["state"].train_state.step)),
)
