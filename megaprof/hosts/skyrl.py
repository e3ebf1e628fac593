"""SkyRL: roles by the worker's class, the global step that travels with the batch, and its own profiler's settings.

Ray reads the methods of the worker classes while their module is loading. Wrapping them afterwards would be too late,
and would make the driver send them to its workers by value. So megaprof wraps the functions that these methods call,
and finds the worker among the callers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megaprof.autoload.contract import Facts, Hook, callers
from megaprof.recorders.call import Batch

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig

_WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_WORKER = "skyrl.backends.skyrl_train.workers.worker"
_PROFILER = "torch_profiler_config"
#: The batches of workers without Megatron.
_TRAINING = Batch(attrgetter("model"))
_FORWARD = replace(_TRAINING, forward_only=lambda arguments: True)
_OF_STRATEGY = {
    "optimizer_step": "optimizer",
    "offload_to_cpu": "offload",
    "backload_to_gpu": "offload",
    "save_checkpoint": "saving",
    "save_hf_model": "saving",
}
#: Fields of the profiler's settings that have another name here; the rest have the same.
_RENAMED = {"ranks": "select", "save_path": "dir", "export_type": "export"}
_SAME = ("activities", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


def config_of(policy: Any) -> ProfileConfig:
    """Returns the ProfileConfig of ``trainer.policy`` with the patch: ``megatron_config.megaprof`` and the environment
    count first, then the fields of ``torch_profiler_config`` that differ from their defaults.

    Without a megaprof target, the fields are for SkyRL's own profiler. Raises ValueError for settings that cannot be
    honoured, such as ``enable`` beside a target.
    """
    from megaprof.config.options import SCHEDULE, ProfileConfig, set_in

    megaprof_settings, settings = dict(policy.megatron_config.megaprof), policy.torch_profiler_config
    set_names = {*set_in(os.environ), *megaprof_settings}
    if "target" not in set_names:
        return ProfileConfig.from_values(megaprof_settings)
    if settings.enable:
        raise ValueError(
            f"{_PROFILER}.enable: True is not valid beside a target of megaprof: a process holds one profiler session; "
            "valid: False"
        )
    defaults = type(settings)()
    changed_names = {
        name for name in (*_RENAMED, *SCHEDULE, *_SAME) if getattr(settings, name) != getattr(defaults, name)
    }
    if not changed_names.isdisjoint(SCHEDULE):
        changed_names.update(SCHEDULE)
    if "export_type" in changed_names:
        changed_names.add("with_stack")
    if not set_names.isdisjoint({"steps", "schedule", *SCHEDULE}):
        changed_names.difference_update(SCHEDULE)
    if "all_ranks" in set_names:
        changed_names.discard("ranks")
    if "ranges" in set_names:
        changed_names.discard("with_modules")
    names = {_RENAMED.get(name, name): name for name in sorted(changed_names)}
    values = {option: getattr(settings, name) for option, name in names.items() if option not in set_names}
    if "select" in values:
        ranks = values["select"]
        values["select"] = str(ranks) if isinstance(ranks, int) else ",".join(map(str, ranks or ()))
    spellings = {option: f"{_PROFILER}.{names[option]}" for option in values}
    return ProfileConfig.from_values(values | megaprof_settings, names=spellings)


def _without_megatron(role: str, arguments: Mapping[str, Any]) -> Facts:
    """Reads a batch of a worker without Megatron (``strategy=fsdp``). A forward pass with a loss is the evaluation of
    an SFT run."""
    number = (getattr(arguments["data"], "metadata", None) or {}).get("global_step")
    return Facts(role=role, iteration=number, evaluation=arguments.get("loss_fn") is not None)


def _attach_step(batch: Any, step: int) -> Facts:
    """Gives a batch the global step, in the trainer's process, as SkyRL gives it to those for training."""
    if batch.metadata is not None:
        batch.metadata.setdefault("global_step", step)
    return Facts(host_step=step)


def _worker(model: Any) -> Facts:
    """Returns what the worker around ``model`` knows, from the frame of its method, which has the batch as ``data``."""
    for frame in callers():
        if {"self", "data"} <= {*frame.f_code.co_varnames}:
            worker, data = frame.f_locals.get("self"), frame.f_locals.get("data")
            if getattr(worker, "model", None) is model:
                is_reference = any(base.__name__ == "MegatronRefWorkerBase" for base in type(worker).__mro__)
                metadata = getattr(data, "metadata", None) or {}
                return Facts(role="ref" if is_reference else "actor", iteration=metadata.get("global_step"))
    return Facts()


HOOKS = (
    # Log-probs, of the policy or of the reference. The policy's may come in mini-batches, as its training does: all
    # of a global step have its number, and the first of them is captured. Mini-batches that only run forward are
    # the evaluation of an SFT run.
    Hook(_WRAPPER, "MegatronModelWrapper.forward", lambda given: _worker(given["self"])),
    Hook(
        _WRAPPER,
        "MegatronModelWrapper.forward_backward_mini_batch",
        lambda given: replace(_worker(given["self"]), evaluation=bool(given.get("forward_only"))),
    ),
    # Methods of base classes, which are wrapped before Ray takes the classes that inherit them. Those for Megatron
    # have methods of their own.
    *(
        hook
        for worker, role in (("PolicyWorkerBase", "actor"), ("CriticWorkerBase", "critic"), ("RefWorkerBase", "ref"))
        for hook in (
            Hook(_WORKER, f"{worker}.forward", partial(_without_megatron, role), batch=_FORWARD),
            Hook(_WORKER, f"{worker}.forward_backward", partial(_without_megatron, role), batch=_TRAINING),
        )
    ),
    Hook(_WORKER, "Worker._sync_weights_to_inference_engines", part="weight_sync"),
    Hook(_WRAPPER, "MegatronModelWrapper.run_pending_grad_sync", part="optimizer"),
    *(
        Hook(f"skyrl.backends.skyrl_train.distributed.{module}", f"{strategy}.{method}", part=part)
        for module, strategy in (("megatron.megatron_strategy", "MegatronStrategy"), ("fsdp_strategy", "FSDPStrategy"))
        for method, part in _OF_STRATEGY.items()
    ),
    # In the process that runs the job.
    Hook("skyrl.train.trainer", "RayPPOTrainer.train", ends="job"),
    Hook("skyrl.train.fully_async_trainer", "FullyAsyncRayPPOTrainer.train", ends="job"),
    Hook("skyrl.train.sft_trainer", "SFTTrainer.shutdown", ends="job"),
    Hook(
        "skyrl.train.trainer",
        "RayPPOTrainer._execute_forward_pass",
        lambda given: _attach_step(given["data_fwd_pass"], given["self"].global_step),
    ),
    Hook("skyrl.train.sft_trainer", "SFTTrainer.train_step", lambda given: _attach_step(given["batch"], given["step"])),
)
