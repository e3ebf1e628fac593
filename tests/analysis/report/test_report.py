"""The report as plain data, and as text for terminals."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import Document, analyze
from megaprof.analysis.report.terminal import show
from megaprof.analysis.report.text.what_if import name_of
from megaprof.analysis.report.views import what_if_table
from megaprof.analysis.samples import mean_of
from megaprof.analysis.words import milliseconds
from megaprof.formats.phrases import Unanswerable
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import BASE, TraceBuilder, chunk, pipeline, plain_stage
from tests.cli.running import check

PIPELINE, TENSOR = WorldLayout(ParallelSizes(pp=4, dp=8)), WorldLayout(ParallelSizes(tp=2, pp=4, dp=4))


def test_stages_have_what_the_traces_say(tmp_path):
    pipeline(tmp_path, [6, 2])
    (target,) = analyze(tmp_path).targets
    assert (target.target, target.role, target.steps) == ("train_actor", None, (5,))
    assert (target.schedule, target.step_time_ms.mean) == ("1f1b", 720)
    assert (target.imbalance, target.slowest_stage) == (1.5, 0)
    price = target.causes[0].price
    assert price.low < price.value < price.high
    stage = target.stages[1]
    assert (stage.pp, stage.ranks) == (1, (1,))
    assert (stage.forward_ms.mean, stage.backward_ms.mean, stage.compute_ms.mean) == (80, 160, 240)
    assert (stage.bubble_ms.mean, stage.bubble_fraction) == (480, pytest.approx(480 / 720))
    exposed = {group: mean_of(ms) for group, ms in stage.exposed_ms.items()}
    assert exposed == {"tp": 0, "ep": 0, "cp": 0, "pp": None, "dp": 0, "unknown": 0}
    assert stage.compute_ms.count == 1
    forward = stage.forward_per_microbatch_ms
    assert (forward.mean, forward.median, forward.min, forward.max) == (20, 20, 20, 20)
    assert [each.chunk for each in stage.chunks] == [0]
    assert ("pp",) in [note.names for note in target.warnings]


def test_targets_and_roles_are_reported_apart_and_in_order(tmp_path):
    for role in ("ref", "actor"):
        pipeline(tmp_path, [2, 2], target="train_log_probs", role=role)
    pipeline(tmp_path, [2, 2])
    pipeline(tmp_path, [2, 2], target="evaluate", step=7)
    targets = analyze(tmp_path).targets
    assert [(t.target, t.role, list(t.steps)) for t in targets] == [
        ("train_actor", None, [5]),
        ("train_log_probs", "actor", [5]),
        ("train_log_probs", "ref", [5]),
        ("evaluate", None, [7]),
    ]


def test_files_that_cannot_be_used_are_named_and_the_rest_is_reported(tmp_path):
    paths = pipeline(tmp_path, [6, 2])
    (tmp_path / "half.pt.trace.json.gz").write_bytes(paths[0].read_bytes()[:-30])
    (tmp_path / "foreign.pt.trace.json").write_text('{"traceEvents": []}')
    TraceBuilder().write(tmp_path, "rangeless.pt.trace.json")
    report = analyze(tmp_path)
    assert report.traces == tuple(paths)
    found = [(each.files[0].partition(".")[0], each.kind) for each in report.warnings]
    assert sorted(found) == [
        ("foreign", "skipped"),
        ("half", "cut"),
        ("half", "skipped"),
        ("rangeless", "skipped"),
    ]
    assert report.targets[0].slowest_stage == 0


def test_one_file_can_be_reported_on(tmp_path):
    first, _ = pipeline(tmp_path, [6, 2])
    report = analyze(first)
    assert report.targets[0].withheld.kind == "stages_missing"


def test_renamed_traces_are_found_when_nothing_else_is_there(tmp_path):
    plain_stage(0, 1, 10, 20).write(tmp_path, "renamed.json")
    assert analyze(tmp_path).targets[0].target == "train_actor"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "does not exist"),
        ({}, "is empty"),
        ({"notes.txt": b"hello", "model.bin": b""}, "it holds model.bin, notes.txt"),
        ({"other.json.gz": b'{"traceEvents": []}'}, "other.json.gz was skipped: it was not written by megaprof"),
        ({"a.pt.trace.json.gz": b"\x1f\x8b"}, "a.pt.trace.json.gz was skipped: it is truncated"),
    ],
)
def test_nothing_to_report_says_what_was_found_instead(tmp_path, files, says):
    directory = tmp_path / "traces"
    if files is not None:
        directory.mkdir()
    for name, content in (files or {}).items():
        (directory / name).write_bytes(content)
    with pytest.raises(Unanswerable) as fault:
        analyze(directory)
    assert says in str(fault.value)
    assert str(directory) in str(fault.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
SMALL = st.integers(-1, 3)
RANGES = st.one_of(
    st.builds("megaprof/{} mb={} chunk={}".format, st.sampled_from(["forward", "backward"]), SMALL, SMALL),
    st.builds("megaprof/combined mb={} chunk={} bmb=0 bchunk=0".format, SMALL, SMALL),
    st.builds("megaprof/{} step={} pp=0".format, st.sampled_from(["train_actor", "evaluate", "\x1b[2J"]), SMALL),
    st.sampled_from(["megaprof/finalize_grads", "gloo:all_reduce", "c10d::alltoall_", "aten::mm", "megaprof/"]),
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "ph": st.just("X"),
            "cat": st.sampled_from(["user_annotation", "cpu_op", "kernel"]),
            "name": RANGES,
            "ts": st.integers(0, 50) | st.floats(),
            "dur": st.integers(-1, 50) | st.floats(),
        }
    ),
    max_size=14,
)
METADATA = st.dictionaries(
    st.sampled_from(
        ["role", "chunks", "microbatches", "sizes", "coords", "schedule", "host", "truncated", "forward_only"]
    ),
    JSON | SMALL | st.just({"pp": 2, "tp": 2}) | st.just([chunk(2)]),
    max_size=3,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(EVENTS, METADATA), min_size=1, max_size=3))
def test_whatever_the_traces_hold_there_is_a_report_or_a_reason(tmp_path, contents):
    directory = tmp_path / "fuzz"
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    for number, (events, metadata) in enumerate(contents):
        trace = TraceBuilder(coords={"rank": number}, metadata=metadata, events=events)
        trace.write(directory, f"{number}.pt.trace.json")
    try:
        report = analyze(directory)
    except Unanswerable as fault:
        text = str(fault)
    else:
        text = report.json().decode()
        assert "\x1b" not in printed(report)
    assert text


def printed(report, width=100, **options):
    sink = io.StringIO()
    show(report, Console(file=sink, width=width, highlight=False, **options))
    return sink.getvalue()


def test_no_prediction_is_shown_whose_gain_is_noise(tmp_path):
    scenario = Scenario("r113", layers=(5, 6), loss=3.0, microbatches=4, noise=0.2, gpu=False, seed=113)
    write(scenario, tmp_path)
    report = analyze(tmp_path)
    found = report.targets[0].what_if
    gaining = [each for each in found.candidates if each.speedup.value > 1.02]
    clear = {name_of(each, found) for each in gaining if each.speedup.low > 1.02}
    noise = {name_of(each, found) for each in gaining} - clear
    assert "6+5 layers" in noise  # in the JSON
    table = what_if_table(found)
    assert table is not None
    assert not noise & {row.cells[0].text for row in table.rows}
    for text in (printed(report), page(report, {})):
        assert {what for what in clear if what in text} == clear


def eight_busy_stages(directory):
    for step in (5, 6):
        sizes = {"tp": 2, "dp": 2}
        chunks = {"chunks": [chunk(12, embedding=True)]}
        pipeline(directory, [8] * 7 + [6], per_layer=20.0 + step, step=step, sizes=sizes, role="actor")
        plain_stage(0, 8, 10, 20, step=step, target="train_log_probs", sizes=sizes, **chunks).write(directory)


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_the_terminal_and_holds_the_answer(tmp_path, width):
    eight_busy_stages(tmp_path)
    pipeline(tmp_path, [6, 2], target="evaluate", metadata={"forward_only": False})
    report = analyze(tmp_path)
    text = printed(report, width)
    paths = {"  " + path.name for path in report.traces} | {str(tmp_path.absolute()), f"  megaprof open {tmp_path}"}
    folded = [line for line in text.splitlines() if line not in paths and ": --" not in line]  # flags are in one piece
    assert all(len(line) <= width for line in folded)
    assert "Stage 0 holds 6 layers" in " ".join(text.split())
    assert "emb+6" in text
    assert "ui.perfetto.dev" in text
    assert "1 of 8 stages captured" in text
    assert "…" not in text  # nothing was cut off
    assert "\x1b" not in text


def test_on_a_narrow_terminal_a_table_goes_on_in_another_with_the_same_stages(tmp_path):
    pipeline(tmp_path, [6] * 7 + [4], sizes=dict.fromkeys(("tp", "cp", "ep", "dp"), 2))
    report = analyze(tmp_path)
    narrow, wide = printed(report, 80), printed(report, 160)
    assert "continued" in narrow
    assert "continued" not in wide
    assert "…" not in narrow + wide
    heads = [line.split() for line in narrow.splitlines() if line.split()[:3] == ["stage", "ranks", "layers"]]
    assert [head[3:] for head in heads[:2]] == [["forward", "backward", "compute", "bubble", "tp"], ["ep", "cp", "dp"]]


def test_the_verdict_stands_before_the_tables(tmp_path):
    pipeline(tmp_path, [6, 2])
    text = printed(analyze(tmp_path))
    order = [
        "step time",
        "imbalance 1.50",
        "Stage 0 holds 6 layers",
        "where the time of a step goes",
        "what if: before",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "4+4 layers" in text[: text.index("where the time of a step goes")]


def test_many_targets_begin_with_a_table_of_them(tmp_path):
    for role, layers in (("actor", [6, 2]), ("critic", [4, 4]), ("ref", [6, 2])):
        pipeline(tmp_path, layers, role=role)
    assert "3 targets" not in printed(analyze(tmp_path))
    plain_stage(0, 1, 10, 20, target="evaluate").write(tmp_path)
    text = printed(analyze(tmp_path), 80)
    overview = text[text.index("4 targets") : text.index("train_actor (actor)")]
    rows = {line.split()[1]: line.split() for line in overview.splitlines() if "train_actor" in line}
    assert rows["actor"][2:6] == ["layers", "of", "stage", "0"]
    assert rows["critic"][2:4] == ["few", "microbatches"]
    assert rows.keys() == {"actor", "critic", "ref"}
    assert "evaluate" in overview
    assert "nothing costs 2.0% of the step" in " ".join(overview.split())


def test_colour_is_for_terminals_only(tmp_path):
    pipeline(tmp_path, [6, 2])
    report = analyze(tmp_path)
    assert "\x1b[" in printed(report, force_terminal=True, color_system="standard")
    assert "\x1b[" not in printed(report)


def test_names_from_files_cannot_speak_to_the_terminal(tmp_path):
    pipeline(tmp_path, [6, 2], role="x\x1b]0;owned\x07[bold red]")
    text = printed(analyze(tmp_path), force_terminal=True, color_system=None)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold red]" in text


def test_importing_the_analysis_loads_nothing_heavy():
    code = "import sys, megaprof.analysis; print([m for m in ('msgspec', 'rich', 'isal', 'torch') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(("slower", "recorded"), [(1.3, "cuda"), (1.0, "cuda"), (1.3, "cpu")])
def test_a_job_that_is_slower_behind_its_windows_is_told(slower, recorded, tmp_path):
    """Only with a GPU: nothing of the profiler stays in a process without one."""
    state = "attached: the process has CUDA graphs"
    profiler = {"asked": [recorded], "recorded": [recorded], "cupti": state}
    pipeline(tmp_path, [6, 2], step=12, metadata={"profiler": profiler, "chunks": []})
    layout, apart = WorldLayout(ParallelSizes(pp=2)), 10 * 10**9
    options = {"forward_ms": (10.0, 8.0), "microbatches": 4}
    write_timelines(tmp_path, layout, steps=12, start_ns=BASE - apart, **options)
    after = {**options, "forward_ms": (10.0 * slower, 8.0), "backward_ms": 20.0 * slower}
    write_timelines(tmp_path, layout, steps=5, first_step=14, start_ns=BASE + apart, **after)
    (target,) = analyze(tmp_path).targets
    told = [note for note in target.warnings if note.kind == "not_recovered"]
    assert len(told) == (slower > 1 and recorded == "cuda")
    for note in told:
        assert note.said == state
        assert note.ms[1] == pytest.approx(1.3 * note.ms[0], rel=0.1)


def test_the_json_follows_its_schema_and_gives_back_the_report(tmp_path: Path) -> None:
    pipeline(tmp_path / "plain", [6, 2])
    pipeline(tmp_path / "single", [4])
    gpu = Scenario("gpu", layers=(4, 6, 4, 4), loss=9.0, exposed={"tp": 0.15}, steps=3, tail=3.0, dp=2)
    write(gpu, tmp_path / "gpu")
    write(Scenario("slow", layers=(4, 4), slow={1: 1.5}, peers=2), tmp_path / "slow")
    slow = [Slow(rank=19, from_step=70, factor=1.5), Slow(stage=1, from_step=30, factor=3, kind="finalize")]
    some = {"steps": 120, "microbatches": 4}
    write_timelines(tmp_path / "tp", TENSOR, slow=slow, last_step={3: 77}, **some)
    slow = [Slow(stage=2, from_step=50, factor=1.4), Slow(from_step=40, until_step=40, factor=4)]
    write_timelines(tmp_path / "stage", PIPELINE, slow=slow, ranks=range(30), **some)
    for directory in tmp_path.iterdir():
        report = analyze(directory)
        check("report", report.to_json())
        read = Document.from_json(report.json())
        assert (read.targets, read.warnings, read.source) == (report.targets, report.warnings, str(directory))


def test_a_step_in_brief_is_that_of_the_tables(tmp_path: Path) -> None:
    pipeline(tmp_path, [6, 2])
    report = analyze(tmp_path)
    (target,) = report.targets
    assert target.profiled
    assert milliseconds(target.step_ms) in page(report, {})


def test_a_path_that_is_not_utf_8_is_written_with_question_marks(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"a\xff")
    pipeline(directory, [6, 2])
    for path in [*directory.iterdir()]:
        path.rename(directory / os.fsdecode(b"\xff" + os.fsencode(path.name)))
    report = analyze(directory)
    assert report.to_json()["source"] == str(tmp_path / "a?")
    assert Document.from_json(report.json()).run == report.run
