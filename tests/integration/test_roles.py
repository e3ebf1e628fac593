"""Roles on real schedules: steps, ranks and files per role, for scopes, annotations and models of a role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megaprof import ProfileConfig, analyze, annotate, install_hooks, role
from megaprof.analysis.trace.traces import Trace, find_traces, read_trace
from megaprof.capture import this_rank
from megaprof.hooks.plain import PlainSteps
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks


def config(directory: Path, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets, str(directory), **options)


def files(directory: Path) -> dict[str, Trace]:
    """The traces by the part of their names that says target, role and step."""
    return {path.name.split(".pp")[0]: read_trace(path) for path in find_traces(directory)}


def labels(trace: Trace) -> list[str]:
    """The ranges of roles, annotations and schedule calls, in order."""
    return [
        r.name.label
        for r in trace.ranges
        if "step" in r.name.fields or r.name.role or r.name.label.startswith("annotated/")
    ]


def test_steps_are_counted_per_target_and_role(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path, "train_log_probs", steps=[1])):
        for name in ("ref", "actor", "ref"):
            with role(name):
                one_rank.log_probs_pass()
        one_rank.log_probs_pass()
        one_rank.log_probs_pass()
        with role("ref"), role("actor"):
            one_rank.log_probs_pass()
    found = files(tmp_path)
    assert sorted(found) == [f"train_log_probs.{part}step000001" for part in ("actor.", "ref.", "")]
    assert {name: trace.metadata.role for name, trace in found.items()} == {
        "train_log_probs.ref.step000001": "ref",
        "train_log_probs.actor.step000001": "actor",
        "train_log_probs.step000001": None,
    }
    assert all(labels(trace) == ["train_log_probs"] for trace in found.values())


def rlhf_step(gpt: Any) -> None:
    with annotate(role="rollout", message="generate"):
        gpt.log_probs_pass()
    with role("ref"):
        gpt.log_probs_pass()
    update(gpt)


@annotate(role="actor")
def update(gpt: Any) -> None:
    gpt.train_step()


def test_discrete_is_a_file_per_role(one_rank: Any, tmp_path: Path) -> None:
    wanted = config(tmp_path, "train_actor", "train_log_probs", steps="1", discrete=True)
    with install_hooks(one_rank.chunks, wanted, iteration=lambda: None):
        for _ in range(3):
            rlhf_step(one_rank)
    found = files(tmp_path)
    assert {name: labels(trace) for name, trace in found.items()} == {
        "annotated.rollout.step000001": ["annotated", "role/rollout/generate", "train_log_probs"],
        "annotated.actor.step000001": ["annotated", "role/actor/update", "train_actor"],
        "train_log_probs.ref.step000001": ["train_log_probs"],
    }
    assert not any(trace.metadata.truncated for trace in found.values())
    assert found["annotated.actor.step000001"].metadata.schedule == "no_pipelining"
    assert {"train_actor", "train_log_probs"} <= {target.target for target in analyze(tmp_path).targets}


def test_otherwise_one_file_a_step_with_all_roles_in_it(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, config(tmp_path, "train_overall", steps="1"), iteration=lambda: None):
        for _ in range(4):
            rlhf_step(one_rank)
    found = files(tmp_path)
    assert list(found) == ["train_overall.step000001"]
    assert labels(found["train_overall.step000001"]) == [
        *("train_overall", "role/actor", "train_actor"),  # entered before the window opened
        *("role/rollout/generate", "train_log_probs", "role/ref", "train_log_probs", "role/actor/update"),
    ]
    targets = {each.key: each for each in analyze(tmp_path).targets}
    assert list(targets) == [
        *(("train_overall", None), ("train_actor", "actor")),
        *(("train_log_probs", "ref"), ("train_log_probs", "rollout")),
    ]
    assert {holds.layers for each in targets.values() for chunk in each.stages[0].chunks if (holds := chunk.holds)} == {
        2
    }
    assert [key for key, each in targets.items() if not each.forward_only] == list(targets)[:2]


def test_annotated_work_without_a_schedule_and_failing_work(one_rank: Any, tmp_path: Path) -> None:
    @annotate(role="reward")
    def score(fail: bool) -> None:
        if fail:
            raise KeyError("of the host")

    with install_hooks(one_rank.chunks, config(tmp_path, "train_actor", steps="0:2", discrete=True)):
        score(False)
        with pytest.raises(KeyError, match="of the host"):
            score(True)
    found = files(tmp_path)
    assert sorted(found) == ["annotated.reward.step000000", "annotated.reward.step000001"]
    done, failed = (found[name].metadata for name in sorted(found))
    assert (done.schedule, done.truncated, done.ranges.reason) == (None, False, "no schedule ran in this window")
    assert (failed.truncated, failed.truncated_reason) == (True, "the host raised an exception")


def test_a_model_of_another_role_is_named_in_the_window_of_the_first(one_rank: Any, tmp_path: Path) -> None:
    wanted = config(tmp_path, "train_overall", steps="0")
    with install_hooks(role="actor", config=wanted, iteration=lambda: None):
        one_rank.train_step()
        with role("critic"):
            one_rank.train_step()
        one_rank.log_probs_pass()
        one_rank.train_step()
    (trace,) = files(tmp_path).values()
    assert trace.metadata.role == "actor"
    assert labels(trace) == ["train_overall", "train_actor", "role/critic", "train_actor", "train_log_probs"]


@pytest.mark.parametrize(
    ("installed", "options"),
    [
        ("actor", {"role_select": "actor=none"}),
        ("actor", {"role_select": {"actor": []}}),
        ("actor", {"role_select": {"actor": None, "ref": []}}),
        (None, {"steps": None}),
        (None, {"steps": []}),
    ],
)
def test_nothing_is_wrapped_where_nothing_is_selected(
    one_rank: Any, tmp_path: Path, installed: str | None, options: dict[str, Any]
) -> None:
    before = dict(vars(schedules))
    with install_hooks(one_rank.chunks, config(tmp_path, "train_actor", **options), role=installed) as handle:
        assert not handle.active
        assert dict(vars(schedules)) == before


def selected(directory: str) -> list[bool]:
    init_distributed()
    active = []
    with cpu_megatron():
        gpt = build(GPTWorkload(dp=2, layers=1, microbatches=1, hidden=32, seq_length=16, heads=2))
        wanted = config(
            Path(directory),
            "train_log_probs",
            steps="0",
            role_select={"actor": [0], "ref": 1, "critic": None, "reward": "all"},
        )
        with install_hooks(gpt.chunks, wanted) as handle:
            active.append(handle.active)
            for name in ("actor", "ref", "critic", "reward", "other"):
                with role(name):
                    gpt.log_probs_pass()
        with install_hooks(
            gpt.chunks, config(Path(directory), "train_actor", role_select="ref=1"), role="ref"
        ) as handle:
            active.append(handle.active)
    return active


def test_each_role_on_its_own_ranks(tmp_path: Path) -> None:
    assert run_ranks(selected, 2, str(tmp_path), timeout=120) == [[True, False], [True, True]]
    captured = {(path.name.split(".")[1], path.name.split("rank")[1][:5]) for path in find_traces(tmp_path)}
    assert captured == {
        *(("actor", "00000"), ("ref", "00001"), ("reward", "00000"), ("reward", "00001")),
        ("other", "00000"),  # no ranks of its own: the default
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role_select": "actor"}, ["--profile-role-select", "'actor'", "actor=0,1;ref=none"]),
        ({"role_select": "actor=0;actor=1"}, ["--profile-role-select", "given twice"]),
        ({"role_select": "actor=x"}, ["--profile-role-select actor", "'x'"]),
        ({"role_select": {"actor": [0, -1]}}, ["--profile-role-select", "-1", "at least 0"]),
        ({"role_select": {"actor": [True]}}, ["--profile-role-select", "True"]),
        ({"role_select": []}, ["--profile-role-select", "none"]),
        ({"role_select": "=1"}, ["--profile-role-select", "'=1'"]),
        ({"steps": [1, "2"]}, ["--profile-steps", "'2'"]),
        ({"steps": [1.0]}, ["--profile-steps", "1.0"]),
        ({"discrete": True, "target": ("train_overall",)}, ["--profile-discrete", "train_overall", "train_actor"]),
    ],
)
def test_what_cannot_be_honoured_is_a_value_error(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError, match="--profile-") as error:
        ProfileConfig(**{"target": ("train_actor",), "dir": "/traces", **options})
    for words in said:
        assert words in str(error.value)


def test_a_rank_outside_the_world_of_its_role_is_a_value_error(one_rank: Any, tmp_path: Path) -> None:
    wanted = config(tmp_path, "train_actor", role_select="ref=7;actor=0")
    with pytest.raises(ValueError, match=r"--profile-role-select ref: rank 7.*outside the world"):
        install_hooks(one_rank.chunks, wanted, role="ref")
    with install_hooks(one_rank.chunks, wanted, role="actor") as handle:
        assert handle.active, "the ranks of another role are checked in the world of that role"


def test_roles_of_worlds_of_different_sizes(one_rank: Any, tmp_path: Path, caplog: Any) -> None:
    """Which role runs in which process is not known before it runs: it is said then, for roles that run here only."""
    wanted = config(tmp_path, "train_actor", "train_log_probs", steps="0", role_select="actor=0,8,16,24;critic=0;ref=9")
    with install_hooks(one_rank.chunks, wanted) as handle, role("actor"):
        assert handle.active
        one_rank.log_probs_pass()
        one_rank.log_probs_pass()
    assert list(files(tmp_path)) == ["train_log_probs.actor.step000000"]
    said = [r.getMessage() for r in caplog.records if "outside the world" in r.getMessage()]
    assert len(said) == 1
    assert "--profile-role-select actor: rank 24" in said[0]
    assert "on the ranks that exist" in said[0]


@pytest.mark.parametrize(("rank", "captured"), [(0, None), (1, "1 window"), (2, None)])
def test_the_lowest_rank_of_a_role_says_what_became_of_its_windows(
    rank: int, captured: str | None, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "megaprof")
    layout = WorldLayout(ParallelSizes(dp=3))
    monkeypatch.setattr(this_rank, "_place", lambda *_, **__: (layout.coords(rank), layout))
    model = torch.nn.Linear(1, 1)
    with install_hooks(model, config(tmp_path, "train_actor", steps="0", role_select="actor=1,2"), pipeline=False):
        steps = PlainSteps(model, 1)
        with role("actor"):
            steps.begin()
            steps.backward(torch.Tensor.backward)(steps.forward(model.forward)(torch.ones(1, 1)).sum())
            steps.end()
    said = [record.getMessage() for record in caplog.records if "megaprof ends" in record.getMessage()]
    assert said == ([] if captured is None else [f"megaprof ends: {captured} captured into {tmp_path}"])


def test_lists_texts_and_mappings_mean_the_same() -> None:
    def of(**options: Any) -> ProfileConfig:
        return ProfileConfig(("train_actor",), "/traces", **options)

    assert of(steps=[1, 2, 5]) == of(steps="1,2,5")
    assert of(steps=(3,)) == of(steps=3) == of(steps="3")
    assert of(steps={"train_actor": [1, 2]}) == of(steps="train_actor=1,2")
    assert of(role_select={"actor": [0, 1], "ref": None}) == of(role_select="actor=0,1;ref=none")
    assert of(steps="[1, 2, 5]").plan("train_actor") == of(steps="1,2,5").plan("train_actor")
    environment = of(steps=None, role_select={"ref": [1]}, discrete=True).to_env()
    assert ProfileConfig.from_env(environment) == of(steps="none", role_select="ref=1", discrete=True)
