"""ProfileConfig: every option, its default and its rule, once.

A field ``record_shapes`` is the flag ``--profile-record-shapes``, the environment variable
``MEGAPROF_RECORD_SHAPES`` and the keyword ``record_shapes=``. A flag overrides the environment, which overrides the
default. `ALIASES` are flags and variables too, and no fields.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any

import megaprof.config.values as read
from megaprof.artifacts.places import check_remote, is_remote
from megaprof.config.values import (
    ANNOTATED,
    NO_STEPS,
    NONE,
    TARGETS,
    TIMELINE,
    TRAIN_OVERALL,
    Plan,
    parse_per_role,
    parse_schedule,
    parse_steps,
)
from megaprof.parallel.selectors import NOBODY, Selector, parse_selector

ENV_PREFIX = "MEGAPROF_"
ACTIVITIES = ("cpu", "cuda")
EXPORTS = ("trace", "stacks")
RANGE_LEVELS = ("step", "microbatch", "layer", "module")
#: Switches that stand for a value of a field.
SWITCHES = {"all_ranks": ("select", "all"), "with_modules": ("ranges", "module")}
#: The parts of ``schedule``, and the least value of each.
SCHEDULE = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 1, "repeat": 0}
ALIASES = (*SWITCHES, *SCHEDULE)
#: The value of ``steps`` that makes the schedule decide. It is not None, because hosts' configurations use None and []
#: for no steps at all.
BY_SCHEDULE = "schedule"
#: Options of the timeline alone.
TIMELINE_ONLY = ("timeline_select", "timeline_megabytes", "collectives")
#: Options that only the torch profiler has, those that others have too, and those that it ignores without CPU activity.
TORCH_ONLY = ("activities", "record_shapes", "with_flops", "export", "kernels")
OF_OTHERS_TOO = ("profile_memory", "with_stack")
NEED_CPU = ("record_shapes", "with_flops", *OF_OTHERS_TOO)


def _option(default: Any, help: str, read: Callable[[str, Any], Any]) -> Any:
    """Returns a field with its help text and the function that reads its value from a flag or a variable:
    ``read(name, value)``."""
    return field(default=default, metadata={"help": help, "read": read})


def flag(name: str) -> str:
    """Returns the command-line flag of a field: ``--profile-record-shapes`` for ``record_shapes``."""
    return "--profile-" + name.removeprefix("profile_").replace("_", "-")


@dataclass(frozen=True)
class ProfileConfig:
    """What to capture, when, on which ranks, and where to write it. Without a target, profiling is off and no function
    is wrapped.

    Raises ValueError for a value that cannot be honoured; the message names the option, the value and what would be
    valid. ``install_hooks`` checks what depends on the world (ranks, coordinates), before the first step.
    """

    target: tuple[str, ...] = _option(
        (),
        f"what to capture: one or more of {', '.join(TARGETS)}. Without a target, profiling is off",
        partial(read.words, TARGETS),
    )
    dir: str | None = _option(
        None,
        "directory for the files; required with a target. May be a remote directory that fsspec supports "
        "(s3://bucket/traces): files are then staged in the temporary directory and uploaded in the background",
        read.directory,
    )
    select: str | None = _option(
        None,
        "ranks that capture: 0,8,16 | all | none | per-stage (the lowest rank of each pipeline stage) | coordinates, "
        "such as pp=*,tp=0,dp=0 or pp=0|3 or pp=0-2. Without it, rank 0 captures",
        read.ranks,
    )
    role_select: str | None = _option(
        None,
        "the same per role; overrides --profile-select: 'actor=0,1;ref=none;critic=all;rollout=per-stage'",
        read.per_name,
    )
    steps: str = _option(
        BY_SCHEDULE,
        "steps to capture, in the host's own iteration numbers: 10 | 1,2,5 | 20:30 | 20:30:5 (end excluded) | none; or "
        "per target: 'train_actor=10:12;train_log_probs=0' (annotated=... for annotated work with --profile-discrete). "
        "Replaces --profile-schedule",
        read.per_name,
    )
    discrete: bool = _option(
        False,
        "write the annotated work of each role to a file of its own. Without it, annotations are ranges in whatever "
        "window is open (train_overall: one file per step, with all roles in it)",
        read.boolean,
    )
    schedule: str = _option(
        "3:0:0:1:1",
        "calls of a target to capture, as SKIP_FIRST:WAIT:WARMUP:ACTIVE:REPEAT of torch.profiler.schedule: so many "
        "calls are skipped; then each cycle has idle calls, further calls before the captured ones, and captured "
        "calls, one file each; REPEAT cycles, 0 for the whole run. What is left out at the end has its default",
        read.text,
    )
    ranges: str = _option(
        "microbatch", f"finest ranges to write: {' | '.join(RANGE_LEVELS)}", partial(read.word, RANGE_LEVELS)
    )
    tool: tuple[str, ...] = _option(
        ("torch",),
        "what records: torch (a profiler trace of each window) | nsys (cudaProfilerStart/Stop, for 'megaprof nsys') | "
        "memory (CUDA memory history) | timeline (every step on every rank, cheap enough to leave on). Several may be "
        "combined",
        read.tools,
    )
    timeline_select: str = _option(
        "all",
        "ranks that keep a timeline, as in --profile-select. The report finds slow ranks among these only",
        read.ranks,
    )
    timeline_megabytes: int = _option(
        64,
        "largest size of a rank's timeline, in MiB; beyond it, the oldest quarter is removed",
        partial(read.count, 1),
    )
    collectives: bool = _option(
        False,
        "also record in the timeline when each rank arrives at its collectives, read from torch's flight recorder. The "
        "report then names the tensor-, context- or expert-parallel rank that the others wait for. "
        "With NCCL, this needs TORCH_NCCL_ENABLE_TIMING=1, which megaprof run sets",
        read.boolean,
    )
    activities: tuple[str, ...] = _option(
        ACTIVITIES,
        "what the torch profiler records: cpu, cuda. cuda alone costs next to nothing, but the trace then does not "
        "name the process groups of collectives",
        partial(read.words, ACTIVITIES),
    )
    record_shapes: bool = _option(False, "record tensor shapes (costs memory)", read.boolean)
    profile_memory: bool = _option(False, "record tensor allocations (costs memory)", read.boolean)
    with_stack: bool = _option(False, "record Python stacks (costs memory)", read.boolean)
    with_flops: bool = _option(False, "estimate FLOPs of operators (records shapes, costs memory)", read.boolean)
    export: tuple[str, ...] = _option(
        ("trace",),
        "what to write from a torch profile: trace (Chrome trace) | stacks (collapsed stacks for a flame graph, "
        "gzipped; needs recorded stacks)",
        partial(read.words, EXPORTS),
    )
    kernels: bool = _option(
        False, "also write the self time and count of every kernel (.kernels.json) for each window", read.boolean
    )
    max_host_memory: str = _option(
        "95%",
        "close an open window early when this process uses more than this size (64GiB), or when more than this share "
        "(80%) of the container's memory is in use (of the machine's, if the container has no limit)",
        read.memory_limit,
    )
    on_finish: str | None = _option(
        None,
        "shell command to run for the finished files of each window, on every rank that captures. $PROFILED_FILES "
        "holds their paths, one per line, and $PROFILED_DIR the save path",
        read.text,
    )
    flush_seconds: int = _option(
        60,
        "longest wait in seconds for unfinished files when the process ends (at most 20 after SIGTERM), and for the "
        "GPU when a window closes",
        partial(read.count, 0),
    )
    on_demand: bool = _option(
        False,
        "let 'megaprof trigger' and 'megaprof status' work on the running job, on every rank. Add "
        f"{flag('steps')} none to capture nothing else. Always on with {flag('tool')} {TIMELINE}",
        read.boolean,
    )

    names: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The user's spelling of each field that was not set by its flag: a variable, or an option of the host."""

    def __post_init__(self) -> None:
        for option in options():
            value = getattr(self, option.name)
            if value is option.default:  # also the way to say "not given" for options without a default
                continue
            object.__setattr__(self, option.name, option.metadata["read"](self.named(option.name), value))
        if self.enabled:
            self._check()

    def named(self, name: str) -> str:
        """Returns the option of field ``name`` as the user spelled it, for messages."""
        return self.names.get(name, flag(name))

    @property
    def enabled(self) -> bool:
        return bool(self.target)

    @property
    def windowed(self) -> bool:
        """False if only the timeline records."""
        return self.tool != (TIMELINE,)

    @property
    def holding(self) -> tuple[str, ...]:
        """The options that make the torch profiler hold weak references to tensors (`megaprof.capture.this_rank`)."""
        names = ("record_shapes", "with_flops", "with_stack") if "torch" in self.tool else ()
        return tuple(name for name in names if getattr(self, name))

    @property
    def timed(self) -> bool:
        """True if every step goes into a timeline."""
        return TIMELINE in self.tool

    @property
    def around_windows(self) -> bool:
        """True if a capture brings a timeline of the calls around its windows."""
        return not self.timed and (self.on_demand or "torch" in self.tool)

    @property
    def listens(self) -> bool:
        """True if captures can be requested while the job runs."""
        return self.on_demand or self.timed

    @property
    def steps_are_none(self) -> bool:
        """True if no step is captured unless somebody requests it while the job runs."""
        targets = (*self.target, ANNOTATED) if self.discrete else self.target
        return self.enabled and all(self.plan(target) == NO_STEPS for target in targets)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles with their own ranks."""
        return tuple(self._ranks_by_role)

    def selector(self, role: str | None = None) -> Selector:
        """Returns the ranks that capture ``role``. If the role has no ranks of its own, those are the ranks for all
        roles, or rank 0."""
        others = "0" if self.select is None else self.select
        return _selector(self._ranks_by_role.get(role or "", others), self.select_option(role))

    def select_option(self, role: str | None = None) -> str:
        """Returns the option that names the ranks of ``role``, as the user spelled it."""
        return f"{self.named('role_select')} {role}" if role in self._ranks_by_role else self.named("select")

    @property
    def timeline_selector(self) -> Selector:
        """The ranks that keep a timeline."""
        return _selector(self.timeline_select, self.named("timeline_select")) if self.timed else NOBODY

    def plan(self, target: str) -> Plan:
        """Returns the steps of ``target`` that are captured."""
        if self.steps == BY_SCHEDULE:
            return parse_schedule(self.schedule, self.named("schedule"))
        lists = parse_steps(self.steps, self.named("steps"))
        return lists.get(target) or lists.get(None) or NO_STEPS

    @property
    def _ranks_by_role(self) -> dict[str, str]:
        return {} if self.role_select is None else parse_per_role(self.role_select, self.named("role_select"))

    def _check(self) -> None:
        named = self.named
        if self.dir is None:
            raise ValueError(f"{named('dir')} is not set: say where the traces go, e.g. {flag('dir')} /data/traces")
        if is_remote(self.dir):
            check_remote(named("dir"), self.dir)
        for role in (None, *self.roles):
            self.selector(role)
        self.plan(self.target[0])
        if self.discrete and TRAIN_OVERALL in self.target:
            raise ValueError(
                f"{named('discrete')} and {named('target')} {TRAIN_OVERALL} contradict each other: a file per role, or "
                f"one a step with all roles in it. Drop one, or give {flag('target')} train_actor train_log_probs"
            )
        if self.on_demand and is_remote(self.dir):
            raise ValueError(
                f"{named('on_demand')} and {named('dir')} {self.dir} exclude each other: requests and answers are "
                "files that all ranks and your shell see. Give a directory"
            )
        self._check_tools()
        if self.steps != BY_SCHEDULE:
            self._check_steps(self.steps)

    def _check_tools(self) -> None:
        named = self.named
        tools = f"{named('tool')} {' '.join(self.tool)}"
        # Nsight Systems records memory and stacks, too, and a tool of somebody else's may.
        torch_only = TORCH_ONLY + OF_OTHERS_TOO * ({"memory", TIMELINE} >= {*self.tool})
        for tool, names in ((TIMELINE, TIMELINE_ONLY), ("torch", torch_only)):
            for name in names:
                if tool not in self.tool and getattr(self, name) != getattr(ProfileConfig, name):
                    raise ValueError(f"{named(name)} has no effect with {tools}: add {tool}, or drop {named(name)}")
        if self.timed and is_remote(str(self.dir)):
            raise ValueError(
                f"{named('tool')} {TIMELINE} and {named('dir')} {self.dir} exclude each other: a timeline grows while "
                "the job runs, which no object store lets a file do. Give a directory"
            )
        _ = self.timeline_selector
        activities = f"{named('activities')} {' '.join(self.activities)}"
        if {"torch", "nsys"} <= set(self.tool) and "cuda" in self.activities:
            raise ValueError(
                f"{tools} and {activities} exclude each other: CUPTI serves one subscriber, and nsys is one. "
                f"Give {flag('activities')} cpu, or one of the two tools"
            )
        for name in NEED_CPU:
            if "torch" in self.tool and "cpu" not in self.activities and getattr(self, name):
                raise ValueError(f"{named(name)} has no effect with {activities}: add cpu, or drop {named(name)}")
        if "stacks" in self.export and not self.with_stack:
            raise ValueError(f"{named('export')} stacks has no stacks to export: add {flag('with_stack')}")

    def _check_steps(self, steps: str) -> None:
        option = self.named("steps")
        if self.schedule != ProfileConfig.schedule:
            raise ValueError(
                f"{option} {steps} and {self.named('schedule')} {self.schedule} contradict each other: give steps or a "
                "schedule"
            )
        lists = parse_steps(steps, option)
        targets = (*self.target, ANNOTATED) if self.discrete else self.target
        for target in targets:
            if target not in lists and None not in lists:
                raise ValueError(f"{option}: {steps!r} has no steps for {target}; add '{target}=...'")
        for extra_target in lists.keys() - {None, *targets}:
            missing = flag("discrete") if extra_target == ANNOTATED else flag("target")
            raise ValueError(f"{option}: {extra_target} has steps in {steps!r} but {missing} does not ask for it")

    def to_env(self) -> dict[str, str]:
        """Returns the ``MEGAPROF_*`` variables from which `from_env` makes the same configuration."""
        values = {option.name: getattr(self, option.name) for option in options()}
        return {
            variable(name): " ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in values.items()
            if value != getattr(ProfileConfig, name)
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ProfileConfig:
        """Returns the configuration that ``MEGAPROF_*`` variables describe. Raises ValueError."""
        return cls.from_values({}, env)

    @classmethod
    def from_values(
        cls, flags: Mapping[str, Any], env: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None
    ) -> ProfileConfig:
        """Returns the configuration of ``flags`` (field name to value), the environment and the defaults.

        ``names`` has the user's spelling of those ``flags`` that are not really flags, for messages. Raises ValueError.
        """
        names = names or {}
        for name in flags.keys() - set(NAMES):
            raise ValueError(f"{name}: unknown option of megaprof; known: {', '.join(NAMES)}")
        set_by_env = set_in(os.environ if env is None else env)
        schedule = str(set_by_env.get("schedule", ProfileConfig.schedule))
        set_by_flags = _without_aliases(flags, lambda name: names.get(name, flag(name)), schedule)
        spellings = {name: variable(name) for name in set_by_env if name not in set_by_flags} | dict(names)
        return cls(**{**set_by_env, **set_by_flags}, names=spellings)


def _selector(ranks: str, option: str) -> Selector:
    """Returns the selection that ``ranks`` describes; ``[]``, ``null`` and ``none`` are no rank."""
    if ranks.strip().lower() in (NONE, "null", "[]"):
        return NOBODY
    return parse_selector(ranks.strip("[]"), option)


def _without_aliases(settings: Mapping[str, Any], spelling: Callable[[str], str], schedule: str) -> dict[str, Any]:
    """Returns ``settings`` with fields in place of `ALIASES`. Parts of the schedule replace those of ``schedule``.
    Raises ValueError if a field is also set otherwise."""
    values = dict(settings)
    for alias, (name, meant) in SWITCHES.items():
        given = values.pop(alias, None)
        if given is not None and read.boolean(spelling(alias), given):
            if values.get(name) not in (None, meant):
                raise ValueError(
                    f"{spelling(alias)} and {spelling(name)} {values[name]} contradict each other: give one"
                )
            values[name] = meant
    parts = {
        name: read.count(least, spelling(name), values.pop(name)) for name, least in SCHEDULE.items() if name in values
    }
    if parts:
        if "schedule" in values:
            raise ValueError(
                f"{spelling('schedule')} and {spelling(next(iter(parts)))} contradict each other: give one"
            )
        whole = dataclasses.asdict(parse_schedule(schedule, spelling("schedule"))) | parts
        values["schedule"] = ":".join(map(str, whole.values()))
    return values


def destination(name: str) -> str:
    """Returns the attribute of a parsed namespace that holds a field's flag."""
    return flag(name).removeprefix("--").replace("-", "_")


def variable(name: str) -> str:
    """Returns the environment variable of a field: ``MEGAPROF_RECORD_SHAPES`` for ``record_shapes``."""
    return ENV_PREFIX + name.removeprefix("profile_").upper()


def options() -> tuple[Field[Any], ...]:
    """Returns the fields of ProfileConfig that are options. Each has a default, and ``help`` and ``read`` in its
    metadata."""
    return tuple(option for option in fields(ProfileConfig) if option.metadata)


NAMES = (*(option.name for option in options()), *ALIASES)


def set_in(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options that ``env`` sets, by name, with their values as text. Raises ValueError."""
    names = {variable(name): name for name in NAMES}
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in names:
            raise ValueError(f"{name}: unknown variable; known: {', '.join(names)}")
    values = {name: env[variable_name] for variable_name, name in names.items() if variable_name in env}
    return _without_aliases(values, variable, ProfileConfig.schedule)
