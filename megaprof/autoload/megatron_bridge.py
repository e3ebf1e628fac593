"""Megatron-Bridge: a callback for ``pretrain(config, forward_step, callbacks=[callback(profile_config)])``."""

from __future__ import annotations

from typing import Any

from megaprof.config.options import ProfileConfig
from megaprof.install import install_hooks


def callback(config: ProfileConfig | None = None) -> Any:
    """Returns a Megatron-Bridge ``Callback`` that installs the hooks when the model exists, before the loop starts.

    Without ``config``, the ``MEGAPROF_*`` environment decides.
    """
    from megatron.bridge.training.callbacks import Callback

    profile_config = ProfileConfig.from_env() if config is None else config

    class ProfileCallback(Callback):  # type: ignore[misc]
        # The only event before the loop asks for its schedule.
        def on_data_init_start(self, context: Any) -> None:
            install_hooks(context.model, profile_config)

    return ProfileCallback()
