"""Coordinates against the real megatron-core: one process plays every rank of a world on torch's fake backend."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaprof.parallel.megatron import NoGrid, coordinates, coordinates_and_layout
from megaprof.parallel.topology import DEFAULT_ORDER, ParallelSizes, WorldLayout
from tests.parallel.test_topology import everybody

ORDERS = ["-".join(order) for order in permutations(DEFAULT_ORDER.split("-"))]

# (world, sizes, order): every axis alone, pairs, all together, expert grids unlike the decoder's, both Megatron-LM
# orders, orders with names left out, and capitals.
WORLDS = [
    (8, {}, DEFAULT_ORDER),
    (8, {"tp": 8}, DEFAULT_ORDER),
    (8, {"pp": 8}, DEFAULT_ORDER),
    (8, {"cp": 4}, DEFAULT_ORDER),
    (8, {"ep": 8}, DEFAULT_ORDER),
    (8, {"tp": 2, "pp": 2}, DEFAULT_ORDER),
    (8, {"tp": 2, "pp": 2, "vpp": 3}, DEFAULT_ORDER),
    (8, {"tp": 2, "pp": 4}, "tp-pp-dp"),
    (8, {"tp": 2, "pp": 2, "etp": 1}, "tp-dp-pp"),
    (8, {"tp": 4}, "dp-tp"),
    (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, "tp-cp-ep-pp-dp"),
    (12, {"tp": 3, "pp": 2, "ep": 2}, DEFAULT_ORDER),
    (12, {"pp": 3, "ep": 2}, DEFAULT_ORDER),
    (16, {"tp": 2, "pp": 2, "cp": 2, "ep": 4}, DEFAULT_ORDER),
    (16, {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1}, DEFAULT_ORDER),
    (16, {"tp": 1, "pp": 4, "cp": 2, "ep": 2, "etp": 2}, DEFAULT_ORDER),
    (16, {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1}, "tp-cp-ep-pp-dp"),
    (16, {"tp": 2, "cp": 2, "ep": 8}, "ep-dp-cp-tp-pp"),
    (16, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "vpp": 2}, "PP-DP-EP-CP-TP"),
    (32, {"tp": 4, "pp": 2, "cp": 2, "ep": 8, "etp": 2}, DEFAULT_ORDER),
]


@contextmanager
def megatron(rank: int, world: int, order: str = DEFAULT_ORDER, **sizes: int) -> Iterator[None]:
    """Megatron's parallel state as `rank` of `world` sees it, destroyed on exit. Nothing is sent anywhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.get("tp", 1),
            pipeline_model_parallel_size=sizes.get("pp", 1),
            virtual_pipeline_model_parallel_size=sizes.get("vpp"),
            context_parallel_size=sizes.get("cp", 1),
            expert_model_parallel_size=sizes.get("ep", 1),
            expert_tensor_parallel_size=sizes.get("etp"),
            order=order,
            create_gloo_process_groups=False,
            **({"gtp_remat_size": sizes["remat"]} if "remat" in sizes else {}),
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def layout_of(world: int, sizes: dict[str, int], order: str) -> WorldLayout:
    dp = world // math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "pp"))
    return WorldLayout(ParallelSizes(dp=dp, **sizes), order)


@pytest.mark.parametrize(("world", "sizes", "order"), WORLDS)
def test_every_rank_has_megatrons_coordinates(world: int, sizes: dict[str, int], order: str) -> None:
    layout = layout_of(world, sizes, order)
    for rank in range(world):
        with megatron(rank, world, order, **sizes):
            coords, found = coordinates_and_layout()
            assert coords == layout.coords(rank)
            assert found is not None
        assert everybody(found) == everybody(layout)


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "pp": 2, "cp": 2, "ep": 2}, {"tp": 2, "pp": 2, "cp": 2, "ep": 4}],
    ids=["same-dp", "expert-dp-differs"],
)
def test_all_120_orders_agree_and_the_same_ones_are_refused(sizes: dict[str, int]) -> None:
    accepted = 0
    for order in ORDERS:
        try:
            layout = layout_of(16, sizes, order)
        except ValueError:
            with pytest.raises((AssertionError, RuntimeError)), megatron(5, 16, order, **sizes):
                pass
            continue
        accepted += 1
        for rank in (6, 15):
            with megatron(rank, 16, order, **sizes):
                assert coordinates()[0] == layout.coords(rank)
    assert 0 < accepted < len(ORDERS)


def test_chunks_are_the_callers_or_megatrons_virtual_pipeline_size() -> None:
    with megatron(0, 4, pp=2, vpp=3):
        assert coordinates()[0].sizes.vpp == 3
        assert coordinates(chunks=2)[0].sizes.vpp == 2
    with megatron(0, 4, pp=2):
        assert coordinates()[0].sizes.vpp == 1


def test_an_uninitialised_parallel_state_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"not initialised, .* call parallel_state.initialize_model_parallel"):
        coordinates_and_layout()


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_a_models_own_process_groups_say_the_same(order: str) -> None:
    groups = getattr(importlib.import_module("megatron.core.process_groups_config"), "ProcessGroupCollection", None)
    if groups is None:
        pytest.skip("this megatron-core has no ProcessGroupCollection")
    for rank in range(16):
        with megatron(rank, 16, order, tp=2, pp=2, cp=2, ep=2):
            own = groups.use_mpu_process_groups(["tp", "pp", "cp", "dp", "ep", "expt_tp"])
            by_groups, by_state = coordinates_and_layout(own), coordinates_and_layout()
            assert by_groups[0] == by_state[0]
            assert everybody(by_groups[1]) == everybody(by_state[1])


@pytest.mark.parametrize(("sizes", "laid_out"), [({"tp": 2, "pp": 2}, True), ({"tp": 2, "cp": 2}, False)])
def test_ranks_that_spread_weights_are_data_parallel(sizes: dict[str, int], laid_out: bool) -> None:
    if "gtp_remat_size" not in inspect.signature(parallel_state.initialize_model_parallel).parameters:
        pytest.skip("megatron-core before 0.19")
    from megatron.core.process_groups_config import ProcessGroupCollection

    seen = set()
    for rank in range(16):
        with megatron(rank, 16, remat=2, **sizes):
            own = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "dp", "ep", "expt_tp", "gtp_remat"])
            coords, layout = coordinates_and_layout()
            assert coordinates_and_layout(own) == (coords, layout)
            assert coords.sizes.world == 16
            assert (layout is not None) == laid_out
            assert layout is None or layout.coords(rank) == coords
            seen.add((coords.tp, coords.pp, coords.cp, coords.dp))
    assert len(seen) == 16


def test_groups_that_are_no_grid_are_refused_with_the_reason() -> None:
    with megatron(1, 8, tp=2, pp=2):
        group = parallel_state.get_tensor_model_parallel_group()
        with pytest.raises(NoGrid, match=r"make 16 ranks .*, and the job has 8"):
            coordinates_and_layout(SimpleNamespace(tp=group, pp=group, cp=group, dp=group))
        with pytest.raises(NoGrid, match="lack cp, dp"):
            coordinates_and_layout(SimpleNamespace(tp=group, pp=group))
        with pytest.raises(NoGrid, match=r"several modules .*this rank runs images, language.*groups=p2p_communicator"):
            coordinates_and_layout(SimpleNamespace(module_pgs={"images": None, "language": None}))


def modules(dims: str = "tp-cp-dp-pp", gap: int = 0, **shapes: tuple[int, ...]) -> SimpleNamespace:
    """The communicator of modules of these shapes, each behind the one before it, and ``gap`` ranks further."""
    grids, offset = {}, 0
    grid = pytest.importorskip("megatron.core.hyper_comm_grid").HyperCommGrid
    for name, shape in shapes.items():
        grids[name] = grid(list(shape), dims.split("-"), rank_offset=offset)
        offset += grids[name].size + gap
    names = list(shapes)
    follow = {name: names[number + 1 : number + 2] for number, name in enumerate(names)}
    return SimpleNamespace(module_to_grid_map=grids, topology=follow)


@pytest.mark.parametrize(
    ("dims", "images", "language", "order"),
    [
        ("tp-cp-dp-pp", (2, 1, 2, 1), (2, 1, 2, 3), "tp-cp-dp-pp"),
        ("dp-tp-cp-pp", (2, 2, 1, 2), (2, 2, 1, 2), "dp-tp-cp-pp"),
        ("tp-cp-pp-dp", (2, 1, 1, 2), (2, 1, 3, 2), None),
    ],
)
def test_modules_that_follow_each_other_are_one_grid(
    dims: str, images: tuple[int, ...], language: tuple[int, ...], order: str | None
) -> None:
    found = []
    for rank in range(16):
        with megatron(rank, 16):
            given = modules(dims, images=images, language=language)
            coords, layout = coordinates_and_layout(given)
            found.append(coords)
        assert everybody(layout) == everybody(WorldLayout(ParallelSizes(tp=2, dp=2, pp=4), order) if order else None)
    places = {(each.pp, each.tp, each.dp) for each in found}
    assert (len(places), {each.sizes.pp for each in found}) == (16, {4})
    assert [each.pp for each in found] == sorted(each.pp for each in found) or order is None
    assert order is None or found == everybody(WorldLayout(ParallelSizes(tp=2, dp=2, pp=4), order))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"images": (1, 1, 4, 1), "language": (2, 1, 2, 1)}, r"images: dp=4; language: tp=2 dp=2"),
        ({"gap": 1, "images": (1, 1, 2, 1), "language": (1, 1, 2, 2)}, "does not begin behind"),
        ({"images": (1, 1, 2, 1), "language": (1, 1, 2, 1)}, "have 4 ranks"),
    ],
)
def test_modules_that_are_no_one_grid_are_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with megatron(0, 8), pytest.raises(NoGrid, match=reason):
        coordinates_and_layout(modules(**given))


def test_modules_side_by_side_are_refused() -> None:
    with megatron(0, 8):
        given = modules(images=(1, 1, 2, 1), sounds=(1, 1, 2, 1), language=(1, 1, 2, 2))
        given.topology = {"images": ["language"], "sounds": ["language"], "language": []}
        with pytest.raises(NoGrid, match="one behind the other"):
            coordinates_and_layout(given)


def test_a_world_that_is_no_grid_has_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    with megatron(1, 8, tp=2):
        monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: dist.group.WORLD)
        assert coordinates_and_layout()[1] is None
