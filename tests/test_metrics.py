"""The scalars of a running job, into the real things that read them."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megaprof import ProfileConfig
from megaprof.control.run import Run
from megaprof.control.status import RankStatus
from megaprof.metrics import sinks
from megaprof.metrics.compute import Summary, summarise
from megaprof.topology import ParallelSizes, WorldLayout

LAYOUT = WorldLayout(ParallelSizes(pp=2, dp=2))
RUN = Run.new(LAYOUT.coords(0), LAYOUT, ("train_actor",), None, 1.0)


def status(rank: int, compute: float | None, step_ms: float = 100.0) -> RankStatus:
    coords = LAYOUT.coords(rank)
    recent = None
    if compute is not None:
        recent = {"target": "train_actor", "steps": 32, "step_ms": step_ms, "forward_ms": compute / 4}
        recent |= {"backward_ms": compute * 3 / 4, "combined_ms": 0.0, "finalize_ms": 10.0, "p2p_ms": None}
    return RankStatus.from_record(
        {
            "rank": rank,
            "coords": {axis: getattr(coords, axis) for axis in ("pp", "tp", "cp", "ep", "dp")},
            "host": "h",
            "name": "h",
            "pid": 1,
            "time": 1e9,
            "interval": 1.0,
            "since": 1e9,
            "calls": {"train_actor": {"begun": 8, "step": 41, "count": 7, "seconds": 0.1}},
            "recent": recent,
            "cost": {"step_us": 50.0, "fraction": 0.0005 + rank / 1e6, "background_fraction": 0.01},
        }
    )


@pytest.fixture
def summary() -> Summary:
    # Rank order: dp is inside pp, so ranks 0 and 1 are stage 0.
    return summarise(RUN, [status(0, 40.0), status(1, 40.0), status(2, 60.0), status(3, 90.0)])


def test_figures(summary: Summary) -> None:
    assert [(s.pp, s.compute_ms, s.slowest_rank) for s in summary.stages] == [(0, 40.0, 0), (1, 75.0, 3)]
    assert summary.imbalance == pytest.approx(75 / 57.5)
    assert summary.slowest_stage == 1
    assert (summary.straggler, summary.straggler_ratio) == (3, pytest.approx(90 / 75))
    assert summary.bubble_fraction == pytest.approx((0.5 + 0.15) / 2)
    assert (summary.step_ms, summary.step, summary.own_cost) == (100.0, 41, pytest.approx(0.000503))


def test_nothing_is_made_up() -> None:
    one = summarise(RUN, [status(0, 40.0)])
    assert (one.imbalance, one.slowest_stage, one.bubble_fraction, one.straggler) == (None, None, None, None)
    untimed = summarise(RUN, [status(rank, None) for rank in range(4)])
    assert (untimed.imbalance, untimed.straggler_ratio, untimed.step_ms) == (None, None, 100.0)
    assert summarise(RUN, []).step_ms is None
    assert "megaprof/imbalance" not in sinks.scalars(untimed)


def test_prometheus_reads_the_file(summary: Summary, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus_client")
    path = tmp_path / "megaprof.prom"
    sink = sinks.Prometheus(path, {"role": 'a"c\\tor\n'})
    sink(summary)
    sink(summary)
    assert [entry.name for entry in tmp_path.iterdir()] == ["megaprof.prom"]
    families = {family.name: family for family in parser.text_string_to_metric_families(path.read_text())}
    (step,) = families["megaprof_step_seconds"].samples
    assert (step.value, step.labels) == (0.1, {"role": 'a"c\\tor\n', "target": "train_actor"})
    assert {s.labels["stage"]: s.value for s in families["megaprof_stage_compute_seconds"].samples} == {
        "0": 0.04,
        "1": 0.075,
    }
    assert families["megaprof_imbalance_ratio"].samples[0].value == pytest.approx(75 / 57.5)
    assert all(family.type == "gauge" and family.documentation for family in families.values())


def test_megatron_lms_tensorboard_writer_gets_them(
    summary: Summary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(tmp_path))
    host = types.SimpleNamespace(_GLOBAL_TENSORBOARD_WRITER=writer, _GLOBAL_WANDB_WRITER=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", host)
    ((name, sink),) = sinks.host_sinks()
    sink(summary)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert name == "TensorBoard"
    (imbalance,) = events.Scalars("megaprof/imbalance")
    assert (imbalance.step, imbalance.value) == (41, pytest.approx(75 / 57.5))
    assert "megaprof/compute_ms/stage_1" in events.Tags()["scalars"]


def test_wandbs_step_stays_the_hosts(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[Any, Any]] = []
    wandb = types.SimpleNamespace(log=lambda data, **options: logged.append((data, options)))
    host = types.SimpleNamespace(_GLOBAL_WANDB_WRITER=wandb)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", host)
    ((_, sink),) = sinks.host_sinks()
    sink(summary)
    ((data, options),) = logged
    assert options == {"commit": False}
    assert data["megaprof/slowest_stage"] == 1


OTEL = """
import sys
from megaprof.metrics import sinks
from megaprof.metrics.compute import Stage, Summary
assert sinks.meter_provider() is None and "opentelemetry" not in sys.modules
from opentelemetry import metrics
assert sinks.meter_provider() is None
metrics.get_meter("host")  # a proxy, which the API makes by itself
assert sinks.meter_provider() is None
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
sink = sinks.OpenTelemetry(sinks.meter_provider(), {"role": "actor"})
stages = (Stage(0, 1, 7, 1.0, 40.0, None, None, None), Stage(1, 1, 7, 1.0, None, None, None, None))
def seen():
    data = reader.get_metrics_data()
    scopes = [] if data is None else data.resource_metrics[0].scope_metrics
    return {m.name: [(dict(p.attributes), p.value) for p in m.data.data_points] for s in scopes for m in s.metrics}
assert not any(seen().values()), seen()
sink(Summary("train_actor", 7, stages, 100.0, 1.25, 1, 0.3, None, None, 0.001))
found = seen()
who = {"role": "actor", "target": "train_actor"}
assert found["megaprof.step"] == [(who, 100.0)], found
assert found["megaprof.imbalance"] == [(who, 1.25)]
assert found["megaprof.stage.compute"] == [({**who, "stage": 0}, 40.0)]
assert not found.get("megaprof.straggler")
sink.close()
assert not any(seen().values())
"""


def test_opentelemetry_where_somebody_has_set_a_provider() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")
    # In a process of its own: a provider can be set only once.
    ran = subprocess.run([sys.executable, "-c", OTEL], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_the_environment_alone_makes_no_provider() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")
    code = (
        "import os; os.environ['OTEL_PYTHON_METER_PROVIDER'] = 'sdk_meter_provider'\n"
        "import opentelemetry.metrics\nfrom megaprof.metrics import sinks\nassert sinks.meter_provider() is None"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trigger_step_time": 0.9}, "--profile-trigger-step-time: 0.9 is not valid"),
        ({"trigger_step_time": 1.5}, "--profile-trigger-step-time has no effect without --profile-on-demand"),
        ({"trigger_imbalance": 1.3, "on_demand": True}, "--profile-trigger-imbalance needs the stages' times"),
        ({"trigger_cooldown": 60, "on_demand": True}, "--profile-trigger-cooldown has no effect without"),
        ({"prometheus": "x.prom"}, "--profile-prometheus has no effect without"),
        ({"on_demand": True, "dir": "memory://bucket/traces"}, "Give a directory"),
    ],
)
def test_options_that_could_not_be_honoured(options: dict[str, Any], complaint: str) -> None:
    if str(options.get("dir", "")).startswith("memory"):
        pytest.importorskip("fsspec", reason="torch brings it")
    with pytest.raises(ValueError, match=r".") as fault:
        ProfileConfig(**{"target": ("train_actor",), "dir": "traces", **options})
    assert complaint in str(fault.value)
