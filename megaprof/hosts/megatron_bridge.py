"""Megatron-Bridge: the step of its train state. Evaluation needs no adapter: ``evaluate`` is known by its name.

Shortest way in besides ``megaprof run``: ``pretrain(config, forward_step, callbacks=[callback(profile_config)])``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaprof.hosts.adapter import Facts, Hook

if TYPE_CHECKING:
    from megaprof.config import ProfileConfig


def _train_step(arguments: Mapping[str, Any]) -> Facts:
    return Facts(iteration=arguments["global_state"].train_state.step)


HOOKS = (Hook("megatron.bridge.training.train", "train_step", _train_step),)


def callback(config: ProfileConfig | None = None) -> Any:
    """A Megatron-Bridge ``Callback`` that installs the hooks when the model exists and before the loop starts.

    Without ``config`` the ``MEGAPROF_*`` environment decides.
    """
    from megatron.bridge.training.callbacks import Callback

    from megaprof.config import ProfileConfig
    from megaprof.hooks.install import install_hooks

    settled = ProfileConfig.from_env() if config is None else config

    class ProfileCallback(Callback):  # type: ignore[misc]
        """The one event before the loop asks for its schedule."""

        def on_data_init_start(self, context: Any) -> None:
            install_hooks(context.model, settled)

    return ProfileCallback()
