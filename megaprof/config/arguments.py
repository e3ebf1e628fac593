"""``--profile-target`` and friends for any argparse parser, Megatron-LM's ``extra_args_provider`` included."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from megaprof.config.options import NAMES, SCHEDULE, SWITCHES, ProfileConfig, destination, flag, options, variable
from megaprof.config.values import TARGETS

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)

#: The attribute of the parsed namespace with the *host's* defaults of the options that megaprof shares with it. Without
#: them, a default of the host (slime: ``--profile-target train_overall``) would look like the user's wish.
_HOST_DEFAULTS = "megaprof_host_defaults"
#: The host's own names for our options select and steps, in Megatron-LM and its descendants.
_HOST_RANKS, _HOST_START, _HOST_END = "profile_ranks", "profile_step_start", "profile_step_end"
#: Megatron-LM's own defaults, for a namespace that `add_profile_args` did not prepare. Newer versions name no rank.
_MEGATRON_DEFAULTS: dict[str, Any] = {_HOST_RANKS: [0], _HOST_START: 10, _HOST_END: 12}
_HOST_PROFILERS = {"profile": "--profile", "use_pytorch_profiler": "--use-pytorch-profiler"}


def add_profile_args(parser: _Parser) -> _Parser:
    """Adds megaprof's options to ``parser`` and returns it, as Megatron's ``extra_args_provider`` expects.

    An option that the host already defines stays the host's, and megaprof uses it: ``--profile-target`` (slime),
    ``--profile-ranks``, ``--profile-step-start`` and ``--profile-step-end`` (Megatron-LM). ``ProfileConfig`` checks the
    values, so a mistake is a ValueError and never a ``SystemExit`` in the middle of a launcher.
    """
    host_options = parser._option_string_actions
    # By attribute, because ``--profile_dir`` and ``--profile-dir`` have one attribute.
    ours = map(destination, NAMES)
    shared_names = {action.dest for action in parser._actions} & {*ours, _HOST_RANKS, _HOST_START, _HOST_END}
    group = parser.add_argument_group(
        "megaprof", "pipeline-stage profiling; every option is also an environment variable, MEGAPROF_<OPTION>"
    )
    for option in options():
        if flag(option.name) in host_options:
            continue
        default, text = option.default, str(option.metadata["help"])
        if not isinstance(default, bool) and default not in (None, ()):
            text += f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
        keywords: dict[str, Any] = {"default": None, "dest": destination(option.name)}
        # Percent signs are argparse's own; the default belongs to ProfileConfig and is only quoted here. The end shows
        # nothing, and keeps `argparse.ArgumentDefaultsHelpFormatter` from calling None the default.
        keywords["help"] = f"{text} [{variable(option.name)}]".replace("%", "%%") + "%(default).0s"
        if isinstance(option.default, bool):
            keywords |= {"action": "store_true"}
        elif isinstance(option.default, tuple):
            keywords |= {"nargs": "+", "metavar": "NAME"}
        else:
            keywords |= {"metavar": option.name.upper()}
        group.add_argument(flag(option.name), **keywords)
    for alias in (*SWITCHES, *SCHEDULE):
        if flag(alias) not in host_options:
            name, value = SWITCHES.get(alias, ("schedule", ""))
            stands = f"the same as {flag(name)} {value}" if value else f"a part of {flag(name)}"
            keywords = {"action": "store_true"} if value else {"metavar": alias.upper()}
            group.add_argument(flag(alias), default=None, help=f"{stands} [{variable(alias)}]", **keywords)
    parser.set_defaults(**{_HOST_DEFAULTS: {name: parser.get_default(name) for name in sorted(shared_names)}})
    return parser


def config_from_args(args: argparse.Namespace | Any, env: Mapping[str, str] | None = None) -> ProfileConfig:
    """Returns the ProfileConfig of a parsed namespace, or of any object with its attributes.

    A flag overrides the environment, which overrides the default. Raises ValueError for an invalid value, for options
    of megaprof without a target, and if the host's own profiler is also on.
    """
    env = os.environ if env is None else env
    defaults: Mapping[str, Any] = getattr(args, _HOST_DEFAULTS, _MEGATRON_DEFAULTS)
    typed_values = {name: _typed(args, defaults, destination(name)) for name in NAMES}
    values = {name: value for name, value in typed_values.items() if value is not None and value is not False}
    megaprof_names = {name for name in values if destination(name) not in defaults}
    names = _honour_host(values, args, defaults, env)
    config = ProfileConfig.from_values(values, env, names)
    if not config.enabled:
        if megaprof_names:
            name = sorted(megaprof_names)[0]
            raise ValueError(f"{flag(name)} is set but no {flag('target')}; valid: one or more of {', '.join(TARGETS)}")
        return config
    check_host_profilers(config, args)
    return config


def check_host_profilers(config: ProfileConfig, args: argparse.Namespace | Any) -> None:
    """Raises ValueError if ``args`` switch the host's own profiler on and ``config`` plans windows. A timeline alone,
    or captures on demand alone, can run beside that profiler."""
    if not config.windowed or config.steps_are_none:
        return
    for name, host_flag in _HOST_PROFILERS.items():
        if getattr(args, name, False):
            raise ValueError(
                f"{host_flag} and {flag('target')} are both set: one process can hold one profiler session. "
                f"Drop {host_flag}, or drop {flag('target')}"
            )


def _typed(args: Any, defaults: Mapping[str, Any], name: str) -> Any:
    """Returns the value of an attribute of ``args`` that the user typed; None if it equals the host's default, since
    the two cannot be told apart."""
    value = getattr(args, name, None)
    return None if name in defaults and value in (defaults[name], []) else value


def _honour_host(
    values: dict[str, Any], args: Any, defaults: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, str]:
    """Adds the host's options of the same meaning to ``values``, the values of our options by name, unless the user set
    ours. Returns how the user spelled each option that was added.

    A value that the user typed counts as a flag. A default of the host counts less than the environment, and turns
    profiling on only together with an explicit ``--profile-dir``.
    """

    def set_anywhere(*names: str) -> bool:
        return any(name in values or variable(name) in env for name in names)

    names: dict[str, str] = {}
    if not set_anywhere("target") and "dir" in values and defaults.get(destination("target")):
        values["target"] = defaults[destination("target")]
    if not set_anywhere("target"):
        return names
    ranks = _typed(args, defaults, _HOST_RANKS)
    if ranks is None and not set_anywhere("select", "all_ranks"):
        ranks = getattr(args, _HOST_RANKS, None)
    if isinstance(ranks, list | tuple) and ranks and "select" not in values:
        values["select"] = ",".join(map(str, ranks))
        names["select"] = "--profile-ranks"
    start, end = getattr(args, _HOST_START, None), getattr(args, _HOST_END, None)
    if not isinstance(start, int) or not isinstance(end, int) or "steps" in values:
        return names
    is_typed = any(_typed(args, defaults, name) is not None for name in (_HOST_START, _HOST_END))
    if is_typed or not set_anywhere("steps", "schedule", *SCHEDULE):
        if not 0 <= start < end:
            raise ValueError(
                f"--profile-step-start {start} --profile-step-end {end}: start must be non-negative and less than end"
            )
        values["steps"] = f"{start}:{end}"
        names["steps"] = "--profile-step-start/--profile-step-end"
    return names
