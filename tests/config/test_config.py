"""ProfileConfig: defaults, environment, and every rule."""

from __future__ import annotations

from typing import Any

import pytest

from megaprof.config.options import ProfileConfig, flag, options, set_in, variable
from megaprof.config.values import TRAIN_ACTOR, TRAIN_LOG_PROBS, Schedule
from megaprof.parallel.selectors import NOBODY


def on(**fields: Any) -> ProfileConfig:
    return ProfileConfig(**{"target": ("train_actor",), "dir": "/traces", **fields})


def test_off_by_default_and_nothing_that_costs_memory_is_on() -> None:
    config = ProfileConfig.from_env({})
    assert config == ProfileConfig()
    assert not config.enabled
    on_by_default = [f.name for f in options() if f.default is True]
    assert on_by_default == []


def test_names_of_flags_and_variables() -> None:
    assert flag("target") == "--profile-target"
    assert flag("record_shapes") == "--profile-record-shapes"
    assert flag("profile_memory") == "--profile-memory"
    assert variable("with_stack") == "MEGAPROF_WITH_STACK"
    assert variable("profile_memory") == "MEGAPROF_MEMORY"


@pytest.mark.parametrize("value", ["1", "true", "yes", "TRUE", "Yes", " yEs "])
@pytest.mark.parametrize("name", ["record_shapes", "profile_memory", "with_stack", "with_flops"])
def test_environment_opts_in(name: str, value: str) -> None:
    assert getattr(ProfileConfig.from_env({variable(name): value}), name) is True


@pytest.mark.parametrize("value", ["0", "false", "No", "off"])
def test_environment_says_no(value: str) -> None:
    assert ProfileConfig.from_env({"MEGAPROF_WITH_STACK": value}).with_stack is False


@pytest.mark.parametrize("value", ["", "2", "maybe", "truee", "ja"])
def test_an_unrecognised_truth_value_is_an_error_not_false(value: str) -> None:
    with pytest.raises(ValueError, match="MEGAPROF_WITH_STACK") as error:
        ProfileConfig.from_env({"MEGAPROF_WITH_STACK": value})
    assert repr(value) in str(error.value)
    assert "1/true/yes" in str(error.value)


def test_a_misspelt_variable_is_an_error() -> None:
    with pytest.raises(ValueError, match="MEGAPROF_TARGETS: unknown variable; known: MEGAPROF_TARGET"):
        ProfileConfig.from_env({"MEGAPROF_TARGETS": "train_actor"})


def test_whole_environment() -> None:
    config = ProfileConfig.from_env(
        {
            "MEGAPROF_TARGET": "train_actor, train_log_probs",
            "MEGAPROF_DIR": "/traces",
            "MEGAPROF_SELECT": "per-stage",
            "MEGAPROF_STEPS": "train_actor=4:6;train_log_probs=1",
            "PATH": "/bin",
        }
    )
    assert config.target == (TRAIN_ACTOR, TRAIN_LOG_PROBS)
    assert [config.plan(TRAIN_ACTOR).captures(s, 0) for s in range(3, 7)] == [False, True, True, False]
    assert config.plan(TRAIN_LOG_PROBS).captures(1, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target": ("train_critic",)}, ["--profile-target", "'train_critic'", "train_actor"]),
        ({"target": []}, ["--profile-target", "names nothing"]),
        ({"target": None}, ["--profile-target", "None"]),
        ({"dir": None}, ["--profile-dir", "not set"]),
        ({"dir": "  "}, ["--profile-dir", "non-empty"]),
        ({"dir": 5}, ["--profile-dir", "5"]),
        ({"steps": "train_actor=3", "discrete": True}, ["--profile-steps", "no steps for annotated", "annotated=..."]),
        ({"steps": "3;annotated=3"}, ["--profile-steps", "annotated has steps", "--profile-discrete"]),
        ({"select": ""}, ["--profile-select"]),
        ({"select": "xp=0"}, ["--profile-select", "xp"]),
        ({"steps": "9:3"}, ["--profile-steps", "9", "3"]),
        ({"steps": "train_log_probs=3"}, ["--profile-steps", "train_actor"]),
        ({"steps": "train_log_probs=3;1"}, ["--profile-steps", "train_log_probs", "--profile-target"]),
        ({"steps": "3", "schedule": "3:0:0:2"}, ["--profile-steps 3", "--profile-schedule 3:0:0:2"]),
        ({"schedule": "-1"}, ["--profile-schedule", "'-1'", "SKIP_FIRST:WAIT:WARMUP:ACTIVE:REPEAT"]),
        ({"schedule": "1:0:0:0"}, ["--profile-schedule", "'1:0:0:0'", "ACTIVE at least 1"]),
        ({"schedule": "1:0:0:1:1:1"}, ["--profile-schedule"]),
        ({"schedule": "1::2"}, ["--profile-schedule"]),
        ({"schedule": None}, ["--profile-schedule", "None"]),
        ({"activities": ()}, ["--profile-activities", "names nothing"]),
        ({"activities": None}, ["--profile-activities", "None"]),
        ({"activities": ("gpu",)}, ["--profile-activities", "'gpu'", "cuda"]),
        ({"ranges": "kernel"}, ["--profile-ranges", "'kernel'", "microbatch"]),
        ({"with_stack": "perhaps"}, ["--profile-with-stack", "'perhaps'"]),
        ({"record_shapes": None}, ["--profile-record-shapes", "None"]),
    ],
)
def test_bad_values_name_option_value_and_what_is_valid(fields: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError, match="--profile-") as error:
        on(**fields)
    for words in said:
        assert words in str(error.value)


def test_schedule_is_the_alternative_to_steps() -> None:
    assert on(schedule="2:1:1:2:0").plan(TRAIN_ACTOR) == Schedule(2, 1, 1, 2, 0)
    assert on(schedule="1:0:2").plan(TRAIN_ACTOR) == Schedule(1, 0, 2, 1, 1)
    assert on().plan(TRAIN_ACTOR) == Schedule(3, 0, 0, 1, 1)


def test_the_parts_of_a_schedule_have_names_of_their_own() -> None:
    """A flag beats a variable part by part, and a whole schedule beats parts that come before it."""
    env = {**ON, "MEGAPROF_ACTIVE": "5", "MEGAPROF_WAIT": "1"}
    assert ProfileConfig.from_env(env).schedule == "3:1:0:5:1"
    assert ProfileConfig.from_values({"active": "2", "repeat": "0"}, env).schedule == "3:1:0:2:0"
    assert ProfileConfig.from_values({"schedule": "7"}, env).schedule == "7"
    assert ProfileConfig.from_values({"active": 2}, {**ON, "MEGAPROF_SCHEDULE": "1:0:2"}).schedule == "1:0:2:2:1"
    assert set_in(env).keys() == {"target", "dir", "schedule"}
    for flags, said in [
        ({"active": "0"}, "--profile-active: 0 is not valid; it must be a whole number of at least 1"),
        ({"wait": "1.5"}, "--profile-wait: '1.5'"),
        ({"warmup": True}, "--profile-warmup: True"),
        ({"schedule": "1", "wait": 2}, "--profile-schedule and --profile-wait contradict each other"),
    ]:
        with pytest.raises(ValueError, match=said):
            ProfileConfig.from_values(flags, ON)


def test_with_modules_is_another_way_to_ask_for_the_ranges_of_modules() -> None:
    assert ProfileConfig.from_env({**ON, "MEGAPROF_WITH_MODULES": "1"}).ranges == "module"
    with pytest.raises(ValueError, match="--profile-with-modules and --profile-ranges layer contradict"):
        ProfileConfig.from_values({"with_modules": True, "ranges": "layer"}, ON)


def test_rank_zero_unless_asked() -> None:
    assert str(on().selector()) == "0"
    assert str(on(select="all").selector()) == "all"


ON = {"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": "/t"}


def test_all_ranks_is_another_way_to_say_select_all() -> None:
    assert ProfileConfig.from_env({**ON, "MEGAPROF_ALL_RANKS": "yes"}).select == "all"
    assert ProfileConfig.from_env({**ON, "MEGAPROF_ALL_RANKS": "0"}).select is None
    assert set_in({**ON, "MEGAPROF_ALL_RANKS": "1"}).keys() == {"target", "dir", "select"}
    with pytest.raises(ValueError, match="MEGAPROF_ALL_RANKS and MEGAPROF_SELECT 0,1 contradict"):
        ProfileConfig.from_env({**ON, "MEGAPROF_ALL_RANKS": "1", "MEGAPROF_SELECT": "0,1"})
    with pytest.raises(ValueError, match="MEGAPROF_ALL_RANKS: 'many'"):
        ProfileConfig.from_env({**ON, "MEGAPROF_ALL_RANKS": "many"})


def test_messages_name_the_option_as_the_user_spelled_it() -> None:
    with pytest.raises(ValueError, match="MEGAPROF_STEPS: start 9 must be less than end 3"):
        ProfileConfig.from_env({**ON, "MEGAPROF_STEPS": "9:3"})
    with pytest.raises(ValueError, match="ranks of the actor"):
        ProfileConfig.from_values({"role_select": "actor=x"}, ON, {"role_select": "ranks of the actor:"})
    config = ProfileConfig.from_values({"select": "7"}, {**ON, "MEGAPROF_ROLE_SELECT": "actor=0"})
    assert config.select_option() == "--profile-select"
    assert config.select_option("ref") == "--profile-select"
    assert config.select_option("actor") == "MEGAPROF_ROLE_SELECT actor"
    assert config == ProfileConfig(("train_actor",), "/t", select="7", role_select="actor=0"), "names are not settings"


def test_annotated_work_has_steps_of_its_own() -> None:
    config = on(steps="train_actor=3;annotated=5,6", discrete=True)
    assert [config.plan("annotated").captures(step, 0) for step in (3, 5, 6)] == [False, True, True]
    assert on(steps="3", discrete=True).plan("annotated") == on(steps="3").plan("train_actor")


def test_what_contradicts_is_named_as_it_was_given() -> None:
    env = {"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": "/t", "MEGAPROF_TOOL": "timeline", "MEGAPROF_KERNELS": "1"}
    with pytest.raises(ValueError, match="MEGAPROF_KERNELS has no effect with MEGAPROF_TOOL timeline: add torch"):
        ProfileConfig.from_env(env)


def test_what_no_chosen_tool_records_is_refused() -> None:
    for tool in ("memory", "timeline"):
        for name, typed in (("with_stack", "--profile-with-stack"), ("profile_memory", "--profile-memory")):
            with pytest.raises(
                ValueError, match=f"{typed} has no effect with --profile-tool {tool}: add torch, or drop"
            ):
                on(tool=(tool,), **{name: True})
            assert on(tool=("nsys", tool), **{name: True}).enabled


def test_an_option_that_a_host_spells_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"targt: unknown option of megaprof; known: target, dir, .*all_ranks"):
        ProfileConfig.from_values({"targt": ["train_actor"], "dir": "/t"}, {})


def test_a_home_directory_is_none_of_that_name(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    env = {"MEGAPROF_TARGET": "train_actor", "MEGAPROF_DIR": "~/traces"}
    assert ProfileConfig.from_env(env).dir == str(tmp_path / "traces")


def test_a_relative_directory_is_the_one_where_it_was_typed(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = on(dir="traces")
    monkeypatch.chdir("/")
    assert config.dir == str(tmp_path / "traces")
    assert config.to_env()["MEGAPROF_DIR"] == str(tmp_path / "traces")
    assert on(dir="memory://bucket/traces").dir == "memory://bucket/traces"


def test_a_relative_directory_of_one_that_is_gone_is_a_mistake(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(
        ValueError, match=r"--profile-dir: 'traces' .* working directory no longer exists; valid: an absolute"
    ):
        on(dir="traces")
    assert on(dir="/traces").dir == "/traces"


def test_a_path_is_taken_for_dir(tmp_path: Any) -> None:
    assert on(dir=tmp_path).dir == str(tmp_path)


def test_ranks_may_be_a_list() -> None:
    def ranks(select: Any, timeline_select: Any = "all") -> ProfileConfig:
        both: Any = {"select": select, "timeline_select": timeline_select}
        return ProfileConfig(target=("train_actor",), dir="/traces", tool=("torch", "timeline"), **both)

    config = ranks([0, 8, 16], (0, 1))
    assert (config.select, config.timeline_select) == ("0,8,16", "0,1")
    assert config == ranks("0,8,16", "0,1")
    assert ranks([], []).selector() == ranks([], []).timeline_selector == NOBODY
    for wrong in ([-1], ["0", "1"], [True], 3):
        with pytest.raises(ValueError, match="--profile-select"):
            ranks(wrong)
