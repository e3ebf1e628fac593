"""verl: the roles of its workers and the steps of its trainer; its own profiling settings, where they name megaprof.

Shortest way in, no edit: ``VERL_USE_EXTERNAL_MODULES=megaprof.autoload.plugin`` in the workers' environment and
``global_profiler.tool=megaprof``. verl treats an unknown tool as no tool, but its trainer still notifies every worker
when a step of ``global_profiler.steps`` starts and ends. Otherwise the trainer's step travels with the batches that its
methods hand to the workers. The SFT trainer calls its worker itself, so its step is found in that caller.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaprof.capture.process import process
from megaprof.config.options import ProfileConfig
from megaprof.hooks.batch import Batch
from megaprof.integrations.contract import Facts, Hook, Host, callers, install_as_asked, over
from megaprof.integrations.verl_settings import NO_STEP, announces, config_from, config_of_job, config_of_worker
from megaprof.runtime.logs import logger, show_lines

__all__ = ["HOST", "config_from"]

_WORKERS = "verl.workers.engine_workers"
_OLD_WORKERS = "verl.workers.megatron_workers"
_PROFILER = "verl.utils.profiler.profile"
_SFT_TRAINER = "verl.trainer.sft_trainer"
_EXPERIMENTAL = "verl.experimental"

#: The number of a profiled step that the trainer does not number: megaprof counts it.
_UNNUMBERED = -1
#: The key of the trainer's step in a batch on its way to the workers.
_SENT = "megaprof_step"


class _Requested:
    """The requests of verl's own settings to megaprof in this process, once they are seen. All None if the settings do
    not name megaprof."""

    config: ProfileConfig | ValueError | None = None
    """The configuration, or the mistake in it."""
    step: int | None = None
    """The trainer's step while it is to be profiled, else NO_STEP."""


def _config() -> ProfileConfig | None:
    """Returns what verl's own settings ask for; None if they do not name megaprof. Raises ValueError like
    `config_from`."""
    if isinstance(_Requested.config, ValueError):
        raise _Requested.config
    return _Requested.config


def _adopt(worker: Any) -> None:
    """Takes verl's settings from a worker that has them; whatever else configures megaprof comes first."""
    if _Requested.config is not None or process.sessions or "MEGAPROF_TARGET" in os.environ:
        return
    try:
        config = config_of_worker(worker)
    except ValueError as mistake:
        # Raised when the host asks for the schedule, because this function must not fail.
        _Requested.config, _Requested.step = mistake, NO_STEP
        return
    if config is not None:
        _Requested.config, _Requested.step = config, NO_STEP if announces(worker) else _UNNUMBERED
        install_as_asked()


def _facts(arguments: Mapping[str, Any], role: str | None) -> Facts:
    _adopt(arguments["self"])
    sent_step = _step_in(arguments.get("data")) if _Requested.step in (None, _UNNUMBERED) else None
    return Facts(role=role, iteration=_Requested.step if sent_step is None else sent_step)


def _reader_for(role: str) -> Any:
    return lambda arguments: _facts(arguments, role)


def _send_step(arguments: Mapping[str, Any]) -> Facts:
    """Gives a batch that is about to go to the workers the trainer's step, in the trainer's process."""
    batch = arguments["batch"]
    metadata = (
        batch.meta_info if hasattr(batch, "meta_info") else batch.extra_info
    )  # which goes through a transfer queue
    metadata[_SENT] = arguments["self"].global_steps
    return Facts()


def _log_probs(arguments: Mapping[str, Any]) -> Facts:
    """Reads log-probs of the actor or, with LoRA, of the reference: that is the actor's model without its adapter, and
    verl asks the actor's worker for both."""
    return _facts(arguments, "ref" if _batch_value(arguments.get("data"), "no_lora_adapter") else "actor")


def _step_in(data: Any) -> int | None:
    """Returns the trainer's step that came with a batch; None if none did."""
    step = _batch_value(data, _SENT)
    return None if step is None else int(step)


def _batch_value(data: Any, name: str) -> Any:
    """Returns what came with a batch under a name, beside its tensors; None if nothing did."""
    for source in (getattr(data, "meta_info", None), getattr(data, "extra_info", None), data):
        get = getattr(source, "get", None)
        value = None if get is None else get(name, None)
        if value is not None:
            return getattr(value, "data", value)  # a tensordict wraps what is no tensor
    return None


def _worker(arguments: Mapping[str, Any]) -> Facts:
    """Reads a call of a TrainingWorker by itself: the critic, or the one model of an SFT run. Inside an actor's or a
    reference's worker the role is known already."""
    worker = arguments["self"]
    facts = _facts(arguments, "critic" if getattr(worker.config, "model_type", None) == "value_model" else None)
    if _sft() and facts.iteration in (None, _UNNUMBERED):
        facts = replace(facts, iteration=_sft_step())
    return facts


def _infer(arguments: Mapping[str, Any]) -> Facts:
    """Reads an inference. An SFT trainer infers only for its validation loss."""
    return replace(_worker(arguments), evaluation=_sft())


def _sft() -> bool:
    """Returns whether this is a process of the SFT trainer that torchrun starts."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _SFT_TRAINER in sys.modules or getattr(main, "name", None) == _SFT_TRAINER


def _sft_step() -> int | None:
    """Returns the trainer's step, which continues across a resume. ``SFTTrainer.fit`` has it in a local variable
    only."""
    for frame in callers():
        if frame.f_code.co_name == "fit" and isinstance(step := frame.f_locals.get("global_step"), int):
            return step
    return None


def _start(arguments: Mapping[str, Any]) -> Facts:
    """Notes that a step to be profiled starts. verl's trainer calls this on every worker, whatever the tool."""
    _adopt(arguments["self"])
    if _Requested.step is not None:
        _Requested.step = arguments.get("kwargs", {}).get("profile_step", _UNNUMBERED)
    return Facts()


def _stop(arguments: Mapping[str, Any]) -> Facts:
    """Notes that the step is over. With ``run_command`` it is the last one, and verl runs its ``finish_hook_cmd``. So
    do we, since Ray may kill this worker before it gets to its end."""
    over("step")
    if _Requested.step is not None:
        _Requested.step = NO_STEP
        if arguments.get("kwargs", {}).get("run_command", arguments.get("run_command", True)):
            over("capture")
    return Facts()


def _run_job(arguments: Mapping[str, Any]) -> Facts:
    """Learns from verl's settings where the workers' files are: the trainer's process waits for them at the end. It may
    be on any node, so it logs where it is."""
    if _Requested.config is None and "MEGAPROF_TARGET" not in os.environ:
        config = arguments.get("config", getattr(arguments.get("self"), "config", None))
        _Requested.config = config_of_job(config or {})
    show_lines()
    logger.info("megaprof: verl's controller is process %d on %s", os.getpid(), socket.gethostname())
    return Facts()


#: Up to verl 0.6.
_OLD_FUNCTIONS = {
    "ActorRolloutRefWorker.generate_sequences": _reader_for("rollout"),
    "ActorRolloutRefWorker.compute_ref_log_prob": _reader_for("ref"),
    "ActorRolloutRefWorker.compute_log_prob": _log_probs,
    "ActorRolloutRefWorker.update_actor": _reader_for("actor"),
    "CriticWorker.compute_values": _reader_for("critic"),
    "CriticWorker.update_critic": _reader_for("critic"),
    "RewardModelWorker.compute_rm_score": _reader_for("reward"),
}


def _module(engine: Any) -> Any:
    """Returns an engine's model. TorchTitan's engine has it in a list, and refuses more than one part."""
    module = engine.module
    return module[0] if isinstance(module, list) else module


#: The batches of engines without Megatron, which all run the forward of a microbatch by their ``forward_step``.
_BATCH = Batch(_module, "forward_step", lambda arguments: bool(arguments.get("forward_only")))
_ENGINES = {
    "fsdp": "FSDPEngine",
    "veomni": "VeOmniEngine",
    "automodel": "AutomodelEngine",
    "torchtitan": "TorchTitanEngine",
}

#: Methods of both trainers of PPO that hand a batch to the workers; the second one's goes through a transfer queue.
_TRAINERS = ("verl.trainer.ppo.ray_trainer:RayPPOTrainer", "verl.trainer.ppo.v1.trainer_base:PPOTrainer")
_SENDERS = ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values", "_update_critic", "_update_actor")

HOST = Host(
    name="verl",
    package="verl",
    hooks=(
        Hook(_WORKERS, "ActorRolloutRefWorker.compute_ref_log_prob", _reader_for("ref")),
        Hook(_WORKERS, "ActorRolloutRefWorker.compute_log_prob", _log_probs),
        Hook(_WORKERS, "ActorRolloutRefWorker.update_actor", _reader_for("actor")),
        Hook(_WORKERS, "TrainingWorker.train_batch", _worker),
        Hook(_WORKERS, "TrainingWorker.infer_batch", _infer),
        *(
            Hook(f"verl.workers.engine.{name}.transformer_impl", f"{engine}.forward_backward_batch", batch=_BATCH)
            for name, engine in _ENGINES.items()
        ),
        *(Hook(_OLD_WORKERS, function, read) for function, read in _OLD_FUNCTIONS.items()),
        Hook(_PROFILER, "DistProfilerExtension.start_profile", _start),
        Hook(_PROFILER, "DistProfilerExtension.stop_profile", _stop),
        # In the process that runs the job.
        *(
            hook
            for module, _, trainer in (name.partition(":") for name in _TRAINERS)
            for hook in (
                Hook(module, f"{trainer}.fit", _run_job, ends="job"),
                *(Hook(module, f"{trainer}.{sender}", _send_step) for sender in _SENDERS),
            )
        ),
        Hook("verl.trainer.sft_trainer_ray", "SFTTrainer.fit", _run_job, ends="job"),
        # Trainers that override it. That of fully_async_policy is an actor of Ray, whose methods are out of reach; when
        # it is done, the process that runs the job clears the queue of samples.
        Hook(f"{_EXPERIMENTAL}.separation.utils", "create_role_worker_mapping", _run_job),
        Hook(f"{_EXPERIMENTAL}.separation.ray_trainer", "SeparateRayPPOTrainer.fit", ends="job"),
        Hook(f"{_EXPERIMENTAL}.one_step_off_policy.ray_trainer", "OneStepOffRayTrainer.fit", ends="job"),
        Hook(f"{_EXPERIMENTAL}.fully_async_policy.message_queue", "MessageQueueClient.clear_queue", ends="job"),
    ),
    config=_config,
)
