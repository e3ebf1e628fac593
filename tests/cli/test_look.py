"""What one look at a job says: since when a rank is slow, from timelines as the job writes them, and in sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from megaprof.cli.look import View, cores_sentence
from megaprof.control.blame import Blame
from megaprof.control.directory import RunningJob
from megaprof.formats import timeline as format
from megaprof.formats.names import shard
from megaprof.metrics import HostBound
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import START_NS, Slow, write_timelines
from tests.metrics.test_metrics import RUN, status

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))
STARTED = START_NS / 1e9


def look(
    directory: Path, started: float = STARTED, host_bound: float | None = None, sizes: ParallelSizes = LAYOUT.sizes
) -> View:
    """Rank 3 takes twice as long as rank 2."""
    statuses = {}
    for rank, ms in {2: 50.0, 3: 100.0}.items():
        recent = status(rank, ms).recent
        assert recent is not None
        statuses[rank] = replace(status(rank, ms), recent=replace(recent, host_bound_passes=host_bound))
    job = RunningJob(directory, replace(RUN, started=started, sizes=sizes))
    return View(job, statuses, 1e9, Blame((), (), 0.0, {}), None)


def since(directory: Path, started: float = STARTED) -> int | None:
    slow = look(directory, started).slow
    assert slow is not None
    assert (slow.ranks, slow.peer) == ((3,), 2)
    return slow.since


@pytest.mark.parametrize(
    ("slow", "step"),
    [
        ([Slow(rank=3, from_step=5, factor=2.0)], 5),
        ([Slow(rank=3, from_step=2, until_step=2, factor=2.0), Slow(rank=3, from_step=20, factor=1.9)], 20),
        ([Slow(rank=3, factor=2.0)], None),
        ([Slow(rank=3, from_step=step, until_step=step, factor=2.0) for step in range(1, 40, 3)], None),
        ([], None),
    ],
    ids=["from one step on", "and once before", "from the beginning", "now and then", "never"],
)
def test_since_when_a_rank_is_slow(slow: list[Slow], step: int | None, tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=40, slow=slow)
    assert since(tmp_path) == step


def test_a_job_with_a_directory_for_each_1024_ranks(tmp_path: Path) -> None:
    sizes = ParallelSizes(pp=2, dp=1024)
    write_timelines(tmp_path / shard(3, sizes.world), LAYOUT, steps=40, slow=[Slow(rank=3, from_step=5, factor=2.0)])
    slow = look(tmp_path, sizes=sizes).slow
    assert slow is not None
    assert slow.since == 5


@pytest.mark.parametrize(("waits", "step"), [(range(24, 40), 24), (range(40), None), (range(0, 40, 2), None)])
def test_since_when_a_gpu_waits_for_its_host(waits: range, step: int | None, tmp_path: Path) -> None:
    """In 12 of its 16 passes in the steps of ``waits``, in one in the others."""
    for path in write_timelines(tmp_path, LAYOUT, steps=40, device_clock=True):
        bits = {True: b"\xff\x0f", False: b"\x01\x00"}
        with path.open("ab") as file:
            file.write(b"".join(format.fact_record(row, format.HOST_BOUND, bits[row in waits]) for row in range(40)))
    assert look(tmp_path, host_bound=0.75).host_bound == HostBound((1,), 0.75, 2, since=step)
    assert look(tmp_path / "none", host_bound=0.75).host_bound == HostBound((1,), 0.75, 2)


def test_an_earlier_run_in_the_same_directory_does_not_count(tmp_path: Path) -> None:
    write_timelines(tmp_path, LAYOUT, steps=20, slow=[Slow(rank=3, from_step=5, factor=2.0)])
    later_ns, slow = START_NS + 3600 * 10**9, [Slow(rank=3, from_step=9, factor=2.0)]
    write_timelines(tmp_path, LAYOUT, steps=20, start_ns=later_ns, slow=slow)
    assert since(tmp_path, STARTED + 3600) == 9


def test_without_readable_timelines_it_is_not_known(tmp_path: Path) -> None:
    assert since(tmp_path) is None
    (tmp_path / write_timelines(tmp_path / "else", LAYOUT, steps=1)[3].name).write_bytes(b"nothing")
    assert since(tmp_path) is None


def test_steps_around_a_window_do_not_tell_when_it_began(tmp_path: Path) -> None:
    slow = [Slow(rank=3, from_step=25, factor=2.0)]
    write_timelines(tmp_path, LAYOUT, steps=20, first_step=20, slow=slow, around_windows=True)
    assert since(tmp_path) is None


def test_ranks_that_wait_for_a_core_are_named_by_the_rule_of_the_report() -> None:
    said = cores_sentence({2: 0.74, 0: 0.40, 1: 0.20})
    assert said.endswith(": something else runs on the cores, or there are more ranks than cores.")
    assert said.startswith("Ranks 0, 2 wait for a processor core, rank 2 for 74% of the time")  # not 1
    assert cores_sentence({2: 0.74, 1: 0.20}).startswith("Rank 2 waits for a processor core, for 74% of the time")
