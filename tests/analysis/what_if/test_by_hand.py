"""Changes that a person chooses, against the report's own predictions and Megatron's rules."""

from __future__ import annotations

import json
import pickle
from dataclasses import astuple, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megaprof.agents.server import of_change
from megaprof.analysis.report.report import Report, analyze
from megaprof.analysis.report.text.what_if import costs_line, memory, name_of
from megaprof.analysis.samples import Interval
from megaprof.analysis.what_if.changeable import Changeable, chosen, split, stages_after, tried
from megaprof.analysis.what_if.changes import Prediction, resliced
from megaprof.analysis.what_if.contents import Cost, CostFit
from megaprof.analysis.what_if.layouts import check_layout, format_layout, parse_layout
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.cli import FAILED, USAGE, main, parser_of
from megaprof.cli.what_if import answer_to, in_words
from megaprof.ui.what_if import answer, moved
from tests.analysis.diagnosis.test_diagnose import HEALTHY
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import pipeline
from tests.analysis.truth import files as truth
from tests.analysis.truth.pipelines import Fault, Priced
from tests.cli.running import check


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    write(Scenario("by hand", layers=(6, 4, 4, 2), loss=4.0, microbatches=8, noise=0.005, steps=3), made)
    return made


@pytest.fixture(scope="module")
def report(directory: Path) -> Report:
    return analyze(directory)


@pytest.fixture(scope="module")
def found(report: Report) -> WhatIf:
    return report.targets[0].what_if


@pytest.fixture(scope="module")
def known(report: Report) -> Changeable:
    (by_hand,) = report.by_hand
    assert by_hand is not None
    return by_hand


def test_what_was_captured_takes_what_was_measured(found: WhatIf, known: Changeable) -> None:
    as_captured = tried(known, known.captured)
    assert as_captured.prediction.step_ms.value == pytest.approx(found.measured_ms)
    assert as_captured.prediction.speedup.value == pytest.approx(1.0)
    assert as_captured.prediction.layout == found.layout == "Et*6|t*4|t*4|t*2L"
    assert as_captured == known.as_captured


def test_as_captured_the_stages_are_those_of_the_report(report: Report, known: Changeable) -> None:
    measured = report.targets[0]
    after = stages_after(measured, known, known.as_captured)
    for stage, *row in zip(measured.stages, after.compute_ms, after.bubbles, strict=True):
        assert stage.compute_ms is not None
        assert row == pytest.approx([stage.compute_ms.mean, stage.bubble_fraction])
    assert after.imbalance == pytest.approx(measured.imbalance)


def test_the_stages_of_another_layout_are_those_of_a_run_with_it(
    tmp_path: Path, report: Report, known: Changeable
) -> None:
    after = stages_after(report.targets[0], known, chosen(known, {"layout": "4,4,4,4"}))
    write(Scenario("ran", layers=(4, 4, 4, 4), loss=4.0, microbatches=8, noise=0.005, steps=3), tmp_path)
    ran = analyze(tmp_path).targets[0]
    for stage, compute_ms, bubble in zip(ran.stages, after.compute_ms, after.bubbles, strict=True):
        assert stage.compute_ms is not None
        assert compute_ms == pytest.approx(stage.compute_ms.mean, rel=0.03)
        assert bubble == pytest.approx(stage.bubble_fraction, abs=0.02)
    assert after.imbalance == pytest.approx(ran.imbalance, rel=0.03)


def test_exchanges_of_larger_microbatches_take_as_long_or_longer_in_proportion(tmp_path: Path) -> None:
    """The files do not say which, unless a person does."""
    write(Scenario("far", layers=(4, 4), transfer=8.0, microbatches=8, noise=0.005, steps=3, gpu=False), tmp_path)
    report = analyze(tmp_path)
    (run,) = report.by_hand
    assert run is not None
    fewer = {"microbatches": "4"}
    as_long, twice, open_ = (chosen(run, fewer | more).prediction for more in ({"p2p": "8.001"}, {"p2p": "16"}, {}))
    assert run.baseline.view.p2p_ms == pytest.approx(8.0, rel=0.05)
    assert open_.step_ms.value == pytest.approx(as_long.step_ms.value, rel=0.01)
    assert open_.step_ms.low < as_long.step_ms.value
    assert open_.step_ms.high > twice.step_ms.value > as_long.step_ms.high, (
        "what a person says of exchanges is not left open"
    )
    (own,) = (each for each in report.targets[0].what_if.candidates if each.microbatches == 4)
    assert own.step_ms == open_.step_ms


def test_the_drawn_step_is_the_one_whose_replay_is_nearest_to_the_average(known: Changeable) -> None:
    replayed = known.baseline.view.pipelines_ms.max(axis=1)
    nearest = np.abs(replayed - replayed.mean()).argmin()
    # That another step is as long as the average says nothing of its replay.
    length = np.roll([10.0, 0.0, -10.0], nearest) + known.baseline.step_ms
    longer = replace(known.baseline, table=replace(known.baseline.table, length=length))
    drawn = replace(known, baseline=longer).as_captured.simulation
    assert drawn.step_ms == pytest.approx(replayed[nearest])


def test_the_same_change_takes_what_the_report_predicts(found: WhatIf, known: Changeable) -> None:
    by_kind: dict[str, int] = {}
    for each in found.candidates:
        if each.kind == "microbatches":
            wanted = replace(known.captured, microbatches=each.microbatches)
        elif each.layout is not None:
            wanted = replace(known.captured, pieces=parse_layout(each.layout, known.stages))
        else:
            continue
        by_kind[each.kind] = by_kind.get(each.kind, 0) + 1
        mine = tried(known, wanted).prediction
        assert mine.step_ms == each.step_ms, each
        assert mine.layout == each.layout or each.kind == "microbatches"
        assert mine.flags == each.flags or each.kind == "microbatches"
    assert by_kind.keys() == {"layout", "chunks", "microbatches"}


def test_whatever_takes_time_in_predictions_is_told() -> None:
    by_kind = {"dense": Cost(4.0, 9.0), "embedding": Cost(0.0, 3.6e-15), "loss": Cost(12.0, 20.7)}
    told = costs_line(CostFit(by_kind, ("dense",), 0.0, False, ("ends_hidden",)))
    assert told.startswith("Costs of a microbatch in the quicker passes, "), "nothing is undisturbed under load"
    assert ["dense 13.0" in told, "loss 32.7" in told, "embedding 0" in told] == [True, True, False]


def test_another_number_of_chunks_is_named_with_the_captured_one(tmp_path: Path) -> None:
    """What a layout gains then comes from the chunks as well."""
    write(Scenario("chunks", layers=((2, 1), (2, 3)), loss=4.0, microbatches=8, noise=0.005, steps=3), tmp_path)
    report = analyze(tmp_path)
    (run,), (target,) = report.by_hand, report.targets
    assert run is not None
    fewer, other = (name_of(chosen(run, {"layout": text}).prediction, target.what_if) for text in ("4,4", "2,2,2,2"))
    assert fewer == "4+4 layers, 1 model chunk per stage instead of 2"
    assert "per stage" not in other


@pytest.mark.parametrize("choices", [{"tokens": "2", "microbatches": "16"}, {"packing": "even"}])
def test_a_choice_that_does_not_exist_is_refused(known: Changeable, choices: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is none of"):
        chosen(known, choices)


def test_a_layout_and_another_number_of_chunks_contradict_each_other(known: Changeable) -> None:
    with pytest.raises(ValueError, match="chunks=2 needs a layout of 8 pieces, not of 4"):
        chosen(known, {"layout": "4,4,4,4", "chunks": "2"})


def test_model_chunks_are_counted_in_a_layout_that_is_written_short() -> None:
    """As on 8 stages of one chunk each: ``Et|(t|)*6tL``."""
    now = WhatIf(layout=format_layout(("Et", *["t"] * 6, "tL")))
    layout = format_layout(("Et", *["t"] * 14, "tL"))
    change = Prediction("by_hand", Interval.of(1.0), Interval(1.0, 1.0, 1.0), layers=(2,) * 8, layout=layout, chunks=2)
    assert name_of(change, now).endswith(" layers, 2 model chunks per stage instead of 1")


def test_the_command_the_tool_and_the_page_say_the_same(
    directory: Path, report: Report, known: Changeable, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = chosen(known, {"layout": "5,4,4,3", "microbatches": "16"}).prediction
    assert mine.layout == "Et*5|t*4|t*4|t*3L"
    assert main(["what-if", str(directory), "--layout", "5,4,4,3", "--microbatches", "16", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    check("what-if", printed)
    assert printed["prediction"] == json.loads(msgspec.json.encode(mine))
    told = of_change(parser_of("what-if").parse([str(directory), "--layout", "5,4,4,3", "--microbatches", "16"]))
    assert {name: value for name, value in told.items() if name != "headline"} == printed
    (target,) = report.targets
    page = answer(known, target, {"layout": "5,4,4,3", "microbatches": "16"})
    assert page.now.prediction == mine
    assert (page.after.bubble, page.after.imbalance) == (printed["bubble"], printed["imbalance"])
    # Half as large, 16 microbatches in flight hold what 8 did: what is told is in layers of captured ones.
    small = replace(mine, in_flight=tuple(each // 2 for each in mine.in_flight), activations=1.0)
    held = report.targets[0].what_if
    halved = replace(small, in_flight=tuple(2 * each for each in small.in_flight), activations=0.5)
    assert memory(halved, held) == memory(small, held)
    for wrong, code in (
        (["--layout", "5,4,4"], USAGE),
        (["--layout", "5,4,4,4"], USAGE),
        (["--microbatches", "0"], USAGE),
        (["--packing", "tight"], USAGE),
        (["--packing", "balanced"], FAILED),
        (["--target", "evaluate"], USAGE),
        (["--run", "7"], USAGE),
    ):
        assert main(["what-if", str(directory), *wrong]) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (Interval(1.2, 1.1, 1.3), ": faster, 1.20 (1.10 to 1.30) times as fast"),
        (Interval(0.8, 0.7, 0.9), ": slower, 0.80 (0.70 to 0.90) times as fast"),
        (Interval(1.001, 0.98, 1.02), ": 1.00 (0.98 to 1.02) times as fast, within the uncertainty"),
    ],
)
def test_the_command_says_faster_or_slower_of_what_surely_is(report: Report, speedup: Interval, said: str) -> None:
    answered = answer_to(report, {"layout": "5,4,4,3"})
    _, step, *_ = in_words(replace(answered, prediction=replace(answered.prediction, speedup=speedup)))
    assert step.endswith(said)


def test_it_survives_the_way_between_processes(known: Changeable) -> None:
    wanted = replace(known.captured, pieces=moved(known.pieces, 0, 3))
    again: Changeable = pickle.loads(pickle.dumps(known))
    assert tried(again, wanted).prediction == tried(known, wanted).prediction


def test_more_microbatches_of_the_same_size_take_longer(known: Changeable) -> None:
    same = replace(known.captured, microbatches=16)
    more = replace(same, same_tokens=False)
    measured = known.baseline.step_ms
    assert tried(known, same).prediction.step_ms.value < measured < tried(known, more).prediction.step_ms.value
    half = tried(known, replace(known.captured, microbatches=4)).prediction
    assert (tried(known, more).prediction.activations, half.activations) == (1.0, 2.0)


@pytest.mark.parametrize(("count", "better"), [(4, False), (16, True)])
def test_steps_of_other_tokens_are_compared_by_token(known: Changeable, count: int, better: bool) -> None:
    found = chosen(known, {"microbatches": str(count), "tokens": "more"}).prediction
    whole = found.step_ms.value / known.baseline.step_ms
    assert found.step_tokens == count / known.microbatches
    took = found.step_ms
    assert astuple(found.speedup) == pytest.approx(
        tuple(found.step_tokens * known.baseline.step_ms / ms for ms in (took.value, took.high, took.low))
    )
    # Fewer microbatches fill the pipeline less well, though their step is shorter.
    assert (found.speedup.value > 1.0, whole > 1.0) == (better, better)


def test_a_layout_that_stays_needs_no_flags(known: Changeable) -> None:
    assert chosen(known, {"microbatches": "16"}).prediction.flags == ()


def test_slower_transfers_make_the_step_longer(known: Changeable) -> None:
    slow = replace(known.captured, p2p_ms=known.baseline.view.p2p_ms + 5.0)
    assert tried(known, slow).prediction.step_ms.value > known.baseline.step_ms + 5.0


def test_transfers_as_quick_as_those_of_other_links_gain_what_the_slow_link_costs(tmp_path: Path) -> None:
    slow = replace(HEALTHY, faults=(Fault("slow_link", 6.0, stage=1),))
    truth.write(slow, Priced(slow).run(Priced(slow).all), tmp_path)
    report = analyze(tmp_path)
    (by_hand,) = report.by_hand
    assert by_hand is not None
    diagnosis = report.targets[0].diagnosis
    assert diagnosis is not None
    (cause,) = diagnosis.causes
    prediction = chosen(by_hand, {"p2p": str(cause.parts["usual_ms"])}).prediction
    assert by_hand.baseline.step_ms - prediction.step_ms.value == pytest.approx(cause.price.value, rel=0.05)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pieces": ("Et*6",) * 4}, "must end with the loss"),
        ({"pieces": ("Etttttt", "tttt", "ttttt", "ttL")}, "expected 16"),
        ({"pieces": ("E", "t" * 16, "L")}, "multiple of pp=4"),
        ({"microbatches": 0}, "between 1 and 4096"),
        ({"microbatches": 10**9}, "between 1 and 4096"),
        ({"p2p_ms": float("nan")}, "number of milliseconds"),
        ({"p2p_ms": -1.0}, "number of milliseconds"),
    ],
)
def test_what_megatron_refuses_is_refused(known: Changeable, change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tried(known, replace(known.captured, **change))  # type: ignore[arg-type]


def test_the_interleaved_schedule_wants_its_groups_whole(known: Changeable) -> None:
    chunks = split(known.pieces, known.stages, 2)
    assert tried(known, replace(known.captured, pieces=chunks)).simulation.schedule.name == "interleaved"
    with pytest.raises(ValueError, match="microbatches=6 leaves 2 in the last group"):
        tried(known, replace(known.captured, pieces=chunks, microbatches=6))


def test_moves_keep_every_layer_and_their_order() -> None:
    pieces = parse_layout("Et*2|tt|ttmmL", 3)
    assert moved(pieces, 0, 2) == ("Et", "tt", "tttmmL")
    assert moved(pieces, 2, 0) == ("Ettt", "tt", "tmmL")
    everything = moved(moved(pieces, 2, 1), 2, 1)
    assert everything == ("Ett", "tttt", "mmL")
    apart = moved(everything, 2, 1, "m")
    assert apart == ("Ett", "ttttmm", "L")
    check_layout(apart, 3, 6, 2)
    for source, target, letter in ((0, 3, "t"), (-1, 0, "t"), (2, 1, "E"), (0, 1, "m")):
        with pytest.raises(ValueError, match="piece"):
            moved(pieces, source, target, letter)
    with pytest.raises(ValueError, match="no decoder layer"):
        moved(everything, 2, 1)


@pytest.mark.parametrize(("layers", "chunks"), [(16, 2), (10, 2), (5, 2), (3, 1)])
def test_another_number_of_chunks_is_split_evenly(layers: int, chunks: int) -> None:
    pieces = split(("E" + "t" * layers, "", "", "L"), 4, chunks)
    check_layout(pieces, 4, layers)
    counts = [piece.count("t") for piece in pieces]
    assert len(pieces) == 4 * chunks
    assert max(counts) - min(counts) <= 1


def test_other_microbatches_share_the_tokens() -> None:
    times = np.array([[1.0, 2.0, 3.0, 6.0]])
    assert resliced(times, 4, 1.0).tolist() == times.tolist()
    assert resliced(times, 8, 0.5).tolist() == [[0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 3.0, 3.0]]
    assert resliced(times, 2, 2.0).tolist() == [[3.0, 9.0]]
    assert resliced(times, 3, 4 / 3)[0] == pytest.approx([1 + 2 / 3, 4 / 3 + 3 * 2 / 3, 1 + 6.0])
    assert resliced(times, 6, 1.0).tolist() == [[1.0, 2.0, 3.0, 6.0, 1.0, 2.0]]


def test_a_run_that_is_not_predicted_cannot_be_changed(tmp_path: Path) -> None:
    pipeline(tmp_path, [4])
    report = analyze(tmp_path)
    assert report.by_hand == (None,)
    assert report.targets[0].what_if.warnings


def test_the_bubble_without_exchanges_is_about_that_of_a_run_without_them(tmp_path: Path) -> None:
    """What exchanges take is no bubble in a GPU trace, but a replay without them is shorter by it."""
    scenario = Scenario("slow exchanges", layers=(4, 4), transfer=15.0, microbatches=8, noise=0.005, steps=3)
    write(scenario, tmp_path / "slow")
    write(replace(scenario, transfer=0.0), tmp_path / "quick")
    report, ran = analyze(tmp_path / "slow"), analyze(tmp_path / "quick").targets[0]
    (run,) = report.by_hand
    assert run is not None
    after = stages_after(report.targets[0], run, chosen(run, {"p2p": "0"}))
    for stage, bubble in zip(ran.stages, after.bubbles, strict=True):
        assert bubble == pytest.approx(stage.bubble_fraction, abs=0.06)


def test_a_refusal_says_once_that_nothing_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline(tmp_path, [8])
    assert main(["what-if", str(tmp_path), "--microbatches", "8"]) == FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megaprof what-if: nothing can be predicted: a single stage")
    assert line.count("predicted") == 1
