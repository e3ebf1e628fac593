"""Whom a job waits for, in layouts that are larger than this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megaprof.cli import main
from megaprof.control.blame import find_culprits
from megaprof.control.directory import RunningJob
from megaprof.formats.job import RankStatus, RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.control import places

NOW = 1_000_000.0


def job(**sizes: int) -> RunRecord:
    layout = WorldLayout(ParallelSizes(**sizes))
    return RunRecord.new(layout.coords(0), layout, None, 1.0)


def record(run: RunRecord, rank: int, phase: str | None, microbatch: int | None = None, **other: Any) -> dict[str, Any]:
    assert run.layout is not None
    coords = run.layout.coords(rank)
    since = other.pop("since", NOW - 60)
    position = None
    if phase is not None:
        position = {"target": "train_actor", "step": 7, "phase": phase, "microbatch": microbatch, "chunk": 0}
        position |= {"since": since, **other.pop("position", {})}
    return {
        "run": run.run,
        "rank": rank,
        "coords": {axis: getattr(coords, axis) for axis in ("pp", "tp", "cp", "ep", "dp")},
        "host": "elsewhere-1",
        "name": f"node{rank // 8:02}",
        "pid": 100 + rank,
        "time": NOW,
        "interval": 1.0,
        "since": since,
        "calls": [{"target": "train_actor", "begun": 8, "seconds": 0.5, "step": 6, "count": 7}],
        "position": position,
        **other,
    }


def statuses(run: RunRecord, phases: dict[int, tuple[Any, ...]], **other: Any) -> dict[int, RankStatus]:
    return {rank: msgspec.convert(record(run, rank, *phase, **other), RankStatus) for rank, phase in phases.items()}


def culprits(run: RunRecord, found: dict[int, RankStatus]) -> list[tuple[int, int]]:
    return [(culprit.rank, culprit.waiting) for culprit in find_culprits(run, found, NOW).culprits]


def test_a_pipeline_waits_for_the_stage_that_computes() -> None:
    run = job(pp=4)
    found = statuses(
        run,
        {
            0: ("send_forward_recv_backward",),
            1: ("backward", 3),
            2: ("send_backward_recv_forward",),
            3: ("recv_forward",),
        },
    )
    assert culprits(run, found) == [(1, 3)]
    assert find_culprits(run, found, NOW).still == pytest.approx(60)


def test_the_interleaved_schedule_goes_round() -> None:
    run = job(pp=4, vpp=2)
    found = statuses(run, {0: ("wait_recv_prev",), 1: ("recv_forward",), 2: ("recv_forward",), 3: ("forward", 0)})
    assert culprits(run, found) == [(3, 3)]


def test_replicas_wait_for_the_one_that_has_not_come_to_the_reduction() -> None:
    run = job(pp=2, dp=4)
    late = 6  # stage 1
    found = statuses(run, {rank: ("finalize_grads",) for rank in range(8) if rank != late})
    found |= statuses(run, {late: ("forward", 5)})
    directly = 4  # the replicas of its stage, and the first stage of its pipeline, which shares the embedding
    assert culprits(run, found) == [(late, directly)]
    outside = found | statuses(run, {late: (None,)})
    assert culprits(run, outside) == [(late, directly)], "before its step has begun: data, checkpoint, optimizer"


def test_whoever_is_silent_is_named_first() -> None:
    run = job(pp=4)
    found = statuses(run, {0: ("recv_backward",), 1: ("recv_backward",), 3: ("recv_forward",)})
    assert culprits(run, found) == [(2, 3)]
    found |= statuses(run, {2: ("forward", 1)}, time=NOW - 100)
    (first,) = find_culprits(run, found, NOW).culprits
    assert (first.rank, first.silent, first.for_s) == (2, True, pytest.approx(100))


def test_tensor_parallel_peers_wait_for_the_one_that_stands_elsewhere_for_longer() -> None:
    run = job(tp=2, pp=2)
    found = statuses(run, {0: ("forward", 3), 2: ("recv_forward",), 3: ("recv_forward",)})
    found |= {1: msgspec.convert(record(run, 1, "between", since=NOW - 70), RankStatus)}
    assert culprits(run, found)[0] == (1, 3)


@pytest.mark.parametrize("role", [None, "actor"])
def test_whoever_waits_is_not_blamed_for_another_targets_steps(role: str | None) -> None:
    """Log-probs come first in a status, and are many steps ahead of training."""
    run = job(dp=2)
    log_probs = {"target": "train_log_probs", "role": role, "begun": 41, "seconds": 0.1, "step": 40, "count": 41}
    training = {"target": "train_actor", "role": role, "begun": 7, "seconds": 0.5, "step": 6, "count": 7}
    found = statuses(run, {0: ("finalize_grads",)}, calls=[log_probs, training], position={"role": role})
    # Behind its last step, for instance while it loads data, and it stands there for less long than the other waits.
    found |= statuses(run, {1: (None,)}, calls=[log_probs, training], since=NOW - 55)
    assert culprits(run, found) == [(1, 1)]
    in_log_probs = {"target": "train_log_probs", "step": 41, "role": role}
    found |= statuses(run, {1: ("forward", 0)}, calls=[log_probs, training], since=NOW - 55, position=in_log_probs)
    assert culprits(run, found) == [(1, 1)]


def test_a_role_of_its_own_is_counted_by_itself() -> None:
    run = job(dp=2)
    calls = [
        {"target": "train_actor", "role": "ref", "begun": 9, "step": 8, "count": 9},
        {"target": "train_actor", "role": "actor", "begun": 5, "step": 4, "count": 5},
    ]
    status = msgspec.convert(record(run, 0, None, calls=calls), RankStatus)
    assert (status.step_of("train_actor", "actor"), status.step_of("train_actor", "ref")) == (4, 8)
    assert status.step_of("train_actor", None) is None


def test_nobody_is_blamed_while_things_move() -> None:
    run = job(pp=4)
    found = statuses(run, dict.fromkeys(range(4), ("recv_forward",)), since=NOW - 2)
    assert find_culprits(run, found, NOW).culprits == ()


def test_all_in_a_circle_names_the_one_that_has_stood_longest() -> None:
    run = job(pp=2)
    found = {
        0: msgspec.convert(record(run, 0, "recv_backward", since=NOW - 90), RankStatus),
        1: msgspec.convert(record(run, 1, "recv_forward", since=NOW - 80), RankStatus),
    }
    assert [rank for rank, _ in culprits(run, found)] == [0]


@pytest.mark.parametrize("damage", ["coords", "calls", "rank", "time", "host"])
def test_a_status_of_another_shape_is_no_status(damage: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        msgspec.convert({**record(job(pp=2), 0, "forward", 1), damage: "x" * 500}, RankStatus)


def test_a_status_of_another_world_is_no_status(tmp_path: Path) -> None:
    run = job(pp=2)
    paths = places.Paths.of(tmp_path, None, run.world)
    written = record(run, 0, "forward", 1)
    places.write(paths.status(0), written)
    assert RunningJob(tmp_path, run).leader() is not None
    places.write(paths.status(0), {**written, "coords": {**written["coords"], "pp": 2}})
    assert RunningJob(tmp_path, run).leader() is None


@pytest.mark.slow
def test_a_thousand_ranks_fit_on_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job(tp=8, pp=16, cp=2, dp=4)
    assert run.world == 1024
    paths = places.Paths.of(tmp_path, None, run.world)
    assert run.layout is not None
    guilty = run.layout.rank_of(tp=3, cp=1, dp=2, pp=5)
    now = time.time()
    records_of = {}
    for rank in range(run.world):
        pp = run.layout.coords(rank).pp
        phase = ("backward", 3) if rank == guilty else ("recv_backward",) if pp < 5 else ("finalize_grads",)
        if pp == 5 and rank != guilty:
            phase = ("finalize_grads",)
        since = now - (65 if rank == guilty else 60)
        records_of[rank] = record(run, rank, *phase, since=since, time=now)
    places.write(paths.run, run)
    for rank, written in records_of.items():
        places.write(paths.status(rank), written)
    monkeypatch.setattr(time, "time", lambda: now)  # however long it took to write them
    assert main(["status", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    named = [line for line in shown.splitlines() if line.startswith("!")]
    assert named[0].startswith(f"! rank {guilty} (stage 5, "), shown
    assert "has been in backward of microbatch 3, train_actor step 7" in named[0]
