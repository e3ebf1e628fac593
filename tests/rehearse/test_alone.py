"""A group of which only one rank runs: what it gives its program, and what it writes down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaprof.rehearse.alone import _group
from tests import programs

OPTIONS = {"group_rank": 1, "group_size": 4, "global_ranks_in_group": [4, 5, 6, 7]}


@pytest.fixture
def exchanges(tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """Rank 1 of the ranks 4 to 7, alone, and the file of its exchanges."""
    written = os.open(tmp_path / "exchanges", os.O_WRONLY | os.O_CREAT)
    yield _group(dist, written, tmp_path / "shapes")(SimpleNamespace(**OPTIONS)), tmp_path / "exchanges"
    os.close(written)


def lines(path: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split()[1:]) for line in path.read_text().splitlines()]


def test_collectives_give_what_this_rank_put_in(exchanges: tuple[Any, Path]) -> None:
    group, path = exchanges
    own, gathered, scattered = torch.tensor([3.0, 5.0]), torch.empty(8), torch.empty(2)
    parts = [torch.empty(2) for _ in range(4)]
    group.allreduce([own]).wait()
    group.all_gather_single(gathered, own).wait()
    group.allgather([parts], [own]).wait()
    group.reduce_scatter_single(scattered, torch.arange(8.0)).wait()
    assert own.tolist() == [3.0, 5.0]
    assert gathered.tolist() == [3.0, 5.0] * 4 == torch.cat(parts).tolist()
    assert scattered.tolist() == [2.0, 3.0]
    kinds = ("all_reduce", "8"), ("all_gather", "32"), ("all_gather", "32"), ("reduce_scatter", "32")
    assert lines(path) == [(*each, "0", "0", "4,5,6,7") for each in kinds]


def test_a_part_may_be_gathered_into_the_tensor_that_it_is_in(exchanges: tuple[Any, Path]) -> None:
    whole = torch.arange(8.0)
    exchanges[0].all_gather_single(whole, whole[2:4]).wait()
    assert whole.tolist() == [2.0, 3.0] * 4
    exchanges[0].reduce_scatter_single(whole[2:4], whole).wait()
    assert whole.tolist() == [2.0, 3.0] * 4


def test_tokens_of_other_ranks_are_nothing(exchanges: tuple[Any, Path]) -> None:
    received = torch.full((3,), 9.0)
    exchanges[0].alltoall_base(received, torch.tensor([1.0, 2.0]), [3], [2]).wait()
    assert received.tolist() == [1.0, 2.0, 0.0]
    several = [torch.full((3,), 9.0) for _ in range(4)]
    exchanges[0].alltoall(several, [torch.full((2,), float(rank)) for rank in range(4)]).wait()
    assert [each.tolist() for each in several] == [[float(rank)] * 2 + [0.0] for rank in range(4)]
    assert lines(exchanges[1]) == [("all_to_all", size, "0", "0", "4,5,6,7") for size in ["8"] * 5]


def test_what_one_rank_gathers_or_scatters_is_known_to_that_rank(exchanges: tuple[Any, Path]) -> None:
    group, path = exchanges
    parts, own = [torch.empty(2) for _ in range(4)], torch.tensor([3.0, 5.0])
    group.gather([parts], [own]).wait()
    group.gather([], [own]).wait()  # to another rank
    assert torch.cat(parts).tolist() == [3.0, 5.0] * 4
    for scatter in (group.scatter, group.reduce_scatter):
        scatter([part := torch.empty(2)], [[torch.full((2,), float(rank)) for rank in range(4)]]).wait()
        assert part.tolist() == [1.0, 1.0]
    group.scatter([part], []).wait()  # by another rank
    assert part.tolist() == [1.0, 1.0]
    assert lines(path) == [
        (f"{kind}", "32", "0", "0", "4,5,6,7") for kind in ["all_gather"] * 2 + ["reduce_scatter"] * 3
    ]


#: What programs do with groups that no schedule needs. Of the two ranks, the second one runs after the first.
PROGRAM = """
import os, sys
from megaprof.rehearse import alone
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
os.environ[alone.VARIABLE] = sys.argv[2] + "/exchanges"
alone.arm()
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
if sys.argv[3:] == ["waits"]:
    next(dist.rendezvous("env://"))  # waits for its peers
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))  # makes the default group
assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [0, 1]
dist.monitored_barrier()
if sys.argv[3:] == ["reads"]:
    dist.distributed_c10d._get_default_store().get("of another rank")
objects = [{"seed": 7}] if sys.argv[1] == "0" else [None]
dist.broadcast_object_list(objects, src=0)
assert objects == [{"seed": 7}]
objects = [3 if sys.argv[1] == "0" else None]
dist.broadcast_object_list(objects, 0, dist.new_group([0, 1], backend="gloo"))
assert objects == [3]
gathered = [None, None]
dist.all_gather_object(gathered, "one")
assert gathered == ["one"] * 2
with dist._coalescing_manager(async_ops=True) as manager:
    dist.all_gather_into_tensor(whole := torch.empty(4), torch.ones(2))
manager.wait()
assert whole.tolist() == [1.0] * 4
"""


def test_groups_do_what_programs_ask_for(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (own := tmp_path / "alone" / rank).mkdir(parents=True)
        ended = programs.run(PROGRAM, rank, own)
        assert ended.returncode == 0, ended.stderr
    ended = programs.run(PROGRAM, "0", tmp_path / "alone" / "0", "waits")
    assert "a store of its own" in ended.stderr
    ended = programs.run(PROGRAM, "0", tmp_path / "alone" / "0", "reads")
    assert "DistStoreError" in ended.stderr.splitlines()[-1]


def test_what_a_neighbour_sends_is_finite_and_leaves_random_numbers_alone(exchanges: tuple[Any, Path]) -> None:
    group, path = exchanges
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    received = torch.full((4, 4), torch.nan, dtype=torch.bfloat16, requires_grad=True)
    group.recv([received], 0).wait()
    assert torch.rand(1) == expected
    assert received.isfinite().all()
    assert 0 < received.abs().max() < 1
    assert lines(path) == [("recv", "32", "0", "0", "4,5,6,7")]


def test_an_exchange_in_a_backward_says_so(exchanges: tuple[Any, Path]) -> None:
    group, path = exchanges
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: group.allreduce([gradient]).wait() and None)
    weight.sum().backward()
    assert lines(path) == [("all_reduce", "8", "1", "0", "4,5,6,7")]


def test_shapes_are_those_that_the_first_stage_sent(
    exchanges: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, sent = exchanges[0], ([3, 1, 8], [5, 1, 8])
    with pytest.raises(RuntimeError, match="another stage"):
        group.recv([torch.empty(3, dtype=torch.int64)], 0)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for shape in sent:
            group.send([torch.tensor(shape)], 2).wait()
    for peer in (0, 2):  # forward from the stage before, backward from the one behind
        for shape in sent:
            received = torch.empty(3, dtype=torch.int64)
            group.recv([received], peer).wait()
            assert received.tolist() == shape
