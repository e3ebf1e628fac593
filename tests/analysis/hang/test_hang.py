"""Who keeps a job waiting, from dumps: of jobs that stop at a known rank, drawn at random, and of real ones on gloo."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megaprof.analysis.dumps import read_dump
from megaprof.analysis.hang import Hang, hang_of
from megaprof.cli import main
from megaprof.formats.phrases import Unanswerable
from megaprof.testing import init_distributed, run_ranks
from tests.cli.running import check

#: Two stages of two tensor-parallel ranks, as Megatron numbers and describes them.
GROUPS = {
    "1": ("TENSOR_MODEL_PARALLEL_GROUP", (0, 1)),
    "2": ("TENSOR_MODEL_PARALLEL_GROUP", (2, 3)),
    "3": ("PIPELINE_MODEL_PARALLEL_GROUP", (0, 2)),
    "4": ("PIPELINE_MODEL_PARALLEL_GROUP", (1, 3)),
    "5": ("MODEL_PARALLEL_GROUP", (0, 1, 2, 3)),
}


def entry(group: str, number: int, place: int, ended: bool, **other: Any) -> dict[str, Any]:
    """An operation as torch's flight recorder has it."""
    return {
        "record_id": place,
        "process_group": (group, GROUPS[group][0]),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": (1_800_000_000 + place) * 10**9,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": "completed" if ended else "scheduled",
        "retired": ended,
        "is_p2p": False,
        **other,
    }


def dump(rank: int, entries: Sequence[Mapping[str, Any]], enqueued: Mapping[str, int] = {}) -> dict[str, Any]:
    own = [name for name, (_, ranks) in GROUPS.items() if rank in ranks]
    return {
        "version": "2.10",
        "entries": list(entries),
        "pg_config": {
            name: {"name": name, "desc": GROUPS[name][0], "ranks": str(list(GROUPS[name][1]))} for name in own
        },
        "pg_status": {
            str(place): {"last_enqueued_collective": enqueued.get(name, 0)} for place, name in enumerate(own)
        },
    }


def hang_in(directory: Path, dumps: Mapping[int, object], write: Callable[[Any], bytes] = pickle.dumps) -> Hang:
    directory.mkdir(exist_ok=True)
    for rank, one in dumps.items():
        (directory / f"rank_{rank}").write_bytes(write(one))
    return hang_of(directory.iterdir())


def who(hang: Hang) -> list[tuple[int, str]]:
    return sorted((culprit.rank, culprit.why) for culprit in hang.culprits)


# Rank 2 waits for rank 3, whose device is stuck, before it waits for rank 0.
@example(calls=list("222223113"), culprit=3, after=3, ahead=3, active=False, device=True, leaves=False)
@given(
    calls=st.lists(st.sampled_from(sorted(GROUPS)), min_size=4, max_size=30),
    culprit=st.integers(0, 3),
    after=st.integers(0, 20),
    ahead=st.integers(1, 6),
    active=st.booleans(),
    device=st.booleans(),
    leaves=st.booleans(),
)
def test_the_rank_that_stops_is_named_and_no_other(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[str],
    culprit: int,
    after: int,
    ahead: int,
    active: bool,
    device: bool,
    leaves: bool,
) -> None:
    """Hosts run ``ahead`` operations beyond the first that has not ended. The culprit's host stops after so many calls,
    or, with ``device``, nothing ends on it any more from there on."""
    program = {rank: [i for i, group in enumerate(calls) if rank in GROUPS[group][1]] for rank in range(4)}
    called: dict[int, list[int]] = {rank: [] for rank in range(4)}
    ended: dict[int, list[int]] = {rank: [] for rank in range(4)}

    def may_call(rank: int) -> bool:
        if not device and rank == culprit and len(called[rank]) >= after:
            return False
        return len(called[rank]) < len(program[rank]) and len(called[rank]) - len(ended[rank]) < ahead

    def may_end(rank: int) -> bool:
        if len(ended[rank]) == len(called[rank]) or (device and rank == culprit and len(ended[rank]) >= after):
            return False
        following = called[rank][len(ended[rank])]
        # A device takes part in an operation once it has ended what came before: the culprit's does so for one more.
        return all(
            following in called[other] and called[other].index(following) <= len(ended[other])
            for other in GROUPS[calls[following]][1]
        )

    moved = True
    while moved:
        moved = False
        for rank in range(4):
            while may_call(rank):
                called[rank].append(program[rank][len(called[rank])])
                moved = True
            while may_end(rank):
                ended[rank].append(called[rank][len(ended[rank])])
                moved = True
    number = [calls[: i + 1].count(group) for i, group in enumerate(calls)]
    dumps = {
        rank: dump(
            rank,
            [
                entry(calls[i], number[i], place, place < len(ended[rank]))
                for place, i in enumerate(called[rank])
                if not active or place >= len(ended[rank])
            ],
            {calls[i]: number[i] for i in called[rank]},
        )
        for rank in range(4)
        if leaves or device or rank != culprit
    }
    found = hang_in(tmp_path_factory.mktemp("dumps"), dumps)
    waiting = any(len(called[rank]) > len(ended[rank]) for rank in range(4) if rank != culprit)
    if not waiting and not (device and len(called[culprit]) > len(ended[culprit])):
        assert not found.culprits
    elif device:
        assert who(found) == [(culprit, "stuck")]
    else:
        assert who(found) == [(culprit, "absent" if leaves else "no_dump")]


def test_other_calls_other_sizes_and_other_orders(tmp_path: Path) -> None:
    def of(**other: Any) -> dict[int, object]:
        return {rank: dump(rank, [entry("5", 1, 0, False, **(other if rank == 2 else {}))]) for rank in range(4)}

    smaller = hang_in(tmp_path / "sizes", of(input_sizes=[[4, 1]]))
    assert who(smaller) == [(2, "differs")]
    assert smaller.culprits[0].instead == "all_reduce 4x1"
    assert who(hang_in(tmp_path / "names", of(profiling_name="nccl:broadcast"))) == [(2, "differs")]
    assert who(hang_in(tmp_path / "types", of(input_dtypes=["Half"]))) == [(2, "differs")]
    uneven = {rank: dump(rank, [entry("5", 1, 0, False, profiling_name="nccl:all_to_all")]) for rank in range(4)}
    uneven[2] = dump(2, [entry("5", 1, 0, False, profiling_name="nccl:all_to_all", input_sizes=[[9]])])
    together = hang_in(tmp_path / "uneven", uneven)
    assert not together.culprits
    assert [(one.operation, one.ranks) for one in together.unended] == [("all_to_all", (0, 1, 2, 3))]
    # Ranks 0 and 2 call the group of four and their own in different orders, on a host that waits in each.
    crossed = {rank: dump(rank, [entry("5", 1, 0, False)]) for rank in (0, 1, 3)}
    crossed[2] = dump(2, [entry("3", 1, 0, False)])
    assert who(hang_in(tmp_path / "orders", crossed)) == [(0, "crossed"), (2, "crossed")]


def test_a_kernel_that_only_some_have_begun(tmp_path: Path) -> None:
    dumps = {rank: dump(rank, [entry("1", 1, 0, False, state="scheduled" if rank else "started")]) for rank in range(2)}
    assert who(hang_in(tmp_path, dumps)) == [(1, "not_begun")]


def test_a_rank_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 waits for rank 1, and the first sentence says so. Rank 2 waits for rank 0 and is another one."""
    dumps = {
        0: dump(0, [entry("1", 1, 0, True), entry("1", 2, 1, False)]),
        1: dump(1, [entry("1", 1, 0, False)]),
        2: dump(2, [entry("3", 1, 0, False)]),
    }
    found = hang_in(tmp_path, dumps)
    assert who(found) == [(1, "stuck")]
    assert found.culprits[0].waiting == (0,)
    assert found.behind == 1
    main(["hang", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "which others of the group have finished: look at its GPU. Rank 0 waits for it." in said
    assert "1 other rank cannot go on" in said


def test_exchanges(tmp_path: Path) -> None:
    """Stage 1 never receives: its tensor-parallel peers have no part in it."""

    def exchange(group: str, name: str, place: int = 0) -> dict[str, Any]:
        return entry(group, 0, place, False, profiling_name=f"nccl:{name}", is_p2p=True)

    dumps = {0: dump(0, [exchange("3", "send 0->1")]), 2: dump(2, [])}
    found = hang_in(tmp_path / "send", dumps)
    assert who(found) == [(2, "absent")]
    assert (found.culprits[0].stage, found.culprits[0].awaited.operation) == (1, "send")
    assert found.missing == (1, 3)
    # A send whose receive is missing blames nobody, as long as a receive or a collective does.
    dumps = {
        0: dump(0, [exchange("3", "send 0->1"), entry("1", 1, 1, False)]),
        1: dump(1, []),
        2: dump(2, [exchange("3", "recv 1<-0")]),
    }
    assert who(hang_in(tmp_path / "both", dumps)) == [(1, "absent")]
    both = {0: dump(0, [exchange("3", "send 0->1")]), 2: dump(2, [exchange("3", "recv 1<-0")])}
    found = hang_in(tmp_path / "link", both)
    assert not found.culprits
    assert [one.operation in ("send", "recv") for one in found.unended] == [True]


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


HOSTILE = {
    "code": pickle.dumps(_Evil()),
    "code inside": pickle.dumps({"entries": [_Evil()]}),
    "types": pickle.dumps({"entries": [{"process_group": 3}]}),
    "ranks": pickle.dumps({**dump(0, []), "pg_config": {"1": {"desc": "", "ranks": "[0, x]"}}}),
    "peer": pickle.dumps(dump(0, [entry("1", 1, 0, False, profiling_name="nccl:send 0->7")])),
    "deep": b"\x80\x02]" + b"]" * 100_000,
    "deep JSON": b"{" * 100_000,
    "frame": b"\x80\x04\x95" + b"\xff" * 8,
    "empty": b"",
    "JSON": b'{"entries": 3}',
}


@pytest.mark.parametrize("held", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_run_nothing_and_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: bytes
) -> None:
    (tmp_path / "rank_0").write_bytes(held)
    with pytest.raises(Unanswerable):
        read_dump(0, tmp_path / "rank_0")
    assert main(["hang", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1


def test_what_must_be_known_about_dumps_is_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stands = [entry("1", 1, 0, False)]
    other = dump(1, stands)
    other["pg_config"]["1"]["ranks"] = "[0, 1, 2]"
    (tmp_path / "older_0").write_bytes(pickle.dumps(dump(0, [])))
    (tmp_path / "rank_2").write_bytes(b"")
    hang = hang_in(tmp_path, {0: dump(0, stands), 1: other})
    assert [(note.kind, note.files, note.ranks) for note in hang.warnings] == [
        ("twice", ("older_0", "rank_0"), (0,)),
        ("dump_unreadable", ("rank_2",), (2,)),
        ("group_differs", (), ()),
    ]
    assert hang.warnings[2].names == ("TENSOR_MODEL_PARALLEL_GROUP", "1", "0, 1", "0, 1, 2")
    main(["hang", str(tmp_path), "--json"])
    assert [note["kind"] for note in json.loads(capsys.readouterr().out)["warnings"]] == [
        note.kind for note in hang.warnings
    ]


#: By fault and rank: what it calls before the dumps, and after them, so that everybody gets on: p for its pair's
#: collective, w for that of all; and how many of its operations have not ended meanwhile.
PLANS = {
    "sleep": [("p", "", 1), ("", "p", 0), ("p", "", 0), ("p", "", 0)],
    "order": [("p", "w", 1), ("w", "p", 1), ("pw", "", 1), ("pw", "", 1)],
}


def _job(fault: str, directory: str) -> None:
    """One of four ranks that reduce in their pair and among all, and then follow the plan of ``fault``."""
    import os
    import threading

    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"  # before the first group is made
    import torch
    import torch.distributed as dist

    rank, _ = init_distributed()
    pairs = [dist.new_group([pair, pair + 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP") for pair in (0, 2)]
    groups, tensor = {"p": pairs[rank // 2], "w": None}, torch.ones(8)

    def call(plan: str) -> None:
        for group in plan:
            dist.all_reduce(tensor, group=groups[group])

    call("pwpwpw")
    first, later, stands = PLANS[fault][rank]
    thread = threading.Thread(target=call, args=(first,))
    thread.start()
    while True:
        held = torch._C._distributed_c10d._dump_fr_trace_json(True, False)
        recorded = json.loads(held)["entries"]
        if len(recorded) == 6 + len(first) and sum(not one["retired"] for one in recorded) == stands:
            break
        time.sleep(0.01)
    Path(directory, f"rank_{rank}.json").write_bytes(held)
    Path(directory, f"done_{rank}_").touch()
    while len(list(Path(directory).glob("done_*"))) < 4:
        time.sleep(0.01)
    call(later)
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"), [("sleep", [(1, "absent")]), ("order", [(0, "crossed"), (1, "crossed")])]
)
def test_a_real_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, expected: list[Any]) -> None:
    run_ranks(_job, 4, fault, str(tmp_path))
    assert main(["hang", str(tmp_path), "--json"]) == 3
    printed = json.loads(capsys.readouterr().out)
    check("hang", printed)
    assert sorted((culprit["rank"], culprit["why"]) for culprit in printed["culprits"]) == expected
    assert min(printed["culprits"], key=lambda one: -one["rank"])["awaited"]["group"] == "TENSOR_MODEL_PARALLEL_GROUP"
