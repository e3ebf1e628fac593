"""Stages put together to a pipeline, from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megaprof import simulate
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text.what_if import layout_advice
from megaprof.analysis.samples import Interval
from megaprof.analysis.trace.steps import ModuleKey
from megaprof.analysis.what_if.changes import Prediction
from megaprof.formats.metadata import Metadata, ModelChunk
from megaprof.formats.phrases import Unanswerable, json_of
from megaprof.formats.ranges import BACKWARD, FORWARD, LAYER
from megaprof.formats.timeline import Memory
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.rehearse import rehearsal
from megaprof.rehearse.links import Link
from megaprof.rehearse.pipeline import Exchange, Pipeline, Stage, alike, record, together, write
from megaprof.rehearse.rehearsal import (
    NAME,
    PREDICTED,
    Rehearsal,
    _best_of,
    _recomputed,
    balanced,
    compared,
    rehearsed,
)
from megaprof.tune import trial

STEPS, MICROBATCHES, GIB, KINDS = 6, 8, 1 << 30, (FORWARD, BACKWARD)
#: 1 GB/s: a million bytes are a millisecond.
LINKS = {"gloo": Link("gloo", 1e9, 0.0, "assumed", "a test")}


def stage(number: int, layers: int, sizes: ParallelSizes, *exchanges: Exchange, chunks: int = 1) -> Stage:
    """A stage whose layers take 10 ms forward and 20 ms backward."""
    schedule = PipelineSchedule.checked(sizes.pp, chunks, MICROBATCHES)
    begin = 2 * number
    metadata = Metadata(
        "train_actor",
        WorldLayout(sizes).coords(WorldLayout(sizes).rank_of(pp=number)),
        (0, STEPS - 1),
        schedule=schedule.name,
        microbatches=MICROBATCHES,
        chunks=(
            ModelChunk(
                number == 0,
                layers,
                tuple(range(begin + 1, begin + layers + 1)),
                0,
                number == sizes.pp - 1,
                ("dense",) * layers,
            ),
        )
        * chunks,
        host="host",
        device="cpu",
    )
    passes = np.tile(np.array([10.0, 20.0])[None, None, :, None] * layers, (STEPS, chunks, 1, MICROBATCHES))
    memory = Memory(layers * GIB, 2 * layers * GIB, 80 * GIB)
    return Stage(metadata, schedule, passes, 0 * passes, np.zeros(STEPS), memory, exchanges)


def pipeline(sizes: ParallelSizes, layers: tuple[int, ...], *exchanges: Exchange) -> Pipeline:
    stages = [stage(number, count, sizes, *exchanges) for number, count in enumerate(layers)]
    return together(stages, WorldLayout(sizes), LINKS, 8)


def test_steps_that_warm_up_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a fifth longer here: not by enough to be left out of a report."""
    sizes = ParallelSizes(pp=2)

    def run(words: Sequence[str], directory: Path, steps: int, *_: object, **__: object) -> trial.Ended:
        warm = np.array([1.2] * trial.WARM_UP + [1.0] * (STEPS - trial.WARM_UP))[:, None, None, None]
        stages = [replace(each, passes=each.passes * warm) for each in (stage(0, 2, sizes), stage(1, 2, sizes))]
        write(together(stages, WorldLayout(sizes), LINKS, 8), directory)
        for path in sorted(directory.iterdir())[1:]:
            path.unlink()
        (directory / "exchanges").touch()
        return trial.Ended("enough")

    monkeypatch.setattr(trial, "run", run)
    found = record(["train.py"], tmp_path / "stage", 0, 2, STEPS - trial.WARM_UP)
    expected = np.broadcast_to(np.array([20.0, 40.0])[:, None], (STEPS - trial.WARM_UP, 1, 2, MICROBATCHES))
    assert found.passes == pytest.approx(expected)


def test_a_pipeline_takes_what_its_replay_does() -> None:
    send = Exchange("send", 3_000_000, False, True, (0, 1), MICROBATCHES)
    made = pipeline(ParallelSizes(pp=2), (3, 1), send, replace(send, kind="recv"))
    expected = simulate([[30.0], [10.0]], [[60.0], [20.0]], MICROBATCHES, p2p_ms=3.0, rendezvous=True).step_ms
    without = simulate([[30.0], [10.0]], [[60.0], [20.0]], MICROBATCHES, rendezvous=True).step_ms
    assert made.step_ms.value == pytest.approx(expected)
    assert made.step[-1] == pytest.approx(without)
    assert made.step_ms.low < expected - 1.0 < expected + 1.0 < made.step_ms.high


def test_collectives_are_counted_where_they_are() -> None:
    sizes, none = ParallelSizes(tp=2, pp=2, dp=2), pipeline(ParallelSizes(tp=2, pp=2, dp=2), (2, 2))
    inside = Exchange("all_reduce", 1_000_000, True, False, (0, 1), 4 * MICROBATCHES)  # 1 ms each, 4 in each backward
    behind = Exchange("reduce_scatter", 10_000_000, False, False, (0, 2), 1)
    gathered = Exchange("all_gather", 10_000_000, False, False, (0, 2), 1)
    longer = pipeline(sizes, (2, 2), inside)
    assert (longer.ends - longer.starts)[0, 0, 0, :, 0] == pytest.approx([20.0, 44.0])
    assert pipeline(sizes, (2, 2), behind).step_ms.value == pytest.approx(none.step_ms.value + 5.0)
    assert pipeline(sizes, (2, 2), gathered).step_ms.value == pytest.approx(none.step_ms.value)


def test_what_runs_beside_compute_costs_anything_from_nothing_to_all() -> None:
    sizes = ParallelSizes(tp=1, pp=2, dp=2)
    shown = pipeline(sizes, (2, 2), Exchange("reduce_scatter", 100_000_000, True, True, (0, 1), 1)).step
    assert shown[1] == pytest.approx(shown[3])
    assert (shown[2] - shown[3]) == pytest.approx(2 * (shown[0] - shown[3]))
    assert (shown[2] > shown[3]).all()


def test_every_command_reads_the_predicted_pipeline(tmp_path: Path) -> None:
    made = pipeline(ParallelSizes(pp=4), (2, 2, 2, 2))
    write(made, tmp_path)
    (target,) = analyze(tmp_path, memory_limit=5 * GIB).targets
    assert target.step_ms == pytest.approx(made.step_ms.value, rel=1e-4)
    assert [each.compute_ms and each.compute_ms.mean for each in target.stages] == pytest.approx([480.0] * 4)
    assert target.what_if.allocated == (4 * GIB,) * 4
    assert target.what_if.layout == "Et*2|t*2|t*2|t*2L"


def test_layers_and_ends_are_those_of_the_profiled_step(tmp_path: Path) -> None:
    """Half of the last stage's passes is the loss, which no time of a whole pass would show."""
    sizes = ParallelSizes(pp=2)
    stages = [stage(number, 2, sizes) for number in (0, 1)]
    parts = [
        tuple(
            (ModuleKey(LAYER, number, None, kind), 0, at, part) for number in numbers for at, kind in enumerate(KINDS)
        )
        for numbers, part in (((1, 2), 0.5), ((3, 4), 0.25))
    ]
    stages = [replace(each, layers=layers) for each, layers in zip(stages, parts, strict=True)]
    write(together(stages, WorldLayout(sizes), LINKS, 8), tmp_path)
    (target,) = analyze(tmp_path).targets
    assert target.what_if.costs is not None
    costs = target.what_if.costs.by_kind
    assert (costs["loss"].forward_ms, costs["loss"].backward_ms) == pytest.approx((10.0, 20.0), rel=1e-3)
    assert costs["embedding"].forward_ms == pytest.approx(0.0, abs=1e-3)
    assert target.what_if.costs.from_ranges


def test_disturbed_passes_leave_their_time_to_layers(tmp_path: Path) -> None:
    """Most passes of the last stage take three times as long, half of which is the loss: no layer costs nothing."""
    sizes = ParallelSizes(pp=2)
    first, last = (stage(number, 2, sizes) for number in (0, 1))
    disturbed = np.random.default_rng(0).random(last.passes.shape) < 0.6
    passes = 2.0 * last.passes * np.where(disturbed, 3.0, 1.0)
    layers = tuple(
        (ModuleKey(LAYER, number, None, kind), 0, at, 0.25) for number in (3, 4) for at, kind in enumerate(KINDS)
    )
    whole = tuple(
        (ModuleKey(LAYER, number, None, kind), 0, at, 0.5) for number in (1, 2) for at, kind in enumerate(KINDS)
    )
    stages = [replace(first, layers=whole), replace(last, passes=passes, layers=layers)]
    write(together(stages, WorldLayout(sizes), LINKS, 8), tmp_path)
    (target,) = analyze(tmp_path).targets
    assert target.what_if.costs is not None
    costs = target.what_if.costs.by_kind
    assert costs["loss"].forward_ms == pytest.approx(20.0, rel=0.2)
    assert costs["dense"].forward_ms == pytest.approx(10.0, rel=0.2)


def test_a_layout_that_fits_is_found_although_it_is_slower(tmp_path: Path) -> None:
    sizes = ParallelSizes(pp=2)
    first, last = (stage(number, 4, sizes) for number in (0, 1))
    stages = [first, replace(last, memory=Memory(4 * GIB, 5 * GIB, 80 * GIB))]
    write(together(stages, WorldLayout(sizes), LINKS, 8), tmp_path)
    (target,) = analyze(tmp_path, memory_limit=7 * GIB).targets
    (found,) = (each for each in target.what_if.candidates if each.kind == "layout" and each.fits)
    assert (target.what_if.allocated, found.layout) == ((8 * GIB, 5 * GIB), "Et*3|t*5L")
    assert found.speedup.value < 1.0


def test_recomputation_runs_forwards_again_and_keeps_what_layers_got(tmp_path: Path) -> None:
    sizes = ParallelSizes(pp=2)
    stages = [stage(number, 2, sizes) for number in (0, 1)]
    put_together = partial(together, layout=WorldLayout(sizes), links=LINKS, per_host=8)
    write(put_together(stages), tmp_path)
    (target,) = analyze(tmp_path, memory_limit=3 * GIB).targets
    found = _recomputed(stages, target.what_if, target.step_ms or 0.0, GIB >> 4, put_together)
    assert found.step_ms.value == pytest.approx(simulate([[20.0]] * 2, [[60.0]] * 2, MICROBATCHES).step_ms)
    assert found.needed == (2 * GIB + 4 * (GIB >> 4) + GIB // 2, 2 * GIB + 2 * (GIB >> 4) + GIB)
    assert found.fits is False  # the last stage: of one layer, all activations of its only microbatch
    assert replace(found, fits=None).flags[:2] == ("--recompute-granularity", "full")


def test_links_are_kept_without_what_stages_do_between_passes(tmp_path: Path) -> None:
    """Each stage takes a millisecond before each pass. Messages of 3 MB then take 6 ms instead of 3 ms."""
    sizes, send = ParallelSizes(pp=2), Exchange("send", 3_000_000, False, True, (0, 1), MICROBATCHES)
    stages = [stage(number, 2, sizes, send) for number in (0, 1)]
    stages = [replace(each, before=np.ones_like(each.passes)) for each in stages]
    for name, bandwidth in ((PREDICTED, 1e9), ("real", 0.5e9)):
        links = {"gloo": replace(LINKS["gloo"], bandwidth=bandwidth)}
        write(made := together(stages, WorldLayout(sizes), links, 8), tmp_path / name)
    what_if = analyze(tmp_path / PREDICTED).targets[0].what_if
    earlier = Rehearsal((), sizes, made.step_ms, 0.0, (LINKS["gloo"],), (3_000_000, 0), what_if, (), None, None, ())
    (tmp_path / NAME).write_bytes(json_of(earlier))
    assert compared(tmp_path, tmp_path / "real")[2]["gloo"].bandwidth == pytest.approx(0.5e9, rel=0.01)


def test_stages_with_different_schedules_are_no_pipeline() -> None:
    sizes = ParallelSizes(pp=2)
    with pytest.raises(Unanswerable, match="same schedule"):
        together([stage(0, 2, sizes), stage(1, 2, sizes, chunks=2)], WorldLayout(sizes), LINKS, 8)


@pytest.mark.parametrize(("beside", "chosen"), [(0.5, True), (5.0, False)])
def test_a_layout_with_other_chunks_is_rehearsed_itself(
    beside: float, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two chunks, each pass takes some time beside its layers, which no pass with one chunk shows."""
    sizes, ran = ParallelSizes(pp=2), list[bool]()
    passes = [[[10.0 + beside] * 2] * 2, [[20.0 + beside] * 2] * 2]

    def record(words: Sequence[str], place: Path, rank: int, world: int, steps: int) -> Stage:
        ran.append(several := "--num-virtual-stages-per-pipeline-rank" in words)
        each = stage(rank, 1 if several else 2, sizes, chunks=1 + several)
        return replace(each, passes=each.passes + beside * several)

    monkeypatch.setattr(rehearsal, "record", record)
    made, report = rehearsed(["train.py"], ["train.py"], tmp_path, 2, STEPS, LINKS, 8)
    assert ran == [False, False, True, True]
    assert (made.best is not None) == chosen
    (target,) = report.targets
    assert target.what_if == made.what_if  # as it ran, and not as it was predicted before
    assert target.advice == layout_advice(made.what_if)
    candidate = next(each for each in made.what_if.candidates if each.chunks == 2)
    assert candidate.step_ms.value == pytest.approx(simulate(*passes, MICROBATCHES).step_ms)
    if made.best is not None:
        assert made.best == candidate


def test_a_command_that_does_not_take_another_layout_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as it did before, whatever its options say."""
    sizes = ParallelSizes(pp=2)
    monkeypatch.setattr(rehearsal, "record", lambda words, place, rank, world, steps: stage(rank, 2, sizes))
    made, _ = rehearsed(["train.py"], ["train.py"], tmp_path, 2, STEPS, LINKS, 8)
    assert made.best is None
    assert next(each.fits for each in made.what_if.candidates if each.chunks == 2) is False
    assert "does not take the options" in capsys.readouterr().err


def test_layouts_with_other_chunks_run_until_no_other_one_may_be_quicker() -> None:
    def change(name: str, speedup: float, chunks: int | None, **more: bool) -> Prediction:
        found = Prediction.of("layout" if chunks is None else "chunks", 100.0, Interval.of(100.0 / speedup))
        return replace(found, layout=name, chunks=chunks, flags=("--some",), **more)

    really, ran = {"two": 1.3, "three": 1.35, "three that fits": 1.32}, list[str]()

    def as_it_runs(wanted: Prediction) -> Prediction:
        ran.append(wanted.layout or "")
        return replace(change(ran[-1], really[ran[-1]], wanted.chunks), fits=ran[-1] != "three")

    changes = [
        change("alike", 1.2, None),
        change("two", 1.5, 2),
        change("another with two", 1.45, 2),
        change("three", 1.4, 3),
        change("three that fits", 1.39, 3),
        change("too large", 1.6, 4, fits=False),
        change("four", 1.25, 4),
    ]
    found, best = _best_of(changes, as_it_runs, 1.0)
    assert ran == ["two", "three", "three that fits"]
    assert best is not None
    assert best.layout == "three that fits"
    assert [each.layout for each in found] == [each.layout for each in changes]
    assert [each.speedup.value for each in found] == pytest.approx([1.2, 1.3, 1.45, 1.35, 1.32, 1.6, 1.25])


def test_only_stages_that_differ_are_run() -> None:
    sizes = ParallelSizes(pp=8)
    even = {number: stage(number, 2, sizes) for number in (0, 4, 7)}
    assert alike(even)
    (chunk,) = even[7].metadata.chunks
    later = replace(even[7].metadata, chunks=(replace(chunk, layer_numbers=(16, 17)),))
    assert not alike({**even, 7: replace(even[7], metadata=later)})
    other = replace(even[7].metadata, chunks=(replace(chunk, kinds=("dense", "moe")),))
    assert not alike({**even, 7: replace(even[7], metadata=other)})


def test_routing_is_balanced_where_megatron_lm_can_do_it() -> None:
    words = ["pretrain_gpt.py", "--num-experts", "8"]
    assert balanced(words) == [*words, "--moe-router-force-load-balancing"]
    assert balanced(words[:1]) == words[:1]
