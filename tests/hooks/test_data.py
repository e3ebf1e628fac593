"""Waiting for data: watched on real schedules, whatever iterates, and without a trace on what is iterated."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import pytest

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.table.table import DATA, Table
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats import timeline as format
from megaprof.formats.facts import unpack_data
from megaprof.formats.ranges import DATA_WAIT
from megaprof.hooks import dispatch
from megaprof.hooks.schedules import Watched
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.analysis.tables import tables_in

#: Milliseconds that a microbatch's data is late: more than a busy machine holds up another one.
LATE = 200.0


class Loader:
    """A host's own iterator, as Megatron-LM's ``RerunDataIterator``: with attributes, a length and a way back."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items, self.taken = items, 0

    def __iter__(self) -> Loader:
        return self

    def __len__(self) -> int:
        return 7

    def __next__(self) -> Any:
        item = next(self.items)
        self.taken += 1
        return item


def config(directory: Path, *tools: str) -> ProfileConfig:
    windows = {"activities": ("cpu",), "steps": "1"} if "torch" in tools else {}
    return ProfileConfig(("train_actor",), str(directory), tool=tools or ("timeline",), **windows)


def waits_in(directory: Path) -> dict[int, np.ndarray]:
    """Milliseconds by step, [microbatch, chunk]."""
    found = {}
    for path in directory.rglob("*" + format.SUFFIX):
        timeline = format.read_timeline(path)
        for row, payload in timeline.facts(format.DATA).items():
            found[int(timeline.steps["step"][row])] = unpack_data(payload) / 1e3  # type: ignore[operator]
    return found


def late(items: Iterator[Any], which: int) -> Iterator[Any]:
    for number, item in enumerate(items):
        time.sleep(LATE / 1e3 * (number == which))
        yield item


@pytest.mark.parametrize("in_python", [False, True])
def test_each_forward_knows_how_long_its_data_took(
    in_python: bool, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_python:
        monkeypatch.setattr(dispatch, "Hook", None)
    batches, number = one_rank.data_iterator, itertools.count()
    monkeypatch.setattr(one_rank, "data_iterator", lambda step: late(batches(step), next(number)))
    with install_hooks(one_rank.chunks, config(tmp_path)):
        for _ in range(3):
            one_rank.train_step()
    found = waits_in(tmp_path)
    assert sorted(found) == [0, 1, 2]
    for step, waits in found.items():
        assert waits[step, 0] >= LATE
        assert int(waits.argmax()) == step


def test_a_window_has_a_range_for_each(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = one_rank.data_iterator
    monkeypatch.setattr(one_rank, "data_iterator", lambda step: late(batches(step), 2))
    with install_hooks(one_rank.chunks, config(tmp_path, "torch")):
        for _ in range(3):
            one_rank.train_step()
    (path,) = find_traces(tmp_path)
    found = [each for each in read_trace(path).ranges if each.name.label == DATA_WAIT]
    assert [each.name.fields for each in found] == [{"mb": number, "chunk": 0} for number in range(3)]
    assert found[2].end - found[2].start >= LATE * 1e6
    (table,) = tables_in(tmp_path).values()
    assert isinstance(table, Table)
    assert (table.delays[DATA][..., 2] >= LATE).any()
    assert (table.compute[..., 0, 2] <= table.passes[:, :, :, None, :, 0, 2] - LATE).any()


def test_what_the_host_gave_is_as_it_was(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, seen = Loader(itertools.chain(*(one_rank.data_iterator(step) for step in range(4)))), list[Any]()
    forward = one_rank.forward_step

    def looks(given: Any, model: Any) -> Any:
        seen.append(given)
        assert isinstance(given, Loader)
        assert (given.taken, len(given), bool(given)) == (loader.taken, 7, True)
        given.mark = loader.taken
        return forward(given, model)

    monkeypatch.setattr(one_rank, "data_iterator", lambda step: loader)
    monkeypatch.setattr(one_rank, "forward_step", looks)
    before = type(loader).__dict__.copy()
    with install_hooks(one_rank.chunks, config(tmp_path)):
        one_rank.train_step()
        assert all(type(given) is Watched for given in seen)
    assert (loader.mark, loader.taken) == (2, 3)  # type: ignore[attr-defined]
    assert type(loader).__dict__ == before
    seen.clear()
    one_rank.train_step()
    assert seen == [loader] * 3


@pytest.mark.parametrize("fault", [StopIteration(), OSError("the disk is gone"), KeyboardInterrupt()])
def test_what_the_loader_raises_passes(fault: BaseException, one_rank: Any, tmp_path: Path, monkeypatch: Any) -> None:
    class Ends:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise fault

    monkeypatch.setattr(one_rank, "data_iterator", lambda step: Ends())
    with install_hooks(one_rank.chunks, config(tmp_path)):
        with pytest.raises(type(fault)) as raised:
            one_rank.train_step()
        assert raised.value is fault or isinstance(fault, StopIteration)


def test_other_things_are_passed_on_as_they_are(one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL and slime give the schedule lists and objects of their own, which have no ``next``."""
    given = [[1, 2, 3], {"a": 1}, object(), range(3), None]
    seen: list[Any] = []
    batches, forward = one_rank.data_iterator, one_rank.forward_step

    def looks(data: Any, model: Any) -> Any:
        seen.append(data)
        return forward(batches(0), model)

    monkeypatch.setattr(one_rank, "forward_step", looks)
    with install_hooks(one_rank.chunks, config(tmp_path)):
        for each in given:
            monkeypatch.setattr(one_rank, "data_iterator", lambda step, each=each: each)
            if each is None or not isinstance(each, list):
                one_rank.train_step()
                assert all(one is each for one in seen[-3:])


def test_it_stands_for_a_generator_too() -> None:
    own = (number for number in range(3))
    watched = Watched(own, "__next__", own.__next__)
    assert isinstance(watched, Iterator)
    assert isinstance(watched, GeneratorType)
    assert [*watched] == [0, 1, 2]
    watched.close()


def test_a_copy_is_one_of_what_it_stands_for() -> None:
    own = Loader(iter(range(9)))
    watched = Watched(own, "__next__", own.__next__)
    assert next(watched) == 0
    for copied in (copy.copy(watched), copy.deepcopy(watched), pickle.loads(pickle.dumps(watched))):
        assert type(copied) is Loader
        assert copied.taken == 1


def chunks_and_stages(directory: str) -> list[str]:
    """Rank 0's first chunk waits for its second microbatch; the middle stage has no iterators."""
    rank, _ = init_distributed()
    kinds = []
    with cpu_megatron():
        gpt = build(GPTWorkload(pp=2, vpp=2, layers=4, hidden=32, seq_length=16, microbatches=4))
        batches, forward = gpt.data_iterator, gpt.forward_step

        def given(step: int) -> Any:
            own: Any = batches(step)
            if rank == 0:
                return [late(own[0], 1), own[1]]
            return [None, own[1]]

        def looks(data: Any, model: Any, *rest: Any) -> Any:
            kinds.append(type(data).__name__)
            return forward(batches(0)[0] if data is None else data, model, *rest)  # type: ignore[index]

        gpt.data_iterator, gpt.forward_step = given, looks  # type: ignore[method-assign]
        with install_hooks(gpt.chunks, config(Path(directory, str(rank)))):
            gpt.train_step()
            gpt.train_step()
    return kinds


def test_every_chunk_has_its_own(tmp_path: Path) -> None:
    first, last = run_ranks(chunks_and_stages, 2, str(tmp_path))
    assert set(first) == {"Watched"}
    assert set(last) == {"Watched", "NoneType"}
    waits = waits_in(tmp_path / "0")[1]
    assert waits[1, 0] >= LATE
    assert waits.argmax() == waits.shape[1]
