"""ms-swift: the callback ``profiler``, for ``--callbacks`` of its Megatron trainers and of its plain ones.

With the patch it is in ms-swift's own registries, and ``--enable_profiler`` selects it. Without the patch,
``--external_plugins`` with the file of `megaprof.autoload.plugin` registers it, and the ``MEGAPROF_*`` environment says
what to do.
"""

from __future__ import annotations

import sys
from typing import Any

from megaprof.config.windows import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.hooks.plain import PlainSteps
from megaprof.install import Handle, install_hooks, install_without_pipeline
from megaprof.integrations.ms_swift import config_of
from megaprof.runtime.patching import Patches

NAME = "profiler"


def register() -> None:
    """Adds the callback to the registries of ms-swift that are loaded."""
    for module, registry, factory in (
        ("swift.megatron.callbacks.mapping", "megatron_callbacks_map", megatron_callback),
        ("swift.callbacks.mapping", "callbacks_map", callback),
    ):
        callbacks = getattr(sys.modules.get(module), registry, None)
        if callbacks is not None:
            callbacks.setdefault(NAME, factory)


def megatron_callback(trainer: Any) -> Any:
    """Returns a ``MegatronCallback`` that installs the hooks before the first step."""
    from swift.megatron.callbacks.base import MegatronCallback

    class ProfilerCallback(MegatronCallback):  # type: ignore[misc]
        handle: Handle | None = None

        def on_train_begin(self) -> None:
            self.handle = install_hooks(self.trainer.wrapped_models, config_of(self.args))

        def on_train_end(self) -> None:
            if self.handle is not None:
                self.handle.remove()

    return ProfilerCallback(trainer)


def callback(args: Any, trainer: Any) -> Any:
    """Returns a ``TrainerCallback`` that captures the steps of a trainer without Megatron, like those of a run without
    a pipeline. The microbatches of a step are those that it accumulates; its number is the trainer's ``global_step``,
    from 0.

    The callback raises ValueError, when training starts, for a target that such a trainer does not have.
    """
    from swift.callbacks.base import TrainerCallback

    class ProfilerCallback(TrainerCallback):  # type: ignore[misc]
        handle: Handle | None = None
        steps: PlainSteps | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            config = config_of(args)
            for target in config.target:
                if target not in (TRAIN_ACTOR, TRAIN_OVERALL):
                    raise ValueError(
                        f"--profiler_target: {target} is not valid for a trainer without Megatron, of which training "
                        f"steps alone are captured; valid: {TRAIN_ACTOR}, {TRAIN_OVERALL}"
                    )
            model = self.trainer.model
            self.patches = Patches()
            self.handle = handle = install_without_pipeline(
                model, config, iteration=lambda: self.trainer.state.global_step
            )
            if handle.active:
                self.steps = steps = PlainSteps(model, args.gradient_accumulation_steps)
                self.patches.shadow(self.trainer, "compute_loss", steps.forward)
                self.patches.shadow(self.trainer.accelerator, "backward", steps.backward)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.steps is not None:
                self.steps.begin()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.steps is not None:
                self.steps.end()

        on_step_end = on_pre_optimizer_step  # if no optimizer step was made

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.handle is not None:
                self.patches.restore()
                self.steps = None
                self.handle.remove()

    return ProfilerCallback(args, trainer)
