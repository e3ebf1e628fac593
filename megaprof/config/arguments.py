"""``--profile-target`` and friends for any argparse parser, Megatron-LM's ``extra_args_provider`` included."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from megaprof.config.options import SCHEDULE, ProfileConfig, destination, flag, options, variable
from megaprof.config.windows import TARGETS

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)

#: Where the parsed namespace carries the defaults that the *host* gave to options shared with it. Without them a
#: default of the host (slime: ``--profile-target train_overall``) would read as the user's wish.
_HOST_DEFAULTS = "megaprof_host_defaults"
#: The host's own names for what we call select and steps (Megatron-LM has them; so do its descendants).
_HOST_RANKS, _HOST_START, _HOST_END = "profile_ranks", "profile_step_start", "profile_step_end"
_HOST_PROFILERS = {"profile": "--profile", "use_pytorch_profiler": "--use-pytorch-profiler"}


def add_profile_args(parser: _Parser) -> _Parser:
    """Add megaprof's options to ``parser`` and return it, as Megatron's ``extra_args_provider`` expects.

    An option that the host already defines is left to the host and honoured: ``--profile-target`` (slime),
    ``--profile-ranks``, ``--profile-step-start`` and ``--profile-step-end`` (Megatron-LM). Values are checked by
    ``ProfileConfig``, so every mistake is a ValueError and none a ``SystemExit`` half-way through a launcher.
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
        keywords["help"] = f"{option.metadata['help']} [{variable(option.name)}]".replace("%", "%%")
        if isinstance(option.default, bool):
            keywords |= {"action": "store_true"}
        elif isinstance(option.default, tuple):
            keywords |= {"nargs": "+", "metavar": "NAME"}
        else:
            keywords |= {"metavar": option.name.upper()}
        group.add_argument(flag(option.name), **keywords)
    parser.set_defaults(**{_HOST_DEFAULTS: {name: parser.get_default(name) for name in shared}})
    return parser


def config_from_args(args: argparse.Namespace | Any, env: Mapping[str, str] | None = None) -> ProfileConfig:
    """The ProfileConfig of a parsed namespace (or any object with its attributes).

    A flag beats the environment, which beats the default. Raises ValueError for a value that is not valid, for
    megaprof options without a target, and when the host's own profiler is switched on as well.
    """
    env = os.environ if env is None else env
    host_defaults: Mapping[str, Any] = getattr(args, _HOST_DEFAULTS, None) or {}
    given: dict[str, Any] = {}
    for option in options():
        name = destination(option.name)
        value = getattr(args, name, None)
        if value is not None and value is not False and not (name in host_defaults and value == host_defaults[name]):
            given[option.name] = value
    ours = {name for name in given if destination(name) not in host_defaults}
    _honour_host(given, args, env, host_defaults)
    config = ProfileConfig.from_values(given, env)
    if not config.enabled:
        if ours:
            first = sorted(ours)[0]
            raise ValueError(
                f"{flag(first)} is set but no {flag('target')}; valid: one or more of {', '.join(TARGETS)}"
            )
        return config
    for name, spelled in _HOST_PROFILERS.items():
        if getattr(args, name, False):
            raise ValueError(
                f"{spelled} and {flag('target')} are both set: one process can hold one profiler session. "
                f"Drop {spelled}, or drop {flag('target')}"
            )
    return config


def _honour_host(given: dict[str, Any], args: Any, env: Mapping[str, str], host_defaults: Mapping[str, Any]) -> None:
    """Fill ``given`` from options of the host that mean the same, where the user gave none of ours.

    What the user typed counts as a flag; what the host merely defaults to ranks below the environment, and turns
    profiling on only together with an explicit ``--profile-dir``.
    """

    def set_anywhere(*names: str) -> bool:
        return any(name in given or variable(name) in env for name in names)

    def typed(*names: str) -> bool:
        return any(getattr(args, name, None) != host_defaults.get(name) for name in names)

    if not set_anywhere("target") and "dir" in given and host_defaults.get(destination("target")):
        given["target"] = host_defaults[destination("target")]
    if not set_anywhere("target"):
        return
    ranks = getattr(args, _HOST_RANKS, None)
    chosen = {"select", "all_ranks"} & given.keys()
    honoured = typed(_HOST_RANKS) or not set_anywhere("select", "all_ranks")
    if isinstance(ranks, list | tuple) and ranks and not chosen and honoured:
        given["select"] = ",".join(map(str, ranks))
    start, end = getattr(args, _HOST_START, None), getattr(args, _HOST_END, None)
    if not isinstance(start, int) or not isinstance(end, int) or "steps" in given:
        return
    if typed(_HOST_START, _HOST_END) or not set_anywhere("steps", *SCHEDULE):
        if not 0 <= start < end:
            raise ValueError(
                f"--profile-step-start {start} --profile-step-end {end}: start must be non-negative and less than end"
            )
        given["steps"] = f"{start}:{end}"
