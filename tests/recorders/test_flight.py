"""torch's flight recorder as a process reads it: two rings, functions where handlers fail, and none at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megaprof.formats.flight import Entry, Flight
from megaprof.recorders import flight

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
    with pytest.raises(flight.NoFlightRecorder, match="flight recorder"):
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
