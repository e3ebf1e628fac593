"""Megatron-Bridge: the step of its train state, and a callback. Evaluation is known by the name of its function,
``evaluate``.

Its own way in: ``pretrain(config, forward_step, callbacks=[callback(profile_config)])``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaprof.autoload.contract import Facts, Hook, Host

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

_TRAINING = "megatron.bridge.training"
HOST = Host(
    name="megatron-bridge",
    package="megatron.bridge",
    hooks=(
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
    ),
)


def callback(config: ProfileConfig | None = None) -> Any:
    """Returns a Megatron-Bridge ``Callback`` that installs the hooks when the model exists, before the loop starts.

    Without ``config``, the ``MEGAPROF_*`` environment decides.
    """
    from megatron.bridge.training.callbacks import Callback

    from megaprof.autoload.install import install_hooks
    from megaprof.config.options import ProfileConfig

    profile_config = ProfileConfig.from_env() if config is None else config

    class ProfileCallback(Callback):  # type: ignore[misc]
        # The only event before the loop asks for its schedule.
        def on_data_init_start(self, context: Any) -> None:
            install_hooks(context.model, profile_config)

    return ProfileCallback()
