"""ProfileConfig: every option, its default and its rule, once.

A field ``record_shapes`` is the flag ``--profile-record-shapes``, the environment variable
``MEGAPROF_RECORD_SHAPES`` and the keyword ``record_shapes=``. A flag beats the environment, which beats the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from megaprof.artifacts.remote import check_remote, is_remote
from megaprof.config.per_role import parse_per_role
from megaprof.config.tools import TIMELINE, known_tools
from megaprof.config.windows import (
    ANNOTATED,
    NONE,
    TARGETS,
    TRAIN_OVERALL,
    Plan,
    Schedule,
    StepList,
    parse_step_list,
    parse_steps,
)
from megaprof.parallel.selectors import Selector, parse_selector
from megaprof.runtime.hostmemory import parse_limit

ENV_PREFIX = "MEGAPROF_"
ACTIVITIES = ("cpu", "cuda")
EXPORTS = ("trace", "stacks")
RANGE_LEVELS = ("step", "microbatch", "layer", "module")
#: Fields that make up the schedule, the alternative to ``steps``.
SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat")
#: The value of ``steps`` that leaves it to them. Not None: None and [] are no steps at all, as hosts' configs have it.
BY_SCHEDULE = "schedule"
#: Options of the torch profiler alone, and those among them that it ignores without CPU activity.
TORCH_ONLY = ("activities", "record_shapes", "with_flops", "with_modules", "export", "execution_trace", "kernels")
NEED_CPU = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _option(default: Any, help: str, read: Callable[[str, Any], Any]) -> Any:
    """A field with its help text and the function that reads a flag's or a variable's value: ``read(name, value)``."""
    return field(default=default, metadata={"help": help, "read": read})


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value).strip():
        raise ValueError(f"{name}: {value!r} is not a non-empty string")
    return str(os.fspath(value)).strip()


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError(f"{name}: {value!r} is neither true nor false; valid: {'/'.join(_TRUE)}, {'/'.join(_FALSE)}")


def _count(minimum: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if isinstance(value, str) and value.strip().lstrip("-").isascii() and value.strip().lstrip("-").isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{name}: {value!r} is not valid; it must be a whole number of at least {minimum}")
        return value

    return read


def _words(known: tuple[str, ...]) -> Callable[[str, Any], tuple[str, ...]]:
    def read(name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = value.replace(",", " ").split()
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"{name}: {value!r} names nothing; valid: one or more of {', '.join(known)}")
        words = [str(w).strip().lower() for w in value]
        for word in words:
            if word not in known:
                raise ValueError(f"{name}: unknown value {word!r}; valid: one or more of {', '.join(known)}")
        return tuple(dict.fromkeys(words))

    return read


def _tools(name: str, value: Any) -> tuple[str, ...]:
    return _words(known_tools())(name, value)  # third parties register theirs


def _memory_limit(name: str, value: Any) -> str:
    parse_limit(name, text := _text(name, value))
    return text


def _numbers(name: str, value: Any) -> str:
    """Text of a step or rank list: ``[1, 2]`` and ``"1,2"`` are the same, None and ``[]`` are ``none``."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return NONE
    items = value if isinstance(value, list | tuple) else [value]
    if len(items) == 1 and isinstance(items[0], str):
        return _text(name, items[0])
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{name}: {item!r} in {value!r} is not valid; valid: whole numbers of at least 0, or none")
    return ",".join(map(str, items))


def _per_name(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = ";".join(f"{key}={_numbers(name, numbers)}" for key, numbers in value.items())
    return _numbers(name, value)


def _per_role(name: str, value: Any) -> str:
    text = _per_name(name, value)
    parse_per_role(text, name)
    return text


def _word(known: tuple[str, ...]) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in known:
            raise ValueError(f"{name}: {value!r} is not valid; valid: one of {', '.join(known)}")
        return value.strip().lower()

    return read


def _factor(name: str, value: Any) -> float:
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = 0.0
    if isinstance(value, bool) or not 1 < factor < 1000:
        raise ValueError(f"{name}: {value!r} is not valid; it must be a number greater than 1, e.g. 1.5")
    return factor


def flag(name: str) -> str:
    """The command-line flag of a field: ``record_shapes`` is ``--profile-record-shapes``."""
    return "--profile-" + name.removeprefix("profile_").replace("_", "-")


@dataclass(frozen=True)
class ProfileConfig:
    """What to capture, when, on which ranks and where to. No target: profiling is off and nothing is wrapped.

    Raises ValueError, naming option, value and what would be valid, for anything that could not be honoured.
    What needs the world (ranks, coordinates) is checked by ``install_hooks``, still before the first step.
    """

    target: tuple[str, ...] = _option(
        (),
        f"what to capture, one or more of {', '.join(TARGETS)}; none: profiling is off",
        _words(TARGETS),
    )
    dir: str | None = _option(
        None,
        "directory that receives the traces, or a remote one that fsspec knows (s3://bucket/traces): staged in the "
        "temporary directory and uploaded in the background; required when a target is set",
        _text,
    )
    select: str | None = _option(
        None,
        "ranks that capture: 0,8,16 | all | per-stage (the lowest rank of each pipeline stage) | coordinates such as "
        "pp=*,tp=0,dp=0 or pp=0|3 or pp=0-2 (default: rank 0)",
        _text,
    )
    all_ranks: bool = _option(False, "capture on every rank", _boolean)
    role_select: str | None = _option(
        None,
        "ranks per role, in the place of the above: 'actor=0,1;ref=none;critic=all;rollout=per-stage'",
        _per_role,
    )
    steps: str = _option(
        BY_SCHEDULE,
        "steps to capture, in the host's own iteration numbers: 10 | 1,2,5 | 20:30 | 20:30:5 (end excluded) | none, or "
        "per target: 'train_actor=10:12;train_log_probs=0'; instead of the schedule below",
        _per_name,
    )
    role_steps: str | None = _option(
        None, "steps per role, in the place of the above: 'actor=1,2,5;ref=none'", _per_role
    )
    discrete: bool = _option(
        False,
        "annotated work of each role in a file of its own; without it, annotations are ranges in whatever window is "
        "open (train_overall: one file a step, with all roles in it)",
        _boolean,
    )
    skip_first: int = _option(3, "schedule: calls of a target to skip before the first cycle", _count(0))
    wait: int = _option(0, "schedule: idle calls at the start of each cycle", _count(0))
    warmup: int = _option(0, "schedule: calls that warm the profiler up and are thrown away, each by itself", _count(0))
    active: int = _option(1, "schedule: calls captured in each cycle, one window each", _count(1))
    repeat: int = _option(1, "schedule: number of cycles; 0 is the whole run", _count(0))
    ranges: str = _option("microbatch", f"finest ranges to write: {' | '.join(RANGE_LEVELS)}", _word(RANGE_LEVELS))
    tool: tuple[str, ...] = _option(
        ("torch",),
        "what records: torch (profiler trace of a window) | nsys (cudaProfilerStart/Stop for 'megaprof nsys') | memory "
        "(CUDA memory history) | timeline (every step on every rank, cheap enough to leave on); several at once where "
        "they can coexist",
        _tools,
    )
    timeline_select: str = _option(
        "all", "ranks that keep a timeline, as in --profile-select; the report names slow ranks only among these", _text
    )
    timeline_megabytes: int = _option(
        64, "size of a rank's timeline, in MiB; beyond it the oldest quarter is removed", _count(1)
    )
    activities: tuple[str, ...] = _option(
        ACTIVITIES,
        "what the torch profiler records: cpu, cuda; cuda alone costs next to nothing",
        _words(ACTIVITIES),
    )
    record_shapes: bool = _option(False, "record tensor shapes (costs memory)", _boolean)
    profile_memory: bool = _option(False, "record tensor allocations (costs memory)", _boolean)
    with_stack: bool = _option(False, "record Python stacks (costs memory)", _boolean)
    with_flops: bool = _option(False, "estimate FLOPs of operators (records shapes, costs memory)", _boolean)
    with_modules: bool = _option(False, "record the module hierarchy (TorchScript modules only)", _boolean)
    export: tuple[str, ...] = _option(
        ("trace",),
        "what becomes of a torch profile: trace (Chrome trace) | stacks (collapsed stacks for a flame graph; needs "
        "stacks to be recorded)",
        _words(EXPORTS),
    )
    execution_trace: bool = _option(
        False, "write a PyTorch execution trace (Chakra, .et.json) beside each window; slows the window down", _boolean
    )
    kernels: bool = _option(
        False, "write self time and count of every kernel (.kernels.json) beside each window", _boolean
    )
    max_host_memory: str = _option(
        "95%",
        "close an open window early when this process uses more than a size (64GiB), or when more than a share (80%) "
        "of the container's memory, or of the machine's where nothing limits it, is used",
        _memory_limit,
    )

    on_finish: str | None = _option(
        None,
        "shell command to run for finished files, on every rank that captures; it finds them in $PROFILED_FILES, one a "
        "line, and the save path in $PROFILED_DIR",
        _text,
    )
    on_finish_when: str = _option(
        "window", "run the command once per window, or once at the end: window | end", _word(("window", "end"))
    )
    flush_seconds: int = _option(
        60, "longest wait for unfinished files when the process ends, in seconds (on SIGTERM at most 20)", _count(0)
    )
    on_demand: bool = _option(
        False,
        "let 'megaprof trigger' capture and 'megaprof status' look while the job runs, on every rank; without any "
        f"other window: {flag('steps')} none. Always on with {flag('tool')} {TIMELINE}",
        _boolean,
    )
    trigger_step_time: float | None = _option(
        None,
        "capture by itself, two steps per stage, when recent steps take so many times what they usually take, e.g. 1.5",
        _factor,
    )
    trigger_imbalance: float | None = _option(
        None,
        "the same when the slowest stage computes so many times as long as the average stage, e.g. 1.3; needs "
        f"{flag('tool')} {TIMELINE}",
        _factor,
    )
    trigger_cooldown: int = _option(
        3600, "seconds after a capture that the job made by itself until it may make another one", _count(1)
    )
    prometheus: str | None = _option(
        None,
        "file for Prometheus' textfile collector: step time, imbalance, bubble, stragglers and megaprof's own cost, "
        "written by rank 0 as the job runs",
        _text,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is f.default:  # also the way to say "not given" for options without a default
                continue
            object.__setattr__(self, f.name, f.metadata["read"](flag(f.name), value))
        if self.enabled:
            self._check()

    @property
    def enabled(self) -> bool:
        return bool(self.target)

    @property
    def windowed(self) -> bool:
        """False when nothing but the timeline records."""
        return self.tool != (TIMELINE,)

    @property
    def timed(self) -> bool:
        """True when every step goes into a timeline."""
        return TIMELINE in self.tool

    @property
    def listens(self) -> bool:
        """True when captures can be asked for while the job runs."""
        return self.on_demand or self.timed

    @property
    def never(self) -> bool:
        """True when the configuration itself asks for no step at all."""
        if self.timed or self.on_demand:
            return False
        targets = (*self.target, ANNOTATED) if self.discrete else self.target
        plans = (self.plan(target, role) for target in targets for role in (None, *self.roles))
        return self.enabled and all(plan == StepList(()) for plan in plans)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have ranks or steps of their own."""
        return tuple(dict.fromkeys((*self._role_ranks, *self._role_steps)))

    def selector(self, role: str | None = None) -> Selector | None:
        """The ranks that capture ``role``, None for no rank.

        Neither --profile-all-ranks nor --profile-select, and nothing for the role: rank 0.
        """
        if role is not None and (ranks := self._role_ranks.get(role)) is not None:
            if ranks.lower() in (NONE, "null", "[]"):
                return None
            try:
                return parse_selector(ranks.strip("[]"))
            except ValueError as mistake:
                raise ValueError(str(mistake).replace(flag("select"), f"{flag('role_select')} {role}", 1)) from None
        return parse_selector("all" if self.all_ranks else "0" if self.select is None else self.select)

    @property
    def timeline_selector(self) -> Selector | None:
        """The ranks that keep a timeline, None for no rank."""
        if not self.timed:
            return None
        try:
            return parse_selector(self.timeline_select)
        except ValueError as mistake:
            raise ValueError(str(mistake).replace(flag("select"), flag("timeline_select"), 1)) from None

    def plan(self, target: str, role: str | None = None) -> Plan:
        """The steps of ``target`` that are captured when ``role`` runs it."""
        if role is not None and (steps := self._role_steps.get(role)) is not None:
            return parse_step_list(steps, str(self.role_steps), flag("role_steps"))
        if self.steps == BY_SCHEDULE:
            return Schedule(self.skip_first, self.wait, self.warmup, self.active, self.repeat)
        lists = parse_steps(self.steps, flag("steps"))
        return lists.get(target) or lists.get(None) or StepList(())

    @property
    def _role_ranks(self) -> dict[str, str]:
        return {} if self.role_select is None else parse_per_role(self.role_select, flag("role_select"))

    @property
    def _role_steps(self) -> dict[str, str]:
        return {} if self.role_steps is None else parse_per_role(self.role_steps, flag("role_steps"))

    def _check(self) -> None:
        if self.dir is None:
            raise ValueError(f"{flag('dir')} is not set: say where the traces go, e.g. {flag('dir')} /data/traces")
        if is_remote(self.dir):
            check_remote(flag("dir"), self.dir)
        if self.on_finish is None and self.on_finish_when != "window":
            raise ValueError(
                f"{flag('on_finish_when')} {self.on_finish_when} has no effect without {flag('on_finish')}"
            )
        if self.all_ranks and self.select is not None:
            raise ValueError(f"{flag('all_ranks')} and {flag('select')} {self.select} contradict each other: give one")
        for role in (None, *self.roles):
            self.selector(role)
            self.plan(self.target[0], role)
        if self.discrete and TRAIN_OVERALL in self.target:
            raise ValueError(
                f"{flag('discrete')} and {flag('target')} {TRAIN_OVERALL} contradict each other: a file per role, or "
                f"one a step with all roles in it. Drop one, or give {flag('target')} train_actor train_log_probs"
            )
        self._check_tools()
        self._check_on_demand()
        if self.steps != BY_SCHEDULE:
            self._check_steps(self.steps)

    def _check_tools(self) -> None:
        tools = f"{flag('tool')} {' '.join(self.tool)}"
        for name in ("timeline_select", "timeline_megabytes"):
            default = next(f.default for f in fields(self) if f.name == name)
            if not self.timed and getattr(self, name) != default:
                raise ValueError(f"{flag(name)} has no effect with {tools}: add {TIMELINE}, or drop {flag(name)}")
        if self.timed and is_remote(str(self.dir)):
            raise ValueError(
                f"{flag('tool')} {TIMELINE} and {flag('dir')} {self.dir} exclude each other: a timeline grows while "
                "the job runs, which no object store lets a file do. Give a directory"
            )
        _ = self.timeline_selector
        activities = f"{flag('activities')} {' '.join(self.activities)}"
        if {"torch", "nsys"} <= set(self.tool) and "cuda" in self.activities:
            raise ValueError(
                f"{tools} and {activities} exclude each other: CUPTI serves one subscriber, and nsys is one. "
                f"Give {flag('activities')} cpu, or one of the two tools"
            )
        for name in TORCH_ONLY:
            value = getattr(self, name)
            default = next(f.default for f in fields(self) if f.name == name)
            if "torch" not in self.tool and value != default:
                raise ValueError(f"{flag(name)} has no effect with {tools}: add torch, or drop {flag(name)}")
        for name in NEED_CPU:
            if "torch" in self.tool and "cpu" not in self.activities and getattr(self, name):
                raise ValueError(f"{flag(name)} has no effect with {activities}: add cpu, or drop {flag(name)}")
        if "stacks" in self.export and not self.with_stack:
            raise ValueError(f"{flag('export')} stacks has no stacks to export: add {flag('with_stack')}")

    def _check_on_demand(self) -> None:
        if self.on_demand and is_remote(str(self.dir)):
            raise ValueError(
                f"{flag('on_demand')} and {flag('dir')} {self.dir} exclude each other: requests and answers are files "
                "that all ranks and your shell see. Give a directory"
            )
        for name in ("trigger_step_time", "trigger_imbalance", "prometheus"):
            if getattr(self, name) is not None and not self.listens:
                raise ValueError(f"{flag(name)} has no effect without {flag('on_demand')} or {flag('tool')} {TIMELINE}")
        if self.trigger_imbalance is not None and not self.timed:
            raise ValueError(f"{flag('trigger_imbalance')} needs the stages' times: add {flag('tool')} {TIMELINE}")
        if self.trigger_cooldown != 3600 and self.trigger_step_time is None and self.trigger_imbalance is None:
            raise ValueError(
                f"{flag('trigger_cooldown')} has no effect without {flag('trigger_step_time')} or "
                f"{flag('trigger_imbalance')}"
            )

    def _check_steps(self, steps: str) -> None:
        for f in fields(self):
            if f.name in SCHEDULE and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"{flag('steps')} {steps} and {flag(f.name)} {getattr(self, f.name)} contradict each other: "
                    "give steps or a schedule"
                )
        lists = parse_steps(steps, flag("steps"))
        for target in self.target:
            if target not in lists and None not in lists:
                raise ValueError(f"{flag('steps')}: {steps!r} has no steps for {target}; add '{target}=...'")
        for named in lists.keys() - {None, *self.target}:
            raise ValueError(f"{flag('steps')}: {named} has steps in {steps!r} but is not in {flag('target')}")

    def to_env(self) -> dict[str, str]:
        """The ``MEGAPROF_*`` variables that ``from_env`` reads this configuration back from, wherever it runs."""
        env = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default:
                continue
            if f.name == "dir" and not is_remote(value):
                value = os.path.abspath(value)  # a child may run in another directory (Ray's workers do)
            env[variable(f.name)] = " ".join(value) if isinstance(value, tuple) else str(value)
        return env

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ProfileConfig:
        """The configuration that ``MEGAPROF_*`` variables describe. Raises ValueError as the class does."""
        return cls.from_values({}, env)

    @classmethod
    def from_values(cls, flags: Mapping[str, Any], env: Mapping[str, str] | None = None) -> ProfileConfig:
        """``flags`` (field name to value, only what was given) over the environment over the defaults."""
        env = os.environ if env is None else env
        known = {variable(f.name): f for f in fields(cls)}
        for name in env:
            if name.startswith(ENV_PREFIX) and name not in known:
                raise ValueError(f"{name}: unknown variable; known: {', '.join(known)}")
        values = {f.name: f.metadata["read"](name, env[name]) for name, f in known.items() if name in env}
        return cls(**{**values, **flags})


def destination(name: str) -> str:
    """The attribute of a parsed namespace that holds a field's flag."""
    return flag(name).removeprefix("--").replace("-", "_")


def variable(name: str) -> str:
    """The environment variable of a field: ``record_shapes`` is ``MEGAPROF_RECORD_SHAPES``."""
    return ENV_PREFIX + name.removeprefix("profile_").upper()


def options() -> tuple[Field[Any], ...]:
    """The fields of ProfileConfig, each with ``help`` and ``read`` in its metadata and a default."""
    return tuple(f for f in fields(ProfileConfig) if f.default is not MISSING)
