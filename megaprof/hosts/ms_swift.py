"""ms-swift's Megatron trainers: their iteration, and the role whose log-probs they compute; the callback ``profiler``,
for ``--callbacks`` of these and of its plain trainers; and its options, with the patch.

ms-swift computes log-probs without Megatron's schedule, so such a pass is annotated work and never a
``train_log_probs`` step. Evaluation is known by the name of its function, ``evaluate``.

Shortest way in, no edit: ``--external_plugins`` with the file of `megaprof.hosts.plugin`, which registers the
callback; the ``MEGAPROF_*`` environment says what to do. With the patch, the callback is in ms-swift's own registries,
and ``--enable_profiler`` selects it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from megaprof.autoload.contract import Facts, Hook
from megaprof.capture import roles
from megaprof.config.values import TRAIN_ACTOR, TRAIN_OVERALL
from megaprof.runtime.patching import Patches

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

_BASE, _TRAINER = "swift.megatron.trainers.base", "BaseMegatronTrainer"
NAME = "profiler"
_RLHF, _GRPO = "swift.megatron.trainers.rlhf_mixin", "swift.megatron.trainers.grpo_trainer"
_ROLLOUT = "swift.megatron.trainers.rollout_mixin"


#: What ``--profiler_contents`` names, in the terms of ProfileConfig.
_CONTENTS = {"stack": "with_stack", "memory": "profile_memory", "shapes": "record_shapes", "flops": "with_flops"}
#: What follows ``--profiler_``, for our options that do not come from ``--profiler_contents``.
_NAMES = {"target": "target", "tool": "tool", "dir": "save_path", "select": "ranks", "steps": "steps"}


def config_of(args: Any) -> ProfileConfig:
    """Returns the ProfileConfig of ms-swift's arguments with the patch: ``--enable_profiler``, ``--profiler_tool``,
    ``--profiler_target``, ``--profiler_save_path``, ``--profiler_ranks``, ``--profiler_contents`` and
    ``--profiler_steps``.

    ``--profiler_ranks`` and ``--profiler_steps`` are lists of numbers, or what --profile-select and --profile-steps
    take; steps are the trainer's own iterations, the first being 0. ``--callbacks profiler`` means the same as
    ``--enable_profiler``. Without either, and without the patch, the ``MEGAPROF_*`` environment decides. Raises
    ValueError for settings that cannot be honoured.
    """
    from megaprof.config.options import ACTIVITIES, ProfileConfig, variable

    enabled = getattr(args, "enable_profiler", None)
    if not enabled and (enabled is None or "profiler" not in args.callbacks):
        return ProfileConfig.from_env()
    contents = [word.lower() for word in args.profiler_contents]
    for word in contents:
        if word not in (*ACTIVITIES, *_CONTENTS):
            raise ValueError(f"--profiler_contents: unknown {word!r}; valid: {', '.join((*ACTIVITIES, *_CONTENTS))}")
    if not args.profiler_save_path and variable("dir") not in os.environ:
        raise ValueError("--profiler_save_path: not set; valid: the directory that receives the traces")
    options: dict[str, Any] = {_CONTENTS[word]: True for word in contents if word in _CONTENTS}
    optional = {
        "target": args.profiler_target,
        "tool": args.profiler_tool,
        "activities": [word for word in contents if word in ACTIVITIES] if "torch" in args.profiler_tool else None,
        "dir": args.profiler_save_path,
        "select": ",".join(args.profiler_ranks),
        "steps": ",".join(args.profiler_steps),
    }
    options |= {name: value for name, value in optional.items() if value}
    names = {name: f"--profiler_{_NAMES.get(name, 'contents')}" for name in options}
    return ProfileConfig.from_values(options, names=names)


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

    from megaprof.autoload.install import Handle, install_hooks

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

    from megaprof.autoload.install import Handle, install_hooks
    from megaprof.hooks.plain import PlainSteps

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
            self.handle = handle = install_hooks(
                model, config, iteration=lambda: self.trainer.state.global_step, pipeline=False
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


HOOKS = (
    Hook(_BASE, f"{_TRAINER}.train_step", lambda arguments: Facts(iteration=arguments["self"].state.iteration)),
    Hook(
        _BASE,
        f"{_TRAINER}.evaluate",
        lambda arguments: Facts(host_step=arguments["self"].state.iteration),
        part="evaluation",
    ),
    Hook(_BASE, f"{_TRAINER}.save_checkpoint", part="saving"),
    Hook(_BASE, "maybe_finalize_async_save", part="saving"),
    Hook(_BASE, f"{_TRAINER}.on_log", part="logging"),
    Hook(_RLHF, "MegatronRLHFTrainer.null_ref_context", lambda _: Facts(role="ref"), context=True),
    Hook(
        _RLHF,
        "MegatronRLHFTrainer.compute_per_token_logps",
        lambda _: Facts(role=roles.current().role or "actor"),
        part="train_log_probs",
    ),
    Hook(_GRPO, "MegatronGRPOTrainer._compute_teacher_logps", lambda _: Facts(role="teacher"), part="train_log_probs"),
    Hook(_GRPO, "MegatronGRPOTrainer._score_completions", part="rewards"),
    Hook(_ROLLOUT, "MegatronRolloutMixin._move_model_to_vllm", part="weight_sync"),
    *(Hook(_ROLLOUT, f"MegatronRolloutMixin.{name}", part="rollout") for name in ("_rollout", "_rollout_requests")),
)
