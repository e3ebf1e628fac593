"""Reading traces: exact times from healthy files, a plain reason for every other file."""

from __future__ import annotations

import gzip
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaprof.analysis.trace import decoding
from megaprof.analysis.trace.decoding import Undecodable
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from tests.analysis.rows import rows
from tests.analysis.synthetic import BASE, TraceBuilder, chunk, kinds


def test_times_are_wall_clock_nanoseconds_to_the_last_digit(tmp_path):
    trace = TraceBuilder()
    trace.call(0, 100)
    trace.events.append(
        {"ph": "X", "cat": "user_annotation", "name": "megaprof/forward mb=3 chunk=0", "ts": 1234.567, "dur": 8.901}
    )
    read = read_trace(trace.write(tmp_path))
    outer, forward = read.ranges
    assert (outer.start, outer.end) == (BASE, BASE + 100_000_000)
    assert (forward.start, forward.end) == (BASE + 1_234_567, BASE + 1_234_567 + 8_901)
    assert forward.name.label == "forward"
    assert forward.name.fields == {"mb": 3, "chunk": 0}


def test_a_healthy_file_never_takes_the_slow_way(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding.Document, "_repaired", lambda self, text: pytest.fail("slow way taken"))
    trace = TraceBuilder()
    trace.call(0, 1)
    trace.events.append(
        {"ph": "X", "cat": "Trace", "name": "Spans", "pid": "Spans", "tid": "Profiler", "ts": 1, "dur": 2}
    )
    assert len(read_trace(trace.write(tmp_path)).ranges) == 1


def test_metadata_are_read_whole(tmp_path):
    trace = TraceBuilder(pp=1, pp_size=4, role="ref", chunks=[chunk(3), chunk(2, loss=True)])
    metadata = read_trace(trace.write(tmp_path)).metadata
    assert (metadata.target, metadata.role, metadata.steps) == ("train_actor", "ref", (5, 5))
    assert (metadata.coords.pp, metadata.sizes.pp, metadata.sizes.vpp) == (1, 4, 2)
    assert [c.layers for c in metadata.chunks] == [3, 2]
    assert [c.loss for c in metadata.chunks] == [False, True]


def test_plain_and_gzipped_files_read_alike_whatever_they_are_called(tmp_path):
    trace = TraceBuilder()
    trace.call(0, 1)
    first = read_trace(trace.write(tmp_path))
    plain = tmp_path / "plain.json.gz"
    plain.write_text(json.dumps(trace.document()))
    assert read_trace(plain).ranges == first.ranges
    renamed = tmp_path / "renamed.json"
    renamed.write_bytes((tmp_path / trace.name).read_bytes())
    assert read_trace(renamed).ranges == first.ranges


def test_the_gpu_copy_of_a_range_does_not_count_twice(tmp_path):
    trace = TraceBuilder()
    trace.call(0, 10)
    trace.event("megaprof/forward mb=0 chunk=0", 1, 2)
    trace.event("megaprof/forward mb=0 chunk=0", 1.5, 4, cat="gpu_user_annotation")
    trace.event("some_kernel", 1.5, 1, cat="kernel")
    read = read_trace(trace.write(tmp_path))
    assert [r.name.label for r in read.ranges] == ["train_actor", "forward"]
    assert read.gpu is not None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (gzip.compress(b'{"traceEvents": [' + b"{}, " * 50, mtime=0)[:-9], "truncated"),
        (b"\x1f\x8b" + b"\xff" * 40, "damaged"),
        (b"this is not a trace", "not JSON"),
        (b'{"traceEvents": [', "truncated"),
        (b"[1, 2]", "not written by megaprof"),
        (b"[]", "not written by megaprof"),
        (b'{"x": 5}', "traceEvents"),
        (b'{"traceEvents": 7}', "traceEvents"),
        (b'{"traceEvents": []}', "not written by megaprof"),
        (b'{"traceEvents": [], "megaprof": 5}', "metadata is damaged"),
        (b'{"traceEvents": [], "megaprof": {"target": "x"}}', "metadata is damaged"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "now"}', "baseTimeNanoseconds"),
        (b'{"traceEvents": [], "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"traceEvents": [], "megaprof": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"traceEvents": [{"args": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}]}", "nested too deeply"),
    ],
)
def test_an_unusable_file_says_what_is_wrong(tmp_path, content, reason):
    path = tmp_path / "x.pt.trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(Undecodable, match=reason):
        read_trace(path)


PLACE = {"rank": 0, "pp": 0, "tp": 0, "cp": 0, "ep": 0, "dp": 0}
SIZES = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 1, "vpp": 1, "etp": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"coords": PLACE | {"pp": 3}}, "pp=3"),
        ({"coords": PLACE | {"rank": -1}}, "rank"),
        ({"coords": PLACE | {"rank": 1 << 40}}, "rank"),
        ({"coords": {"rank": 0}}, "required field `pp` - at `\\$.coords`"),
        ({"sizes": SIZES | {"pp": 10**30}}, "more than"),
        ({"sizes": SIZES | {"dp": 1 << 40}}, "more than"),
        ({"steps": [1 << 47, 1 << 47]}, "steps"),
        ({"microbatches": 1 << 40}, "microbatches"),
        ({"chunks": [{"layers": 1 << 40}]}, "layers"),
        ({"host": "\ud800"}, "damaged"),
        ({"sizes": SIZES | {"pp": 0}}, "pp"),
        ({"steps": [1]}, "steps"),
        ({"chunks": "many"}, "chunks"),
        ({"target": None}, "target"),
    ],
)
def test_impossible_metadata_are_refused(tmp_path, change, reason):
    path = TraceBuilder(metadata=change).write(tmp_path, "x.pt.trace.json")
    with pytest.raises(Undecodable, match=reason):
        read_trace(path)


def test_a_base_time_out_of_range_is_refused(tmp_path):
    document = TraceBuilder().document() | {"baseTimeNanoseconds": 10**25}
    path = tmp_path / "x.pt.trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(Undecodable, match="baseTimeNanoseconds"):
        read_trace(path)


def test_a_directory_or_a_missing_file_is_unreadable(tmp_path):
    for path in (tmp_path, tmp_path / "missing.pt.trace.json"):
        with pytest.raises(Undecodable, match="cannot be read"):
            read_trace(path)


def _range_event(**change):
    event = {"ph": "X", "cat": "user_annotation", "name": "megaprof/forward mb=0 chunk=0", "ts": 5.0, "dur": 1.0}
    return event | change


@pytest.mark.parametrize(
    "bad",
    [
        {"dur": -1.0},
        {"dur": 1e300},
        {"ts": 1e300},
        {"ts": 10**400},
        {"ts": float("nan")},
        {"dur": float("inf")},
        {"ts": "soon"},
        {"name": 7},
        {"tid": [1]},
        {"cat": {}},
    ],
)
def test_one_bad_event_costs_only_itself(tmp_path, bad):
    trace = TraceBuilder()
    trace.call(0, 10)
    trace.forward(1, 2, 3)
    trace.events.append(_range_event(**bad))
    read = read_trace(trace.write(tmp_path))
    assert [r.name.label for r in read.ranges] == ["train_actor", "forward"]
    assert read.ranges[1].name.fields["mb"] == 1
    assert [(each.kind, each.count) for each in read.warnings] == [("events_left_out", 1)]


def test_bytes_that_are_not_utf8_are_survived(tmp_path):
    trace = TraceBuilder()
    trace.call(0, 10)
    text = json.dumps(trace.document()).replace('"python"', '"\\u0000"').encode().replace(b"process_name", b"\xff\xfe")
    path = tmp_path / "x.pt.trace.json"
    path.write_bytes(text)
    assert len(read_trace(path).ranges) == 1


def test_traces_are_found_by_suffix_below_the_directory_but_unfinished_ones_are_not(tmp_path):
    for name in (
        "b.pt.trace.json",
        "deep/er/a.pt.trace.json.gz",
        ".c.pt.trace.json.gz.7.raw",
        ".d.pt.trace.json",
        "e.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(p.relative_to(tmp_path)) for p in find_traces(tmp_path)] == [
        "b.pt.trace.json",
        "deep/er/a.pt.trace.json.gz",
    ]


def test_metadata_count_not_the_name(tmp_path):
    trace = TraceBuilder(pp=1, pp_size=2)
    trace.call(0, 1)
    lying = trace.write(tmp_path, trace.name.replace("pp1", "pp0"))
    assert read_trace(lying).metadata.coords.pp == 1


def test_calls_of_a_whole_step_are_told_apart_by_their_labels(tmp_path):
    trace = TraceBuilder(target="train_overall")
    trace.call(0, 100)
    for label, start in (("train_log_probs", 5), ("train_actor", 20), ("train_actor", 40)):
        trace.call(start, 10, label=label)
        trace.forward(0, start + 1, 2)
    calls = steps_of(read_trace(trace.write(tmp_path)))
    assert [(c.target, c.index, len(c.passes.kind)) for c in calls] == [
        ("train_overall", 0, 3),
        ("train_log_probs", 0, 1),
        ("train_actor", 0, 1),
        ("train_actor", 1, 1),
    ]
    assert [c.forward_only for c in calls[1:]] == [True, False, False]


class TestExposedCommunication:
    """One forward from 0 to 10 ms with operators and collectives inside."""

    def call(
        self, tmp_path, sizes, collectives=(("gloo:all_reduce", 4, 3),), operators=(("aten::mm", 0, 4),), forwards=1
    ):
        trace = TraceBuilder(sizes=sizes, microbatches=forwards)
        trace.call(0, 10 * forwards)
        for mb in range(forwards):
            trace.forward(mb, 10 * mb, 10)
        for name, start, duration in collectives:
            trace.event(name, start, duration, tid=2)
        trace.event("aten::linear", 0, 10 * forwards, cat="cpu_op")
        for name, start, duration in operators:
            trace.event(name, start, duration, cat="cpu_op")
        (call,) = steps_of(read_trace(trace.write(tmp_path)))
        return call

    def test_only_leaf_operators_hide_it(self, tmp_path):
        operators = [("aten::mm", 0, 5), ("c10d::allreduce_", 5, 1)]
        call = self.call(tmp_path, {"tp": 2}, operators=operators)
        assert call.spent["tp"] == 2_000_000
        assert rows(call)[0].compute == 8_000_000

    def test_the_only_group_there_is_gets_it(self, tmp_path):
        for group in ("tp", "cp", "ep", "dp"):
            call = self.call(tmp_path, {group: 2})
            assert {g: ns for g, ns in call.spent.items() if ns} == {group: 3_000_000}

    def test_a_group_of_one_rank_communicates_with_nobody(self, tmp_path):
        call = self.call(tmp_path, {"pp": 2})
        assert [each.compute for each in rows(call)] == [10_000_000]

    def test_what_passes_lose_is_told_by_group(self, tmp_path):
        collectives = [("gloo:all_to_all", 4, 3), ("gloo:all_reduce", 7, 1)]
        call = self.call(tmp_path, {"ep": 2, "dp": 2}, collectives)
        assert rows(call)[0].exposed == {"ep": 3_000_000, "unknown": 1_000_000}
        assert (math.isnan(call.spent["ep"]), call.spent["unknown"]) == (True, 1_000_000)

    def test_several_possible_groups_get_none_of_it_but_compute_is_known(self, tmp_path):
        call = self.call(tmp_path, {"tp": 2, "cp": 2})
        assert {group for group in call.spent if math.isnan(call.spent[group])} == {"tp", "cp"}
        assert call.spent["ep"] == 0
        assert [each.names for each in call.reasons if each.kind == "exposed_unknown"] == [("tp", "cp")]
        assert rows(call)[0].compute == 7_000_000

    def test_an_all_to_all_is_never_of_tensor_or_data_parallelism(self, tmp_path):
        call = self.call(tmp_path, {"tp": 2, "ep": 2, "dp": 2}, [("gloo:all_to_all", 4, 3)])
        assert (call.spent["tp"], call.spent["ep"]) == (0, 3_000_000)

    def test_equally_many_in_every_microbatch_are_not_of_data_parallelism(self, tmp_path):
        even = [("gloo:all_reduce", 4, 3), ("gloo:all_reduce", 14, 3)]
        assert self.call(tmp_path, {"tp": 2, "dp": 2}, even, forwards=2).spent["tp"] == 6_000_000
        uneven = [*even, ("gloo:all_reduce", 18, 1)]
        assert math.isnan(self.call(tmp_path, {"tp": 2, "dp": 2}, uneven, forwards=2).spent["tp"])

    def test_an_all_reduce_in_every_microbatch_is_not_of_data_parallelism_even_if_no_other_group_is_there(
        self, tmp_path
    ):
        """Megatron's loss reduces over its tensor-parallel group, which may be a single rank."""
        even = [("gloo:all_reduce", 4, 3), ("gloo:all_reduce", 14, 3)]
        call = self.call(tmp_path, {"dp": 2}, even, forwards=2)
        assert call.spent["dp"] == 0
        assert [each.compute for each in rows(call)] == [10_000_000, 10_000_000]
        gathered = [("gloo:all_gather", 4, 3), ("gloo:all_gather", 14, 3)]
        assert self.call(tmp_path, {"dp": 2}, gathered, forwards=2).spent["dp"] == 6_000_000

    def test_pipeline_exchanges_are_not_collectives(self, tmp_path):
        call = self.call(tmp_path, {"tp": 2}, [("gloo:recv", 0, 9), ("gloo:send", 0, 9)])
        assert rows(call)[0].exposed == {}

    def test_on_a_gpu_it_is_not_measured(self, tmp_path):
        trace = TraceBuilder(sizes={"tp": 2})
        trace.call(0, 10)
        trace.forward(0, 0, 10)
        trace.event("ncclDevKernel", 1, 2, cat="kernel")
        (call,) = steps_of(read_trace(trace.write(tmp_path)))
        assert math.isnan(call.spent["tp"])
        assert "exposed_unknown" in kinds(call.reasons)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("megaprof/forward mb=0 chunk=0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "megaprof/train_actor step=1 pp=0",
        "megaprof/forward mb=0 chunk=0",
        "megaprof/backward mb=? chunk=9",
        "gloo:all_reduce",
    ]
)
EVENT = st.fixed_dictionaries(
    {"ph": st.just("X") | JSON, "cat": st.sampled_from(["user_annotation", "cpu_op", "kernel"]) | JSON},
    optional={
        "name": NAMES | JSON,
        "ts": st.floats() | st.integers() | JSON,
        "dur": st.floats() | st.integers() | JSON,
        "tid": st.integers() | JSON,
        "args": JSON,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENT | JSON, max_size=12))
def test_no_event_can_break_reading_or_attribution(tmp_path, events):
    path = tmp_path / "x.pt.trace.json"
    path.write_text(json.dumps(TraceBuilder(sizes={"tp": 2}).document() | {"traceEvents": events}))
    for call in steps_of(read_trace(path)):
        assert all(each.compute >= 0 and each.working >= 0 for each in rows(call))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["traceEvents", "megaprof", "baseTimeNanoseconds", "other"]), JSON) | JSON)
def test_no_document_raises_anything_but_unreadable(tmp_path, document):
    path = tmp_path / "x.pt.trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(Undecodable):
        read_trace(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(TraceBuilder().document()["megaprof"])), JSON, max_size=4))
def test_no_metadata_raise_anything_but_unreadable(tmp_path, change):
    trace = TraceBuilder(metadata=change)
    trace.call(0, 10)
    path = trace.write(tmp_path, "x.pt.trace.json")
    reason = ""
    try:
        assert len(steps_of(read_trace(path))) == 1
    except Undecodable as fault:
        reason = str(fault)
    assert not reason or "metadata" in reason
