"""Windows: several targets; steps of the host; names of files that repeat."""

from __future__ import annotations

import gzip
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaprof import ProfileConfig, analyze, annotate, install_hooks
from megaprof.analysis.merge import merge
from megaprof.analysis.trace.traces import Trace, find_traces, read_trace
from megaprof.capture import profiler
from megaprof.capture.process import process
from megaprof.capture.this_rank import _say_start
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.synthetic import kinds

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def _no_handle_is_left() -> Iterator[None]:
    yield
    for session in process.sessions.copy():
        profiler.leave(session)


def on(directory: Path, *targets: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(targets, str(directory), **options)


def files(directory: Path) -> dict[str, Trace]:
    """The traces by the part of their names that says target, role and step, and which repeat it is."""
    return {path.name.replace(".pt.trace.json.gz", ""): read_trace(path) for path in sorted(find_traces(directory))}


def short(directory: Path) -> dict[str, Trace]:
    return {name.split(".pp")[0]: trace for name, trace in files(directory).items()}


def metadata(directory: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(find_traces(directory)):
        with gzip.open(path) as file:
            found[path.name.split(".pp")[0]] = json.load(file)["megaprof"]
    return found


def steps(trace: Trace) -> list[str]:
    """The ranges of whole steps, in order."""
    return [f"{r.name.label} {r.name.fields['step']}" for r in trace.ranges if "step" in r.name.fields]


class Host:
    """A host whose step number is told from outside; ``mini_batches`` grad-accumulation steps in each."""

    def __init__(self, gpt: Any, mini_batches: int = 1) -> None:
        self.gpt, self.mini_batches, self.step = gpt, mini_batches, -1

    def number(self) -> int | None:
        return self.step if self.step >= 0 else None

    def run(self, *numbers: int) -> None:
        for self.step in numbers:
            self.gpt.log_probs_pass()
            for _ in range(self.mini_batches):
                self.gpt.train_step()


# ---- several targets


def test_a_step_in_a_window_of_another_target_has_no_file_of_its_own(
    one_rank: Any, tmp_path: Path, caplog: Any
) -> None:
    host = Host(one_rank)
    targets = ("train_overall", "train_actor", "train_log_probs")
    caplog.set_level("INFO", logger="megaprof")
    config = on(tmp_path, *targets, steps="4;train_actor=4,6;train_log_probs=0")
    with install_hooks(one_rank.chunks, config, iteration=host.number):
        host.run(3, 4, 5, 6)
    assert {name: steps(trace) for name, trace in short(tmp_path).items()} == {
        "train_log_probs.step000000": ["train_log_probs 0"],
        "train_overall.step000004": ["train_overall 4", "train_log_probs 1", "train_actor 4"],
        "train_actor.step000006": ["train_actor 6"],
    }
    first, *_, last = [record for record in caplog.records if record.getMessage().startswith("megaprof ")]
    assert "no file of train_actor and train_log_probs for what is in a window of train_overall" in first.getMessage()
    assert last.levelname == "WARNING"
    assert "train_actor: step 4 was not captured: a window of train_overall was open" in last.getMessage()


# ---- the host's step


def test_train_overall_is_the_hosts_step_with_all_its_mini_batches(one_rank: Any, tmp_path: Path) -> None:
    host = Host(one_rank, mini_batches=3)
    with install_hooks(one_rank.chunks, on(tmp_path, "train_overall", steps="7"), iteration=host.number):
        host.run(6, 7, 8)
    (trace,) = files(tmp_path).values()
    assert steps(trace) == ["train_overall 7", "train_log_probs 1", *["train_actor 7"] * 3]
    assert (trace.metadata.truncated, trace.metadata.steps) == (False, (7, 7))
    assert {t.target for t in analyze(tmp_path).targets} >= {"train_actor"}


def test_a_training_step_that_runs_forward_only_is_no_log_prob_pass(one_rank: Any, tmp_path: Path) -> None:
    """As Megatron-LM's with all layers frozen; another function of the name is none."""

    def train_step(*, forward_only: bool) -> None:
        one_rank.log_probs_pass()

    with install_hooks(one_rank.chunks, on(tmp_path, "train_actor", "train_log_probs", steps="0")):
        train_step(forward_only=False)
        train_step(forward_only=True)
    assert sorted(short(tmp_path)) == ["train_actor.step000000", "train_log_probs.step000000"]


def test_hybrid_context_parallelism_has_sub_samples(one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Two, with its own way to run them replaced: it needs CUDA. Nothing says that one is missing."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    if not hasattr(schedules, "hybrid_context_parallel_forward_backward"):
        pytest.skip("this megatron-core has no hybrid context parallelism")

    typed = "model_type" in inspect.signature(schedules.backward_step).parameters  # 0.19 has it no more

    def sub_samples(step: Any, data: Any, model: Any, number: int, taken: Any, grad: Any, store: Any, config: Any,
                    *others: Any) -> Any:  # fmt: skip
        for current in range(2):
            output, tokens = schedules.forward_step(
                step, data, model, number, taken, store, config, cp_group_size=1, current_microbatch=current
            )
            schedules.backward_step(taken, output, grad, *others[-1:] * typed, config)
        return store, tokens

    monkeypatch.setattr(schedules, "hybrid_context_parallel_forward_backward", sub_samples)
    monkeypatch.setattr(one_rank.config, "hybrid_context_parallel", True)
    with install_hooks(one_rank.chunks, on(tmp_path, "train_actor", steps="1:4", tool=("torch", "timeline"))):
        for _ in range(5):
            one_rank.train_step()
    assert all(trace.metadata.microbatches is None for trace in files(tmp_path).values())
    (target,) = analyze(tmp_path).targets
    forwards = target.stages[0].forward_ms
    assert forwards is not None
    assert forwards.count == len(target.steps)
    assert "left_out" not in kinds(target.warnings)
    assert target.diagnosis is None
    assert target.withheld is not None
    assert target.withheld.kind == "schedule_unknown"
    assert target.fleet is not None
    assert target.fleet.coverage.ranks == 1


# ---- discrete


def test_annotated_work_has_the_steps_that_are_named_for_it(one_rank: Any, tmp_path: Path) -> None:
    config = on(tmp_path, "train_actor", steps="train_actor=9;annotated=1", discrete=True)

    @annotate(role="rollout")
    def generate() -> None:
        torch.ones(2).sum()

    with install_hooks(one_rank.chunks, config, iteration=lambda: None):
        for _ in range(3):
            generate()
    assert list(short(tmp_path)) == ["annotated.rollout.step000001"]


def test_annotated_work_on_another_thread_is_not_captured_and_that_is_said(
    one_rank: Any, tmp_path: Path, caplog: Any
) -> None:
    config = on(tmp_path, "train_actor", steps="train_actor=none;annotated=1", discrete=True, role_select="ref=none")
    generate, score = (annotate(role=role)(lambda: None) for role in ("rollout", "ref"))
    with install_hooks(one_rank.chunks, config):
        for _ in range(3):
            for work in (generate, score):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
    assert short(tmp_path) == {}
    (said,) = [line for line in caplog.messages if "thread" in line]
    assert "annotated work of rollout is captured only on the thread of install_hooks" in said


# ---- no file is replaced


def again(gpt: Any, directory: Path, **options: Any) -> None:
    with install_hooks(gpt.chunks, on(directory, "train_log_probs", steps="0", **options)):
        gpt.log_probs_pass()


def test_a_restart_in_the_same_directory_replaces_nothing(one_rank: Any, tmp_path: Path) -> None:
    again(one_rank, tmp_path, kernels=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again(one_rank, tmp_path, kernels=True)
    again(one_rank, tmp_path, kernels=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    stem = "train_log_probs.step000000.pp0-tp0-cp0-ep0-dp0.rank00000"
    assert sorted(after) == sorted(
        f"{stem}{repeat}{suffix}" for repeat in ("", ".2", ".3") for suffix in (".pt.trace.json.gz", ".kernels.json")
    )
    runs = {each["run"] for each in metadata(tmp_path).values()}
    assert len(runs) == 1, "one process"
    (target,) = analyze(tmp_path).targets
    assert target.steps == (0,)
    assert "twice" in kinds(target.warnings), "the report says that it chose"
    merge(tmp_path, tmp_path / "merged.json.gz")


def test_two_models_without_roles_do_not_share_a_file(one_rank: Any, tmp_path: Path) -> None:
    config = on(tmp_path, "train_log_probs", steps="0")
    with install_hooks(torch.nn.Linear(2, 2), config) as other, install_hooks(one_rank.chunks, config) as own:
        session = other._session
        assert session is not None
        one_rank.log_probs_pass()
        _, ((step, demand),) = session.agenda.begins("train_log_probs")
        session._open(step, demand)
        assert process.window is not None
        final = process.window.window.path(tmp_path, ".kernels.json")
        waiting = session.writer.raw_path(final)
        waiting.touch()
        for handle in (other, own):
            assert handle._session is not None
            assert not handle._session.writer.raw_path(final).exists(), "it waits to be finished"
        waiting.unlink()
        session.end_window("no call came")
        assert not torch._C._autograd._profiler_enabled()


def test_a_handle_that_another_thread_removes_takes_its_own_window_only(one_rank: Any, tmp_path: Path) -> None:
    host = Host(one_rank)
    other = install_hooks(torch.nn.Linear(2, 2), on(tmp_path / "other", "train_log_probs"))
    removing: list[threading.Thread] = []

    def remove(*_: Any) -> None:
        if host.step == 1 and not removing:
            removing.append(threading.Thread(target=other.remove))
            removing[0].start()
            removing[0].join(60)
            assert other.active, "the training thread does it when its call ends"

    hook = one_rank.chunks[0].register_forward_pre_hook(remove)
    with install_hooks(one_rank.chunks, on(tmp_path, "train_overall", steps="1"), iteration=host.number):
        host.run(0, 1, 2)
        assert not other.active
    hook.remove()
    (trace,) = files(tmp_path).values()
    assert not trace.metadata.truncated
    assert "train_actor 1" in steps(trace)


def test_a_handle_that_is_removed_inside_a_call_is_removed_behind_it(one_rank: Any, tmp_path: Path) -> None:
    """Stopping Kineto inside the autograd engine can crash the process."""
    handle = install_hooks(one_rank.chunks, on(tmp_path, "train_actor", schedule="0"))
    seen: list[bool] = []

    def remove(_: Any) -> None:
        handle.remove()
        seen.append(handle.active and torch._C._autograd._profiler_enabled())

    hook = next(one_rank.chunks[0].parameters()).register_hook(remove)
    one_rank.train_step()
    hook.remove()
    assert set(seen) == {True}
    assert not handle.active
    (trace,) = files(tmp_path).values()
    assert not trace.metadata.truncated


# ---- what is said


@pytest.fixture
def lines(caplog: Any) -> Callable[[], list[str]]:
    caplog.set_level("INFO", logger="megaprof")
    return lambda: [record.getMessage() for record in caplog.records]


def test_one_line_at_the_start_one_for_each_window_one_at_the_end(
    one_rank: Any, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, "train_actor", steps="1,2"), iteration=lambda: None):
        for _ in range(4):
            one_rank.train_step()
    name = "train_actor.step00000{}.pp0-tp0-cp0-ep0-dp0.rank00000.pt.trace.json.gz"
    # What a killed process of another test left is removed by the next one, with a line.
    assert [line for line in lines() if "a killed process had left" not in line] == [
        f"megaprof captures train_actor (steps 1,2) on rank 0 of 1; keeps the times of up to 20 calls before each "
        f"window and of 5 behind it; writes to {tmp_path}",
        *(f"megaprof captured train_actor step {n}: {tmp_path / name.format(n)}" for n in (1, 2)),
        f"megaprof ends: 2 windows captured into {tmp_path}",
    ]


@pytest.mark.parametrize(("options", "hinted"), [({"steps": "1"}, True), ({"steps": "none", "on_demand": True}, False)])
def test_only_who_plans_windows_is_told_how_many_stages_they_see(
    options: dict[str, Any], hinted: bool, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    layout = WorldLayout(ParallelSizes(pp=2))
    _say_start(on(tmp_path, "train_actor", "train_overall", **options), layout.coords(0), [0], layout)
    assert [hint in lines()[0] for hint in ("sees 1 of 2 stages", "writes no file of")] == [hinted] * 2


def test_after_a_fault_nothing_is_said_of_what_ran(
    one_rank: Any, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    with install_hooks(one_rank.chunks, on(tmp_path, "train_actor", steps="1"), iteration=lambda: {}["host"]):
        one_rank.train_step()
    assert lines()[-1] == f"megaprof ends: no windows captured into {tmp_path}; profiling was off after a fault"
