"""The HTML report: complete, small, and deaf to whatever names the traces hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaprof.analysis.report.drawn import StepTimeline
from megaprof.analysis.report.html import page
from megaprof.analysis.report.report import analyze
from megaprof.analysis.report.text.what_if import layout_advice
from megaprof.analysis.samples import Interval, Spread
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis import scenarios
from tests.analysis.exchanging import exchanging, write
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.synthetic import BASE, TraceBuilder, chunk, kinds, pipeline, plain_stage

HOSTILE = '</script><img src=x onerror="alert(1)">\'"><svg/onload=alert(2)>&amp;'
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Collects elements and the text behind them; fails on a tag that is closed without having been opened."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.texts = [], [], {}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        key = self.open[-1] if self.open else ""
        self.texts[key] = self.texts.get(key, "") + data


def render(directory, name="run"):
    report = replace(analyze(directory), path=Path(name))
    text = page(report, report.steps())
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return text, reader


def data(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


def boxes(row):
    """(start, duration, name, microbatch, chunk) with absolute starts, as the script unpacks them."""
    now, found = 0, []
    for place in range(0, len(row["boxes"]), 5):
        gap, duration, *others = row["boxes"][place : place + 5]
        now += gap
        found.append((now, duration, *others))
    return found


def test_the_verdict_is_above_the_timeline_and_the_numbers_below(tmp_path):
    pipeline(tmp_path, [6, 2])
    text, reader = render(tmp_path)
    order = ["Stage 0 holds 6 layers", "<canvas", "Where the time of a step goes", "How long microbatches take"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "emb+6" in text
    assert "480<small class=error> (67%)</small>" in text  # stage 1's bubble
    assert len([tag for tag, _ in reader.elements if tag == "canvas"]) == 1


def test_the_file_stands_alone(tmp_path):
    pipeline(tmp_path, [6, 2])
    text, reader = render(tmp_path)
    assert not [tag for tag, _ in reader.elements if tag in ("link", "img", "iframe", "object", "base")]
    assert not [attributes for _, attributes in reader.elements if attributes.keys() & {"src", "href"}]
    assert "url(" not in text
    assert "@import" not in reader.texts["style"]
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_no_script_but_ours_may_run(tmp_path):
    pipeline(tmp_path, [6, 2])
    text, reader = render(tmp_path)
    (policy,) = [a["content"] for _, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy"]
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not [a for _, a in reader.elements if any(key.startswith("on") for key in a)]


def test_hostile_names_are_text(tmp_path):
    _, honest = render(written(tmp_path / "honest", "actor", "node"))
    _, hostile = render(written(tmp_path / "hostile", HOSTILE, HOSTILE), name=HOSTILE.replace("/", ""))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in honest.elements]
    assert HOSTILE in hostile.texts["h2"]
    assert HOSTILE.replace("/", "") in hostile.texts["title"]  # no file name has a slash


def written(directory, role, host):
    kinds = [chunk(2, kind=role)]
    for pp in (0, 1):
        metadata = {"host": f"{host}{pp}", "schedule": role, "truncated": True, "truncated_reason": host}
        plain_stage(pp, 2, 5, 9, role=role, metadata=metadata, chunks=kinds).write(directory, f"{pp}.pt.trace.json")
    return directory


def test_every_pass_has_its_box(tmp_path):
    write(exchanging([0.0, 0.0], microbatches=3), tmp_path)
    (step,) = data(render(tmp_path)[0])
    assert [(row["stage"], row["rank"]) for row in step["rows"]] == [(0, 0), (1, 1)]
    names, kinds = step["names"], dict(zip(step["names"], step["kinds"], strict=True))
    assert (kinds["send_forward"], kinds["forward"]) == ("exchange", "forward")
    found = boxes(step["rows"][0])
    assert [box for box in found if names[box[2]] == "forward"] == [
        (0, 2000, names.index("forward"), 0, 0),
        (2050, 2000, names.index("forward"), 1, 0),
        (4100, 2000, names.index("forward"), 2, 0),
    ]
    assert {box[3] for box in found if kinds[names[box[2]]] == "exchange"} == {-1}
    assert step["rows"][0]["span"][0] == 0


def test_clocks_of_several_hosts_are_aligned_and_that_is_said(tmp_path):
    write(exchanging([0.0, 500.0]), tmp_path)
    text, _ = render(tmp_path)
    (step,) = data(text)
    starts = [row["span"][0] for row in step["rows"]]
    assert abs(starts[0] - starts[1]) <= 100  # microseconds
    assert "exchanges aligned the clocks of the stages" in text.lower()


def test_of_equal_steps_the_latest_is_drawn_on_the_lowest_rank_of_a_stage(tmp_path):
    for step, base in ((3, 0.0), (4, 700.0)):
        for rank, tp in ((1, 1), (0, 0)):
            plain_stage(0, 1, 5, 9, step=step, start=base, coords={"rank": rank, "tp": tp}, sizes={"tp": 2}).write(
                tmp_path
            )
    report = analyze(tmp_path)
    (drawn,) = report.steps().values()
    assert drawn.step == 4
    assert [row.rank for row in drawn.rows] == [0]
    assert drawn.rows[0].extent[0] == BASE + 700_000_000


def test_a_slow_rank_is_drawn_below_the_first_rank_of_its_stage(tmp_path):
    scenarios.write(scenarios.Scenario("slow", layers=(4, 4), slow={1: 1.5}, peers=2, steps=3), tmp_path / "traces")
    four = WorldLayout(ParallelSizes(pp=2, dp=2))
    write_timelines(tmp_path / "timelines", layout=four, steps=20, slow=[Slow(rank=3, factor=1.6)], chunk_layers=[4, 4])
    for name in ("traces", "timelines"):
        report = analyze(tmp_path / name)
        (target,), (drawn,) = report.targets, report.steps().values()
        (slow,) = target.slow_ranks
        assert [row.stage for row in drawn.rows] == [0, 1, 1]
        assert drawn.rows[2].rank == slow.ranks[0] == 3
    ends = [max(box.end for box in row.passes if box.kind == "backward") + row.offset_ns for row in drawn.rows]
    assert ends[2] > ends[1], "on the clock of the others, it computes longer than its peer"


def test_the_captured_step_nearest_to_the_average_is_drawn(tmp_path):
    last = {1: (2, "forward", 3)}
    scenarios.write(scenarios.Scenario("last", layers=(4, 4), hiccups=last, noise=0.0, steps=3), tmp_path)
    report = analyze(tmp_path)
    assert report.targets[0].steps == (5, 6, 7)
    (drawn,) = report.steps().values()
    assert drawn.step == 6, "not the last, which is longer than the numbers say"


def test_a_slow_rank_is_not_drawn_where_replicas_do_not_wait_for_each_other(tmp_path):
    slow = scenarios.Scenario("slow", layers=(4, 4), slow={1: 1.5}, peers=2, steps=3, target="train_log_probs")
    scenarios.write(slow, tmp_path)
    report = analyze(tmp_path)
    assert report.targets[0].slow_ranks
    (drawn,) = report.steps().values()
    assert [row.stage for row in drawn.rows] == [0, 1]


def test_the_last_of_several_steps_in_one_trace_is_drawn(tmp_path):
    for pp in (0, 1):
        trace = TraceBuilder(pp=pp, pp_size=2, microbatches=1, metadata={"steps": [5, 7]})
        for number, step in enumerate((5, 6, 7)):
            trace.forward(0, 100 * number + 10 * pp, 10)
            trace.backward(0, 100 * number + 30, 20)
            trace.call(100 * number + 10 * pp, 90, step=step)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.targets[0].steps == (5, 6, 7)
    (drawn,) = report.steps().values()
    assert (drawn.step, [row.stage for row in drawn.rows]) == (7, [0, 1])


def test_of_a_step_that_was_captured_twice_the_later_one_is_drawn(tmp_path):
    name = "train_actor.step000005.pp0-tp0-cp0-ep0-dp0.rank00000{}.pt.trace.json.gz"
    plain_stage(0, 1, 5, 9).write(tmp_path, name.format(""))
    plain_stage(0, 1, 5, 9, start=700.0).write(tmp_path, name.format(".2"))
    report = analyze(tmp_path)
    assert "twice" in kinds(report.targets[0].warnings)
    (drawn,) = report.steps().values()
    assert drawn.rows[0].extent[0] == BASE + 700_000_000


def test_each_of_several_sizes_is_drawn_for_itself(tmp_path):
    pipeline(tmp_path, [2, 2], metadata={"run": "a"})
    plain_stage(3, 4, 10, 20, metadata={"run": "a"}).write(tmp_path)
    two, four = data(render(tmp_path)[0])
    assert [[row["stage"] for row in step["rows"]] for step in (two, four)] == [[0, 1], [3]]


def test_what_is_not_known_is_left_out_and_not_guessed(tmp_path):
    trace = TraceBuilder(metadata={"ranges": {"microbatch": False, "reason": "captured with --profile-ranges step"}})
    trace.call(0, 50)
    trace.write(tmp_path)
    text, _ = render(tmp_path)
    assert "captured with --profile-ranges step" in text
    assert "How long microbatches take" not in text
    assert "None" not in re.sub(r"<script.*", "", text, flags=re.S)


def test_a_report_without_timelines_is_still_a_page(tmp_path):
    pipeline(tmp_path, [6, 2])
    text = page(analyze(tmp_path), {})
    assert "<canvas" not in text
    assert data(text) == [None]


def test_why_nothing_is_predicted_is_said_once(tmp_path):
    scenarios.write(scenarios.Scenario("one stage", layers=(8,), exposed={"tp": 0.3}), tmp_path)
    report = analyze(tmp_path)
    (why,) = report.targets[0].what_if.warnings
    text = page(report, report.steps())
    assert "No layout is advised." in text
    assert text.count(why.text[1:]) == 1


def test_what_if_shows_before_and_after(tmp_path):
    pipeline(tmp_path, [6, 2])
    report = analyze(tmp_path)
    flags = ("--pipeline-model-parallel-layout", "Et*4|t*4L", "<flag>")
    best = Prediction("layout", Interval.of(500.0), Interval(1.4, 1.3, 1.5), layers=(4, 4), flags=flags)
    found = WhatIf(
        replay_ms=710.0,
        measured_ms=720.0,
        replay_error=Spread.of([-0.014]),
        layout="Et*6|t*2L",
        candidates=(best, replace(best, layers=(7, 1), speedup=Interval.of(1.001))),
        best=best,
        advice="change",
    )
    target = replace(report.targets[0], what_if=found, advice=layout_advice(found))
    text = page(replace(report, targets=(target,)), {})
    flags = "--pipeline-model-parallel-layout &#39;Et*4|t*4L&#39; &#39;&lt;flag&gt;&#39;"
    assert text.count(flags) == 2  # above, and in the table
    assert '<th scope=row class="text">4+4 layers' in text
    assert "off by -1.4%" in text
    assert "<td>1.40<small class=error> (1.30 to 1.50)</small></td>" in text
    assert "7+1 layers" not in text


def test_64_stages_of_512_microbatches_stay_small(tmp_path):
    stages, microbatches = 64, 512
    drawn = []
    report = None
    for pp in range(2):  # 64 real traces would be the same rows again
        pipeline_stage(pp, microbatches).write(tmp_path)
    report = analyze(tmp_path)
    step = report.steps()[0]
    drawn = {0: StepTimeline(step.step, step.rows * (stages // 2), 1, ())}
    text = page(report, drawn)
    assert sum(len(row["boxes"]) for row in data(text)[0]["rows"]) == 5 * stages * 4 * microbatches
    assert len(text.encode()) < 6_000_000


def pipeline_stage(pp, microbatches):
    """Passes of 2 and 4 ms with an exchange behind each."""
    trace = TraceBuilder(pp=pp, pp_size=2, microbatches=microbatches)
    for mb in range(microbatches):
        trace.forward(mb, mb * 8.123, 2.017)
        trace.event("megaprof/send_forward_recv_backward", mb * 8.123 + 2.05, 1.211)
        trace.backward(mb, mb * 8.123 + 3.301, 4.005)
        trace.event("megaprof/send_backward_recv_forward", mb * 8.123 + 7.33, 0.741)
    trace.call(0, microbatches * 8.2)
    return trace


@pytest.mark.parametrize("start", [float(10**12), -float(10**12), 0.0])
def test_a_clock_that_is_far_off_is_no_reason_to_fail(tmp_path, start):
    plain_stage(0, 1, 5, 9, start=start).write(tmp_path)
    text, _ = render(tmp_path)
    assert boxes(data(text)[0]["rows"][0])[0][:2] == (0, 5000)


def test_tables_have_headers_with_scope_and_are_reached_by_keyboard(tmp_path):
    pipeline(tmp_path, [6, 2])
    text = page(analyze(tmp_path), {})
    heads = re.findall(r"<th\b[^>]*>", text)
    assert heads
    assert all("scope=col" in head or "scope=row" in head for head in heads)
    wide = re.findall(r'<div class="scroll"[^>]*>', text)
    assert wide
    assert all('tabindex="0" role="region" aria-label="' in each for each in wide)


def test_of_several_targets_every_region_and_drawing_names_its_own(tmp_path):
    pipeline(tmp_path, [6, 2], role="actor")
    pipeline(tmp_path, [4, 4], role="critic")
    _, reader = render(tmp_path)
    labels = [a["aria-label"] for tag, a in reader.elements if "aria-label" in a]
    assert len(labels) == len(set(labels))
    assert all(("(actor)" in label) != ("(critic)" in label) for label in labels)
    assert "2 targets" not in labels


def test_many_targets_begin_with_a_table_that_leads_to_each(tmp_path):
    for role in ("actor", "critic", "ref", "<reward>"):
        pipeline(tmp_path, [6, 2] if role == "actor" else [4, 4], role=role)
    text, reader = render(tmp_path)
    overview = text[text.index("<table>") : text.index("<main>")]
    assert re.findall(r'href="#(\w+)"', overview) == ["t0", "t1", "t2", "t3"]
    assert {"t0", "t1", "t2", "t3"} <= {a.get("id") for _, a in reader.elements}
    assert "&lt;reward&gt;" in overview
    assert overview.count('<td class="text slow">layers of stage 0') == 1
    assert overview.count('<td class="text slow">few microbatches') == 3
