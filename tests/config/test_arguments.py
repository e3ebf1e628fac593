"""Flags on any parser, beside the options that a host already has."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megaprof.config.arguments import add_profile_args, config_from_args
from megaprof.config.options import ProfileConfig, destination, flag, options


def parse(flags: list[str], env: dict[str, str] | None = None, host: Any = None) -> ProfileConfig:
    parser = argparse.ArgumentParser()
    if host is not None:
        host(parser)
    return config_from_args(add_profile_args(parser).parse_args(flags), env or {})


def megatron_lm(parser: argparse.ArgumentParser) -> None:
    """The profiling options of Megatron-LM, by their real names, types and defaults."""
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-step-start", type=int, default=10)
    parser.add_argument("--profile-step-end", type=int, default=12)
    parser.add_argument("--profile-ranks", type=int, nargs="+", default=[])
    parser.add_argument("--use-pytorch-profiler", action="store_true")
    parser.add_argument("--pytorch-profiler-collect-shapes", action="store_true")
    parser.add_argument("--record-memory-history", action="store_true")
    parser.add_argument("--nvtx-ranges", action="store_true")
    parser.add_argument("--otel-enabled", action="store_true")


def slime(parser: argparse.ArgumentParser) -> None:
    megatron_lm(parser)
    parser.add_argument("--profile-target", type=str, nargs="+", default=["train_overall"])


ON = ["--profile-target", "train_actor", "--profile-dir", "/traces"]


def test_nothing_given_is_off() -> None:
    for host in (None, megatron_lm, slime):
        assert parse([], host=host) == ProfileConfig()


def test_words_are_separated_alike_in_flags_and_variables() -> None:
    for words in (
        ["train_actor,train_log_probs"],
        ["train_actor,", "train_log_probs"],
        ["train_actor train_log_probs"],
    ):
        typed = parse(["--profile-target", *words, "--profile-dir", "/traces"])
        assert typed == parse([], {"MEGAPROF_TARGET": " ".join(words), "MEGAPROF_DIR": "/traces"})
        assert typed.target == ("train_actor", "train_log_probs")


def test_every_option_is_a_flag_that_reaches_the_config() -> None:
    values = {
        "target": (["train_actor", "train_log_probs"], ("train_actor", "train_log_probs")),
        "dir": (["/t"], "/t"),
        "select": (["per-stage"], "per-stage"),
        "steps": (["1:3"], "1:3"),
        "role_select": (["actor=0,1;ref=none"], "actor=0,1;ref=none"),
        "ranges": (["step"], "step"),
        "activities": (["cpu"], ("cpu",)),
        "tool": (["memory"], ("memory",)),
        "export": (["trace"], ("trace",)),
        "max_host_memory": (["64GiB"], "64GiB"),
        "timeline_select": (["per-stage", "--profile-tool", "timeline"], "per-stage"),
        "timeline_megabytes": (["7", "--profile-tool", "timeline"], 7),
        "collectives": (["--profile-tool", "timeline"], True),
        "on_finish": (["ls"], "ls"),
        "flush_seconds": (["5"], 5),
        "schedule": (["1:0:2:3"], "1:0:2:3"),
    }
    for option in options():
        given, expected = values.get(option.name, ([], True))
        base = [] if option.name in ("target", "dir") else ON
        extra = [] if base else (ON[2:] if option.name == "target" else ON[:2])
        config = parse([*base, *extra, flag(option.name), *given])
        assert getattr(config, option.name) == expected, option.name


def test_a_flag_beats_the_environment_beats_the_default() -> None:
    env = {"MEGAPROF_TARGET": "train_log_probs", "MEGAPROF_DIR": "/env", "MEGAPROF_ACTIVE": "5"}
    config = parse(ON, env)
    assert (config.target, config.dir, config.schedule) == (("train_actor",), "/traces", "3:0:0:5:1")


def test_provider_returns_the_parser_as_megatron_expects() -> None:
    parser = argparse.ArgumentParser()
    assert add_profile_args(parser) is parser


@pytest.mark.parametrize("host", [megatron_lm, slime])
def test_no_clash_with_a_hosts_options(host: Any) -> None:
    parser = argparse.ArgumentParser(conflict_handler="error")
    host(parser)
    add_profile_args(parser)
    strings = [string for action in parser._actions for string in action.option_strings]
    assert len(strings) == len(set(strings))
    assert all(flag(option.name) in strings for option in options())
    assert "--profile-select" in parser.format_help()


@pytest.mark.parametrize("formatter", [argparse.HelpFormatter, argparse.ArgumentDefaultsHelpFormatter])
def test_the_help_says_every_default_that_is_not_nothing(formatter: Any) -> None:
    parser = add_profile_args(argparse.ArgumentParser(formatter_class=formatter))
    told = " ".join(parser.format_help().partition("--profile-all-ranks  ")[0].split())
    assert "None" not in told
    defaults = [each.default for each in options() if not isinstance(each.default, bool | None) and each.default != ()]
    shown = [" ".join(each) if isinstance(each, tuple) else each for each in defaults]
    assert {"3:0:0:1:1", 64, "schedule", "torch", "cpu cuda", "95%"} <= set(shown)
    for each in shown:
        assert told.count(f"(default: {each})") == shown.count(each)


def test_a_hosts_defaults_for_options_of_our_names_are_nobodys_wish() -> None:
    """Scripts often have torch.profiler's own schedule as options, and some spell options with underscores."""

    def host(parser: argparse.ArgumentParser) -> None:
        for part in ("wait", "warmup", "active"):
            parser.add_argument(f"--profile-{part}", type=int, default=2)
        parser.add_argument("--profile_dir", default="./runs")

    assert not parse([], host=host).enabled
    assert parse([*ON, "--profile-steps", "5"], host=host).schedule == ProfileConfig.schedule
    assert parse([*ON[:2], "--profile_dir", "/t", "--profile-active", "4"], host=host).schedule == "3:0:0:4:1"


def test_twice_on_one_parser_does_not_clash_either() -> None:
    parser = add_profile_args(add_profile_args(argparse.ArgumentParser()))
    assert config_from_args(parser.parse_args(ON), {}).target == ("train_actor",)


def test_megatron_lms_steps_and_ranks_are_honoured() -> None:
    config = parse(
        [*ON, "--profile-step-start", "4", "--profile-step-end", "6", "--profile-ranks", "0", "3"], host=megatron_lm
    )
    assert (config.steps, config.select) == ("4:6", "0,3")
    assert parse(ON, host=megatron_lm).steps == "10:12"
    assert parse(ON, host=megatron_lm).select is None
    with pytest.raises(ValueError, match="-step-start/--profile-step-end 10:20 and --profile-schedule 3:2:0:1:1"):
        parse([*ON, "--profile-step-end", "20", "--profile-wait", "2"], host=megatron_lm)


def of_megatron_alone(flags: list[str], env: dict[str, str]) -> ProfileConfig:
    """As `install_hooks` reads Megatron-LM's global arguments, of a parser that we had no part in."""
    parser = argparse.ArgumentParser()
    megatron_lm(parser)
    parser.set_defaults(profile_ranks=[0])
    return config_from_args(parser.parse_args(flags), env)


def test_megatron_lms_own_defaults_are_not_the_users_wish() -> None:
    env = {"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": "/t"}
    config = of_megatron_alone([], {**env, "MEGAPROF_SELECT": "per-stage", "MEGAPROF_STEPS": "3"})
    assert (config.select, config.steps) == ("per-stage", "3")
    assert of_megatron_alone([], {**env, "MEGAPROF_ALL_RANKS": "1"}).select == "all"
    assert of_megatron_alone([], {**env, "MEGAPROF_ACTIVE": "2"}).steps == "schedule"
    typed = of_megatron_alone(["--profile-ranks", "3", "--profile-step-end", "14"], {**env, "MEGAPROF_SELECT": "all"})
    assert (typed.select, typed.steps) == ("3", "10:14")
    assert of_megatron_alone([], env).steps == "10:12"


def test_all_ranks_is_select_all_and_contradicts_any_list() -> None:
    assert parse([*ON, "--profile-all-ranks"]).select == "all"
    assert parse([*ON, "--profile-all-ranks"], {"MEGAPROF_SELECT": "1"}).select == "all"
    assert parse([*ON, "--profile-select", "0"], {"MEGAPROF_ALL_RANKS": "1"}).select == "0"
    assert parse([*ON, "--profile-all-ranks"], host=megatron_lm).select == "all"
    with pytest.raises(ValueError, match="--profile-all-ranks and --profile-ranks 0,8 contradict"):
        parse([*ON, "--profile-all-ranks", "--profile-ranks", "0", "8"], host=megatron_lm)


def test_messages_name_the_hosts_option() -> None:
    config = parse([*ON, "--profile-ranks", "9"], host=megatron_lm)
    assert config.select_option() == "--profile-ranks"


def test_ours_beat_the_hosts() -> None:
    config = parse([*ON, "--profile-steps", "7", "--profile-step-start", "4"], host=megatron_lm)
    assert config.steps == "7"
    config = parse([*ON, "--profile-select", "per-stage", "--profile-ranks", "1"], host=megatron_lm)
    assert config.select == "per-stage"


def test_a_default_of_the_hosts_ranks_below_the_environment_and_what_was_typed_above() -> None:
    env = {"MEGAPROF_STEPS": "7"}
    assert parse(ON, env, megatron_lm).steps == "7"
    assert parse([*ON, "--profile-step-end", "20"], env, megatron_lm).steps == "10:20"
    assert parse([*ON, "--profile-active", "2"], host=megatron_lm).steps == "schedule"


def test_slimes_target_is_honoured_and_its_default_alone_turns_nothing_on() -> None:
    assert not parse([], host=slime).enabled
    assert parse(["--profile-target", "train_actor", "--profile-dir", "/t"], host=slime).target == ("train_actor",)
    assert parse(["--profile-dir", "/t"], host=slime).target == ("train_overall",)


@pytest.mark.parametrize("profiler", ["--profile", "--use-pytorch-profiler"])
def test_the_hosts_own_profiler_beside_ours_is_refused(profiler: str) -> None:
    with pytest.raises(ValueError, match="one profiler session") as error:
        parse([*ON, profiler], host=megatron_lm)
    assert profiler in str(error.value)
    assert parse([*ON, profiler, "--profile-tool", "timeline"], host=megatron_lm).timed
    assert not parse([profiler], host=megatron_lm).enabled


def test_options_without_a_target_are_refused() -> None:
    with pytest.raises(ValueError, match="--profile-dir is set but no --profile-target"):
        parse(["--profile-dir", "/t"])
    assert not parse([], {"MEGAPROF_DIR": "/t"}).enabled


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--profile-active", "0"], "--profile-active"),
        (["--profile-active", "many"], "--profile-active"),
        (["--profile-target", "train_all"], "train_all"),
        (["--profile-steps", "5:2"], "start 5 must be less than end 2"),
        (["--profile-all-ranks", "--profile-select", "0,1"], "contradict"),
    ],
)
def test_mistakes_are_value_errors_never_system_exit(flags: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse([*ON, *flags])


def test_reversed_host_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="--profile-step-start 12 --profile-step-end 3"):
        parse([*ON, "--profile-step-start", "12", "--profile-step-end", "3"], host=megatron_lm)


def test_a_plain_object_will_do() -> None:
    class Args:
        profile_target = ("train_actor",)
        profile_dir = "/t"
        profile_with_stack = False

    assert destination("target") == "profile_target"
    assert config_from_args(Args(), {}).target == ("train_actor",)
