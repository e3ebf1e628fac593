"""torch's flight recorder as a process reads it: two rings, functions where handlers fail, and none at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megaprof.formats import timeline as format
from megaprof.formats.facts import Groups, unpack_arrivals, unpack_json
from megaprof.formats.flight import Entry, Flight, GroupConfig
from megaprof.formats.phrases import Unanswerable
from megaprof.recorders import flight
from megaprof.recorders.flight import Reading

#: What NCCL's ring has of a collective that has ended, beside what is always there (torch 2.13, with timing).
NCCL = {
    **{"pg_id": 1, "op_id": 3, "p2p_seq_id": 0, "timeout_ms": 600000, "thread_name": "python"},
    **{"output_sizes": [[4]], "output_dtypes": ["Float"], "duration_ms": 0.25},
    **{"time_discovered_started_ns": 1790000000000000000, "time_discovered_completed_ns": 1790000000100000000},
}


def ring(*calls: tuple[int, str]) -> bytes:
    """As torch writes it: numbers of the status are texts, and no entries are left out."""
    entries = [
        Entry(("1", "TENSOR"), place, name, when, "scheduled", True, place) for place, (when, name) in enumerate(calls)
    ]
    held = msgspec.to_builtins(Flight("2.10", entries))
    for each in held["entries"]:
        each |= NCCL
    held["pg_status"] = {"1": {"last_enqueued_collective": "7"}}
    if not entries:
        del held["entries"]
    return msgspec.json.encode(held)


def module(**rings: bytes) -> Any:
    """A private module of torch's without handlers."""
    return SimpleNamespace(**{name: lambda collectives, active, held=held: held for name, held in rings.items()})


def test_both_rings_are_read_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, gloo = ring((10, "nccl:all_reduce"), (30, "nccl:all_gather")), ring((20, "gloo:barrier"))
    held = module(_dump_nccl_trace_json=nccl, _dump_fr_trace_json=gloo)

    def refused(name: str) -> Any:
        raise RuntimeError(name)

    held._get_handler, held._Request, held._Response = refused, object, object  # functions answer where handlers do not
    monkeypatch.setattr(flight, "_module", lambda: held)
    assert [(entry.profiling_name, entry.duration_ms) for entry in flight.entries()] == [
        ("nccl:all_reduce", 0.25),
        ("gloo:barrier", 0.25),
        ("nccl:all_gather", 0.25),
    ]
    monkeypatch.setattr(flight, "_module", lambda: module(_dump_nccl_trace_json=ring(), _dump_fr_trace_json=ring()))
    assert flight.entries() == []


@pytest.mark.parametrize("held", [module(), module(_dump_fr_trace_json=b"{}"), module(_dump_fr_trace_json=b"[")])
def test_what_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    monkeypatch.setattr(flight, "_module", lambda: held)
    with pytest.raises(Unanswerable, match="flight recorder"):
        flight.entries()


@pytest.mark.parametrize(
    ("arguments", "env", "kept"),
    [
        ([], {}, {flight.SIZE: "2000"}),
        (["train.py", "--flight-recorder-dump-path", "/tmp"], {}, {}),
        (["--flight-recorder-dump-path=/tmp"], {}, {}),
        ([], {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}),
        ([], {"TORCH_FR_DUMP_TEMP_FILE": "/tmp/f"}, {"TORCH_FR_DUMP_TEMP_FILE": "/tmp/f"}),
    ],
)
def test_the_size_is_set_where_nobody_has_said_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], env: dict[str, str], kept: dict[str, str]
) -> None:
    monkeypatch.setattr(flight, "_module", lambda: module(_dump_fr_trace_json=b""))
    flight.keep(arguments, env)
    assert env == kept


def test_an_older_torch_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_module", lambda: module(_dump_nccl_trace_json=b""))
    env: dict[str, str] = {}
    assert flight.keep([], env) == "TORCH_NCCL_TRACE_BUFFER_SIZE"


SECOND = 10**9
GROUPS = {"1": GroupConfig("TENSOR_MODEL_PARALLEL_GROUP", "[0, 1]"), "2": GroupConfig("ALONE", "[0]")}


def entry(place: int, when: float, group: str = "1", name: str = "gloo:all_reduce", **other: Any) -> Entry:
    return Entry(
        (group, ""), place + 1, name, int(when * SECOND), "scheduled", other.pop("retired", True), place, **other
    )


def reading(monkeypatch: pytest.MonkeyPatch, entries: list[Entry], steps: int, file: int = 1) -> Reading:
    """Steps of 10 s from 100 s on, each written in a row of its own."""
    monkeypatch.setattr(flight, "calls", lambda: entries)
    monkeypatch.setattr(flight, "groups", lambda: GROUPS)
    found = Reading()
    for row in range(steps):
        begin = 100 + 10 * row
        found.wrote(((file, row), row, begin * SECOND, (begin + 9) * SECOND))
    return found


def test_whole_steps_are_written_with_their_groups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ring has run over, and begins within step 1; between steps others are called.
    calls = [*(entry(7 + i, 115 + i) for i in range(20)), entry(30, 136, "2"), entry(31, 137, is_p2p=True)]
    own = reading(monkeypatch, calls, 4)
    found = own.look()
    assert [(row, what) for (_, row), what, _ in found] == [
        (2, format.GROUPS),
        (2, format.COLLECTIVES),
        (3, format.COLLECTIVES),
    ]
    assert unpack_json(found[0][2], Groups) == {"1": GROUPS["1"]}
    (second,) = unpack_arrivals(found[1][2])
    assert [round(value / 1e6, 3) for value in second.values.tolist()] == [*map(float, range(9))]
    assert second.numbers.tolist() == [13 + i for i in range(9)]
    assert not second.lengths
    assert own.look(last=True) == []  # nothing is written twice


def test_what_the_device_has_not_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = entry(0, 101, name="nccl:all_gather", retired=False)
    own = reading(monkeypatch, [pending], 1)
    assert own.look() == []
    pending.retired, pending.duration_ms = True, 2.5
    (_, (_, _, payload)) = own.look(last=True)
    (arrivals,) = unpack_arrivals(payload)
    assert (arrivals.lengths, arrivals.values.tolist()) == (True, [2500])


def test_what_has_ended_on_the_device_is_waited_for_until_torch_has_timed_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch sees that a collective has ended when it is asked, and times it when its watchdog looks the next time."""
    timed = [entry(i, 101 + i, name="nccl:all_reduce", duration_ms=1.0) for i in range(4)]
    ended = entry(4, 105, name="nccl:all_reduce", retired=False)
    ended.state = "completed"
    own = reading(monkeypatch, [*timed, ended], 1)
    assert own.look() == []
    ended.retired = True  # and torch could not ask the device for this one
    (_, (_, _, payload)) = own.look(last=True)
    (arrivals,) = unpack_arrivals(payload)
    assert (arrivals.numbers.tolist(), arrivals.values.tolist()) == ([1, 2, 3, 4], [1000] * 4)
    assert caplog.messages == []


def test_a_batch_of_collectives_has_the_state_and_the_time_of_the_entry_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("nccl:_broadcast_oop", "nccl:_broadcast_oop", "nccl:coalesced")
    batch = [entry(place, 101 + place, name=name, retired=False) for place, name in enumerate(names)]
    for each in batch:
        each.collective_seq_id = 1
    batch[-1].retired, batch[-1].duration_ms = True, 2.5
    (_, (_, _, payload)) = reading(monkeypatch, batch, 1).look()
    (arrivals,) = unpack_arrivals(payload)
    assert (arrivals.numbers.tolist(), arrivals.values.tolist()) == ([1], [2500])


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry(0, 101, name="nccl:all_reduce")], "TORCH_NCCL_ENABLE_TIMING=1"),
        ([], "TORCH_FR_BUFFER_SIZE=2000"),
        ([entry(5, 105)], "fewer collectives than a step has"),
        (None, "none here"),
    ],
)
def test_what_is_missing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, entries: list[Entry] | None, why: str
) -> None:
    own = reading(monkeypatch, entries or [], 1)
    if entries is None:

        def none() -> list[Entry]:
            raise Unanswerable("none here")

        monkeypatch.setattr(flight, "calls", none)
    for _ in range(2):
        assert [what for _, what, _ in own.look(last=True) if what == format.COLLECTIVES] == []
        own.wrote(((1, 0), 1, 100 * SECOND, 109 * SECOND))
    assert [why in line for line in caplog.messages] == [True]


def test_ranks_read_at_the_same_steps_and_no_more_often_than_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that takes 2 s of 10 s steps is done every 512 steps: 0.04 % of the time."""
    looks: list[int] = []
    monkeypatch.setattr("time.thread_time", lambda: looks.append(0) or 2.0 * len(looks))
    own = reading(monkeypatch, [entry(i, 100 + i) for i in range(10)], 3)
    read = []
    for step in range(3, 1600):
        own.wrote(((1, step), step, (100 + 10 * step) * SECOND, (109 + 10 * step) * SECOND))
        before = len(looks)
        own.look()
        read += [step] if len(looks) > before else []
    assert read == [3, 512, 1024, 1536]
