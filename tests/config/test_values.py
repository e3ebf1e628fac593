"""Step lists and schedules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaprof.config.values import TARGETS, Schedule, parse_steps


def steps_of(text: str, target: str | None = None) -> list[int]:
    plan = parse_steps(text, "--profile-steps")[target]
    return [step for step in range(100) if plan.captures(step, 0)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("10", [10]),
        ("1,2,5", [1, 2, 5]),
        ("20:30", list(range(20, 30))),
        ("20:30:5", [20, 25]),
        (" 3 , 7:9 ", [3, 7, 8]),
        ("0", [0]),
    ],
)
def test_step_lists(text: str, steps: list[int]) -> None:
    assert steps_of(text) == steps


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("10", 1),
        ("1,2,5", 3),
        ("20:30", 10),
        ("20:30:5", 2),
        ("3:5,4:7", 4),
        ("none", 0),
        ("5,0:9999999999", 9999999999),
    ],
)
def test_how_many_windows(text: str, windows: int) -> None:
    assert parse_steps(text, "--profile-steps")[None].windows == windows


def test_a_schedule_has_a_window_for_each_active_call() -> None:
    plan = Schedule(skip_first=1, wait=0, warmup=0, active=2, repeat=3)
    assert [index for index in range(12) if plan.captures(0, index)] == [1, 2, 3, 4, 5, 6]
    assert plan.windows == 6
    assert Schedule(0, 0, 0, 1, 0).windows is None


def test_what_is_left_of_a_step_list() -> None:
    plan = parse_steps("5,1,3:1000000000", "--profile-steps")[None]
    assert plan.left({3, 4}, 3) == [1, 5, 6]
    assert parse_steps("1,2", "--profile-steps")[None].left({1, 2}, 3) == []


def test_steps_per_target() -> None:
    lists = parse_steps("train_actor=10:12; train_log_probs=3;7", "--profile-steps")
    assert set(lists) == {"train_actor", "train_log_probs", None}
    assert steps_of("train_actor=10:12;7", "train_actor") == [10, 11]
    assert steps_of("train_actor=10:12;7") == [7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a step"),
        ("-1", "'-1'"),
        ("a", "'a'"),
        ("1,,2", "''"),
        ("5:5", "start 5 must be less than end 5"),
        ("9:5", "start 9 must be less than end 5"),
        ("1:9:0", "stride 0"),
        ("1:2:3:4", "1:2:3:4"),
        ("1.5", "1.5"),
        ("٣", "not a step"),
        ("actor=3", "unknown target 'actor'"),
        ("train_actor=1;train_actor=2", "train_actor given twice"),
        ("1;2", "given twice"),
    ],
)
def test_bad_steps_are_value_errors_that_name_the_value(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="--profile-steps") as error:
        parse_steps(text, "--profile-steps")
    assert said in str(error.value)


@given(st.text(max_size=30) | st.from_regex(r"[0-9:,;= a-z_-]{0,20}", fullmatch=True))
def test_any_text_is_read_or_refused_with_a_value_error(text: str) -> None:
    try:
        lists = parse_steps(text, "--profile-steps")
    except ValueError:
        return
    assert set(lists) <= {None, *TARGETS}


@given(
    skip_first=st.integers(0, 4),
    wait=st.integers(0, 3),
    warmup=st.integers(0, 3),
    active=st.integers(1, 3),
    repeat=st.integers(0, 3),
)
def test_schedule_is_torchs(skip_first: int, wait: int, warmup: int, active: int, repeat: int) -> None:
    ours = Schedule(skip_first, wait, warmup, active, repeat)
    theirs = torch.profiler.schedule(skip_first=skip_first, wait=wait, warmup=warmup, active=active, repeat=repeat)
    action = torch.profiler.ProfilerAction
    for index in range(60):
        # A step number far from the index must not matter: a run resumed at 5,000 counts its calls from 0.
        captured = theirs(index) in (action.RECORD, action.RECORD_AND_SAVE)
        assert ours.captures(5000 + index, index) is captured
