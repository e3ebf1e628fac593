"""``annotate`` and ``role``: what they wrap stays what it was, with and without a window open."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaprof import ProfileConfig, annotate, install_hooks, role
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.capture import roles
from megaprof.capture.process import process
from megaprof.recorders import emit
from megaprof.recorders.torch_profiler import TorchRecorder


class Policy:
    """Every kind of function, annotated."""

    @annotate
    def method(self, value: int, *, times: int = 2) -> int:
        """Doc."""
        return value * times

    @annotate(role="actor")
    @staticmethod
    def static(value: int) -> tuple[int, str | None]:
        return value, roles.current().role

    @annotate(role="critic", message="of the class")
    @classmethod
    def of_class(cls) -> tuple[type, str | None]:
        return cls, roles.current().role

    @annotate(role="rollout", color="red")
    async def coroutine(self, value: int) -> tuple[int, str | None]:
        await asyncio.sleep(0)
        return value, roles.current().role


@pytest.fixture(params=["off", "recording"])
def names(request: Any, tmp_path: Path) -> Iterator[Callable[[], Counter[str]]]:
    """With hooks and an open window, and without; the ranges that were written."""
    if request.param == "off":
        yield Counter
        return
    one_rank = request.getfixturevalue("one_rank")
    handle = install_hooks(one_rank.chunks, ProfileConfig(("train_overall",), str(tmp_path), schedule="0"))
    one_rank.train_step()

    def written() -> Counter[str]:
        handle.remove()
        (path,) = find_traces(tmp_path)
        labels = (range_.name.label for range_ in read_trace(path).ranges)
        return Counter(label for label in labels if label.startswith(("role/", "annotated/")))

    yield written
    handle.remove()


def test_functions_and_methods_are_what_they_were(names: Any) -> None:
    policy = Policy()
    assert policy.method(3, times=4) == 12
    assert Policy.static(3) == policy.static(3) == (3, "actor" if process.sessions else None)
    assert Policy.of_class() == (Policy, "critic" if process.sessions else None)
    assert asyncio.run(policy.coroutine(3)) == (3, "rollout" if process.sessions else None)
    assert Policy.method.__doc__ == "Doc."
    assert (Policy.method.__name__, Policy.method.__qualname__) == ("method", "Policy.method")
    assert list(inspect.signature(Policy.method).parameters) == ["self", "value", "times"]
    assert inspect.iscoroutinefunction(Policy.coroutine)
    assert roles.current().role is None
    if process.sessions:
        assert names() == {
            "annotated/Policy.method": 1,
            "role/actor/Policy.static": 2,
            "role/critic/of_the_class": 1,
            "role/rollout/Policy.coroutine": 1,
        }


class Fault(BaseException):
    pass


def test_exceptions_pass_through_unchanged(names: Any) -> None:
    fault = Fault()

    @annotate(role="actor")
    def function() -> None:
        raise fault

    @annotate(role="actor")
    async def coroutine() -> None:
        raise fault

    def block() -> None:
        with annotate(role="actor", message="block"):
            raise fault

    for run in (function, block, lambda: asyncio.run(coroutine())):
        with pytest.raises(Fault) as caught:
            run()
        assert caught.value is fault
        assert roles.current().role is None
    if process.sessions:
        assert sum(names().values()) == 3


def test_tasks_that_take_turns_keep_their_roles_and_their_ranges(names: Any) -> None:
    turns: list[tuple[str, str | None]] = []

    async def work(own: str) -> None:
        with role(own):
            for _ in range(3):
                turns.append((own, roles.current().role))
                await asyncio.sleep(0)
                await Policy().coroutine(1)

    async def all_of_them() -> None:
        await asyncio.gather(work("ref"), work("actor"), work("critic"))

    asyncio.run(all_of_them())
    assert turns[:3] == [("ref", "ref"), ("actor", "actor"), ("critic", "critic")], "they did not take turns"
    assert all(own == seen for own, seen in turns)
    if process.sessions:
        assert names() == {"role/rollout/Policy.coroutine": 9, "role/ref": 1, "role/actor": 1, "role/critic": 1}


def test_a_block_and_a_scope_may_be_nested_in_themselves(names: Any) -> None:
    block, scope = annotate("block"), role("ref")
    with block, block, scope, scope:
        assert roles.current().role == "ref"
    assert roles.current().role is None
    if process.sessions:
        assert names() == {"annotated/block": 2, "role/ref": 2}


def test_a_scope_is_not_that_of_other_threads() -> None:
    seen = []
    with role("ref"):
        thread = threading.Thread(target=lambda: seen.append(roles.current().role))
        thread.start()
        thread.join()
        assert asyncio.run(asyncio.to_thread(lambda: roles.current().role)) == "ref"
    assert seen == [None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": ""}, "annotate: role: ''"),
        ({"role": "a;b"}, "'a;b'"),
        ({"role": 3}, "annotate: role: 3"),
        ({"message": ""}, "message=''"),
        ({"message": 3}, "message=3 is not valid; valid: text, not empty"),
        ({"color": "no such color"}, "color='no such color'"),
        ({"color": -1}, "color=-1"),
        ({"color": True}, "color=True"),
        ({"domain": 3}, "domain=3"),
        ({"category": 1.5}, "category=1.5 is not valid; valid: text or a number, not empty"),
    ],
)
def test_what_cannot_be_honoured_is_a_value_error_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="annotate") as error:
        annotate(**options)(print)
    assert said in str(error.value)
    assert "valid" in str(error.value)
    assert "class" not in str(error.value)


def test_what_is_wrong_again_with_hooks_put_in_anew_is_said_again(one_rank: Any, tmp_path: Path, caplog: Any) -> None:
    config = ProfileConfig(("train_overall",), str(tmp_path), schedule="0")
    for _ in range(2):
        with install_hooks(one_rank.chunks, config):
            for _ in range(3):
                role("a;b")
    assert sum("a;b" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("name", ["", "  ", "a;b", 3, None])
def test_a_block_in_the_training_loop_never_raises_for_its_role(name: Any, caplog: Any) -> None:
    for _ in range(3):
        with role("actor"), role(name):
            assert roles.current().role == "actor"
        if name is not None:
            with role("actor"), annotate(role=name):
                assert roles.current().role == "actor"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if name is None else 2), "each mistake is said once"
    assert all(repr(name) in line and "left out" in line for line in said)


def test_one_scope_in_several_tasks_that_take_turns(names: Any, monkeypatch: Any) -> None:
    """The same instance, entered by two tasks that end in the order in which they began: no stack fits that."""
    scope, block, stacks = role("ref"), annotate("block"), []
    monkeypatch.setattr("nvtx.push_range", lambda name, **look: stacks.append(name))

    async def work(turns: int) -> str | None:
        with scope, block:
            for _ in range(turns):
                await asyncio.sleep(0)
            return roles.current().role

    async def both() -> list[str | None]:
        found = await asyncio.gather(work(1), work(3))
        assert roles.current().role is None
        return list(found)

    assert asyncio.run(both()) == ["ref", "ref"]
    assert stacks == [], "NVTX keeps a stack, on which these would close each other"
    if process.sessions:
        assert names() == {"role/ref": 2, "role/ref/block": 2}


def test_a_coroutine_that_is_closed_in_another_context(names: Any) -> None:
    class Never:
        def __await__(self) -> Generator[None, None, None]:
            yield

    @annotate(role="rollout")
    async def wait() -> None:
        await Never()

    coroutine = wait()
    contextvars.copy_context().run(coroutine.send, None)
    coroutine.close()
    assert roles.current().role is None


def test_only_functions_can_be_annotated() -> None:
    with pytest.raises(ValueError, match="not a function"):
        annotate(role="ref")(Policy)
    for descriptor in (property(len), functools.cached_property(len)):  # it would take the attribute's place
        with pytest.raises(ValueError, match=r"property.* is not a function"):
            annotate(descriptor)

    def generator() -> Generator[int, None, None]:
        yield 1

    with pytest.raises(ValueError, match=r"generator is a generator, .* valid: a block around each part of its work"):
        annotate(generator)


def test_annotating_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megaprof\n"
        "@megaprof.annotate(role='rollout')\n"
        "def work(): return 7\n"
        "with megaprof.role('ref'): assert work() == 7\n"
        "assert not {'torch', 'megatron', 'nvtx', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_that_nsys_records_has_ranges_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller never calls a schedule, and opens no window."""
    from megaprof.recorders import emit

    @annotate(role="rollout", message="generate")
    def generate() -> str:
        return "done"

    ended: list[emit.LoggedRange] = []
    monkeypatch.setattr(emit, "log", ended)
    generate()
    assert ended == []
    monkeypatch.setattr(process, "traced", True)
    with role("critic"), annotate(message="block"):
        assert generate() == "done"
    assert [name.removeprefix("megaprof/role/") for name, *_ in ended] == [
        "rollout/generate",
        "critic/block",
        "critic",
    ]


def test_a_fault_of_ours_in_a_backward_stops_no_recorder_there(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopping Kineto inside the autograd engine can crash the process."""
    inside: list[bool] = []

    @annotate
    def annotated() -> None:
        inside.append(process.dispatcher.inside is not None)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    def discard(recorder: TorchRecorder) -> None:
        stopped.append(process.dispatcher.inside is not None)
        discarded(recorder)

    def hook(_: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(emit, "Range", broken)
            annotated()

    stopped, discarded = list[bool](), TorchRecorder.discard
    monkeypatch.setattr(TorchRecorder, "discard", discard)
    parameter = next(one_rank.chunks[0].parameters())
    with install_hooks(one_rank.chunks, ProfileConfig(("train_actor",), str(tmp_path), schedule="0")) as handle:
        watched = parameter.register_hook(hook)
        try:
            one_rank.train_step()
        finally:
            watched.remove()
        assert not handle.active
    assert set(inside) == {True}
    assert stopped
    assert not any(stopped)
    assert find_traces(tmp_path) == []
