"""install_hooks: nothing when off, everything back afterwards, faults contained, the host's exceptions untouched."""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import logging
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication, schedules

from megaprof import ProfileConfig, add_profile_args, evaluation, install_hooks
from megaprof.artifacts import writer
from megaprof.autoload import contract
from megaprof.capture import session as sessions
from megaprof.formats.ranges import P2P_OPERATIONS, RangeName, parse
from megaprof.formats.timeline import SUFFIX as TIMELINE_SUFFIX
from megaprof.formats.timeline import read_timeline
from megaprof.hooks.schedules import SCHEDULES
from megaprof.recorders.torch_profiler import TorchRecorder
from tests import programs

pytestmark = pytest.mark.usefixtures("one_rank")


def hooked_objects() -> dict[str, Any]:
    """Every attribute that megaprof may replace, as it is now."""
    places: list[tuple[Any, tuple[str, ...]]] = [
        (schedules, (*SCHEDULES, "forward_step", "backward_step", "backward_step_multimodule")),
        (p2p_communication, P2P_OPERATIONS),
    ]
    if hasattr(p2p_communication, "P2PCommunicator"):
        places.append((p2p_communication.P2PCommunicator, P2P_OPERATIONS))
    try:
        from megatron.core.pipeline_parallel import combined_1f1b

        places.append((combined_1f1b, ("combined_forward_backward_step",)))
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        places.append((FullCudaGraphWrapper, ("__call__",)))
    except ImportError:  # megatron-core 0.12 and 0.13
        pass
    return {f"{owner}.{name}": vars(owner).get(name) for owner, names in places for name in names}


@pytest.fixture(autouse=True)
def _everything_is_put_back() -> Any:
    before = hooked_objects()
    yield
    after = hooked_objects()
    assert [name for name in before if before[name] is not after[name]] == []


def on(directory: Path, **fields: Any) -> ProfileConfig:
    first = {} if "steps" in fields else {"schedule": "0"}
    return ProfileConfig(**{"target": ("train_actor",), "dir": str(directory), **first, **fields})


def traces(directory: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(directory.glob("*.pt.trace.json.gz")):
        with gzip.open(path) as file:
            found[path.name.split(".pp")[0]] = json.load(file)
    return found


def labels(trace: Any) -> list[str]:
    return [name.label for event in trace["traceEvents"] if (name := parse(event.get("name", ""))) is not None]


def test_off_wraps_nothing(one_rank: Any) -> None:
    before = hooked_objects()
    handle = install_hooks(one_rank.chunks, ProfileConfig())
    assert not handle.active
    assert all(hooked_objects()[name] is before[name] for name in before)
    handle.remove()


def test_a_rank_that_is_not_selected_wraps_nothing(one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from megaprof.parallel.selectors import Selector

    monkeypatch.setattr(Selector, "selects", lambda self, coords: False)
    before = hooked_objects()
    assert not install_hooks(one_rank.chunks, on(tmp_path)).active
    assert all(hooked_objects()[name] is before[name] for name in before)


def test_remove_restores_the_very_same_objects_and_is_idempotent(one_rank: Any, tmp_path: Path) -> None:
    before = hooked_objects()
    handle = install_hooks(one_rank.chunks, on(tmp_path))
    changed = [name for name, value in hooked_objects().items() if value is not before[name]]
    assert any("forward_backward_no_pipelining" in name for name in changed)
    assert any("forward_step" in name for name in changed)
    handle.remove()
    handle.remove()
    assert all(hooked_objects()[name] is before[name] for name in before)


def test_install_is_idempotent_and_a_second_configuration_is_refused(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path)) as handle:
        wrapped = hooked_objects()
        assert install_hooks(one_rank.chunks, on(tmp_path)) is handle
        assert install_hooks(one_rank.chunks[0], on(tmp_path)) is handle
        assert all(hooked_objects()[name] is wrapped[name] for name in wrapped)
        with pytest.raises(ValueError, match="another configuration"):
            install_hooks(one_rank.chunks, on(tmp_path, with_stack=True))


def test_hooks_for_a_part_of_a_model_are_those_of_the_model(one_rank: Any, tmp_path: Path) -> None:
    other = torch.nn.Linear(2, 2)
    with install_hooks([*one_rank.chunks, other], on(tmp_path)) as handle:
        assert install_hooks(one_rank.chunks, on(tmp_path)) is handle
        assert install_hooks(other, on(tmp_path)) is handle


def test_two_models_removed_out_of_order(one_rank: Any, tmp_path: Path) -> None:
    other = torch.nn.Linear(2, 2)
    first = install_hooks(one_rank.chunks, on(tmp_path), role="actor")
    second = install_hooks(other, on(tmp_path), role="ref")
    assert first is not second
    first.remove()
    assert second.active
    one_rank.train_step()
    assert traces(tmp_path) == {}, "the model without hooks was captured"
    second.remove()


def test_somebody_elses_later_patch_survives(one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    original = schedules.forward_step
    handle = install_hooks(one_rank.chunks, on(tmp_path))
    ours = schedules.forward_step
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    schedules.forward_step = theirs
    try:
        handle.remove()
        assert schedules.forward_step is theirs
        one_rank.train_step()
        assert len(calls) == one_rank.workload.microbatches
    finally:
        schedules.forward_step = original


def test_the_model_is_not_kept_alive(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    reference = weakref.ref(model)
    with install_hooks(model, on(tmp_path)):
        del model
        gc.collect()
        assert reference() is None


def test_flags_namespace_and_environment_configure_alike(one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    flags = ["--profile-target", "train_actor", "--profile-dir", str(tmp_path), "--profile-skip-first", "1"]
    namespace = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    with install_hooks(one_rank.chunks, namespace) as from_flags:
        assert from_flags.active
    monkeypatch.setenv("MEGAPROF_TARGET", "train_actor")
    monkeypatch.setenv("MEGAPROF_DIR", str(tmp_path))
    monkeypatch.setenv("MEGAPROF_SKIP_FIRST", "1")
    with install_hooks(one_rank.chunks) as from_environment:
        assert from_environment.config == from_flags.config


def test_ranks_outside_the_world_are_refused_before_the_first_step(one_rank: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--profile-select"):
        install_hooks(one_rank.chunks, on(tmp_path, select="7"))
    with pytest.raises(ValueError, match="--profile-select"):
        install_hooks(one_rank.chunks, on(tmp_path, select="pp=1"))


@pytest.mark.parametrize("model", [[], "model", 3, [None]])
def test_what_is_not_a_model_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="install_hooks: model"):
        install_hooks(model, on(tmp_path))


def test_schedule_counts_calls_and_one_window_is_one_file(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, schedule="1:1:1:2")):
        for _ in range(7):
            one_rank.train_step()
    found = traces(tmp_path)
    assert list(found) == ["train_actor.step000003", "train_actor.step000004"]
    for trace in found.values():
        assert labels(trace).count("forward") == one_rank.workload.microbatches


def test_no_profiler_is_open_between_steps(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, schedule="0:0:2:1:0")):
        for _ in range(4):
            one_rank.train_step()
            assert not torch._C._autograd._profiler_enabled()


def test_evaluation_is_a_target_of_its_own(one_rank: Any, tmp_path: Path) -> None:
    targets = ("train_actor", "train_log_probs", "evaluate")
    with install_hooks(one_rank.chunks, on(tmp_path, target=targets, schedule="0:0:0:1:0")):
        one_rank.evaluate()  # recognised by the function's name
        one_rank.log_probs_pass()
        with evaluation():
            one_rank.log_probs_pass()
        one_rank.log_probs_pass()
        one_rank.train_step()
    assert list(traces(tmp_path)) == [
        "evaluate.step000000",
        "evaluate.step000001",
        "train_actor.step000000",
        "train_log_probs.step000000",
        "train_log_probs.step000001",
    ]


def test_host_iteration_numbers_a_resumed_run(one_rank: Any, tmp_path: Path) -> None:
    numbers = iter([5000, 5001, 5001, 5002])
    current = {"iteration": -1}
    config = on(tmp_path, target=("train_actor", "train_log_probs"), steps="train_actor=5001:5003;train_log_probs=0")
    with install_hooks(one_rank.chunks, config, iteration=lambda: current["iteration"]):
        for current["iteration"] in numbers:
            one_rank.train_step()
            one_rank.log_probs_pass()
    found = traces(tmp_path)
    assert list(found) == ["train_actor.step005001", "train_actor.step005002", "train_log_probs.step000000"]
    assert labels(found["train_actor.step005001"]).count("train_actor") == 1, "the rerun of 5001 was captured too"


def test_megatron_lms_iteration_is_found(one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import types

    module = types.ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = argparse.Namespace(curr_iteration=731)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with install_hooks(one_rank.chunks, on(tmp_path, steps="731")):
        one_rank.train_step()
    assert list(traces(tmp_path)) == ["train_actor.step000731"]


def test_the_end_of_a_hosts_step_finishes_its_window_and_its_files(
    one_rank: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """What a host tells where it may end the process next, as Ray does: without warning."""
    publish = writer.publish
    monkeypatch.setattr(writer, "publish", lambda *files: (time.sleep(0.5), publish(*files)))
    with install_hooks(one_rank.chunks, on(tmp_path, target=("train_overall",), steps="1")):
        for _ in range(2):
            one_rank.train_step()
        assert traces(tmp_path) == {}
        contract.over("step")
        (trace,) = traces(tmp_path).values()
        assert trace["megaprof"]["truncated"] is False
        contract.over("step")  # nothing is open, nothing is waited for
    contract.over("step")
    assert list(traces(tmp_path)) == ["train_overall.step000001"]


def test_train_overall_lasts_until_the_next_step_and_holds_what_lies_between(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, target=("train_overall",), steps="1")):
        for _ in range(3):
            one_rank.train_step()
            one_rank.log_probs_pass()
    found = traces(tmp_path)
    assert list(found) == ["train_overall.step000001"]
    trace = found["train_overall.step000001"]
    counts = {label: labels(trace).count(label) for label in ("train_overall", "train_actor", "train_log_probs")}
    assert counts == {"train_overall": 1, "train_actor": 1, "train_log_probs": 1}
    assert trace["megaprof"]["truncated"] is False
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("Optimizer.step" in name for name in names), "the optimizer lies between two steps"


def test_a_window_that_is_open_at_the_end_is_kept_and_marked(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, target=("train_overall",), steps="0")):
        one_rank.train_step()
    trace = traces(tmp_path)["train_overall.step000000"]
    assert (trace["megaprof"]["truncated"], trace["megaprof"]["truncated_reason"]) == (True, "the hooks were removed")


def test_ranges_step_writes_the_outermost_range_only(one_rank: Any, tmp_path: Path) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, ranges="step")):
        one_rank.train_step()
    trace = traces(tmp_path)["train_actor.step000000"]
    assert labels(trace) == ["train_actor"]
    assert trace["megaprof"]["ranges"] == {"microbatch": False, "reason": "captured with --profile-ranges step"}


class HostError(Exception):
    """Raised by the host's own code."""


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_an_exception_of_the_hosts_passes_unchanged_and_the_trace_is_kept(
    where: str, one_rank: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    error = HostError(where)

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise error

    original = one_rank.forward_step

    def failing(iterator: Any, model: Any) -> Any:
        if where == "forward":
            raise error
        output, loss = original(iterator, model)
        if where == "backward":
            output = Raise.apply(output)

        def failing_loss(tensor: Any) -> Any:
            raise error

        return output, failing_loss if where == "loss" else loss

    monkeypatch.setattr(one_rank, "forward_step", failing)
    handle = install_hooks(one_rank.chunks, on(tmp_path))
    with pytest.raises(HostError) as caught:
        one_rank.train_step()
    assert caught.value is error
    assert not torch._C._autograd._profiler_enabled()
    handle.flush()
    trace = traces(tmp_path)["train_actor.step000000"]
    assert trace["megaprof"]["truncated_reason"] == "the host raised an exception"
    handle.remove()


@pytest.mark.parametrize("method", ["start", "stop", "discard"])
def test_a_window_that_fails_fails_alone(
    method: str, one_rank: Any, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the first two; the third one is captured, the timeline has all steps, and the end says what is missing."""
    original, failed = getattr(TorchRecorder, method), []

    def broken(self: Any, *args: Any) -> None:
        if len(failed) == 2:
            original(self, *args)
            return
        failed.append(method)
        stop(self)  # leave no profiler running behind this test
        raise RuntimeError("kineto is unwell")

    stop = TorchRecorder.discard
    monkeypatch.setattr(TorchRecorder, method, broken)
    monkeypatch.setattr(sessions, "follows_at_once", lambda *_: True)
    caplog.set_level(logging.WARNING, logger="megaprof")
    with install_hooks(one_rank.chunks, on(tmp_path, steps="2:5", tool=("torch", "timeline"))) as handle:
        losses = [one_rank.train_step() for _ in range(2)]
        one_rank.evaluate()  # what was prepared for the next training step is discarded
        losses += [one_rank.train_step() for _ in range(3)]
        assert handle.active
    assert all(len(step) == one_rank.workload.microbatches for step in losses)
    said = [r.getMessage() for r in caplog.records if "kineto is unwell" in r.getMessage()]
    (timeline,) = tmp_path.glob("*" + TIMELINE_SUFFIX)
    assert read_timeline(timeline).steps["step"].tolist() == list(range(5))
    captured = sorted(int(name.partition("step")[2]) for name in traces(tmp_path))
    if method == "discard":  # of what nobody needs any more
        assert captured == [2, 3, 4]
    else:
        assert captured == [4]
        assert len(said) == 2
        assert "train_actor step 2 is not captured" in said[0]
        assert said[1].startswith("megaprof ends: 1 window captured")
        assert "train_actor: steps 2-3 were not captured: it could not" in said[1]


def test_a_fault_inside_a_range_is_contained(one_rank: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def broken(name: Any) -> str:
        raise ZeroDivisionError("naming")

    monkeypatch.setattr(RangeName, "__str__", broken)
    with install_hooks(one_rank.chunks, on(tmp_path)) as handle:
        assert len(one_rank.train_step()) == one_rank.workload.microbatches
        assert not handle.active
    assert caplog.text.count("naming") == 1
    assert not torch._C._autograd._profiler_enabled()


def test_another_profiler_that_is_already_active_is_left_alone(one_rank: Any, tmp_path: Path, caplog: Any) -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with install_hooks(one_rank.chunks, on(tmp_path)) as handle, profiler as theirs:
        one_rank.train_step()
        assert handle.active
        assert torch._C._autograd._profiler_enabled()
    assert "already active" in caplog.text
    assert theirs.events()
    assert traces(tmp_path) == {}


def test_a_directory_that_cannot_be_made_turns_profiling_off(one_rank: Any, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with install_hooks(one_rank.chunks, on(tmp_path / "file" / "traces")) as handle:
        assert not handle.active
        one_rank.train_step()
    assert "cannot be created" in caplog.text


def test_a_schedule_asked_for_before_install_is_not_captured_and_one_asked_for_after_is(
    one_rank: Any, tmp_path: Path
) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path)):
        one_rank.train_step(get_forward_backward_func())
    assert len(traces(tmp_path)) == 1


def test_a_new_model_at_a_freed_address_gets_hooks_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    """CPython gives a freed address away at once; here every model has the same one, as far as `id` tells."""
    monkeypatch.setattr("megaprof.autoload.install.id", lambda model: 1, raising=False)
    model = torch.nn.Linear(2, 2)
    first = install_hooks(model, on(tmp_path), role="actor")
    del model
    gc.collect()
    second = install_hooks(torch.nn.Linear(2, 2), on(tmp_path), role="ref")
    try:
        assert second is not first
        assert second.active
    finally:
        first.remove()
        second.remove()


@pytest.mark.parametrize(
    "where",
    [
        "hooks.schedules.patch_p2p",
        "hooks.schedules._backward",
        "autoload.registry.adapt",
        "capture.profiler.innermost",
        "autoload.install.Listener",
    ],
)
def test_hooks_that_cannot_go_in_leave_nothing_behind(
    where: str, one_rank: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("megatron is another one")

    before = hooked_objects()
    monkeypatch.setattr(f"megaprof.{where}", broken)
    handle = install_hooks(one_rank.chunks, on(tmp_path, on_demand=where == "autoload.install.Listener"))
    assert not handle.active
    assert all(hooked_objects()[name] is before[name] for name in before)
    assert caplog.text.count("installing the hooks failed") == 1
    assert len(one_rank.train_step()) == one_rank.workload.microbatches
    monkeypatch.undo()
    with install_hooks(one_rank.chunks, on(tmp_path)) as handle:
        assert handle.active, "the model is not blocked by what failed"


LINES = """
import logging, sys, tempfile, torch.distributed as dist
{first}
from megatron.core import parallel_state
from megaprof import ProfileConfig, install_hooks
with tempfile.TemporaryDirectory() as place:
    dist.init_process_group("gloo", init_method=f"file://{{place}}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with install_hooks(None, ProfileConfig(("train_actor",), place + "/traces", steps="500")):
        {then}
"""


@pytest.mark.parametrize(
    ("first", "then", "shown"),
    [
        ("", "pass", ["megaprof captures train_actor (steps 500) on rank 0 of 1", "megaprof ends: no windows"]),
        ("", "logging.basicConfig(format='HOST %(message)s')", ["megaprof captures", "HOST megaprof ends: no windows"]),
        ("logging.basicConfig(format='HOST %(message)s')", "pass", ["HOST megaprof ends: no windows"]),
    ],
)
def test_lines_are_seen_where_the_host_configured_no_logging(first: str, then: str, shown: list[str]) -> None:
    finished = programs.run(LINES.format(first=first, then=then))
    assert finished.returncode == 0, finished.stderr
    lines = [line for line in finished.stderr.splitlines() if "megaprof" in line and "warn" not in line.lower()]
    assert len(lines) == len(shown), finished.stderr
    assert all(line.startswith(start) for line, start in zip(lines, shown, strict=True))


def test_a_relative_directory_survives_a_change_of_the_working_directory(
    one_rank: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with install_hooks(one_rank.chunks, on(Path("traces"))):
        assert (tmp_path / "traces").is_dir(), "made when the hooks go in, not inside a step"
        monkeypatch.chdir(tmp_path / "elsewhere")
        one_rank.train_step()
    assert list(traces(tmp_path / "traces")) == ["train_actor.step000000"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
