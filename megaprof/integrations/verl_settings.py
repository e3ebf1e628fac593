"""verl's own profiling settings, translated: what its hydra configuration asks of a profiler, as a `ProfileConfig`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from megaprof.config import readers
from megaprof.config.options import ProfileConfig, variable

#: The value of ``global_profiler.tool`` that hands verl's settings to megaprof.
TOOL = "megaprof"
#: verl's own tools, by name, and ours. With ``megaprof`` the tool is that of ``MEGAPROF_TOOL``, or torch, and
#: ``tool_config.torch`` has the options of a trace.
_TOOLS = {"torch": "torch", "nsys": "nsys", "torch_memory": "memory"}
_CONTENTS = {"shapes": "record_shapes", "memory": "profile_memory", "stack": "with_stack"}
#: For each role whose work runs Megatron's schedule, the path of its profiler settings.
_PROFILERS = {
    "actor": "actor_rollout_ref.actor.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
    "reward": "reward_model.profiler",
}
#: The rollout does not run Megatron's schedule, but it works in the same worker (up to 0.6): with ``discrete`` it has a
#: file of its own.
_ROLLOUT = "actor_rollout_ref.rollout.profiler"
#: The number of a step that verl's trainer does not profile. verl counts from 1, and never gets there.
NO_STEP = 2**31 - 1
_ANY_STEP = range(NO_STEP)


def config_of_job(job_config: Any) -> ProfileConfig | None:
    """Returns what a job's whole configuration asks of megaprof; None unless it names megaprof as its tool. Raises
    ValueError like `config_from`."""
    if _get(job_config, "global_profiler.tool") == TOOL:
        return config_from(job_config)
    if _get(job_config, "profiler.tool") == TOOL:  # an SFT run
        return _from_profilers(_ANY_STEP, {"profiler": job_config["profiler"]})
    return None


def config_of_worker(worker: Any) -> ProfileConfig | None:
    """Returns what the configuration of a worker asks of megaprof; None unless it names megaprof as its tool. Raises
    ValueError like `config_from`."""
    worker_config: Any = getattr(worker, "config", None)
    job_config = worker_config._get_root() if hasattr(worker_config, "_get_root") else {}
    if "global_profiler" in job_config:
        return config_of_job(job_config)
    if _get(worker_config, "profiler_config.tool") != TOOL:
        return None
    # A worker that has only the settings of its own profiler; its trainer announces when to profile.
    path = _PROFILERS["critic"] if _get(worker_config, "model_type") == "value_model" else "profiler"
    return _from_profilers(_ANY_STEP, {path: worker_config.profiler_config})


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
    profilers = {path: profiler for path in _PROFILERS.values() if (profiler := _get(config, path)) is not None}
    return _from_profilers(_get(config, "global_profiler.steps"), profilers, _get(config, _ROLLOUT))


def _from_profilers(steps: Any, profilers: Mapping[str, Any], rollout: Any = None) -> ProfileConfig:
    """Returns what profiler settings ask for. ``profilers``: those of each role, by path; ``rollout``: those of the
    rollout."""
    enabled = {path: profiler for path, profiler in profilers.items() if _get(profiler, "enable", False)}
    if steps is not None and not isinstance(steps, range):
        steps = _numbers("global_profiler.steps", steps)
    tool = _common(enabled, "tool")
    if not steps or tool is None:
        return ProfileConfig()
    tools = _tools(tool)
    section = "tool_config." + (tool if tool != TOOL else "torch")
    path = _common(enabled, "save_path")
    discrete = bool(_common(enabled, f"{section}.discrete", False))
    # By default, verl writes one file for all the work of a process in a step. A timeline has no windows.
    by_target = discrete or tools == ("timeline",)
    values: dict[str, Any] = {
        "target": ("train_actor", "train_log_probs") if by_target else ("train_overall",),
        "dir": None if path is None else readers.directory("global_profiler.save_path", path),
        "steps": f"{steps.start}:{steps.stop}" if isinstance(steps, range) else ",".join(map(str, steps)),
        "tool": tools,
        "discrete": discrete,
    }
    values |= _chosen_ranks(profilers, rollout if discrete else None)
    if "torch" in tools:
        values |= _torch(enabled, section)
    elif tool == TOOL and (contents := _common(enabled, f"{section}.contents")):
        raise ValueError(
            f"{section}.contents: {list(contents)} has no effect with {variable('tool')} {' '.join(tools)}; valid: []"
        )
    command = _common(enabled, "finish_hook_cmd")
    if command is not None:
        values |= {"on_finish": _finish_command(enabled, tool, command), "on_finish_when": "end"}
    return ProfileConfig.from_values(values)


def _tools(tool: str) -> tuple[str, ...]:
    """Returns our tools for verl's tool. Raises ValueError if it and ``MEGAPROF_TOOL`` contradict each other."""
    if tool != TOOL and tool not in _TOOLS:
        raise ValueError(
            f"global_profiler.tool: {tool!r} is not valid for megaprof; valid: {', '.join((TOOL, *_TOOLS))}"
        )
    name = variable("tool")
    env_tools = readers.tools(name, os.environ[name]) if name in os.environ else None
    if tool == TOOL:
        return env_tools or ("torch",)
    if env_tools not in (None, (_TOOLS[tool],)):
        raise ValueError(
            f"global_profiler.tool: {tool!r} and {name}={os.environ[name]} contradict each other; valid: one of them, "
            f"or global_profiler.tool={TOOL}"
        )
    return (_TOOLS[tool],)


def _chosen_ranks(profilers: Mapping[str, Any], rollout: Any) -> dict[str, str]:
    """Returns the options that select the ranks of each role or, without roles, of the one model of an SFT run."""
    if profilers.keys().isdisjoint(_PROFILERS.values()):
        return {"select": next(_ranks(path, profiler) for path, profiler in profilers.items()) or "0"}
    ranks_by_role = {role: _ranks(path, profilers[path]) for role, path in _PROFILERS.items() if path in profilers}
    if rollout is not None:
        ranks_by_role["rollout"] = _ranks(_ROLLOUT, rollout)
    chosen = [f"{role}={ranks}" for role, ranks in ranks_by_role.items() if ranks is not None]
    return {"role_select": ";".join(chosen)} if chosen else {}


def _torch(enabled: Mapping[str, Any], section: str) -> dict[str, Any]:
    schedule = _common(enabled, f"{section}.schedule")
    for name in ("active", "skip_first", "wait", "warmup") if schedule is not None else ():
        value, valid = _get(schedule, name, 0), (0, 1) if name == "active" else (0,)
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
