"""FSDP2's manual offload under a window: that it really fails, when, and that it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaprof import ProfileConfig, annotate, install_hooks
from megaprof.capture import session as sessions
from megaprof.capture.agenda import Demand
from megaprof.capture.this_rank import ThisRank, offloads_manually

fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")


# conftest's world of one rank is enough: FSDP2 shards over a mesh of it.
@pytest.fixture(scope="module")
def _world(one_rank: Any) -> None:
    assert torch.distributed.get_world_size() == 1


def sharded(**options: Any) -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fsdp.fully_shard(model[0], mesh=mesh, **options)
    fsdp.fully_shard(model, mesh=mesh, **options)
    return model


def move_under_a_window(**options: bool) -> None:
    model = sharded()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options):
        model(torch.randn(4, 8))
        model.to(torch.float64)  # on the CPU, what model.to("cpu") is on a GPU: both go through _apply


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("option", ["record_shapes", "with_flops"])
def test_the_crash_is_real(option: str) -> None:
    with pytest.raises(RuntimeError, match="Couldn't swap") as crash:
        move_under_a_window(**{option: True})
    assert "Expected no weakrefs" in str(crash.value.__cause__)


@pytest.mark.parametrize("option", ["record_shapes", "with_flops", "with_stack"])
def test_a_parameter_of_an_ordinary_module_is_held_with_stacks_too(option: str) -> None:
    model = nn.Linear(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **{option: True}):
        model(torch.randn(4, 8))
        with pytest.raises(RuntimeError, match="Expected no weakrefs"):
            torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(8, 8)))


@pytest.mark.usefixtures("_world")
def test_nothing_is_held_without_those_options() -> None:
    move_under_a_window()
    move_under_a_window(profile_memory=True)


def check_model(config: ProfileConfig, models: list[nn.Module]) -> None:
    ThisRank.of(config, None, tuple(models), pipeline=False)


def on(**fields: Any) -> ProfileConfig:
    return ProfileConfig(**{"target": ("train_overall",), "dir": "/t", **fields})


def test_what_holds_tensors_is_the_torch_profiler() -> None:
    assert on(record_shapes=True, with_stack=True).holding == ("record_shapes", "with_stack")
    assert on(tool=("nsys",), with_stack=True).holding == ()


@pytest.mark.usefixtures("_world")
def test_an_fsdp2_model_is_recognised() -> None:
    assert offloads_manually(sharded())
    assert offloads_manually(nn.Sequential(nn.Linear(2, 2), sharded()))
    assert not offloads_manually(sharded(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)))
    assert not offloads_manually(nn.Linear(2, 2))
    assert not offloads_manually(object())


@pytest.mark.usefixtures("_world")
def test_a_window_between_steps_of_an_fsdp2_model_is_refused() -> None:
    for lasting, fields in (
        ("--profile-target train_overall", {}),
        ("--profile-discrete", {"target": ("train_actor",), "discrete": True}),
    ):
        with pytest.raises(ValueError, match=f"{lasting}: with --profile-record-shapes on an FSDP2 model"):
            check_model(on(record_shapes=True, **fields), [sharded()])
    check_model(on(), [sharded()])
    check_model(on(record_shapes=True, target=("train_actor",)), [sharded()])
    check_model(on(record_shapes=True), [sharded(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))])


@pytest.mark.usefixtures("_world")
def test_install_hooks_refuses_it_before_the_first_step_and_takes_megatrons(one_rank: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on an FSDP2 model"):
        install_hooks(sharded(), on(dir=str(tmp_path), record_shapes=True))
    with install_hooks(one_rank.chunks, on(dir=str(tmp_path), record_shapes=True)) as handle:
        assert handle.active


class Chunks:
    """What one_rank runs is not FSDP2's: this is, for all that `offloads_manually` looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions, "offloads_manually", lambda chunk: True)


@pytest.mark.usefixtures("_world")
def test_hooks_that_went_in_without_a_model_refuse_it_at_the_first_call(
    one_rank: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """As through `megaprof run` and plugins: the model is known when the schedule is called, and not before."""
    Chunks(monkeypatch)
    with install_hooks(None, on(dir=str(tmp_path), record_shapes=True, steps="0")) as handle:
        one_rank.train_step()
        one_rank.train_step()
        assert handle.active, "a refused window is no fault"
    assert list(tmp_path.iterdir()) == []
    refusal, end = [r.getMessage() for r in caplog.records if "Couldn't swap" in r.getMessage()]
    assert "step 0 is not captured: with --profile-record-shapes on an FSDP2 model" in refusal
    assert "step 0 was not captured: with --profile-record-shapes on an FSDP2 model" in end


@pytest.mark.usefixtures("_world")
def test_annotated_windows_are_given_up_when_such_a_model_runs_in_them(
    one_rank: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    Chunks(monkeypatch)
    wanted = on(target=("train_actor",), dir=str(tmp_path), record_shapes=True, discrete=True, steps="annotated=0:3;9")
    with install_hooks(None, wanted):
        for _ in range(2):
            with annotate(role="actor"):
                one_rank.train_step()
                assert not torch._C._autograd._profiler_enabled()
    assert list(tmp_path.iterdir()) == []
    *lines, end = (record.getMessage() for record in caplog.records)
    refused = [line.partition(": with ")[0] for line in lines if "is not captured" in line]
    assert refused == [f"megaprof: annotated of actor step {number} is not captured" for number in (0, 1)]
    assert "annotated of actor: steps 0-1 were not captured: with --profile-record-shapes" in end


@pytest.mark.usefixtures("_world")
def test_captures_on_demand_refuse_it_too(one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    Chunks(monkeypatch)
    monkeypatch.setattr("megaprof.control.listener.Listener.look", lambda _: None)  # it would find no request
    with install_hooks(None, on(dir=str(tmp_path), on_demand=True, steps="none")) as handle:
        session = handle._session
        assert session is not None
        session.demand = demand = Demand("train_overall", None, 0, 1, [], holding=("with_stack",))
        one_rank.train_step()
    assert (demand.over, demand.taken) == (True, [])
    assert "with --profile-with-stack on an FSDP2 model" in str(demand.reason)
