"""``--profile-target`` and friends for any argparse parser, Megatron-LM's ``extra_args_provider`` included."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import Field
from typing import Any, TypeVar

from megaprof.config.options import ALL_RANKS, SCHEDULE, ProfileConfig, destination, flag, options, variable
from megaprof.config.windows import TARGETS

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)

#: Where the parsed namespace carries the defaults that the *host* gave to options shared with it. Without them a
#: default of the host (slime: ``--profile-target train_overall``) would read as the user's wish.
_HOST_DEFAULTS = "megaprof_host_defaults"
#: The host's own names for what we call select and steps (Megatron-LM has them; so do its descendants).
_HOST_RANKS, _HOST_START, _HOST_END = "profile_ranks", "profile_step_start", "profile_step_end"
#: Megatron-LM's own defaults, for a namespace that `add_profile_args` had no part in. Newer versions name no rank.
_MEGATRON_DEFAULTS: dict[str, Any] = {_HOST_RANKS: [0], _HOST_START: 10, _HOST_END: 12}
_HOST_PROFILERS = {"profile": "--profile", "use_pytorch_profiler": "--use-pytorch-profiler"}


def add_profile_args(parser: _Parser) -> _Parser:
    """Adds megaprof's options to ``parser`` and returns it, as Megatron's ``extra_args_provider`` expects.

    An option that the host already defines stays the host's, and megaprof uses it: ``--profile-target`` (slime),
    ``--profile-ranks``, ``--profile-step-start`` and ``--profile-step-end`` (Megatron-LM). ``ProfileConfig`` checks the
    values, so a mistake is a ValueError and never a ``SystemExit`` in the middle of a launcher.
    """
    taken = parser._option_string_actions
    shared = [destination(f.name) for f in options() if flag(f.name) in taken]
    shared += [name for name in (_HOST_RANKS, _HOST_START, _HOST_END) if "--" + name.replace("_", "-") in taken]
    group = parser.add_argument_group(
        "megaprof", "pipeline-stage profiling; every option is also an environment variable, MEGAPROF_<OPTION>"
    )
    for option in options():
        if flag(option.name) in taken:
            continue
        keywords: dict[str, Any] = {"default": None, "dest": destination(option.name)}
        # Percent signs are argparse's own; the default belongs to ProfileConfig and is only quoted here.
        keywords["help"] = f"{_help(option)} [{variable(option.name)}]".replace("%", "%%")
        if isinstance(option.default, bool):
            keywords |= {"action": "store_true"}
        elif isinstance(option.default, tuple):
            keywords |= {"nargs": "+", "metavar": "NAME"}
        else:
            keywords |= {"metavar": option.name.upper()}
        group.add_argument(flag(option.name), **keywords)
    if flag(ALL_RANKS) not in taken:
        group.add_argument(
            flag(ALL_RANKS),
            action="store_true",
            default=None,
            help=f"capture on every rank; the same as {flag('select')} all [{variable(ALL_RANKS)}]",
        )
    parser.set_defaults(**{_HOST_DEFAULTS: {name: parser.get_default(name) for name in shared}})
    return parser


def _help(option: Field[Any]) -> str:
    """Returns the help of an option, with its default where it has one."""
    default, text = option.default, str(option.metadata["help"])
    if isinstance(default, bool) or default in (None, ()):
        return text
    return f"{text} (default: {' '.join(default) if isinstance(default, tuple) else default})"


def config_from_args(args: argparse.Namespace | Any, env: Mapping[str, str] | None = None) -> ProfileConfig:
    """Returns the ProfileConfig of a parsed namespace, or of any object with its attributes.

    A flag overrides the environment, which overrides the default. Raises ValueError for an invalid value, for options
    of megaprof without a target, and if the host's own profiler is also on.
    """
    env = os.environ if env is None else env
    recorded = getattr(args, _HOST_DEFAULTS, None)
    defaults: Mapping[str, Any] = _MEGATRON_DEFAULTS if recorded is None else recorded
    typed = {name: _typed(args, defaults, destination(name)) for name in (*(o.name for o in options()), ALL_RANKS)}
    given = {name: value for name, value in typed.items() if value is not None and value is not False}
    ours = {name for name in given if destination(name) not in defaults}
    names = _honour_host(given, args, defaults, env)
    config = ProfileConfig.from_values(given, env, names)
    if not config.enabled:
        if ours:
            first = sorted(ours)[0]
            raise ValueError(
                f"{flag(first)} is set but no {flag('target')}; valid: one or more of {', '.join(TARGETS)}"
            )
        return config
    check_host_profilers(config, args)
    return config


def check_host_profilers(config: ProfileConfig, args: argparse.Namespace | Any) -> None:
    """Raises ValueError where ``args`` switch the host's own profiler on, and ``config`` has windows of its own: a
    timeline alone, and captures on demand alone, may stand beside it."""
    if not config.windowed or config.steps_are_none:
        return
    for name, spelled in _HOST_PROFILERS.items():
        if getattr(args, name, False):
            raise ValueError(
                f"{spelled} and {flag('target')} are both set: one process can hold one profiler session. "
                f"Drop {spelled}, or drop {flag('target')}"
            )


def _typed(args: Any, defaults: Mapping[str, Any], name: str) -> Any:
    """Returns the value of an attribute of ``args`` that the user typed; None if it equals the host's default, since
    the two cannot be told apart."""
    value = getattr(args, name, None)
    return None if name in defaults and value in (defaults[name], []) else value


def _honour_host(
    given: dict[str, Any], args: Any, defaults: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, str]:
    """Fills ``given`` from options of the host that mean the same, where the user gave none of ours. Returns how the
    user spelled each option that was filled in.

    A value that the user typed counts as a flag. A default of the host's ranks below the environment, and turns
    profiling on only together with an explicit ``--profile-dir``.
    """

    def set_anywhere(*names: str) -> bool:
        return any(name in given or variable(name) in env for name in names)

    names: dict[str, str] = {}
    if not set_anywhere("target") and "dir" in given and defaults.get(destination("target")):
        given["target"] = defaults[destination("target")]
    if not set_anywhere("target"):
        return names
    ranks = _typed(args, defaults, _HOST_RANKS)
    if ranks is None and not set_anywhere("select", ALL_RANKS):
        ranks = getattr(args, _HOST_RANKS, None)
    if isinstance(ranks, list | tuple) and ranks and "select" not in given:
        given["select"] = ",".join(map(str, ranks))
        names["select"] = "--profile-ranks"
    start, end = getattr(args, _HOST_START, None), getattr(args, _HOST_END, None)
    if not isinstance(start, int) or not isinstance(end, int) or "steps" in given:
        return names
    typed = any(_typed(args, defaults, name) is not None for name in (_HOST_START, _HOST_END))
    if typed or not set_anywhere("steps", *SCHEDULE):
        if not 0 <= start < end:
            raise ValueError(
                f"--profile-step-start {start} --profile-step-end {end}: start must be non-negative and less than end"
            )
        given["steps"] = f"{start}:{end}"
        names["steps"] = "--profile-step-start/--profile-step-end"
    return names
