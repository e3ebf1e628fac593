"""Coordinates of ranks, from sizes and rank order alone."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.parallel.topology import AXES, DEFAULT_ORDER, ParallelSizes, RankCoords, WorldLayout

ORDERS = ["-".join(order) for order in permutations(DEFAULT_ORDER.split("-"))]


@st.composite
def layouts(draw: st.DrawFn) -> WorldLayout:
    size = st.integers(1, 4)
    tp, cp, dp, pp = draw(size), draw(size), draw(size), draw(size)
    ways = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, ways + 1) if ways % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, ways // etp + 1) if (ways // etp) % n == 0]))
    sizes = ParallelSizes(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
    order = draw(st.sampled_from(ORDERS))
    try:
        return WorldLayout(sizes, order)
    except ValueError:  # pp last is always possible
        return WorldLayout(sizes, "-".join([*(axis for axis in order.split("-") if axis != "pp"), "pp"]))


def everybody(layout: WorldLayout | None) -> list[RankCoords]:
    """The coordinates of every rank, in order; none without a layout."""
    return [] if layout is None else [layout.coords(rank) for rank in range(layout.sizes.world)]


@given(layouts())
def test_coordinates_and_ranks_are_a_bijection(layout: WorldLayout) -> None:
    places = set()
    for rank, coords in enumerate(everybody(layout)):
        place = {axis: getattr(coords, axis) for axis in ("tp", "cp", "dp", "pp")}
        assert layout.rank_of(**place) == coords.rank == rank
        assert all(0 <= getattr(coords, axis) < getattr(layout.sizes, axis) for axis in AXES)
        places.add(tuple(place.values()))
    assert len(places) == layout.sizes.world
    stages = [min(coords.rank for coords in everybody(layout) if coords.pp == pp) for pp in range(layout.sizes.pp)]
    assert stages == [layout.rank_of(pp=pp) for pp in range(layout.sizes.pp)]


def test_one_rank_of_a_world_too_large_to_enumerate() -> None:
    layout = WorldLayout(ParallelSizes(tp=8, cp=4, dp=2**41, pp=16, ep=64, etp=1))
    coords = layout.coords(2**50 - 1)
    assert (coords.tp, coords.cp, coords.pp, coords.ep, coords.dp) == (7, 3, 15, 63, layout.sizes.dp - 1)
    assert layout.rank_of(tp=7, cp=3, dp=layout.sizes.dp - 1, pp=15) == 2**50 - 1


def test_expert_tensor_parallel_size_defaults_to_tensor_parallel_size() -> None:
    assert ParallelSizes(tp=4).etp == 4
    assert ParallelSizes(tp=4, etp=1).etp == 1
    assert ParallelSizes(tp=2, pp=4, cp=2, dp=4).world == 64


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 8, "ep": 3}, "etp=1 x ep=3 x pp=1 = 3 does not divide the world of 8 ranks"),
        ({"tp": 2, "dp": 4, "etp": 3}, "etp=3 x ep=1 x pp=1 = 3 does not divide"),
        ({"tp": 0}, "tp=0 is not a whole number of at least 1"),
        ({"pp": -2}, "pp=-2 is not"),
        ({"etp": -1}, "etp=-1 is not"),
        ({"cp": True}, "cp=True is not"),
        ({"cp": 2.0}, "cp=2.0 is not"),
        ({"dp": None}, "dp=None is not"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldLayout(ParallelSizes(**sizes))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("tp-xp-dp-pp", "unknown axis 'xp'; known: tp, pp, cp, ep, dp"),
        ("", "unknown axis ''"),
        ("tp-cp-ep-dp-pp-tp", "axis 'tp' stands twice"),
        ("tp-cp-dp-pp", "axis 'ep' of size 2 is missing"),
        ("tp-cp-ep-dp", "axis 'pp' of size 2 is missing"),
        ("tp-cp-ep-pp-dp", "with pp not last, the expert grid's dp=4 must equal dp=2"),
    ],
)
def test_impossible_orders_are_refused(order: str, message: str) -> None:
    sizes = ParallelSizes(tp=2, pp=2, cp=2, ep=2, etp=1, dp=2)
    with pytest.raises(ValueError, match=message):
        WorldLayout(sizes, order)


def test_places_outside_the_world_are_refused() -> None:
    layout = WorldLayout(ParallelSizes(tp=2, pp=2, dp=2))
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=f"rank {rank} is outside the world of 8 ranks"):
            layout.coords(rank)
