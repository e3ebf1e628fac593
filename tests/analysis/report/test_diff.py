"""Two captures compared: what changed, by how much, and whether that is more than chance."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from megaprof.analysis import words
from megaprof.analysis.report import diff as text
from megaprof.analysis.report.diff import compare
from megaprof.analysis.report.report import Document, analyze
from megaprof.analysis.report.terminal import show_diff
from megaprof.formats.phrases import Unanswerable
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import pipeline


def report(directory, layers, *, steps=(5,), **options):
    for step in steps:
        pipeline(directory, layers, step=step, **options)
    return analyze(directory)


def document(report):
    """As it stands in its file."""
    return report.to_json()


def read(document):
    return Document.from_json(json.dumps(document).encode())


def only(diff):
    (target,) = diff.targets
    return target


def test_a_layout_change_is_seen_on_every_stage(tmp_path):
    target = only(compare(report(tmp_path / "a", [6, 2]), report(tmp_path / "b", [4, 4])))
    assert [(s.layers_before, s.layers_after) for s in target.stages] == [("emb+6", "emb+4"), ("2+loss", "4+loss")]
    first, second = (stage.changes for stage in target.stages)
    assert (first["forward_ms"].before, first["forward_ms"].after) == (240, 160)
    assert first["forward_ms"].change == pytest.approx(-1 / 3)
    assert first["compute_ms"].beyond_spread is True
    assert second["backward_ms"].change == pytest.approx(1.0)
    assert (target.step_time.before, target.step_time.after) == (720, 481)
    assert target.verdict_before.startswith("layers of stage 0")
    assert not target.verdict_after.startswith("layers")
    assert target.layer.change == pytest.approx(0.0, abs=0.01)


def test_one_step_cannot_tell_chance_from_change_where_microbatches_say_nothing(tmp_path):
    target = only(compare(report(tmp_path / "a", [6, 2]), report(tmp_path / "b", [6, 2], per_layer=11.0)))
    assert target.step_time.change == pytest.approx(0.1, abs=0.01)
    assert target.step_time.beyond_spread is None
    assert target.stages[1].changes["bubble_ms"].beyond_spread is None
    assert target.stages[0].changes["forward_ms"].beyond_spread is True  # four microbatches, all alike
    assert target.layer.change == pytest.approx(0.1, abs=0.01)


def test_a_change_within_the_spread_is_called_that(tmp_path):
    before, after = (document(report(tmp_path / name, [6, 2])) for name in "ab")
    for saved, mean in ((before, 100.0), (after, 102.0)):
        for stage in saved["targets"][0]["stages"]:
            stage["forward_ms"] |= {"mean": mean, "stdev": 5.0, "count": 10}
    change = only(compare(read(before), read(after))).stages[0].changes["forward_ms"]
    assert (change.change, change.beyond_spread) == (pytest.approx(0.02), False)
    for stage in after["targets"][0]["stages"]:
        stage["forward_ms"]["mean"] = 106.0
    assert only(compare(read(before), read(after))).stages[0].changes["forward_ms"].beyond_spread is True


def test_several_steps_tell_for_the_step_time_too(tmp_path):
    before = report(tmp_path / "a", [6, 2], steps=(1, 2, 3))
    after = report(tmp_path / "b", [6, 2], steps=(1, 2, 3), per_layer=12.0)
    assert only(compare(before, after)).step_time.beyond_spread is True
    assert only(compare(before, before)).step_time.beyond_spread is False


def test_a_step_is_surely_slower_or_surely_not_or_it_is_not_certain(tmp_path):
    """The interval of the change, 1.645 standard errors to both sides, lies above the bound, below it, or around it."""
    before, after = (document(report(tmp_path / name, [4, 4], steps=(1, 2, 3))) for name in "ab")
    for saved, mean in ((before, 100.0), (after, 106.0)):
        saved["targets"][0]["step_time_ms"] |= {"mean": mean, "stdev": 3.0, "count": 19}

    def judged(**changed):
        target = only(compare(read(before), replace_in(after, **changed)))
        return target.slower_by(0.03), text.bound_clause(target, 0.03), target.step_time

    slower, said, step = judged()
    assert (step.change, step.low, step.high) == pytest.approx((0.06, 0.06 - 0.01645, 0.06 + 0.01645), abs=1e-5)
    assert slower is True
    assert said.startswith("a step is surely more than 3.0% slower (+6.0%, between +4.4% and +7.6%): no cause explains")
    assert judged(mean=104.0)[0] is None
    assert "is not certain (+4.0%" in judged(mean=104.0)[1]
    assert judged(mean=100.5)[0] is False
    assert judged(mean=90.0)[0] is False
    assert judged(count=2)[0] is None
    assert "three steps in each" in judged(count=2)[1]


def replace_in(saved, **step_time):
    saved = json.loads(json.dumps(saved))
    saved["targets"][0]["step_time_ms"] |= step_time
    return read(saved)


def test_what_made_a_step_slower_is_named(tmp_path):
    even, uneven = (report(tmp_path / name, split, steps=(1, 2, 3)) for name, split in (("a", [4, 4]), ("b", [6, 2])))
    target = only(compare(even, uneven))
    moved = target.causes["layers"]
    assert (moved.before, moved.beyond_spread, moved.change) == (0.0, True, None)
    assert moved.after > 100.0
    assert target.slower_by(0.03) is True
    assert "the price of layers went from 0.00 to" in text.bound_clause(target, 0.03)
    assert text.bound_clause(target, 0.03).endswith("most of the difference")
    assert only(compare(uneven, even)).slower_by(0.03) is False


def test_a_slower_machine_is_not_taken_for_a_cause_that_costs_more_on_it(tmp_path):
    quick, slow = (report(tmp_path / str(ms), [6, 2], steps=(1, 2, 3), per_layer=ms) for ms in (10.0, 18.0))
    target = only(compare(quick, slow))
    assert target.causes["layers"].change == pytest.approx(0.8, abs=0.05)
    assert target.causes["layers"].beyond_spread is True
    assert "no cause explains it" in text.bound_clause(target, 0.03)


@pytest.mark.parametrize(
    ("other", "note", "judged"),
    [
        ({"microbatches": 8}, "microbatches 4 -> 8: steps do not do the same work", False),
        ({"sizes": {"dp": 2}}, "dp 1 -> 2: steps do not do the same work", False),
        ({"sizes": {"tp": 2}}, "tp 1 -> 2", True),
    ],
)
def test_steps_with_other_work_are_not_judged(tmp_path, other, note, judged):
    before = report(tmp_path / "a", [6, 2], steps=(1, 2, 3))
    after = report(tmp_path / "b", [6, 2], steps=(1, 2, 3), **other)
    target = only(compare(before, after))
    assert note in target.notes
    assert target.comparable == (target.slower_by(0.03) is not None) == judged
    assert ("do not do the same work" in text.bound_clause(target, 0.03)) != judged


def test_more_microbatches_are_no_slower_stage(tmp_path):
    before, after = report(tmp_path / "a", [6, 2]), report(tmp_path / "b", [6, 2], microbatches=8)
    target = only(compare(before, after))
    assert target.stages[0].changes["forward_ms"].beyond_spread is None
    assert any("microbatches 4 -> 8" in note for note in target.notes)


def test_times_of_two_models_are_shown_and_not_compared(tmp_path):
    """A layer of experts takes as long as it takes: no machine, load or setting made it slower than a dense one."""
    steps = (1, 2, 3)
    before = report(tmp_path / "a", [6, 2], steps=steps)
    after = report(tmp_path / "b", [4, 4], steps=steps, per_layer=30.0, kind="moe")
    diff = compare(before, read(document(after)))
    target = only(diff)
    assert (target.layer, target.prediction) == (None, None)
    changes = [target.step_time, *(each for stage in target.stages for each in stage.changes.values())]
    assert {(each.change, each.beyond_spread) for each in changes} == {(None, None)}
    assert (target.step_time.before, target.step_time.after) == (720, 1441)
    sink = io.StringIO()
    show_diff(diff, Console(file=sink, width=400))
    shown = sink.getvalue()
    assert "step time 720 → 1441 ms" in shown
    assert "layers 8 dense -> 8 moe: another model, so no time is compared" in shown
    assert "whether the machine changed is not known: the captures are of different models" in shown
    assert "not the layout" not in shown
    assert only(compare(before, report(tmp_path / "c", [4, 4], steps=steps))).same_model


def test_stages_of_one_capture_only_are_shown_with_nothing_beside_them(tmp_path):
    target = only(compare(report(tmp_path / "a", [4, 4]), report(tmp_path / "b", [2, 2, 2, 2])))
    third = target.stages[2]
    assert (third.layers_before, third.layers_after) == (None, "2")
    change = third.changes["forward_ms"]
    assert (change.before, change.after, change.change, change.beyond_spread) == (None, 80, None, None)
    assert any(note.startswith("pp 2 -> 4") for note in target.notes)


def test_what_is_wrong_with_a_capture_is_said(tmp_path):
    whole = report(tmp_path / "a", [6, 2])
    report(tmp_path / "b", [4, 4])
    first, _ = sorted((tmp_path / "b").iterdir())
    first.write_bytes(b"")
    half = analyze(tmp_path / "b")
    diff = compare(whole, half)
    assert [each.removeprefix("second capture: ") for each in diff.warnings] == [each.text for each in half.warnings]
    assert any("it is empty" in each for each in diff.warnings)
    of_target = half.targets[0]
    for each in (*of_target.warnings, *of_target.what_if.warnings):
        assert any(note.endswith(f"capture: {each.text}") for note in only(diff).notes)
    named = "no cause of lost time is named"
    assert any(note.startswith(f"second capture: {named}: 1 of 2 stages") for note in only(diff).notes)
    assert compare(whole, read(document(half))) == diff
    assert sum(f"{named}: 1 of 2 stages" in note for note in only(compare(half, half)).notes) == 1


def test_targets_are_matched_by_name_and_role(tmp_path):
    for role in ("actor", "ref"):
        pipeline(tmp_path / "a", [2, 2], target="train_log_probs", role=role)
    before = report(tmp_path / "a", [2, 2])
    pipeline(tmp_path / "b", [3, 1], target="train_log_probs", role="ref")
    diff = compare(before, analyze(tmp_path / "b"))
    assert (only(diff).target, only(diff).role) == ("train_log_probs", "ref")
    (only_in_first,) = diff.warnings
    assert only_in_first.endswith(" only in the first capture: not compared")
    assert "train_actor, " in only_in_first or ", train_actor" in only_in_first
    assert "train_log_probs (actor)" in only_in_first
    both = analyze(tmp_path / "a")
    assert [(each.target, each.role) for each in compare(both, both).targets] == [each.key for each in both.targets]


def test_nothing_in_common_says_what_there_is(tmp_path):
    before = report(tmp_path / "a", [2, 2])
    after = report(tmp_path / "b", [2, 2], target="evaluate")
    with pytest.raises(Unanswerable, match=r"train_actor in the first, evaluate in the second"):
        compare(before, after)


@pytest.mark.parametrize(
    "document",
    [[], None, {}, {"version": "1", "targets": 3}, {"version": "1", "targets": [{"target": 1, "stages": []}]}],
)
def test_what_is_no_report_is_refused(document):
    with pytest.raises(ValueError):  # noqa: PT011  # each says something else
        read(document)


def test_a_saved_report_compares_as_the_report_itself(tmp_path):
    write(Scenario("gpu", layers=((2, 4), (2, 2)), exposed={"tp": 0.1}, dp=2, tail=2.0, steps=3), tmp_path / "a")
    write(Scenario("cpu", layers=((2, 2), (2, 2)), gpu=False), tmp_path / "b")
    before, after = analyze(tmp_path / "a"), analyze(tmp_path / "b")
    assert compare(read(document(before)), read(document(after))) == compare(before, after)


def test_a_layout_that_was_predicted_stands_beside_what_came_of_it(tmp_path):
    job = Scenario("job", layers=(6, 2), gpu=False, noise=0.005, steps=2)
    found = []
    for number, run in enumerate((job, replace(job, layers=(4, 4), seed=1), replace(job, layers=(4, 4), layer=7.0))):
        write(run, tmp_path / str(number))
        found.append(analyze(tmp_path / str(number)))
    before, after, slower = found
    kept = only(compare(read(document(before)), after)).prediction
    assert (kept.what, kept.layout, kept.inside) == ("4+4 layers", "Et*4|t*4L", True)
    predicted = next(each for each in before.targets[0].what_if.candidates if each.layout == kept.layout)
    assert (kept.predicted, kept.predicted_ms) == (predicted.speedup, predicted.step_ms.value)
    times = [each.targets[0].diagnosis.step_ms for each in (before, after)]
    assert (kept.measured, kept.measured_ms) == (times[0] / times[1], times[1])
    assert kept.error == pytest.approx(kept.expected_ms.value / kept.measured_ms - 1)
    assert abs(kept.error) < 0.02
    machine = only(compare(before, slower))
    assert machine.prediction.inside is True, "layers take longer there: the prediction is not to blame"
    assert machine.prediction.expected_ms.value > (1.0 + 0.8 * machine.layer.change) * machine.prediction.predicted_ms
    assert abs(machine.prediction.error) < 0.02
    wrong = document(before)
    for each in wrong["targets"][0]["what_if"]["candidates"]:
        each["step_ms"] = {name: 0.8 * ms for name, ms in each["step_ms"].items()}
    wrong = compare(read(wrong), after)
    assert only(wrong).prediction.inside is False
    sink = io.StringIO()
    show_diff(wrong, Console(file=sink, width=400))
    assert "4+4 layers: predicted 1.4" in sink.getvalue()
    assert "outside its interval" in sink.getvalue()
    unsure = document(before)
    for each in unsure["targets"][0]["what_if"]["candidates"]:
        each["speedup"]["low"] = 0.9
    kept = only(compare(read(unsure), after)).prediction
    assert kept.inside is None, "1.4, from 0.9 on, predicts nothing, whatever comes"
    told = text.prediction_clause(kept)
    steps = [kept.before_ms, kept.predicted_ms, kept.measured_ms, kept.expected_ms.value]
    assert all(words.number(ms) in told for ms in steps), "and yet all numbers, so that anybody may judge"


def test_what_is_certain_in_one_capture_and_possible_in_the_other_does_not_look_new(tmp_path):
    before, after = report(tmp_path / "a", [6, 2]), report(tmp_path / "b", [6, 2])
    (target,) = (saved := document(before))["targets"]
    diagnosis = target["diagnosis"]
    (layers,) = (each for each in diagnosis["causes"] if each["kind"] == "layers")
    diagnosis |= {"causes": [], "perhaps": [layers], "sure": False}
    found = only(compare(read(saved), after))
    assert found.verdict_before.startswith("perhaps layers of stage 0 (")
    assert "perhaps" not in found.verdict_after
    assert "layers of stage 0 (" in found.verdict_after


def test_what_disturbed_one_capture_alone_is_none_of_the_layout(tmp_path):
    """The first capture lost 300 ms of every step to waiting for cores, and the second one nothing."""
    found = []
    for number, layers in enumerate(((6, 2), (4, 4))):
        write(Scenario("job", layers=layers, gpu=False, noise=0.005, steps=2), tmp_path / str(number))
        found.append(analyze(tmp_path / str(number)))
    before, after = found
    plain = only(compare(before, after)).prediction
    for width, inside in ((1.0, True), (1000.0, None)):
        (disturbed,) = (saved := document(before))["targets"]
        diagnosis = disturbed["diagnosis"]
        diagnosis["step_ms"] += 300.0
        price = {"value": 300.0, "low": 300.0 - width, "high": 300.0 + width}
        diagnosis["causes"].append({**diagnosis["causes"][0], "kind": "processor_wait", "price": price})
        for each in disturbed["what_if"]["candidates"]:
            each["step_ms"] = {name: ms + 300.0 for name, ms in each["step_ms"].items()}
        kept = only(compare(read(saved), after)).prediction
        assert kept.measured > 1.2 * plain.measured
        assert (kept.expected_ms.value, kept.error) == pytest.approx((plain.expected_ms.value, plain.error))
        assert kept.inside is inside, "an uncertain disturbance leaves open what the layout did"
    price |= {"value": kept.predicted_ms + 1.0}
    diagnosis["causes"][-1]["price"] = price
    kept = only(compare(read(saved), after)).prediction
    assert (kept.expected_ms, kept.inside) == (None, None), "no step takes less than nothing"
    assert "what of that the machine changed is not known" in text.prediction_clause(kept)


@pytest.mark.parametrize("slow", [{"link": {1: 20.0}}, {"slow": {1: 1.3}, "peers": 2}])
def test_what_is_as_slow_in_both_captures_is_a_part_of_the_prediction(tmp_path, slow):
    """A slow link or rank costs the first layout more than the second one, which hides it."""
    found = []
    for number, layers in enumerate(((4, 4, 4, 4), (5, 3, 4, 4))):
        write(Scenario("job", layers=layers, noise=0.005, steps=3, **slow), tmp_path / str(number))
        found.append(analyze(tmp_path / str(number)))
    before, after = found
    (saved,) = (document_before := document(before))["targets"]
    change = saved["what_if"]["candidates"][0] | {"layout": after.targets[0].what_if.layout}
    step_ms = after.targets[0].diagnosis.step_ms
    step = {"value": step_ms, "low": 0.98 * step_ms, "high": 1.02 * step_ms}
    saved["what_if"]["candidates"] = [change | {"step_ms": step}]
    kept = only(compare(read(document_before), after)).prediction
    assert kept.error == pytest.approx(0.0, abs=0.02)


def test_a_prediction_is_compared_with_steps_of_its_own_kind(tmp_path):
    """Closing windows took 300 ms of every step of the first capture, which are not in what it predicted."""
    found = []
    for number, layers in enumerate(((6, 2), (4, 4))):
        write(Scenario("job", layers=layers, gpu=False, noise=0.005, steps=2), tmp_path / str(number))
        found.append(analyze(tmp_path / str(number)))
    before, after = found
    plain = only(compare(before, after)).prediction
    (target,) = before.targets
    spread = target.step_time_ms
    longer = replace(target, step_time_ms=replace(spread, mean=spread.mean + 300.0))
    closing = replace(before, targets=(longer,))
    kept = only(compare(closing, after)).prediction
    assert (kept.measured, kept.error, kept.inside) == (plain.measured, plain.error, True)
    assert kept.before_ms / kept.measured_ms == kept.measured


def test_nothing_was_predicted_of_the_same_layout_or_of_other_microbatches(tmp_path):
    before = report(tmp_path / "a", [6, 2])
    assert only(compare(before, report(tmp_path / "b", [6, 2], per_layer=11.0))).prediction is None
    assert only(compare(before, report(tmp_path / "c", [4, 4], microbatches=8))).prediction is None
    assert only(compare(before, report(tmp_path / "d", [1, 7]))).prediction is None
    other = document(report(tmp_path / "e", [4, 4]))
    assert only(compare(before, read(other))).prediction is not None
    other["targets"][0]["sizes"]["dp"] = 2
    assert only(compare(before, read(other))).prediction is None


def test_it_is_plain_data(tmp_path):
    before, after = report(tmp_path / "a", [6, 2]), report(tmp_path / "b", [4, 4])
    found = msgspec.json.decode(msgspec.json.encode(compare(before, after)))
    assert found["targets"][0]["stages"][0]["changes"]["compute_ms"].keys() == {
        "before",
        "after",
        "change",
        "beyond_spread",
        "low",
        "high",
    }
