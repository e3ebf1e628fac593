"""Replay, verdict and advice on pipelines that others published; PUBLISHED_PIPELINES names the directory of tables."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaprof.analysis.report.report import TargetReport, analyze
from megaprof.analysis.simulation import Simulation, simulate
from tests.analysis.published import read, write


def reported(tables: Path, out: Path) -> TargetReport:
    write(read(tables), out)
    (target,) = analyze(out).targets
    return target


def real(name: str, out: Path) -> TargetReport:
    if "PUBLISHED_PIPELINES" not in os.environ:
        pytest.skip("PUBLISHED_PIPELINES does not name a directory of published tables")
    return reported(Path(os.environ["PUBLISHED_PIPELINES"]) / name, out)


@pytest.mark.parametrize(("name", "most"), [("bytedance-ST", 0.003), ("primus-pp8", 0.006), ("megatronapp", 0.02)])
def test_the_replay_reproduces_real_gpus(name: str, most: float, tmp_path: Path) -> None:
    error = real(name, tmp_path).what_if.replay_error
    assert error is not None
    assert max(abs(error.min), abs(error.max), abs(error.median)) <= 4 * most
    assert abs(error.median) <= most


def test_the_long_last_stage_is_named(tmp_path: Path) -> None:
    target = real("bytedance-ST", tmp_path)
    assert target.slowest_stage == 3
    assert [cause.stage for cause in target.causes if cause.kind == "embedding_or_loss"] == [3]
    (even,) = [each for each in target.what_if.candidates if each.kind == "balanced"]
    # Published: a last stage like the others would make the step 1.22 times as fast.
    assert 1.1 < even.speedup.value < 1.25


def test_no_layout_is_advised_where_nobody_says_how_many_layers_there_are(tmp_path: Path) -> None:
    for name in ("bytedance-ST", "primus-pp8", "megatronapp"):
        found = real(name, tmp_path / name).what_if
        assert found.best is None
        assert [(each.kind, each.stages) for each in found.warnings] == [("no_layout", (0,))]


def passes(run: Simulation, stage: int, kind: str) -> list[tuple[float, float]]:
    """Start and end by microbatch, of the first chunk."""
    own = [each for each in run.events if (each.stage, each.phase, each.chunk) == (stage, kind, 0)]
    return [(each.start_ms, each.end_ms) for each in sorted(own, key=lambda each: each.microbatch)]


def test_starts_and_ends_by_iteration_are_read(tmp_path: Path) -> None:
    run = simulate([[10.0], [14.0]], [[20.0], [28.0]], 4)
    (tmp_path / "config.json").write_text(json.dumps({"pp_size": 2, "num_mbs": 4}))
    for stage in range(2):
        times = {}
        for short, kind in (("fwd", "forward"), ("bwd", "backward")):
            times |= {
                f"{short}_{end}": [each[n] for each in passes(run, stage, kind)]
                for n, end in ((0, "start"), (1, "end"))
            }
        (tmp_path / f"pp_rank_{stage}.json").write_text(json.dumps({str(number): times for number in (1, 2, 3)}))
    target = reported(tmp_path, tmp_path / "out")
    assert (target.steps, target.microbatches) == ((1, 2, 3), 4)
    assert target.step_time_ms is not None
    assert target.step_time_ms.mean == pytest.approx(run.step_ms)
    assert target.slowest_stage == 1


def test_a_trace_of_several_chunks_is_read(tmp_path: Path) -> None:
    run = simulate([[5.0, 5.0]] * 4, [[10.0, 10.0]] * 4, 4)
    events = []
    for each in run.events:
        about = {"iteration": 10, "microbatch": each.microbatch, "model_chunk": each.chunk}
        for ph, ms in (("B", each.start_ms), ("E", each.end_ms)):
            args = about if ph == "E" else {"iteration": 10}
            events.append({"name": each.phase, "ph": ph, "ts": round(1000 * ms), "pid": each.stage, "args": args})
    (tmp_path / "some-aggregated-iter10.json").write_text(json.dumps(events))
    target = reported(tmp_path, tmp_path / "out")
    assert (target.sizes.pp, target.sizes.vpp, target.schedule) == (4, 2, "interleaved")
    assert target.what_if.replay_error is not None
    assert abs(target.what_if.replay_error.mean) < 0.001


def test_other_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no trace"):
        read(tmp_path)
