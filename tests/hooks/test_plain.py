"""Trainers without Megatron's schedule: a host's function that runs the microbatches of a step by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.autoload import arming, contract, install, registry
from megaprof.autoload.contract import Facts, Hook
from megaprof.capture import profiler
from megaprof.capture.process import process
from megaprof.recorders.call import Batch
from megaprof.runtime.armed import armed
from megaprof.runtime.patching import Patches

MICROBATCHES = 3


class Engine:
    """As a host has one: a forward and a backward per microbatch, with activations computed again."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Linear(4, 4)
        self.step = 0

    def forward_backward_batch(self, data: Any, forward_only: bool = False) -> list[float]:
        losses = []
        for row in data:
            loss = self.forward_step(row)
            if not forward_only:
                loss.backward()
            losses.append(loss.item())
        return losses

    def forward_step(self, row: Any) -> Any:
        checkpointed = torch.utils.checkpoint.checkpoint(self.module, row, use_reentrant=True)
        return checkpointed.square().mean()

    def fails(self, data: Any) -> None:
        self.forward_step(data[0]).backward()
        raise KeyError("the host's own")


def data() -> list[torch.Tensor]:
    return [torch.full((1, 4), float(n), requires_grad=True) for n in range(MICROBATCHES)]


def facts(arguments: Any) -> Facts:
    return Facts(role="actor", iteration=arguments["self"].step)


BATCH = Batch(lambda engine: engine.module, "forward_step", lambda arguments: bool(arguments.get("forward_only")))
HOOKS = (
    Hook("a_host", "Engine.forward_backward_batch", facts, batch=BATCH),
    Hook("a_host", "Engine.fails", facts, batch=Batch(lambda engine: engine.module)),
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    host = ModuleType("a_host")
    host.Engine = type("Engine", (Engine,), dict(vars(Engine)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_host", host)
    patches = Patches()
    contract.apply(HOOKS, patches)
    yield host.Engine()  # type: ignore[attr-defined]
    patches.restore()
    install.stop()


def config(directory: Path, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets, str(directory), activities=("cpu",), **options)


def passes(path: Path) -> list[tuple[str, int]]:
    names = [each.name for each in read_trace(path).ranges]
    return [(name.label, name.fields["mb"]) for name in names if name.label in ("forward", "backward")]


def test_a_batch_is_a_step(engine: Engine, tmp_path: Path) -> None:
    plain = [engine.forward_backward_batch(data()) for _ in range(2)]
    wanted = config(tmp_path, "train_actor", "train_log_probs", steps="5", tool=("torch", "timeline"))
    before = torch.autograd.backward
    with install_hooks(None, wanted, pipeline=False):
        for engine.step in (4, 5, 5):  # of a step's mini-batches the first
            assert engine.forward_backward_batch(data(), forward_only=True) == plain[0]
            assert engine.forward_backward_batch(data()) == plain[0]
    assert torch.autograd.backward is before
    assert "forward_step" not in vars(engine)
    found = {path.name.partition(".rank")[0]: passes(path) for path in find_traces(tmp_path)}
    forwards = [("forward", n) for n in range(MICROBATCHES)]
    place = "pp0-tp0-cp0-ep0-dp0"
    assert found == {
        f"train_actor.actor.step000005.{place}": [
            e for n in range(MICROBATCHES) for e in (("forward", n), ("backward", n))
        ],
        f"train_log_probs.actor.step000005.{place}": forwards,
    }
    (trace, _) = (read_trace(path) for path in find_traces(tmp_path))
    assert (trace.metadata.schedule, trace.metadata.microbatches, trace.metadata.sizes.world) == (
        "no_pipelining",
        MICROBATCHES,
        1,
    )
    assert list(tmp_path.glob("*.timeline*"))


def test_all_batches_of_a_step_are_one_window(engine: Engine, tmp_path: Path) -> None:
    """As a controller drives it: start, step, stop."""
    assert install.start(config(tmp_path, "train_overall", steps="1"), pipeline=False)
    for _ in range(3):
        engine.forward_backward_batch(data(), forward_only=True)
        engine.forward_backward_batch(data())
        engine.step = install.step()
    install.stop()
    (path,) = find_traces(tmp_path)
    assert path.name.startswith("train_overall.step000001.")
    assert len(passes(path)) == 3 * MICROBATCHES


def test_an_exception_of_the_hosts_passes(engine: Engine, tmp_path: Path) -> None:
    with install_hooks(None, config(tmp_path, "train_actor", steps="0,1"), pipeline=False):
        with pytest.raises(KeyError, match="the host's own"):
            engine.fails(data())  # type: ignore[attr-defined]
        engine.step = 1
        engine.forward_backward_batch(data())
    assert "forward" not in vars(engine.module)
    failed, whole = find_traces(tmp_path)
    assert (read_trace(failed).metadata.truncated_reason, read_trace(whole).metadata.truncated) == (
        "the host raised an exception",
        False,
    )


def test_the_first_batch_brings_the_hooks(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(armed, "config", config(tmp_path, "train_actor", steps="0"))
    monkeypatch.setattr(armed, "install", arming.install)
    monkeypatch.setattr(armed, "awaits_batch", True)
    assert not arming.install()  # Megatron's groups are waited for
    try:
        engine.forward_backward_batch(data())
        assert not armed.awaits_batch
    finally:
        for session in process.sessions.copy():
            profiler.leave(session)
    (path,) = find_traces(tmp_path)
    assert path.name.startswith("train_actor.actor.step000000.")


def test_every_host_names_a_batch_by_its_own_function() -> None:
    named = {(hook.module, hook.function) for hook in registry.HOOKS if hook.batch is not None}
    assert len(named) == sum(hook.batch is not None for hook in registry.HOOKS) == 10


def test_positions_tell_where_sequences_begin(engine: Engine, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)

        def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
            return self.inner(input_ids.float()[..., None])

    engine.module = Model()  # type: ignore[assignment]
    engine.forward_step = lambda row: engine.module(row, position_ids=row).sum()  # type: ignore[method-assign]
    rows = [torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[0, 1, 2, 3]])]
    with install_hooks(None, config(tmp_path, "train_actor", steps="0"), pipeline=False):
        forward = vars(engine.module).get("forward")
        engine.forward_backward_batch(rows)
        assert vars(engine.module).get("forward") is forward
    (path,) = find_traces(tmp_path)
    metadata = read_trace(path).metadata
    assert (metadata.lengths, metadata.lengths_from) == (((3, 2), (4,)), "position_ids")
