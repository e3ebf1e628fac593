"""Which layout is tried next, and what the trials came to: on trials that are made."""

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megaprof.analysis.samples import Interval
from megaprof.analysis.what_if.layouts import layers_per_stage, parse_layout
from megaprof.formats import timeline as format
from megaprof.formats.phrases import Unanswerable
from megaprof.formats.timeline import Memory
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.tune import failures, sentence, show, stopped, trials
from megaprof.tune.tuning import (
    NAME,
    Proposal,
    Trial,
    Tuning,
    best_proposal,
    completed,
    load,
    store,
    upcoming,
)
from tests.analysis.job_timelines import write_timelines
from tests.cli.running import megaprof

GIB = 1 << 30
COMMAND = ("python", "pretrain.py", "--num-layers", "8")


def proposal(layout: str, ms: float, reach: float, against: int = 1) -> Proposal:
    flags = ("--pipeline-model-parallel-layout", layout)
    return Proposal(layout, layout, flags, Interval(ms, ms - reach, ms + reach), against)


def trial(number: int, ms: float, layout: str, *proposals: Proposal, asked: Proposal | None = None) -> Trial:
    step = Interval(ms, ms - 1, ms + 1)
    return Trial(
        number,
        COMMAND,
        f"trial-{number}",
        asked,
        "measured",
        layout=layout,
        stages=2,
        step_ms=step,
        steps=9,
        next=proposals,
    )


def tuning(*trials: Trial) -> Tuning:
    found = Tuning(COMMAND, 9, 4)
    for each in trials:
        found = found.having(each)
    return found


def test_the_best_lower_end_comes_first() -> None:
    found = tuning(trial(1, 100, "6+2", proposal("5+3", 90, 1), proposal("4+4", 85, 20)))
    chosen = best_proposal(found)
    assert chosen is not None
    assert chosen.layout == "5+3"


def test_nothing_is_tried_that_may_gain_less_than_a_percent() -> None:
    assert best_proposal(tuning(trial(1, 100, "6+2", proposal("5+3", 90, 9.5)))) is None


def test_what_was_tried_is_not_tried_again_and_the_best_trial_is_the_mark() -> None:
    asked = proposal("5+3", 90, 1)
    found = tuning(trial(1, 100, "6+2", asked, proposal("4+4", 92, 1)), trial(2, 91, "5+3", asked=asked))
    assert best_proposal(found) is None


@pytest.mark.parametrize(("memory", "filled"), [(None, False), ((2 * GIB, GIB), True)])
def test_a_column_in_which_no_trial_has_anything_is_left_out(memory: tuple[int, ...] | None, filled: bool) -> None:
    view = trials(tuning(replace(trial(1, 100, "6+2"), memory=memory)))
    names = [column.name for column in view.columns]
    assert ("memory" in names, "predicted" in names) == (filled, False)
    assert {len(row.cells) for row in view.rows} == {len(names)}


def test_the_table_has_its_heads_whole_in_80_columns() -> None:
    asked = replace(proposal("5+3", 1404, 60), memory=(16 * GIB, 12 * GIB))
    given, other = (replace(trial(n, ms, "6+2"), memory=(16 * GIB, 12 * GIB)) for n, ms in ((1, 1619), (2, 1388)))
    found, printed = tuning(given, replace(other, proposal=asked)), StringIO()
    show(found, Console(file=printed, width=80))
    assert len(trials(found).columns) == 8
    assert "\u2026" not in printed.getvalue()


def test_of_two_predictions_of_a_layout_the_more_certain_one_counts() -> None:
    sure, unsure = proposal("4+4", 80, 2, against=2), proposal("4+4", 70, 8)
    asked = proposal("5+3", 90, 1)
    found = tuning(trial(1, 100, "6+2", asked, unsure), trial(2, 90, "5+3", sure, asked=asked))
    assert best_proposal(found) == sure


def test_a_failed_trial_is_a_measurement_and_no_end() -> None:
    bad = proposal("4+4", 80, 1)
    failed = Trial(2, COMMAND, "trial-2", bad, "out_of_memory", why="memory ran out")
    found = tuning(trial(1, 100, "6+2", bad, proposal("5+3", 90, 1)), failed)
    chosen = best_proposal(found)
    assert chosen is not None
    assert chosen.layout == "5+3"
    assert found.result is not None
    assert found.result.trial == 1
    assert found.result.as_predicted == (0, 0)
    assert sentence(found) == "Nothing gained: no other layout was measured."
    assert sentence(tuning(trial(1, 100, "6+2"))) == "Nothing gained: no other layout was tried."


@pytest.mark.parametrize(
    ("memory", "tried"),
    [
        ((16, 12), False),
        ((17, 13), False),
        ((17, 11), True),  # less on a stage, which may be the one that had too little
        (None, True),
    ],
)
def test_what_needs_no_less_memory_than_a_trial_that_ran_out_of_it_is_not_tried(
    memory: tuple[int, ...] | None, tried: bool
) -> None:
    bad = replace(proposal("4+4", 80, 1), memory=(16, 12))
    failed = Trial(2, COMMAND, "trial-2", bad, "out_of_memory", why="memory ran out")
    other, small = replace(proposal("5+3", 82, 1), memory=memory), replace(proposal("3+5", 90, 1), memory=(12, 15))
    chosen = best_proposal(tuning(trial(1, 100, "6+2", bad, other, small), failed))
    assert chosen == (other if tried else small)
    assert best_proposal(tuning(trial(1, 100, "6+2", bad, other, small), replace(failed, outcome="failed"))) == other


def test_the_result() -> None:
    asked = proposal("5+3", 80, 2)
    found = tuning(trial(1, 100, "6+2", asked), trial(2, 81, "5+3", asked=asked))
    assert found.result is not None
    assert (found.result.trial, found.result.as_predicted) == (2, (1, 1))
    assert found.result.speedup.value == pytest.approx(100 / 81)
    assert found.result.speedup.low < 100 / 81 * 0.98  # two runs of one layout differ, too
    assert found.result.command == (*COMMAND, *asked.flags)


@pytest.mark.parametrize(("again", "quickest", "held"), [(81, 3, 1), (130, 2, 0)])
def test_a_trial_that_its_prediction_excludes_runs_once_more(again: float, quickest: int, held: int) -> None:
    asked = proposal("5+3", 80, 2)
    found = tuning(trial(1, 100, "6+2", asked, proposal("4+4", 85, 1)), trial(2, 97, "5+3", asked=asked))
    waiting = upcoming(found, Path("nowhere")).pending
    assert waiting is not None
    assert (waiting.again, waiting.proposal, waiting.command) == (2, asked, COMMAND)
    assert upcoming(replace(found, most_trials=2), Path("nowhere")).stopped == "trials_spent"
    found = found.having(replace(trial(3, again, "5+3", asked=asked), again=2))
    assert found.result is not None
    assert (found.result.trial, found.result.as_predicted) == (quickest, (held, 1))
    then = upcoming(found, Path("nowhere")).pending
    assert (then and then.proposal and then.proposal.layout) == ("4+4" if quickest == 2 else None)


@pytest.mark.parametrize(("more", "trials", "expected"), [(10, 4, 10), (18, 4, 18), (19, 4, 0), (10, 2, 0), (0, 4, 0)])
def test_what_more_steps_would_tell_is_told_if_they_are_no_more_than_the_trials_left_make(
    more: int, trials: int, expected: int
) -> None:
    unsure = replace(proposal("5+3", 95, 9), more_steps=more)
    found = replace(tuning(trial(1, 100, "6+2", unsure)), most_trials=trials)
    waiting = upcoming(found, Path("nowhere")).pending
    assert (waiting and (waiting.again, waiting.more_steps)) == ((1, expected) if expected else None)
    found = found.having(replace(trial(2, 99, "6+2", unsure), again=1, more_steps=more))
    assert upcoming(found, Path("nowhere")).stopped == "nothing_left"
    assert found.result is not None
    assert (found.result.trial, found.result.speedup.value, found.result.command) == (2, 1.0, COMMAND)


def test_it_stops() -> None:
    asked = proposal("5+3", 80, 2)
    first = trial(1, 100, "6+2", asked)
    there = Path("nowhere")
    for unsure, reason in (((), "no change is predicted"), ((proposal("5+3", 99, 9),), None)):
        alone = replace(trial(1, 100, "6+2", *unsure), says="no change is predicted")
        found = upcoming(tuning(alone), there)
        assert (found.stopped, found.reason) == ("nothing_left", reason), "why nothing was predicted, if nothing was"
    assert upcoming(replace(tuning(first), most_trials=1), there).stopped == "trials_spent"
    unmeasured = replace(first, outcome="failed", step_ms=None, why="no schedule ran")
    found = upcoming(tuning(unmeasured), there)
    assert (found.reason, failures(found)) == ("no schedule ran", []), "it is told once"


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"targets": []}')
    with pytest.raises(Unanswerable):
        load(tmp_path)


def ran(directory: Path, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Write the timelines of a layout of two stages whose layers all cost the same. A layer has 2 GiB, and 1 for its
    activations of a microbatch. Returns the peaks."""
    files = write_timelines(
        directory,
        WorldLayout(ParallelSizes(pp=2)),
        steps=12,
        microbatches=9,  # Megatron interleaves no such number
        forward_ms=[5.0 * each for each in layers],
        backward_ms=[10.0 * each for each in layers],
        chunk_layers=layers,
        noise=0.002,
    )
    peaks = layers[0] * 4 * GIB, layers[1] * 3 * GIB
    for file, held, peak in zip(files, layers, peaks, strict=True):
        memory = Memory(2 * held * GIB, peak, 80 * GIB)
        file.write_bytes(file.read_bytes() + format.fact_record(0, format.MEMORY, memory.pack()))
    return peaks


@pytest.mark.parametrize(
    ("limit", "best"),
    [
        (None, "Et*4|t*4L"),  # 16 and 12 GiB
        (15.5, "Et*3|t*5L"),  # 12 and 15
        (11, None),
    ],
)
def test_a_limit_of_memory_bounds_what_is_tried(limit: float | None, best: str | None, tmp_path: Path) -> None:
    found = Tuning(COMMAND, 9, 4, memory_limit=None if limit is None else round(limit * GIB))
    while (waiting := (found := upcoming(found, tmp_path)).pending) is not None:
        layout = "Et*2|t*6L" if waiting.proposal is None else waiting.proposal.layout
        peaks = ran(tmp_path / waiting.directory, layers_per_stage(parse_layout(layout, 2), 2))
        found = completed(found, waiting, tmp_path / waiting.directory)
        fits = limit is None or max(peaks) <= limit * GIB
        assert found.trials[-1].memory == peaks
        assert found.trials[-1].outcome == ("measured" if fits else "above_limit")
        assert waiting.proposal is None or (waiting.proposal.memory == peaks and fits)
    assert found.stopped == "nothing_left"
    assert (found.best.layout if found.best else None) == best


def test_files_that_were_moved_are_found_again(tmp_path: Path) -> None:
    out, moved = tmp_path / "tuned", tmp_path / "moved"
    out.mkdir()
    command = (sys.executable, *COMMAND[1:])
    store(out, Tuning(command, 9, 1, saving_off=(), trials=(Trial(1, command, "trial-1"),)))
    moved.mkdir()
    ran(moved, (6, 2))
    assert megaprof("tune", "--next", moved, "--out", out).returncode == 0
    found = load(out)
    assert found is not None
    assert (found.trials[0].outcome, out / found.trials[0].directory) == ("measured", moved)


def test_a_limit_of_memory_that_nothing_measures_is_refused(tmp_path: Path) -> None:
    found = upcoming(replace(tuning(trial(1, 100, "6+2", proposal("4+4", 80, 1))), memory_limit=GIB), tmp_path)
    assert (found.stopped, found.pending) == ("not_measured", None)
    assert "the timelines say nothing of memory" in (stopped(found) or "")


def test_a_run_in_another_layout_than_the_proposed_one_is_not_as_asked(tmp_path: Path) -> None:
    found = Tuning(COMMAND, 9, 4)
    for _ in range(2):
        found = upcoming(found, tmp_path)
        assert found.pending is not None
        ran(tmp_path / found.pending.directory, (6, 2))
        found = completed(found, found.pending, tmp_path / found.pending.directory)
    assert [each.outcome for each in found.trials] == ["measured", "not_as_asked"]
    assert "does not take the options" in (found.trials[1].why or "")
    assert (found.result and found.result.command) == COMMAND
