"""A capture in the host's own trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megaprof import ProfileConfig, install_hooks


def test_the_hosts_span_names_the_capture(one_rank: Any, tmp_path: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("host")
    config = ProfileConfig(("train_actor",), str(tmp_path), steps="1", activities=("cpu",))
    with install_hooks(one_rank.chunks, config, role="actor"):
        for _ in range(2):
            with tracer.start_as_current_span("step"):
                one_rank.train_step()
    first, second = exporter.get_finished_spans()
    (event,) = second.events
    assert not first.events
    assert event.name == "megaprof.capture"
    assert dict(event.attributes or {}) == {
        "megaprof.target": "train_actor",
        "megaprof.role": "actor",
        "megaprof.step": 1,
        "megaprof.file": next(tmp_path.glob("*.pt.trace.json.gz")).name.partition(".pt.")[0],
    }
