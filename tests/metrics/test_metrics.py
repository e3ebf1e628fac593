"""The scalars of a running job, into the real things that read them."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megaprof import ProfileConfig
from megaprof.autoload import megatron_lm
from megaprof.formats.job import RankStatus, RunRecord
from megaprof.metrics import HostBound, SlowRanks, Summary, host_bound, sinks, slow_ranks, summarise
from megaprof.parallel.topology import ParallelSizes, WorldLayout

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))
RUN = RunRecord.new(LAYOUT.coords(0), LAYOUT, None, 1.0)


def status(rank: int, compute: float | None, step_ms: float = 100.0) -> RankStatus:
    coords = LAYOUT.coords(rank)
    recent = None
    if compute is not None:
        recent = {"target": "train_actor", "steps": 32, "step_ms": step_ms, "forward_ms": compute / 4}
        recent |= {"backward_ms": compute * 3 / 4, "combined_ms": 0.0, "compute_ms": compute}
        recent |= {"finalize_ms": 10.0, "p2p_ms": None}
    return msgspec.convert(
        {
            "run": RUN.run,
            "rank": rank,
            "coords": {axis: getattr(coords, axis) for axis in ("pp", "tp", "cp", "ep", "dp")},
            "host": "h",
            "name": "h",
            "pid": 1,
            "time": 1e9,
            "interval": 1.0,
            "since": 1e9,
            "calls": [{"target": "train_actor", "begun": 8, "step": 41, "count": 7, "seconds": 0.1}],
            "recent": recent,
        },
        RankStatus,
    )


@pytest.fixture
def summary() -> Summary:
    # Rank order: dp is inside pp, so ranks 0 and 1 are stage 0.
    return summarise(RUN, [status(0, 40.0), status(1, 40.0), status(2, 60.0), status(3, 90.0)])


def test_figures(summary: Summary) -> None:
    assert [(s.pp, s.compute_ms, s.slowest_rank) for s in summary.stages] == [(0, 40.0, 0), (1, 60.0, 3)]
    assert summary.imbalance == pytest.approx(60 / 50), "of ranks that are not slow"
    assert (summary.slowest_stage, summary.slow_stage) == (1, 1)
    assert (summary.straggler, summary.straggler_ratio) == (3, pytest.approx(90 / 60)), "against its peer, not itself"
    of_stages = [1 - (s.compute_ms + s.gradients_ms) / s.step_ms for s in summary.stages]
    assert summary.bubble_fraction == pytest.approx(sum(of_stages) / 2), "of the numbers beside it"
    assert (summary.step_ms, summary.step) == (100.0, 41)
    assert summarise(RUN, [status(rank, 95.0) for rank in range(4)]).bubble_fraction == 0.0, "no less than nothing"


def test_slow_ranks_and_a_peer_to_compare_them_with() -> None:
    assert slow_ranks([status(0, 40.0), status(1, 42.0), status(2, 60.0), status(3, 65.0)]) == []
    first, second = slow_ranks([status(0, 50.0), status(1, 40.0), status(2, 60.0), status(3, 156.0)])
    assert first == SlowRanks((3,), 1, pytest.approx(2.6), 156.0, 2)
    assert second == SlowRanks((0,), 0, pytest.approx(1.25), 50.0, 1)
    assert slow_ranks([status(0, 40.0), status(2, 90.0)]) == [], "a stage with one rank has no peers"


def test_a_rank_that_waits_for_a_processor_core_is_not_slow() -> None:
    waiting = replace(status(2, 90.0), waits=0.45)  # of 100 ms
    assert slow_ranks([status(0, 40.0), status(1, 40.0), waiting, status(3, 50.0)]) == []
    slow = slow_ranks([status(0, 40.0), status(1, 40.0), waiting, replace(status(3, 156.0), waits=0.4)])
    assert [each.ranks for each in slow] == [(3,)]


def test_of_two_ranks_that_wait_for_a_core_most_of_the_time_none_is_slow() -> None:
    """What would be left of both is small, and says nothing. Measured in a job whose rank 3 was slow."""
    waiting = [
        replace(status(rank, ms, 2036.0), waits=waits) for rank, ms, waits in ((0, 898.4, 0.316), (1, 803.3, 0.348))
    ]
    slow = [replace(status(2, 1182.0, 1977.0), waits=0.416), replace(status(3, 1642.0, 1946.0), waits=0.119)]
    assert [each.ranks for each in slow_ranks(waiting + slow)] == [(3,)]
    assert summarise(RUN, waiting + slow).slow_stage is None, "nor is a stage that waits"
    assert summarise(RUN, waiting + slow).stages[0].compute_ms == pytest.approx((898.4 + 803.3) / 2)


def test_beside_a_slow_rank_no_other_rank_and_no_stage_is_named() -> None:
    job = [status(0, 40.0), status(1, 41.0), status(2, 40.0), status(3, 96.0)]
    summary = summarise(RUN, job)
    assert (summary.imbalance, summary.slow_stage) == (pytest.approx(40.5 / 40.25), None)
    assert [slow.stage for slow in slow_ranks(job)] == [1]
    one_stage = [replace(each, coords={**each.coords, "pp": 0}) for each in job]
    (slow,) = slow_ranks([*one_stage[:2], replace(one_stage[2], recent=status(2, 46.0).recent), one_stage[3]])
    assert slow.ranks == (3,), "rank 2 is 1.15 times as slow as its peers, and not 2.4 times"


def test_ranks_that_wait_for_each_other_inside_a_microbatch_are_slow_together() -> None:
    # Of four ranks of a stage two wait for each other, and so are equally slow.
    four = [
        replace(status(rank, ms), coords={**status(0, ms).coords, "pp": 0}) for rank, ms in enumerate((80, 40, 80, 40))
    ]
    (slow,) = slow_ranks(four)
    assert (set(slow.ranks), slow.ratio, slow.peer) == ({0, 2}, pytest.approx(2.0), 1)


def test_nothing_is_made_up() -> None:
    one = summarise(RUN, [status(0, 40.0)])
    assert (one.imbalance, one.slowest_stage, one.bubble_fraction, one.straggler) == (None, None, None, None)
    untimed = summarise(RUN, [status(rank, None) for rank in range(4)])
    assert (untimed.imbalance, untimed.straggler_ratio, untimed.step_ms) == (None, None, 100.0)
    assert summarise(RUN, []).step_ms is None
    assert "megaprof/imbalance" not in sinks.scalars(untimed)


def test_roles_have_names_of_their_own(summary: Summary) -> None:
    assert sinks.scalars(summary, "actor").keys().isdisjoint(sinks.scalars(summary, "critic"))


def test_megatron_lms_tensorboard_writer_gets_them(
    summary: Summary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(tmp_path))
    host = types.SimpleNamespace(_GLOBAL_TENSORBOARD_WRITER=writer, _GLOBAL_WANDB_WRITER=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", host)
    ((name, sink),) = sinks.host_sinks(megatron_lm.writers())
    sink(summary)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert name == "TensorBoard"
    (imbalance,) = events.Scalars("megaprof/imbalance")
    assert (imbalance.step, imbalance.value) == (41, pytest.approx(60 / 50))
    assert "megaprof/compute_ms/stage_1" in events.Tags()["scalars"]


def test_wandbs_step_stays_the_hosts(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[Any, Any]] = []
    wandb = types.SimpleNamespace(log=lambda data, **options: logged.append((data, options)))
    host = types.SimpleNamespace(_GLOBAL_WANDB_WRITER=wandb)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", host)
    ((_, sink),) = sinks.host_sinks(megatron_lm.writers())
    sink(summary)
    ((data, options),) = logged
    assert options == {"commit": False}
    assert data["megaprof/slowest_stage"] == 1


OTEL = """
import sys
from megaprof.autoload import megatron_lm
from megaprof.metrics import sinks
from megaprof.metrics import StageFigures, Summary
assert sinks.meter(megatron_lm.writers()[-1]) is None and "opentelemetry" not in sys.modules
from opentelemetry import metrics
assert sinks.meter(megatron_lm.writers()[-1]) is None
metrics.get_meter("host")  # a proxy, which the API makes by itself
assert sinks.meter(megatron_lm.writers()[-1]) is None
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
provider = MeterProvider(metric_readers=[reader])
if "megatron-lm" in sys.argv:  # its telemetry may keep a provider of its own
    import types
    host = types.SimpleNamespace(_GLOBAL_TELEMETRY_HANDLE=types.SimpleNamespace(is_exporting=False))
    sys.modules["megatron.training.global_vars"] = host
    assert sinks.meter(megatron_lm.writers()[-1]) is None
    host._GLOBAL_TELEMETRY_HANDLE = types.SimpleNamespace(is_exporting=True, meter=provider.get_meter("megatron-lm"))
else:
    metrics.set_meter_provider(provider)
sink = sinks.open_telemetry(sinks.meter(megatron_lm.writers()[-1]), "actor")
stages = tuple(StageFigures(pp, 1, 7, 1.0, ms, *[None] * 5) for pp, ms in enumerate((40.0, None)))
def seen():
    data = reader.get_metrics_data()
    scopes = [] if data is None else data.resource_metrics[0].scope_metrics
    return {m.name: [(dict(p.attributes), p.value) for p in m.data.data_points] for s in scopes for m in s.metrics}
assert not any(seen().values()), seen()
sink(Summary("train_actor", 7, stages, 100.0, 1.25, 1, 0.3, None, None, 1, 32))
found = seen()
who = {"role": "actor", "target": "train_actor"}
assert found["megaprof.step"] == [(who, 100.0)], found
assert found["megaprof.imbalance"] == [(who, 1.25)]
assert found["megaprof.stage.compute"] == [({**who, "stage": 0}, 40.0)]
assert not found.get("megaprof.straggler")
sink(None)
assert not any(seen().values())
"""


@pytest.mark.parametrize("whose", ["everybody", "megatron-lm"])
def test_opentelemetry_where_somebody_has_set_it_up(whose: str) -> None:
    # In a process of its own: a provider can be set only once.
    ran = subprocess.run([sys.executable, "-c", OTEL, whose], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_the_environment_alone_makes_no_provider() -> None:
    code = (
        "import os; os.environ['OTEL_PYTHON_METER_PROVIDER'] = 'sdk_meter_provider'\n"
        "import opentelemetry.metrics\nfrom megaprof.metrics import sinks\nassert sinks.meter(None) is None"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_writer_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        tried = 0

        def add_scalar(self, *arguments: Any) -> None:
            self.tried += 1
            raise OSError(28, "No space left on device")

    writer = Full()
    fresh = replace(status(0, 40.0), time=time.time())
    logged: list[Any] = []
    wandb = types.SimpleNamespace(log=lambda data, **options: logged.append(data))
    host = types.SimpleNamespace(_GLOBAL_TENSORBOARD_WRITER=writer, _GLOBAL_WANDB_WRITER=wandb)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", host)
    job: Any = types.SimpleNamespace(run=RUN, statuses=lambda ranks: {0: fresh})
    overview = sinks.Overview(LAYOUT.coords(0), None, lambda: job, megatron_lm.writers)
    for _ in range(3):
        overview.look()
    assert (writer.tried, len(logged)) == (1, 3)
    assert caplog.text.count("no scalars to TensorBoard any more") == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"on_demand": True, "dir": "memory://bucket/traces"}, "Give a directory"),
    ],
)
def test_options_that_could_not_be_honoured(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as fault:
        ProfileConfig(**{"target": ("train_actor",), "dir": "traces", **options})
    assert complaint in str(fault.value)


def test_a_step_is_as_long_as_its_longest_stage_and_the_bubble_is_of_that() -> None:
    entered_later = {0: 40.0, 1: 40.0, 2: 30.0, 3: 30.0}
    found = summarise(
        RUN, [status(rank, ms, step_ms=100.0 if rank < 2 else 80.0) for rank, ms in entered_later.items()]
    )
    assert found.step_ms == 100.0, "no mean of ranks that enter it at different times"
    assert found.bubble_fraction == pytest.approx(((1 - 0.5) + (1 - 0.4)) / 2)


def test_where_some_ranks_keep_a_timeline_it_says_how_long_a_step_is() -> None:
    """The others know only how long it is from one step to the next: 100 ms of 200 ms here."""
    between = status(1, None)
    slower = replace(between, calls=tuple(replace(call, seconds=0.2) for call in between.calls))
    others = [replace(slower, rank=rank, coords=status(rank, None).coords) for rank in (1, 3)]
    found = summarise(RUN, [status(0, 40.0), status(2, 60.0), *others])
    assert (found.step_ms, [stage.step_ms for stage in found.stages]) == (100.0, [100.0, 100.0])
    assert found.bubble_fraction == pytest.approx(((1 - 0.5) + (1 - 0.7)) / 2)
    assert summarise(RUN, others).step_ms == pytest.approx(200.0)


def test_stages_whose_gpus_wait_for_their_host_in_most_passes() -> None:
    def waiting(rank: int, share: float | None) -> RankStatus:
        recent = status(rank, 40.0).recent
        assert recent is not None
        return replace(status(rank, 40.0), recent=replace(recent, host_bound_passes=share))

    job = [waiting(rank, share) for rank, share in enumerate((0.2, 0.4, 0.9, 1.0))]
    found = summarise(RUN, job)
    assert [stage.host_bound_passes for stage in found.stages] == [pytest.approx(0.3), pytest.approx(0.95)]
    assert sinks.scalars(found)["megaprof/host_bound_passes/stage_1"] == pytest.approx(0.95)
    assert host_bound(job) == HostBound((1,), pytest.approx(0.95), 3)
    both = [waiting(rank, share) for rank, share in enumerate((0.6, 0.8, 0.9, 1.0))]
    assert host_bound(both) == HostBound((1, 0), pytest.approx(0.7), 3)
    assert host_bound([status(rank, 40.0) for rank in range(4)]) is None, "no GPU's clock says so"
