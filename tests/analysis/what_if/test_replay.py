"""What cannot be replayed, or only otherwise than the metadata say, is said in a sentence of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaprof.analysis.notes import Note
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text.what_if import worth_showing
from megaprof.analysis.simulation import compiled, simulate
from megaprof.parallel.schedules import PipelineSchedule
from tests.analysis.synthetic import TraceBuilder, chunk


def test_another_order_than_megatrons_is_not_replayed(tmp_path: Path) -> None:
    for pp in range(2):
        trace = TraceBuilder(pp=pp, pp_size=2, microbatches=8)
        for mb in range(8):
            trace.forward(mb, 10 * mb, 10)
            trace.backward(mb, 80 + 20 * mb, 20)
        trace.call(0, 240)
        trace.write(tmp_path)
    found = analyze(tmp_path).targets[0].what_if
    assert found.replay_error is None
    assert found.best is None
    (note,) = found.warnings
    names = "forward", "backward", "1f1b"
    assert note.why == Note("schedule_differs", stages=(0,), names=names, count=2, of=0)


@pytest.mark.parametrize("waits", [True, False])
def test_exchanges_are_replayed_as_they_fit(tmp_path: Path, waits: bool) -> None:
    p2p = {"overlap_p2p_comm": not waits, "overlap_p2p_comm_warmup_flush": not waits}
    times = [[10.0, 10.0], [14.0, 6.0], [10.0, 10.0], [6.0, 14.0]]
    run = simulate(times, [[2 * ms for ms in each] for each in times], 8, p2p_ms=8.0, rendezvous=waits)
    for pp in range(4):
        metadata = {"schedule": "interleaved", "microbatch_group_size": 4, "p2p": p2p}
        held = [chunk(2, embedding=pp == 0), chunk(2, loss=pp == 3)]
        trace = TraceBuilder(pp=pp, pp_size=4, microbatches=8, chunks=held, metadata=metadata)
        for event in run.events:
            if event.stage == pp:
                add = trace.forward if event.phase == "forward" else trace.backward
                add(event.microbatch, event.start_ms, event.end_ms - event.start_ms, event.chunk)
        trace.call(0, run.step_ms)
        trace.write(tmp_path)
    found = analyze(tmp_path).targets[0].what_if
    assert found.rendezvous is waits
    assert found.replay_error is not None
    assert abs(found.replay_error.mean) < 0.05
    assert "overlap" not in [each.kind for each in found.candidates]  # nothing overlaps, or everything


def test_exchanges_that_overlap_everywhere_are_a_change(tmp_path: Path) -> None:
    """A heavy loss holds the stages that feed the last one while the pipeline fills, if they wait in their exchanges.
    The programs of both are compared with Megatron's in `tests/parallel/test_schedules.py`."""
    layers = (1, 2), (1, 1), (1, 1), (1, 0)
    steady = PipelineSchedule.checked(4, 2, 8)
    passes = np.array(layers)[..., None, None] * np.array([10.0, 20.0])[:, None] * np.ones(8)
    passes[3, 1] += np.array([25.0, 17.0])[:, None]
    before, after = (compiled(each, True) for each in (steady, steady._replace(overlap="all")))
    ends = before.ends(passes)
    for pp in range(4):
        held = [chunk(layers[pp][0], embedding=pp == 0), chunk(layers[pp][1], loss=pp == 3)]
        metadata = {"schedule": "interleaved", "microbatch_group_size": 4, "p2p": {"overlap_p2p_comm": True}}
        trace = TraceBuilder(pp=pp, pp_size=4, microbatches=8, chunks=held, metadata=metadata)
        for kind, number, microbatch in np.ndindex(2, 2, 8):
            took = passes[pp, number, kind, microbatch]
            add = trace.backward if kind else trace.forward
            add(microbatch, ends[pp, number, kind, microbatch] - took, took, number)
        trace.call(0, before.step_ms(passes).item())
        trace.write(tmp_path)
    (target,) = analyze(tmp_path).targets
    (found,) = (each for each in target.what_if.candidates if each.kind == "overlap")
    assert found.step_ms.value == pytest.approx(after.step_ms(passes).item(), rel=0.005)
    assert found.speedup.value > 1.03
    assert found.flags == ("--overlap-p2p-communication-warmup-flush",)
    assert found in worth_showing(target.what_if)


def test_a_stage_that_enters_late_makes_no_transfer_long(tmp_path: Path) -> None:
    for step in range(3):
        for pp, (start, forward, backward, end) in enumerate([(0, 0, 81, 101), (50, 50, 60, 80)]):
            trace = TraceBuilder(pp=pp, pp_size=2, microbatches=1, step=step)
            trace.forward(0, forward, 10)
            trace.backward(0, backward, 20)
            trace.call(start, end - start)
            trace.write(tmp_path)
    # The backward's input is 1 ms under way; that of the forward waits for 40 ms until stage 1 begins the step.
    p2p_ms = analyze(tmp_path).targets[0].what_if.p2p_ms
    assert p2p_ms is not None
    assert p2p_ms <= 1.0


def test_what_lies_before_the_first_pass_is_replayed(tmp_path: Path) -> None:
    run = simulate([[10.0], [14.0]], [[20.0], [28.0]], 4, rendezvous=True)
    for pp in range(2):
        trace = TraceBuilder(pp=pp, pp_size=2)
        for event in (e for e in run.events if e.stage == pp):
            getattr(trace, event.phase)(event.microbatch, 50.0 + event.start_ms, event.end_ms - event.start_ms)
        trace.call(0.0, 50.0 + run.step_ms)
        trace.write(tmp_path)
    found = analyze(tmp_path).targets[0].what_if
    assert found.replay_ms == pytest.approx(50.0 + run.step_ms)
    assert found.replay_error is not None
    assert found.replay_error.mean == pytest.approx(0.0, abs=1e-6)
