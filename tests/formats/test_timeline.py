"""The timeline file: what is written is what is read, up to any byte at which a process may die."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats import codes, ranges
from megaprof.formats import timeline as format
from megaprof.formats.metadata import Metadata, MicrobatchRanges, ModelChunk
from megaprof.formats.timeline import UnreadableTimeline, read_timeline
from megaprof.parallel.topology import ParallelSizes, RankCoords
from tests.formats.step_records import StepRecord, events_of, step_record

METADATA = Metadata(
    "train_actor",
    RankCoords(3, pp=1, tp=1, cp=0, ep=0, dp=0, sizes=ParallelSizes(tp=2, pp=2)),
    (5, 5),
    chunks=(ModelChunk(False, 2, (3, None), 0, True, ("dense", "moe")),),
    p2p={"overlap_p2p_comm": True},
    ranges=MicrobatchRanges(False, "a reason"),
    timeline={"clock": "host"},
)
Position = tuple[int | None, int | None]
POSITIONS = st.tuples(st.none() | st.integers(0, 10_000), st.none() | st.integers(0, 100))


@given(POSITIONS, POSITIONS)
def test_codes_come_back_as_range_names(forward: Position, backward: Position) -> None:
    name = codes.name(codes.phase(codes.FORWARD, *forward))
    assert name is not None
    assert (name.label, name.fields) == ("forward", {"mb": forward[0], "chunk": forward[1]})
    both = codes.name(codes.combined(codes.phase(0, *forward), codes.phase(0, *backward)))
    assert both is not None
    assert tuple(both.fields.values()) == (*forward, *backward)


def test_every_exchange_and_wait_has_a_code_of_its_own() -> None:
    labels = [codes.name(codes.exchange(operation)) for operation in ranges.P2P_OPERATIONS]
    assert [name.label for name in labels if name] == list(ranges.P2P_OPERATIONS)
    waits = [codes.name(codes.wait(handle)) for handle in (*codes.WAITS, "something_new")]
    assert [name.label for name in waits if name] == [
        *(f"wait_{handle}" for handle in codes.WAITS),
        "wait_exchange",
    ]
    assert codes.name(0) is None
    assert codes.name(15) is None


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[StepRecord]]:
    """A shape and steps of it; an event may lie inside another, as exchanges in a combined pass do."""
    shape = draw(st.lists(st.integers(0, (1 << 60) - 1), max_size=12))
    made = []
    for number in range(draw(st.integers(0, 5))):
        longest = draw(st.sampled_from([100, 65535, 65536, 1 << 20, 1 << 34]))
        starts = sorted(draw(st.lists(st.integers(0, 20 * longest), min_size=len(shape), max_size=len(shape))))
        lengths = draw(st.lists(st.integers(0, longest), min_size=len(shape), max_size=len(shape)))
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        totals = {kind: draw(st.integers(0, 1 << 33)) for kind in codes.KINDS.values()}
        made.append(StepRecord(0, 0, number, 3, 10**18 + number, max(ends, default=0), starts, ends, totals, 17))
    return shape, made


def written(shape: list[int], records: list[StepRecord]) -> list[bytes]:
    head = format.MAGIC + format.metadata_record(METADATA.as_dict()) + format.shape_record(shape)
    return [head, *map(step_record, records)]


@given(steps())
def test_steps_come_back(tmp_path_factory: pytest.TempPathFactory, case: tuple[list[int], list[StepRecord]]) -> None:
    shape, records = case
    path = tmp_path_factory.mktemp("t") / "x.timeline.bin"
    path.write_bytes(b"".join(written(shape, records)))
    timeline = read_timeline(path)
    assert timeline.damage is None
    assert timeline.metadata == (METADATA,)
    assert len(timeline.steps) == len(records)
    for position, record in enumerate(records):
        fixed, events = timeline.steps[position], events_of(timeline, position)
        assert (fixed["step"], fixed["index"], fixed["start_ns"], fixed["own"]) == (
            record.step,
            3,
            record.start_ns,
            17,
        )
        for kind, total in record.totals.items():
            assert fixed[kind] == min(total, (1 << 32) - 1)
        assert events is not None
        assert events.code.tolist() == shape
        lengths = [end - start for start, end in zip(record.starts, record.ends, strict=True)]
        gaps = [b - a for a, b in zip([0, *record.starts], record.starts, strict=False)]
        longest = max([0, *lengths, *gaps])
        # The unit is twice as long where rounding might not fit into 16 bits.
        allowed = 0 if longest < 1 << 16 else 2 * longest // 0xFFFF
        for read, true in ((events.start, record.starts), (events.end, record.ends)):
            assert all(0 <= was - now <= allowed for now, was in zip(read.tolist(), true, strict=True))
    assert (read_timeline(path, events=False).steps == timeline.steps).all()
    positions = [*range(len(records))]
    there, times = timeline.times(positions) if records else ([], [])
    alone = [events_of(timeline, position) for position in positions]
    assert list(there) == positions
    assert [each.T.tolist() for each in times] == [[each.start.tolist(), each.end.tolist()] for each in alone if each]


def test_cut_at_any_byte_everything_before_is_read(tmp_path: Path) -> None:
    shape = [codes.phase(codes.FORWARD, 0, 0), codes.FINALIZE]
    records = [StepRecord(0, 0, n, 0, 10**18, 900, [5, 700], [600, 900], {"forward": 595}) for n in range(3)]
    parts = written(shape, records)
    whole = b"".join(parts)
    ends = np.cumsum([len(part) for part in parts])
    path = tmp_path / "x.timeline.bin"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        if cut < len(format.MAGIC):
            if cut:
                with pytest.raises(UnreadableTimeline):
                    read_timeline(path)
            continue
        timeline = read_timeline(path)
        assert len(timeline.steps) == max(0, int((ends <= cut).sum()) - 1)
        assert (timeline.damage is None) == (cut in ends or cut == len(format.MAGIC) or cut == _after_metadata())


def _after_metadata() -> int:
    return len(format.MAGIC) + len(format.metadata_record(METADATA.as_dict()))


@given(st.data())
def test_a_damaged_byte_ends_the_reading_and_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    records = [StepRecord(0, 0, n, 0, 10**18, 900, [5], [600], {"forward": 595}) for n in range(4)]
    whole = bytearray(b"".join(written([codes.FINALIZE], records)))
    place = data.draw(st.integers(len(format.MAGIC), len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("t") / "x.timeline.bin"
    path.write_bytes(bytes(whole))
    timeline = read_timeline(path)
    assert timeline.damage is not None
    assert [step["step"] for step in timeline.steps] == list(range(len(timeline.steps)))


@given(st.binary(max_size=200))
def test_any_file_is_a_timeline_or_unreadable(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.mktemp("t") / "x.timeline.bin"
    for data in (tail, format.MAGIC + tail):
        path.write_bytes(data)
        try:
            timeline = read_timeline(path)
        except UnreadableTimeline:
            continue
        for position in range(len(timeline.steps)):
            events_of(timeline, position)


def test_what_is_no_timeline_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTimeline, match="cannot be read"):
        read_timeline(tmp_path / "none.timeline.bin")
    (tmp_path / "text").write_text("hello, world")
    with pytest.raises(UnreadableTimeline, match="no timeline of megaprof's"):
        read_timeline(tmp_path / "text")


@pytest.mark.parametrize(("starts", "ends"), [([5, 4], [6, 6]), ([5, 6], [7, 5])])
def test_events_out_of_order_are_refused(starts: list[int], ends: list[int]) -> None:
    with pytest.raises(ValueError, match="order of their starts"):
        step_record(StepRecord(0, 0, 0, 0, 0, 9, starts, ends, {}))


def test_a_step_with_the_usual_shape_costs_four_bytes_an_event() -> None:
    """The budget: 1 KB a step at 32 microbatches, where a middle stage has 128 events."""
    starts = [i * 1500 for i in range(128)]
    ends = [start + 1400 for start in starts]
    record = StepRecord(0, 0, 10**6, 0, 10**18, 10**6, starts, ends, {})
    assert len(step_record(record)) < 600
    assert len(step_record(dataclasses.replace(record, starts=[], ends=[]))) < 70


@pytest.mark.parametrize(
    "change",
    [{"step": 1 << 47}, {"step": (1 << 63) - 1}, {"step": -1}, {"start_ns": -1}, {"start_ns": (1 << 63) - 1}],
)
def test_a_step_with_an_impossible_number_ends_the_reading(tmp_path: Path, change: dict[str, int]) -> None:
    records = [StepRecord(0, 0, n, 0, 10**18, 900, [5], [600], {"forward": 595}) for n in range(4)]
    records[2] = dataclasses.replace(records[2], **change)
    path = tmp_path / "x.timeline.bin"
    path.write_bytes(b"".join(written([codes.FINALIZE], records)))
    timeline = read_timeline(path)
    assert timeline.damage == "a step has an impossible number or time"
    assert timeline.steps["step"].tolist() == [0, 1]
    assert events_of(timeline, 1) is not None


def test_events_that_last_for_centuries_are_damage(tmp_path: Path) -> None:
    step = step_record(StepRecord(0, 0, 0, 0, 10**18, 900, [5, 6], [7, 8], {}))
    payload = bytearray(step[5:-4])
    payload[format.STEP_TYPE.itemsize] = 63  # the unit: microseconds to the power of two
    shape = [codes.FINALIZE, codes.FINALIZE]
    path = tmp_path / "x.timeline.bin"
    path.write_bytes(written(shape, [])[0] + format._record(format.STEP, bytes(payload)) + step)
    timeline = read_timeline(path)
    assert len(timeline.steps) == 2
    assert events_of(timeline, 0) is None
    there, times = timeline.times([0, 1])
    assert (there.tolist(), times.tolist()) == ([1], [[[5, 7], [6, 8]]])


@pytest.mark.parametrize(
    "change", [{"target": None}, {"coords": {"rank": 1 << 40}}, {"sizes": {"pp": 10**30}}, {"steps": [1 << 47] * 2}]
)
def test_metadata_that_cannot_be_end_the_reading(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "x.timeline.bin"
    records = [StepRecord(0, 0, 0, 0, 10**18, 900, [5], [600], {})]
    head = format.MAGIC + format.metadata_record({**METADATA.as_dict(), **change}) + format.shape_record([4])
    path.write_bytes(head + b"".join(map(step_record, records)))
    timeline = read_timeline(path)
    assert timeline.damage is not None
    assert timeline.damage.startswith("its metadata is damaged: ")
    assert len(timeline.steps) == 0
