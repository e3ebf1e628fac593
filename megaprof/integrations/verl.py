"""verl: whose work a worker does, and verl's own profiling settings, where they name megaprof as their tool.

Shortest way in, no edit: ``VERL_USE_EXTERNAL_MODULES=megaprof.autoload.plugin`` in the workers' environment and
``global_profiler.tool=megaprof``. verl takes a tool that it does not know for none, but its trainer still tells every
worker when a step of ``global_profiler.steps`` starts and ends. Otherwise the trainer's step travels with the batches
that its methods hand to the workers; the SFT trainer's is known where it calls its worker itself.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from megaprof.capture.process import process
from megaprof.config import readers
from megaprof.config.options import ProfileConfig, variable
from megaprof.hooks.batch import Batch
from megaprof.integrations.contract import Facts, Hook, Host, callers, install_as_asked, over
from megaprof.runtime.logs import logger, show_lines

_WORKERS = "verl.workers.engine_workers"
_OLD_WORKERS = "verl.workers.megatron_workers"
_PROFILER = "verl.utils.profiler.profile"
_SFT_TRAINER = "verl.trainer.sft_trainer"

#: The value of ``global_profiler.tool`` that hands verl's settings to megaprof.
TOOL = "megaprof"
#: What verl's own tools are here. With ``megaprof`` the tool is that of ``MEGAPROF_TOOL``, or torch, and what there is
#: to set about a trace is in ``tool_config.torch``.
_TOOLS = {"torch": "torch", "nsys": "nsys", "torch_memory": "memory"}
_CONTENTS = {"shapes": "record_shapes", "memory": "profile_memory", "stack": "with_stack"}
#: Where the profiler settings are of each role whose work runs Megatron's schedule.
_PROFILERS = {
    "actor": "actor_rollout_ref.actor.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
    "reward": "reward_model.profiler",
}
#: The rollout has no schedule of Megatron's, but work of its own in the worker (up to 0.6): a file of its own with
#: ``discrete``.
_ROLLOUT = "actor_rollout_ref.rollout.profiler"
_NO_STEP = 2**31 - 1
"""The number of a step that verl's trainer does not profile. verl counts from 1, and never gets there."""
_ANY_STEP = range(_NO_STEP)
_UNNUMBERED = -1
"""A step that is profiled, and whose number the trainer does not tell: it is counted."""
_SENT = "megaprof_step"
"""What the trainer's step is called in a batch on its way to the workers."""


def config_from(config: Any) -> ProfileConfig:
    """Returns what verl's whole configuration asks of its profiler, as a ProfileConfig.

    ``config``: the hydra tree, or mappings and objects in its shape. Off without a tool, steps or an enabled role.
    What verl has no setting for is read from the ``MEGAPROF_*`` environment. Raises ValueError, naming setting, value
    and what would be valid, for what cannot be honoured.
    """
    if _get(config, "global_profiler.profile_continuous_steps", False):
        raise ValueError(
            "global_profiler.profile_continuous_steps: True is not valid: a file of megaprof's holds one step; valid: "
            "False"
        )
    profilers = {path: found for path in _PROFILERS.values() if (found := _get(config, path)) is not None}
    return _translated(_get(config, "global_profiler.steps"), profilers, _get(config, _ROLLOUT))


def _translated(steps: Any, profilers: Mapping[str, Any], rollout: Any = None) -> ProfileConfig:
    enabled = {path: found for path, found in profilers.items() if _get(found, "enable", False)}
    if steps is not None and not isinstance(steps, range):
        steps = _numbers("global_profiler.steps", steps)
    tool = _one(enabled, "tool")
    if not steps or tool is None:
        return ProfileConfig()
    tools = _tools(tool)
    section = "tool_config." + (tool if tool != TOOL else "torch")
    path = _one(enabled, "save_path")
    discrete = bool(_one(enabled, f"{section}.discrete", False))
    # By default verl has one file for all the work of a process in a step. A timeline has no windows.
    separate = discrete or tools == ("timeline",)
    given: dict[str, Any] = {
        "target": ("train_actor", "train_log_probs") if separate else ("train_overall",),
        "dir": None if path is None else readers.directory("global_profiler.save_path", path),
        "steps": f"{steps.start}:{steps.stop}" if isinstance(steps, range) else ",".join(map(str, steps)),
        "tool": tools,
        "discrete": discrete,
    }
    given |= _chosen_ranks(profilers, rollout if discrete else None)
    if "torch" in tools:
        given |= _torch(enabled, section)
    elif tool == TOOL and (contents := _one(enabled, f"{section}.contents")):
        raise ValueError(
            f"{section}.contents: {list(contents)} has no effect with {variable('tool')} {' '.join(tools)}; valid: []"
        )
    command = _one(enabled, "finish_hook_cmd")
    if command is not None:
        given |= {"on_finish": _finish(enabled, tool, command), "on_finish_when": "end"}
    return ProfileConfig.from_values(given)


def _tools(tool: str) -> tuple[str, ...]:
    """The tools of megaprof that record. Raises ValueError where verl's tool and ``MEGAPROF_TOOL`` contradict."""
    if tool != TOOL and tool not in _TOOLS:
        raise ValueError(
            f"global_profiler.tool: {tool!r} is not valid for megaprof; valid: {', '.join((TOOL, *_TOOLS))}"
        )
    name = variable("tool")
    asked = readers.tools(name, os.environ[name]) if name in os.environ else None
    if tool == TOOL:
        return asked or ("torch",)
    if asked not in (None, (_TOOLS[tool],)):
        raise ValueError(
            f"global_profiler.tool: {tool!r} and {name}={os.environ[name]} contradict each other; valid: one of them, "
            f"or global_profiler.tool={TOOL}"
        )
    return (_TOOLS[tool],)


def _chosen_ranks(profilers: Mapping[str, Any], rollout: Any) -> dict[str, str]:
    """The ranks of each role; without roles, those of the one model of an SFT run."""
    if profilers.keys().isdisjoint(_PROFILERS.values()):
        return {"select": next(_ranks(path, found) for path, found in profilers.items()) or "0"}
    named = {role: _ranks(path, profilers[path]) for role, path in _PROFILERS.items() if path in profilers}
    if rollout is not None:
        named["rollout"] = _ranks(_ROLLOUT, rollout)
    chosen = [f"{role}={ranks}" for role, ranks in named.items() if ranks is not None]
    return {"role_select": ";".join(chosen)} if chosen else {}


def _torch(enabled: Mapping[str, Any], section: str) -> dict[str, Any]:
    schedule = _one(enabled, f"{section}.schedule")
    for name in ("active", "skip_first", "wait", "warmup") if schedule is not None else ():
        value, valid = _get(schedule, name, 0), (0, 1) if name == "active" else (0,)
        if value not in valid:
            raise ValueError(
                f"{section}.schedule.{name}: {value!r} is not valid for megaprof, which captures the first mini-batch "
                f"of a step; valid: {', '.join(map(str, valid))}"
            )
    contents = list(_one(enabled, f"{section}.contents") or ())
    known = ("cpu", "cuda", *_CONTENTS)
    for word in contents:
        if word not in known:
            raise ValueError(f"{section}.contents: unknown {word!r}; valid: {', '.join(known)}")
    # verl records CPU activity whatever is listed, and CUDA activity where nothing is.
    activities = ("cpu", "cuda") if "cuda" in contents or not contents else ("cpu",)
    return {"activities": activities} | {_CONTENTS[word]: True for word in contents if word in _CONTENTS}


def _ranks(path: str, profiler: Any) -> str | None:
    """Returns a value for --profile-role-select; None where verl's list of ranks is empty, which is its default."""
    ranks = profiler.get("ranks", ()) if isinstance(profiler, Mapping) else getattr(profiler, "ranks", ())
    if not _get(profiler, "enable", False) or ranks is None:
        return "none"
    ranks = _numbers(f"{path}.ranks", ranks)
    if _get(profiler, "all_ranks", False):
        if ranks:
            raise ValueError(f"{path}.all_ranks: True and {path}.ranks: {ranks} contradict each other; valid: one")
        return "all"
    return ",".join(map(str, ranks)) or None


def _finish(enabled: Mapping[str, Any], tool: str, command: str) -> str:
    """verl's command with those of verl's variables that a command like that reads."""
    for name in ("finish_hook_all_ranks", "finish_hook_ranks"):
        value = _one(enabled, name)
        if value:
            raise ValueError(
                f"{name}: {value!r} is not valid for megaprof, which runs finish_hook_cmd on the ranks that capture; "
                "valid: unset"
            )
    known = f'VERL_PROFILE_SAVE_PATH="$PROFILED_DIR" VERL_PROFILE_TOOL={tool} VERL_PROFILE_RANK="$RANK"'
    return f"export {known}; {command}"


def _one(enabled: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The setting ``name`` of all enabled roles: a process has one profiler, whatever the roles in it."""
    values = {path: _get(profiler, name, default) for path, profiler in enabled.items()}
    for path, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise ValueError(
                f"{path}.{name}: {value!r} is not valid beside {first}.{name}: {values[first]!r}; valid: the same for "
                "all enabled roles"
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


class _Asked:
    """What verl's own settings ask of megaprof, once a worker turned up that has them and names megaprof in them."""

    config: ProfileConfig | ValueError | None = None
    step: int | None = None
    """The trainer's step, where it tells it; _NO_STEP outside the steps that are to be profiled."""


def _config() -> ProfileConfig | None:
    """Returns what verl's own settings ask for, None where they do not name megaprof. Raises ValueError like
    `config_from`."""
    if isinstance(_Asked.config, ValueError):
        raise _Asked.config
    return _Asked.config


def _adopt(worker: Any) -> None:
    """Take verl's settings from a worker that has them; whatever else configures megaprof comes first."""
    if _Asked.config is not None or process.sessions or "MEGAPROF_TARGET" in os.environ:
        return
    tool, translate = _settings_of(worker)
    if tool != TOOL:
        return
    _Asked.step = _NO_STEP
    try:
        _Asked.config = translate()
    except ValueError as mistake:
        _Asked.config = mistake  # raised where the schedule is asked for: not in here, which must not fail
    else:
        install_as_asked()


def _settings_of(worker: Any) -> tuple[Any, Callable[[], ProfileConfig]]:
    """The tool that the worker's settings name, and the translation of those settings."""
    own: Any = getattr(worker, "config", None)
    whole = own._get_root() if hasattr(own, "_get_root") else {}
    if "global_profiler" in whole:
        return _get(whole, "global_profiler.tool"), lambda: config_from(whole)
    # A worker that was given its own profiler's settings alone, and is told when to profile.
    path = _PROFILERS["critic"] if _get(own, "model_type") == "value_model" else "profiler"
    return _get(own, "profiler_config.tool"), lambda: _translated(_ANY_STEP, {path: own.profiler_config})


def _facts(arguments: Mapping[str, Any], role: str | None) -> Facts:
    _adopt(arguments["self"])
    sent = _sent_with(arguments.get("data")) if _Asked.step in (None, _UNNUMBERED) else None
    return Facts(role=role, iteration=_Asked.step if sent is None else sent)


def _as(role: str) -> Any:
    return lambda arguments: _facts(arguments, role)


def _send_step(arguments: Mapping[str, Any]) -> Facts:
    """In the trainer's process: a batch that is about to go to the workers gets the trainer's step."""
    batch = arguments["batch"]
    carried = (
        batch.meta_info if hasattr(batch, "meta_info") else batch.extra_info
    )  # which goes through a transfer queue
    carried[_SENT] = arguments["self"].global_steps
    return Facts()


def _log_probs(arguments: Mapping[str, Any]) -> Facts:
    """With LoRA the reference is the actor's model without its adapter, and verl asks the actor's worker for both."""
    return _facts(arguments, "ref" if _carried(arguments.get("data"), "no_lora_adapter") else "actor")


def _sent_with(data: Any) -> int | None:
    """The trainer's step that came with a batch, None where it did not."""
    step = _carried(data, _SENT)
    return None if step is None else int(step)


def _carried(data: Any, name: str) -> Any:
    """Returns what came with a batch beside its tensors, None where it did not."""
    for carried in (getattr(data, "meta_info", None), getattr(data, "extra_info", None), data):
        get = getattr(carried, "get", None)
        value = None if get is None else get(name, None)
        if value is not None:
            return getattr(value, "data", value)  # a tensordict wraps what is no tensor
    return None


def _worker(arguments: Mapping[str, Any]) -> Facts:
    """A TrainingWorker by itself: the critic, or the one model of an SFT run. Inside an actor's or a reference's worker
    the role is known from outside."""
    worker = arguments["self"]
    facts = _facts(arguments, "critic" if getattr(worker.config, "model_type", None) == "value_model" else None)
    if _sft() and facts.iteration in (None, _UNNUMBERED):
        facts = replace(facts, iteration=_sft_step())
    return facts


def _infer(arguments: Mapping[str, Any]) -> Facts:
    """An SFT trainer infers for nothing but its validation loss."""
    return replace(_worker(arguments), evaluation=_sft())


def _sft() -> bool:
    """Returns whether this is a process of the SFT trainer that torchrun starts."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _SFT_TRAINER in sys.modules or getattr(main, "name", None) == _SFT_TRAINER


def _sft_step() -> int | None:
    """The trainer's step, which continues across a resume. ``SFTTrainer.fit`` has it in a variable and tells nobody."""
    for frame in callers():
        if frame.f_code.co_name == "fit" and isinstance(step := frame.f_locals.get("global_step"), int):
            return step
    return None


def _start(arguments: Mapping[str, Any]) -> Facts:
    """verl's trainer calls this on every worker where a step starts that is to be profiled, whatever the tool."""
    _adopt(arguments["self"])
    if _Asked.step is not None:
        _Asked.step = arguments.get("kwargs", {}).get("profile_step", _UNNUMBERED)
    return Facts()


def _stop(arguments: Mapping[str, Any]) -> Facts:
    """The step is over. With ``run_command`` it is the last one, and verl runs its ``finish_hook_cmd``. So do we, since
    Ray may kill this worker before it gets to its end."""
    over("step")
    if _Asked.step is not None:
        _Asked.step = _NO_STEP
        if arguments.get("kwargs", {}).get("run_command", arguments.get("run_command", True)):
            over("capture")
    return Facts()


def _run_job(arguments: Mapping[str, Any]) -> Facts:
    """In the trainer's process, which waits for the workers' files at the end: verl's settings say where they are. It
    may be on any node, so it says where."""
    whole = getattr(arguments["self"], "config", None) or {}
    if _Asked.config is None and "MEGAPROF_TARGET" not in os.environ:
        if _get(whole, "global_profiler.tool") == TOOL:
            _Asked.config = config_from(whole)
        elif _get(whole, "profiler.tool") == TOOL:  # SFT
            _Asked.config = _translated(_ANY_STEP, {"profiler": whole["profiler"]})
    show_lines()
    logger.info("megaprof: verl's controller is process %d on %s", os.getpid(), socket.gethostname())
    return Facts()


#: Up to verl 0.6.
_OLD_FUNCTIONS = {
    "ActorRolloutRefWorker.generate_sequences": _as("rollout"),
    "ActorRolloutRefWorker.compute_ref_log_prob": _as("ref"),
    "ActorRolloutRefWorker.compute_log_prob": _log_probs,
    "ActorRolloutRefWorker.update_actor": _as("actor"),
    "CriticWorker.compute_values": _as("critic"),
    "CriticWorker.update_critic": _as("critic"),
    "RewardModelWorker.compute_rm_score": _as("reward"),
}


def _module(engine: Any) -> Any:
    """TorchTitan's engine has its model in a list, of which more than one part is refused there."""
    module = engine.module
    return module[0] if isinstance(module, list) else module


#: Of engines without Megatron: all of them run a microbatch forward by their ``forward_step``.
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
        Hook(_WORKERS, "ActorRolloutRefWorker.compute_ref_log_prob", _as("ref")),
        Hook(_WORKERS, "ActorRolloutRefWorker.compute_log_prob", _log_probs),
        Hook(_WORKERS, "ActorRolloutRefWorker.update_actor", _as("actor")),
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
    ),
    config=_config,
)
