"""verl: the roles of its workers and the steps of its trainer; its own profiling settings, where they name megaprof.

Shortest way in, no edit: ``VERL_USE_EXTERNAL_MODULES=megaprof.hosts.plugin`` in the workers' environment and
``global_profiler.tool=megaprof``. verl treats an unknown tool as no tool, but its trainer still notifies every worker
when a step of ``global_profiler.steps`` starts and ends. Otherwise the trainer's step travels with the batches that its
methods hand to the workers. The SFT trainer calls its worker itself, so its step is found in that caller.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megaprof.autoload.contract import Facts, Hook, local, over
from megaprof.capture.process import process
from megaprof.config import values as read
from megaprof.config.options import ProfileConfig, variable
from megaprof.recorders.call import Batch
from megaprof.runtime.armed import armed
from megaprof.runtime.isolation import logger, show_lines

_WORKERS = "verl.workers.engine_workers"
_OLD_WORKERS = "verl.workers.megatron_workers"
_PROFILER = "verl.utils.profiler.profile"
_SFT_TRAINER = "verl.trainer.sft_trainer"
_EXPERIMENTAL = "verl.experimental"

#: The number of a profiled step that the trainer does not number: megaprof counts it.
_UNNUMBERED = -1
#: The key of the trainer's step in a batch on its way to the workers.
_SENT = "megaprof_step"


#: The value of ``global_profiler.tool`` that hands verl's settings to megaprof.
TOOL = "megaprof"
#: verl's own tools, by name, and ours. With ``megaprof`` the tool is that of ``MEGAPROF_TOOL``, or torch, and
#: ``tool_config.torch`` has the options of a trace.
_TOOLS = {"torch": "torch", "nsys": "nsys", "torch_memory": "memory"}
_CONTENTS = {"shapes": "record_shapes", "memory": "profile_memory", "stack": "with_stack"}
#: The settings by which a mistake in an option of ours is named, where it is found only there.
_NAMES = {
    "dir": "global_profiler.save_path",
    "steps": "global_profiler.steps",
    "select": "profiler.ranks",
    "role_select": "profiler.ranks of",
}
#: The sections of the roles whose work runs Megatron's schedule; their settings are in ``profiler`` there. The rollout
#: does not run it, but it works in the same worker (up to 0.6): with ``discrete`` it has a file of its own.
_ROLES = {
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.ref": "ref",
    "critic": "critic",
    "actor_rollout_ref.critic": "critic",
    "reward_model": "reward",
    "actor_rollout_ref.rm": "reward",
    "actor_rollout_ref.rollout": "rollout",
}
#: The profiling settings that verl has or had: in its guide to Nsight Systems they begin with ``profile_``, and up to
#: 0.6 there were ``step_start`` and ``step_end``. Then those without effect, with the values that ask for nothing.
_KNOWN = {
    *("tool", "enable", "name", "steps", "profile_continuous_steps", "save_path", "all_ranks", "ranks", "discrete"),
    *("relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"),
    *("contents", "step_start", "step_end", "active", "skip_first", "wait", "warmup", "repeat"),
    *("controller_nsight_options", "worker_nsight_options"),
    *("profile_steps", "profile_interval", "profile_ranks", "profile_ranks_all", "profile_discrete"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "profile_token_start": (),
    "profile_token_end": (),
    "trace_alloc_max_entries": (100_000,),
    "stack_depth": (32,),
    "memory_snapshot_num_steps": (1,),
    "context": ("all",),
    "stacks": ("all", "python"),
    "kw_args": ({},),
}
#: The number of a step that verl's trainer does not profile. verl counts from 1, and never gets there.
NO_STEP = 2**31 - 1
_ANY_STEP = range(NO_STEP)


class _Announced:
    step: int | None = None
    """The trainer's step while it is to be profiled, else NO_STEP; `_UNNUMBERED` if the trainer does not say. None if
    verl's settings do not name megaprof."""


def _adopt(worker: Any) -> None:
    """Takes verl's settings from a worker that has them; whatever else configures megaprof comes first."""
    if armed.config is not None or process.sessions or "MEGAPROF_TARGET" in os.environ:
        return
    worker_config: Any = getattr(worker, "config", None)
    tree = worker_config._get_root() if hasattr(worker_config, "_get_root") else {}
    try:
        if "global_profiler" in tree:
            config = _config_of_job(tree)
        elif _get(worker_config, "profiler_config.tool") == TOOL:  # a worker that has its own profiler's settings alone
            path = "critic.profiler" if _get(worker_config, "model_type") == "value_model" else "profiler"
            config = _from_profilers(_ANY_STEP, {path: worker_config.profiler_config})
        else:
            return
    except ValueError as mistake:
        # Raised when the host asks for the schedule, because this function must not fail.
        armed.config, _Announced.step = mistake, NO_STEP
        return
    if config is not None:
        # Its trainer does not announce steps that are from settings which it does not read.
        announced = "global_profiler" not in tree or _get(tree, "global_profiler.steps") is not None
        armed.config, _Announced.step = config, NO_STEP if announced else _UNNUMBERED
        armed.install()


def _facts(role: str | None, arguments: Mapping[str, Any]) -> Facts:
    _adopt(arguments["self"])
    sent_step = _batch_value(arguments.get("data"), _SENT) if _Announced.step in (None, _UNNUMBERED) else None
    return Facts(role=role, iteration=_Announced.step if sent_step is None else int(sent_step))


def _send_step(arguments: Mapping[str, Any]) -> Facts:
    """Gives a batch that is about to go to the workers the trainer's step, in the trainer's process."""
    batch = arguments["batch"]
    # The second kind goes through a transfer queue.
    metadata = batch.meta_info if hasattr(batch, "meta_info") else batch.extra_info
    metadata[_SENT] = arguments["self"].global_steps
    return Facts()


def _log_probs(arguments: Mapping[str, Any]) -> Facts:
    """Reads log-probs of the actor or, with LoRA, of the reference: that is the actor's model without its adapter, and
    verl asks the actor's worker for both."""
    return _facts("ref" if _batch_value(arguments.get("data"), "no_lora_adapter") else "actor", arguments)


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
    facts = _facts("critic" if getattr(worker.config, "model_type", None) == "value_model" else None, arguments)
    if _sft() and facts.iteration in (None, _UNNUMBERED):
        # The trainer's step, which continues across a resume, is in a variable of its ``fit`` only.
        facts = replace(facts, iteration=local("global_step"))
    return facts


def _sft() -> bool:
    """Returns whether this is a process of the SFT trainer that torchrun starts."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _SFT_TRAINER in sys.modules or getattr(main, "name", None) == _SFT_TRAINER


def _start(arguments: Mapping[str, Any]) -> Facts:
    """Notes that a step to be profiled starts. verl's trainer calls this on every worker, whatever the tool."""
    _adopt(arguments["self"])
    if _Announced.step is not None:
        _Announced.step = arguments.get("kwargs", {}).get("profile_step", _UNNUMBERED)
    return Facts()


def _stop(arguments: Mapping[str, Any]) -> Facts:
    """Notes that the step is over. Ray may kill this worker before it gets to its end, so its files are finished."""
    over("step")
    if _Announced.step is not None:
        _Announced.step = NO_STEP
    return Facts()


def _run_job(arguments: Mapping[str, Any]) -> Facts:
    """Learns from verl's settings where the workers' files are: the trainer's process waits for them at the end. It may
    be on any node, so it logs where it is."""
    if armed.config is None and "MEGAPROF_TARGET" not in os.environ:
        config = arguments.get("config", getattr(arguments.get("self"), "config", None))
        armed.config = _config_of_job(config or {})
    show_lines()
    logger.info("megaprof: verl's controller is process %d on %s", os.getpid(), socket.gethostname())
    return Facts()


def _config_of_job(job_config: Any) -> ProfileConfig | None:
    """Returns what a job's whole configuration asks of megaprof; None unless it names megaprof as its tool. Raises
    ValueError like `config_from`."""
    config = None
    if _get(job_config, "global_profiler.tool") == TOOL:
        config = config_from(job_config)
    elif _get(job_config, "profiler.tool") == TOOL:  # an SFT run
        config = _from_profilers(_ANY_STEP, {"profiler": job_config["profiler"]})
    if config is not None and not config.enabled and os.environ.get("RANK", "0") == "0":
        logger.warning("megaprof captures nothing: verl's settings name no steps, or enable the profiler of no role")
    return config


def config_from(config: Any) -> ProfileConfig:
    """Returns what verl's whole configuration asks of its profiler, whichever tool it names.

    ``config`` is the hydra tree, or mappings and objects in its shape. Profiling is off without a tool, steps or an
    enabled role. What verl has no setting for is read from the ``MEGAPROF_*`` environment. Raises ValueError for what
    cannot be honoured, with the setting, its value and what would be valid.
    """
    if _get(config, "global_profiler.profile_continuous_steps", False):
        raise ValueError(
            "global_profiler.profile_continuous_steps: True is not valid: a file of megaprof's holds one step; valid: "
            "False"
        )
    steps, early = _get(config, "global_profiler.steps"), _get(config, "trainer.profile_steps")
    if early is not None:
        early = _numbers("trainer.profile_steps", early)
        if steps is not None and list(steps) != early:
            raise ValueError(
                f"trainer.profile_steps: {early} and global_profiler.steps: {steps} contradict each other; valid: one"
            )
        steps = early
    # A tool is only named in later versions: the guide is to Nsight Systems.
    tool = _get(config, "global_profiler.tool", "nsys")
    save_path = _get(config, "global_profiler.save_path")
    _heed("global_profiler", _get(config, "global_profiler"), tool)
    _heed("trainer", _get(config, "trainer"), tool, prefix="profile")
    profilers = {}
    for role_path in _ROLES:
        section = _get(config, role_path, {})
        _heed(role_path, section, tool, prefix="profile_")
        if (profiler := _get(section, "profiler")) is not None:
            profilers[f"{role_path}.profiler"] = profiler
        if any(_get(section, name) is not None for name in ("profile_ranks", "profile_ranks_all", "profile_discrete")):
            if _get(profiler, "enable", False):
                raise ValueError(
                    f"{role_path}.profile_*: not valid beside {role_path}.profiler.enable: True; valid: one"
                )
            profilers.pop(f"{role_path}.profiler", None)
            profilers[role_path] = _as_in_the_guide(section, role_path, tool, save_path)
    return _from_profilers(steps, profilers)


def _as_in_the_guide(section: Any, path: str, tool: str, save_path: str | None) -> dict[str, Any]:
    """Returns the profiler settings of a role from those that verl's guide to Nsight Systems has for it."""
    ranks, every = _get(section, "profile_ranks"), bool(_get(section, "profile_ranks_all", False))
    ranks = [] if ranks is None else _numbers(f"{path}.profile_ranks", ranks)
    if ranks and every:
        raise ValueError(f"{path}.profile_ranks_all: True and profile_ranks: {ranks} contradict each other; valid: one")
    return {
        "tool": tool,
        "enable": every or bool(ranks),
        "ranks": ranks,
        "all_ranks": every,
        "save_path": save_path,
        "discrete": bool(_get(section, "profile_discrete", False)),
    }


def _from_profilers(steps: Any, profilers: Mapping[str, Any]) -> ProfileConfig:
    """Returns what profiler settings ask for. ``profilers``: those of each role, by path."""
    enabled = {
        path: profiler
        for path, profiler in profilers.items()
        if _get(profiler, "enable", False) and _role(path) != "rollout"
    }
    tool = _common(enabled, "tool")
    section = "tool_config." + (tool if tool not in (TOOL, None) else "torch")
    for path, profiler in profilers.items():
        if path.endswith("profiler"):
            _heed(path, profiler, section.rpartition(".")[2])
    if steps is not None and not isinstance(steps, range):
        steps = _numbers("global_profiler.steps", steps)
    steps = _with_step_range(steps, enabled, section)
    if not steps or tool is None:
        return ProfileConfig()
    tools = _tools(tool)
    path = _common(enabled, "save_path")
    discrete = bool(_common(enabled, f"{section}.discrete", False)) or bool(_common(enabled, "discrete", False))
    # By default, verl writes one file for all the work of a process in a step. A timeline has no windows.
    by_target = discrete or tools == ("timeline",)
    values: dict[str, Any] = {
        "target": ("train_actor", "train_log_probs") if by_target else ("train_overall",),
        "dir": None if path is None else read.directory("global_profiler.save_path", path),
        "steps": f"{steps.start}:{steps.stop}" if isinstance(steps, range) else ",".join(map(str, steps)),
        "tool": tools,
        "discrete": discrete,
    }
    values |= _chosen_ranks(profilers, discrete)
    if "torch" in tools:
        values |= _torch(enabled, section)
    elif tool == TOOL and (contents := _common(enabled, f"{section}.contents")):
        raise ValueError(
            f"{section}.contents: {list(contents)} has no effect with {variable('tool')} {' '.join(tools)}; valid: []"
        )
    command = _common(enabled, "finish_hook_cmd")
    if command is not None:
        values["on_finish"] = _finish_command(enabled, tool, command)
    return ProfileConfig.from_values(values, names={name: _NAMES[name] for name in values.keys() & _NAMES})


def _with_step_range(steps: Any, enabled: Mapping[str, Any], section: str) -> Any:
    """Returns the steps to capture, of which ``step_start`` and ``step_end`` may say more: the mini-batches of a step
    (up to 0.6) or, if nothing else says which steps, these. The end is not captured."""
    names = f"{section}.step_start", f"{section}.step_end"
    start, end = (_common(enabled, name) for name in names)
    for name, value in zip(names, (start, end), strict=True):
        if value is not None:
            _numbers(name, [value])
    if start is not None and end is not None and start >= end:
        raise ValueError(f"{names[0]}: {start} must be less than {names[1]}: {end}")
    if not steps:
        return steps if steps is not None or end is None else range(start or 0, end)
    for name, value, valid in zip(names, (start, end), ((None, 0), (None, 1)), strict=True):
        if value not in valid:
            raise ValueError(
                f"{name}: {value} is not valid for megaprof beside global_profiler.steps: it selects mini-batches of a "
                f"step, of which megaprof captures the first; valid: {valid[1]}, or no steps"
            )
    return steps


def _role(path: str) -> str | None:
    return _ROLES.get(path.removesuffix(".profiler"))


def _heed(path: str, node: Any, tool: str | None, prefix: str = "") -> None:
    """Logs on rank 0 the settings in ``node`` that have no effect, of those whose names begin with ``prefix``. Those of
    other tools than ``tool`` are not looked at."""
    if os.environ.get("RANK", "0") != "0":
        return
    for name in node if isinstance(node, Mapping) else getattr(node, "__dict__", ()):
        if name.startswith("_") or not name.startswith(prefix):
            continue
        value = _get(node, name)
        if name in (tool, "tool_config", "global_tool_config", "schedule"):
            _heed(f"{path}.{name}", value, tool)
        elif name in (TOOL, *_TOOLS, "npu", "precision_debugger"):
            continue
        elif name not in (*_KNOWN, *_NEUTRAL):
            logger.warning("megaprof: %s.%s: unknown, so it has no effect", path, name)
        elif name in _NEUTRAL and value not in (None, *_NEUTRAL[name]):
            logger.warning("megaprof: %s.%s: %r has no effect with megaprof", path, name, value)


def _tools(tool: str) -> tuple[str, ...]:
    """Returns our tools for verl's tool. Raises ValueError if it and ``MEGAPROF_TOOL`` contradict each other."""
    if tool != TOOL and tool not in _TOOLS:
        raise ValueError(
            f"global_profiler.tool: {tool!r} is not valid for megaprof; valid: {', '.join((TOOL, *_TOOLS))}"
        )
    name = variable("tool")
    env_tools = read.tools(name, os.environ[name]) if name in os.environ else None
    if tool == TOOL:
        return env_tools or ("torch",)
    if env_tools not in (None, (_TOOLS[tool],)):
        raise ValueError(
            f"global_profiler.tool: {tool!r} and {name}={os.environ[name]} contradict each other; valid: one of them, "
            f"or global_profiler.tool={TOOL}"
        )
    return (_TOOLS[tool],)


def _chosen_ranks(profilers: Mapping[str, Any], discrete: bool) -> dict[str, str]:
    """Returns the options that select the ranks of each role or, without roles, of the one model of an SFT run."""
    if not any(map(_role, profilers)):
        return {"select": next(_ranks(path, profiler) for path, profiler in profilers.items()) or "0"}
    ranks_by_role = {_role(path): _ranks(path, profiler) for path, profiler in profilers.items()}
    if not discrete:
        ranks_by_role.pop("rollout", None)
    chosen = [f"{role}={ranks}" for role, ranks in ranks_by_role.items() if ranks is not None]
    return {"role_select": ";".join(chosen)} if chosen else {}


def _torch(enabled: Mapping[str, Any], section: str) -> dict[str, Any]:
    schedule = _common(enabled, f"{section}.schedule")
    for name in ("active", "skip_first", "wait", "warmup", "repeat"):
        value, valid = _get(schedule, name, 0), (0, 1) if name in ("active", "repeat") else (0,)
        if value not in valid:
            raise ValueError(
                f"{section}.schedule.{name}: {value!r} is not valid for megaprof, which captures the first mini-batch "
                f"of a step; valid: {', '.join(map(str, valid))}"
            )
    contents = list(_common(enabled, f"{section}.contents") or ())
    valid_words = ("cpu", "cuda", *_CONTENTS)
    for word in contents:
        if word not in valid_words:
            raise ValueError(f"{section}.contents: unknown {word!r}; valid: {', '.join(valid_words)}")
    # verl always records CPU activity, and also CUDA activity if nothing is listed.
    activities = ("cpu", "cuda") if "cuda" in contents or not contents else ("cpu",)
    return {"activities": activities} | {_CONTENTS[word]: True for word in contents if word in _CONTENTS}


def _ranks(path: str, profiler: Any) -> str | None:
    """Returns a role's value for --profile-role-select; None if verl's list of ranks is empty, which is its default."""
    ranks = profiler.get("ranks", ()) if isinstance(profiler, Mapping) else getattr(profiler, "ranks", ())
    if not _get(profiler, "enable", False) or ranks is None:
        return "none"
    ranks = _numbers(f"{path}.ranks", ranks)
    if _get(profiler, "all_ranks", False):
        if ranks:
            raise ValueError(f"{path}.all_ranks: True and {path}.ranks: {ranks} contradict each other; valid: one")
        return "all"
    return ",".join(map(str, ranks)) or None


def _finish_command(enabled: Mapping[str, Any], tool: str, command: str) -> str:
    """Returns verl's command, with the variables that verl sets for it."""
    for name in ("finish_hook_all_ranks", "finish_hook_ranks"):
        value = _common(enabled, name)
        if value:
            raise ValueError(
                f"{name}: {value!r} is not valid for megaprof, which runs finish_hook_cmd on the ranks that capture; "
                "valid: unset"
            )
    variables = f'VERL_PROFILE_SAVE_PATH="$PROFILED_DIR" VERL_PROFILE_TOOL={tool} VERL_PROFILE_RANK="$RANK"'
    return f"export {variables}; {command}"


def _common(enabled: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Returns the setting ``name`` that all enabled roles share: a process has one profiler, whatever its roles."""
    values = {path: _get(profiler, name, default) for path, profiler in enabled.items()}
    for path, value in values.items():
        first_path = next(iter(values))
        if value != values[first_path]:
            raise ValueError(
                f"{path}.{name}: {value!r} is not valid beside {first_path}.{name}: {values[first_path]!r}; valid: the "
                "same for all enabled roles"
            )
    return next(iter(values.values()), default)


def _numbers(name: str, values: Iterable[Any]) -> list[int]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: {values!r} is not valid; valid: a list of whole numbers of at least 0")
    numbers = list(values)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{name}: {number!r} in {numbers} is not valid; valid: whole numbers of at least 0")
    return numbers


def _get(node: Any, path: str, default: Any = None) -> Any:
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
        if node is None or node == "???":  # OmegaConf's way to say that a value is missing
            return default
    return node


#: Up to verl 0.6.
_OLD_FUNCTIONS: dict[str, tuple[Any, str | None]] = {
    "ActorRolloutRefWorker.generate_sequences": (partial(_facts, "rollout"), "rollout"),
    "ActorRolloutRefWorker.compute_ref_log_prob": (partial(_facts, "ref"), None),
    "ActorRolloutRefWorker.compute_log_prob": (_log_probs, None),
    "ActorRolloutRefWorker.update_actor": (partial(_facts, "actor"), None),
    "CriticWorker.compute_values": (partial(_facts, "critic"), None),
    "CriticWorker.update_critic": (partial(_facts, "critic"), None),
    "RewardModelWorker.compute_rm_score": (partial(_facts, "reward"), "rewards"),
}


def _module(engine: Any) -> Any:
    """Returns an engine's model. TorchTitan's engine has it in a list, and refuses more than one part."""
    module = engine.module
    return module[0] if isinstance(module, list) else module


#: The batches of engines without Megatron, which all run the forward of a microbatch by their ``forward_step``.
_BATCH = Batch(_module, "forward_step", lambda arguments: bool(arguments.get("forward_only")))
_ENGINES = {
    f"verl.workers.engine.{name}.transformer_impl": engine
    for name, engine in {
        "megatron": "MegatronEngine",
        "fsdp": "FSDPEngine",
        "veomni": "VeOmniEngine",
        "automodel": "AutomodelEngine",
        "torchtitan": "TorchTitanEngine",
    }.items()
}
_OF_ENGINE = {"optimizer_step": "optimizer", "save_checkpoint": "saving", "to": "offload"}

#: Methods of both trainers of PPO that hand a batch to the workers; the second one's goes through a transfer queue.
_TRAINERS = ("verl.trainer.ppo.ray_trainer:RayPPOTrainer", "verl.trainer.ppo.v1.trainer_base:PPOTrainer")
_SENDERS = ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values", "_update_critic", "_update_actor")

HOOKS = (
    Hook(_WORKERS, "ActorRolloutRefWorker.compute_ref_log_prob", partial(_facts, "ref")),
    Hook(_WORKERS, "ActorRolloutRefWorker.compute_log_prob", _log_probs),
    Hook(_WORKERS, "ActorRolloutRefWorker.update_actor", partial(_facts, "actor")),
    Hook(_WORKERS, "TrainingWorker.train_batch", _worker),
    # An SFT trainer infers only for its validation loss.
    Hook(_WORKERS, "TrainingWorker.infer_batch", lambda given: replace(_worker(given), evaluation=_sft())),
    Hook(_WORKERS, "ActorRolloutRefWorker.update_weights", part="weight_sync"),
    *(
        Hook(module, f"{engine}.forward_backward_batch", batch=_BATCH)
        for module, engine in _ENGINES.items()
        if engine != "MegatronEngine"
    ),
    *(
        Hook(module, f"{engine}.{method}", part=part)
        for module, engine in _ENGINES.items()
        for method, part in _OF_ENGINE.items()
    ),
    *(Hook(_OLD_WORKERS, function, read, part=part) for function, (read, part) in _OLD_FUNCTIONS.items()),
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
)
