"""Who keeps a pipeline waiting, from dumps: batched exchanges, as Megatron calls them, and their state behind them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaprof.analysis.hang import Hang, hang_of, hang_of_job
from megaprof.analysis.report.text.sentences import hang_sentences
from megaprof.formats.flight import Entry, Flight
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.recorders import flight
from tests.analysis.hang.recorded import Call, Rank, dumps_of, pipelines, run
from tests.analysis.hang.test_hang import who

ONE_F_ONE_B = PipelineSchedule.checked(4, 1, 6)
INTERLEAVED = PipelineSchedule.checked(3, 2, 3, group_size=3)
TWO = PipelineSchedule.checked(2, 3, 4, group_size=2)


def found(ranks: Mapping[int, Rank], *args: Any, **kwargs: Any) -> Hang:
    """What `megaprof hang` finds in the dumps, and in what the ranks of a running job write: both the same."""
    dumps = dumps_of(ranks, *args, **kwargs)
    whole = hang_of_job({rank: msgspec.convert(dump, Flight, strict=False) for rank, dump in dumps.items()}, {})
    for each in dumps.values():
        kept = flight.in_flight(msgspec.convert(each["entries"], list[Entry]))
        each["entries"] = msgspec.to_builtins(kept)
    assert whole == hang_of_job(msgspec.convert(dumps, dict[int, Flight], strict=False), {})
    return whole


@settings(max_examples=40)
@example(schedule=ONE_F_ONE_B, replicas=1, culprit=2, after=20, ahead=1, ring=60, unbatched=set(), old=False)
@example(schedule=ONE_F_ONE_B, replicas=2, culprit=0, after=9, ahead=3, ring=2000, unbatched=set(), old=True)
@example(schedule=ONE_F_ONE_B, replicas=1, culprit=3, after=2, ahead=2, ring=2000, unbatched={1}, old=False)
@example(schedule=INTERLEAVED, replicas=2, culprit=4, after=9, ahead=1, ring=40, unbatched=set(), old=False)
@given(
    schedule=st.sampled_from([ONE_F_ONE_B, INTERLEAVED, TWO]),
    replicas=st.integers(1, 2),
    culprit=st.integers(0, 7),
    after=st.integers(0, 60),
    ahead=st.integers(1, 4),
    ring=st.sampled_from([40, 60, 2000]),
    unbatched=st.sets(st.integers(0, 7)),
    old=st.booleans(),
)
def test_the_rank_that_stops_before_its_next_exchange_is_named_and_no_other(
    schedule: PipelineSchedule,
    replicas: int,
    culprit: int,
    after: int,
    ahead: int,
    ring: int,
    unbatched: set[int],
    old: bool,
) -> None:
    program = pipelines(schedule, replicas, unbatched=unbatched)
    culprit %= len(program)
    after %= len(program[culprit])
    ranks = run(program, {culprit: after}, ahead)
    hang = found(ranks, replicas, ring, old=old)
    assert who(hang) == [(culprit, "absent")]
    assert hang.culprits[0].stage == culprit // replicas
    assert hang.unended == ()
    waiting = sum(one.ended < one.called for rank, one in ranks.items() if rank != culprit)
    assert len(hang.culprits[0].waiting) + hang.behind == waiting


@pytest.mark.parametrize("ring", [40, 60, 2000])
@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, INTERLEAVED, TWO])
def test_nobody_is_to_blame_for_what_all_have_called(schedule: PipelineSchedule, ring: int) -> None:
    ranks = run(pipelines(schedule), {})
    for one in ranks.values():
        one.ended = len(one.program) - 1
    hang = found(ranks, 1, ring)
    assert hang.culprits == ()
    assert [(one.operation, one.number, one.ranks) for one in hang.unended] == [("all_reduce", 2, tuple(ranks))]
    assert "No rank is to blame" in " ".join(hang_sentences(hang))


@pytest.mark.parametrize("stuck", range(4))
def test_a_collective_that_one_device_has_not_begun(stuck: int) -> None:
    ranks = run(pipelines(ONE_F_ONE_B), {})
    for one in ranks.values():
        one.ended = len(one.program) - 1
    dumps = dumps_of(ranks)
    dumps[stuck]["entries"][-1]["state"] = "scheduled"
    hang = hang_of_job(msgspec.convert(dumps, dict[int, Flight], strict=False), {})
    assert who(hang) == [(stuck, "not_begun")]


@settings(max_examples=20)
@given(
    schedule=st.sampled_from([ONE_F_ONE_B, INTERLEAVED, TWO]),
    culprit=st.integers(0, 3),
    after=st.integers(0, 60),
    ahead=st.integers(1, 3),
)
def test_an_exchange_that_does_not_end_on_a_stuck_device_blames_no_rank(
    schedule: PipelineSchedule, culprit: int, after: int, ahead: int
) -> None:
    program = pipelines(schedule)
    culprit %= len(program)
    after %= len(program[culprit])
    hang = found(run(program, {}, ahead, {culprit: after}))
    assert hang.culprits == ()
    assert any(culprit in one.ranks for one in hang.unended)


def test_a_dump_that_is_missing_or_cut(tmp_path: Path) -> None:
    ranks = run(pipelines(ONE_F_ONE_B), {2: 14})
    dumps = {rank: pickle.dumps(dump) for rank, dump in dumps_of(ranks).items()}
    for rank, content in dumps.items():
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content[:200] if rank == 2 else content)
    hang = hang_of(tmp_path.iterdir())
    assert (who(hang), hang.missing) == ([(2, "unreadable")], ())
    said = " ".join(hang_sentences(hang))
    assert "nccl_trace_rank_2" in said
    assert "left no dump" not in said
    (tmp_path / "nccl_trace_rank_2").unlink()
    hang = hang_of(tmp_path.iterdir())
    assert (who(hang), hang.missing) == ([(2, "no_dump")], (2,))
    assert "Rank 2 (stage 2) left no dump" in " ".join(hang_sentences(hang))


BOTH = Call((("send", 1), ("recv", 1)))


@pytest.mark.parametrize("name", ["send", "recv"])
def test_two_ranks_that_wait_for_each_other_in_one_group(name: str) -> None:
    hang = found(run({0: [BOTH, Call(((name, 1),))], 1: [Call((("send", 0), ("recv", 0))), Call(((name, 0),))]}, {}))
    assert who(hang) == [(0, "crossed"), (1, "crossed")]
    assert [one.instead for one in hang.culprits] == [f"{name} 8 of PIPELINE_MODEL_PARALLEL_GROUP"] * 2
    assert "another group" not in " ".join(hang_sentences(hang))


def in_one_group(*called: str | tuple[str, ...]) -> Hang:
    """Each rank is in something else of one group; several names are a batch, of which the last entry has the state."""

    def entry(place: int, name: str) -> dict[str, Any]:
        exchange = ">" in name or "<" in name
        return {
            **{"process_group": ("0", "default_pg"), "time_created_ns": 1, "state": "scheduled", "retired": False},
            **{"profiling_name": f"nccl:{name}", "record_id": place, "is_p2p": exchange, "p2p_seq_id": int(exchange)},
            "collective_seq_id": int(not exchange),
        }

    group = {"0": {"desc": "default_pg", "ranks": str([*range(len(called))])}}
    flights = {
        rank: {
            "version": "2.10",
            "pg_config": group,
            "entries": [entry(*each) for each in enumerate((names,) if isinstance(names, str) else names)],
        }
        for rank, names in enumerate(called)
    }
    return hang_of_job(msgspec.convert(flights, dict[int, Flight], strict=False), {})


@pytest.mark.parametrize(
    ("other", "instead"),
    [("recv 1<-0", "recv"), ("send 1->0", "send"), (("send 1->0", "recv 1<-0"), "recv"), ("broadcast", "broadcast")],
)
def test_different_operations_of_one_group(other: str | tuple[str, ...], instead: str) -> None:
    hang = in_one_group("all_reduce", other)
    assert {why for _, why in who(hang)} == {"differs"}
    assert next(one.instead for one in hang.culprits if one.rank == 1) == instead
    assert "same group" in " ".join(hang_sentences(hang))
    hang = in_one_group("all_reduce", other, "all_reduce", "all_reduce")
    assert [(one.rank, one.why, one.instead, one.waiting) for one in hang.culprits] == [
        (1, "differs", instead, (0, 2, 3))
    ]


def test_a_batch_of_collectives_is_one_operation() -> None:
    """Its entry behind it may not be there yet: a host may wait in NCCL for it to be connected."""
    batch = ("_broadcast_oop", "_broadcast_oop", "coalesced")
    for last in (3, 2):
        hang = in_one_group(batch[:last], batch)
        assert (who(hang), [one.operation for one in hang.unended]) == ([], ["_broadcast_oop"])
    assert who(in_one_group(batch, batch, ())) == [(2, "absent")]


@pytest.mark.parametrize("rank", range(4))
def test_a_batch_whose_entry_behind_it_is_not_there_yet_has_not_ended(rank: int) -> None:
    dumps = dumps_of(run(pipelines(ONE_F_ONE_B), {2: 14}))
    if dumps[rank]["entries"][-1]["state"] == "started":
        del dumps[rank]["entries"][-1]
    assert who(hang_of_job(msgspec.convert(dumps, dict[int, Flight], strict=False), {})) == [(2, "absent")]


def test_a_rank_writes_what_matters_whatever_is_in_its_ring() -> None:
    """1,000 batches that are over, and one that is not; then hundreds of calls that wait for it."""
    ranks = run({0: [BOTH] * 1000 + [Call()] * 300, 1: [Call((("send", 0), ("recv", 0)))] * 999}, {}, 400)
    entries = msgspec.convert(list(dumps_of(ranks, ring=1 << 20)[0]["entries"]), list[Entry])
    kept = flight.in_flight(entries)
    assert len(kept) == flight._MOST + 1, "and the last collective"
    assert [(entry.profiling_name, entry.p2p_seq_id) for entry in kept[:2]] == [
        ("nccl:send 0->1", 1000),
        ("nccl:recv 0<-1", 1000),
    ]
    assert not any(entry.ended for entry in kept)
