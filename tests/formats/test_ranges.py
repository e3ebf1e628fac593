"""Range names: what is written is what is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.config.values import TARGETS
from megaprof.formats import ranges
from megaprof.formats.ranges import RangeName, parse
from megaprof.parallel.topology import ParallelSizes, RankCoords

number = st.integers(0, 10**9) | st.none()


def test_the_contract() -> None:
    sizes = ParallelSizes(tp=2, pp=4, cp=2, ep=2, dp=2)
    coords = RankCoords(rank=9, pp=1, tp=0, cp=1, ep=1, dp=0, sizes=sizes)
    assert ranges.step_range("train_actor", 12, coords) == "megaprof/train_actor step=12 pp=1 tp=0 cp=1 ep=1 dp=0"
    assert str(RangeName(ranges.FORWARD, {"mb": 3, "chunk": 0})) == "megaprof/forward mb=3 chunk=0"
    assert str(RangeName(ranges.BACKWARD, {"mb": None, "chunk": None})) == "megaprof/backward mb=? chunk=?"
    assert ranges.exchange_range("recv_forward", (3, 0)) == "megaprof/recv_forward mb=3 chunk=0"
    both = "megaprof/send_forward_recv_backward mb=3 chunk=0 bmb=? bchunk=?"
    assert ranges.exchange_range("send_forward_recv_backward", (3, 0), (None, None)) == both


@given(st.sampled_from(TARGETS), *[st.integers(0, 99999)] * 6)
def test_step_ranges_are_read_back(target: str, step: int, pp: int, tp: int, cp: int, ep: int, dp: int) -> None:
    sizes = ParallelSizes(tp=10**5, pp=10**5, cp=10**5, ep=10**5, dp=10**5)
    name = ranges.step_range(target, step, RankCoords(rank=0, pp=pp, tp=tp, cp=cp, ep=ep, dp=dp, sizes=sizes))
    read = parse(name)
    assert read is not None
    assert read.label == target
    assert read.fields == {"step": step, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp": dp}


@given(
    st.sampled_from([ranges.FORWARD, ranges.COMBINED, ranges.FINALIZE_GRADS]),
    st.dictionaries(st.sampled_from(["mb", "chunk", "bmb", "bchunk"]), number),
)
def test_phase_ranges_are_read_back_and_unknown_is_none(label: str, fields: dict[str, int | None]) -> None:
    assert parse(str(RangeName(label, fields))) == RangeName(label, fields)


@pytest.mark.parametrize("operation", [*ranges.P2P_OPERATIONS, "wait_recv_prev"])
def test_exchanges_and_waits_transfer_something(operation: str) -> None:
    read = parse(ranges.PREFIX + operation)
    assert read is not None
    assert ranges.transfers(read.label)
    assert not ranges.transfers("forward")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "forward",
        "other/forward",
        "megaprof",
        "megaprof/",
        "megaprof/ ",
        "megaprof/forward mb",
        "megaprof/forward mb=x",
        "megaprof/forward mb=1 mb=2",
        "megaprof/forward  mb=1",
        "megaprof/forward mb=-1",
        "megaprof/forward mb=" + "9" * 40,
    ],
)
def test_what_is_not_ours_is_none(name: str) -> None:
    assert parse(name) is None


@given(st.text())
def test_any_text_is_parsed_or_none(text: str) -> None:
    parse(text)
    parse(ranges.PREFIX + text)
